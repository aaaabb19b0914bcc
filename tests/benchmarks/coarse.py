"""What of the projections a query could leave unread, and still find what a scan of all of them finds.

Of an index of real text with projections (`--index`), and real queries (`--queries`: JSON Lines, as for
`stride query --file`): gate gradients of the queries, folded as the product folds them. What is to be found
are the hundred highest estimates, in units of their errors (by which chunks are chosen to be read); of
every way to look at less first, the least share of the chunks, the same for all queries, that holds .9 of
them (.95, .99).

- `lists`: inverted files (k-means by Lloyd's algorithm, every chunk in the nearest list; nearest lists
  first). `cosine`: of signs. `augmented`: of signs in units of the estimates with one more number, so that
  all have one length (Bachrach et al., RecSys 2014: maximum inner products as nearest neighbours).
  `bounded`: lists of cosine by their centroid's product times their largest chunk. `gradients`: what would
  be, were there no projections: lists of unit gate gradients (p numbers a chunk) of `--sample` chunks,
  against these chunks' exact products.
- `screens`: a scan of all chunks by less of what is kept, then by all of it where that is high: of the
  query's three bits the highest alone, or the highest two; the first bytes of a chunk alone; those signs
  where the query's numbers are largest (for which signs would have to lie number by number, not chunk by
  chunk).
- `kernel`: nanoseconds a chunk of the product's scan, in the same process as one by the highest bit alone,
  and one that goes on with the others where that is high.
- `reading`: what choosing chunks to read takes, of an index that is `--times` as large (its projections
  over and over), in scans of the product: means and spreads of all estimates, and of a sample as the
  product does it; the choice itself, and the choice by the recovery alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from stride_cli.attribution import direct_readout
from stride_cli.attribution.direct_readout import SecondEstimates, query_gradients
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import Workspace
from stride_cli.operators.gate_kernels import _ones, sign_products
from stride_cli.operators.gradients import chunk_gradients
from stride_cli.operators.projections import Projections, _folding, bit_planes
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from stride_cli.output import emit, note
from stride_cli.recovery.problem import Solution
from stride_cli.recovery.refinement import candidates
from stride_cli.startup import compiled
from tests.benchmarks._machine import interleave, machine

TOP, RECALLS, LISTS, SAMPLE = 100, (0.9, 0.95, 0.99), (256, 1024), 30_000
_ROUNDS, _LEARNT_FROM, _BLOCK = 8, 40_000, 1 << 14
SCREENED = 1 / 32  # of the chunks are looked at with all bits, by the kernel that looks twice


@dataclass(frozen=True)
class Ground:
    """What is searched: signs (n, r) int8, √step (n,), numbers of queries (Q, r), and as the product has
    them: three bits, (Q, 3, r) ±1."""

    signs: np.ndarray
    size: np.ndarray
    queries: np.ndarray
    bits: np.ndarray

    def products(self, numbers: np.ndarray) -> np.ndarray:
        """Σ_j sign_ij numbers_qj, (Q, n) float32."""
        asked = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
        return np.concatenate([(asked @ part.T).numpy() for part in self.blocks()], axis=1)

    def blocks(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.signs), _BLOCK):
            yield torch.from_numpy(self.signs[start : start + _BLOCK]).float()

    @property
    def numbers(self) -> np.ndarray:
        """The queries' numbers as rounded, Σ_k 2^k t_k."""
        return self.bits[:, 0] + 2 * self.bits[:, 1] + 4 * self.bits[:, 2]


def highest(scores: np.ndarray) -> np.ndarray:
    """The hundred of every query."""
    return np.argpartition(-scores, TOP, axis=1)[:, :TOP]


def shares(places: np.ndarray, key: str = "share") -> dict[str, float]:
    """Of where each query's hundred come in an order (Q, 100), as a share of all chunks: the least share that
    holds .9 of them …"""
    found = np.sort(places.ravel())
    return {f"{key}_for_{100 * recall:g}": float(found[int(recall * len(found))]) for recall in RECALLS}


def ranks(coarse: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where the wanted chunks come by other numbers, as a share of n."""
    found = []
    for row, own in zip(coarse, wanted, strict=True):
        ordered = np.sort(row)
        found.append(1 - np.searchsorted(ordered, row[own], side="left") / len(row))
    return np.array(found)


def screens(ground: Ground) -> Iterator[dict[str, Any]]:
    whole = ground.products(ground.numbers) * ground.size
    wanted = highest(whole)
    length = ground.signs.shape[1]
    largest = np.argsort(-np.abs(ground.queries), axis=1)

    def only(numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        kept = np.zeros_like(numbers)
        np.put_along_axis(kept, places, np.take_along_axis(numbers, places, 1), 1)
        return kept

    first = np.broadcast_to(np.arange(length), largest.shape)
    two = 4 * ground.bits[:, 2] + 2 * ground.bits[:, 1]
    for what, numbers, count in (
        ("highest bit", ground.bits[:, 2], length),
        ("two bits", two, length),
        *(
            ("first bytes", only(ground.numbers, first[:, : length // part]), length // part)
            for part in (2, 4)
        ),
        *(
            ("largest numbers", only(ground.numbers, largest[:, : length // part]), length // part)
            for part in (2, 4, 8)
        ),
    ):
        places = ranks(ground.products(numbers) * ground.size, wanted)
        yield {"what": what, "bytes_looked_at": count // 8, **shares(places)}


def lloyd(points: torch.Tensor, count: int, rng: np.random.Generator) -> torch.Tensor:
    """Unit centroids of points on a sphere."""
    unit = torch.nn.functional.normalize(points, dim=1)
    centroids = unit[rng.choice(len(unit), count, replace=False)]
    for _ in range(_ROUNDS):
        owner = (unit @ centroids.T).argmax(dim=1)
        sums = torch.zeros_like(centroids).index_add_(0, owner, unit)
        empty = sums.abs().sum(dim=1) == 0
        sums[empty] = unit[rng.choice(len(unit), int(empty.sum()))]
        centroids = torch.nn.functional.normalize(sums, dim=1)
    return centroids


def held(owner: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How much of the corpus is in lists up to each wanted chunk's own, in the order of each query (Q, L)."""
    sizes = np.bincount(owner, minlength=order.shape[1])
    upto = np.cumsum(sizes[order], axis=1) / len(owner)
    place = np.argsort(order, axis=1)
    return np.take_along_axis(upto, np.take_along_axis(place, owner[wanted], axis=1), axis=1)


def lists(ground: Ground) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    products = ground.products(ground.numbers)
    wanted = highest(products * ground.size)
    lengths = np.linalg.norm(ground.numbers, axis=1) * ground.signs.shape[1] ** 0.5
    cosine = np.take_along_axis(products, wanted, 1).min(axis=1) / lengths
    about = {
        "cosine_of_the_100th": float(cosine.mean()),
        "cosine_by_chance": ground.signs.shape[1] ** -0.5,
    }
    some = np.sort(rng.choice(len(ground.signs), min(len(ground.signs), _LEARNT_FROM), replace=False))
    length = ground.signs.shape[1]
    # ‖√step · signs / √r‖ = √step, and one more number makes all as long as the longest
    longest = float(ground.size.max())
    more = np.sqrt(np.maximum(0.0, longest**2 - np.square(ground.size))).astype(np.float32)

    def points(rows: np.ndarray | slice, augmented: bool) -> torch.Tensor:
        signs = torch.from_numpy(ground.signs[rows]).float() / length**0.5
        if not augmented:
            return signs
        size, rest = torch.from_numpy(ground.size[rows]), torch.from_numpy(more[rows])
        return torch.cat([signs * size[:, None], rest[:, None]], dim=1)

    asked = torch.from_numpy(ground.numbers.astype(np.float32))
    for count in LISTS:
        for augmented in (False, True):
            began = time.process_time()
            centroids = lloyd(points(some, augmented), count, rng)
            owner = np.concatenate(
                [
                    (points(slice(at, at + _BLOCK), augmented) @ centroids.T).argmax(dim=1).numpy()
                    for at in range(0, len(ground.signs), _BLOCK)
                ]
            )
            made = time.process_time() - began
            near = (asked @ centroids[:, :length].T).numpy()
            orders = {"augmented" if augmented else "cosine": near}
            if not augmented:
                largest = np.zeros(count, np.float32)
                np.maximum.at(largest, owner, ground.size)
                orders["bounded"] = near * largest
            for what, by in orders.items():
                places = held(owner, np.argsort(-by, axis=1), wanted)
                cost = {"microseconds_a_chunk_to_make": 1e6 * made / len(owner)}
                yield {"what": what, "lists": count, **shares(places), **about, **cost}


def gradient_lists(
    workspace: Workspace, steered: SteeredModel, asked: np.ndarray, sample: int
) -> Iterator[dict[str, Any]]:
    """Lists of the gradients themselves."""
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(workspace.n_chunks, min(sample, workspace.n_chunks), replace=False))
    gradients = np.zeros((len(rows), asked.shape[1]), np.float32)
    for group in workspace.chunks.plan(2048, rows):
        for part in workspace.chunks.small_groups(group, steered.chunks_at_once):
            batch = workspace.chunks.batch(part)
            own = torch.cat([each.float() for each in chunk_gradients(steered, batch)[0]], dim=1)
            gradients[np.searchsorted(rows, batch.rows)] = (own * batch.scored[:, None]).numpy()
    points, queries = torch.from_numpy(gradients), torch.from_numpy(asked)
    lengths = points.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    exact = (queries @ points.T / lengths.sqrt()).numpy()  # in units as estimates are
    wanted = highest(exact)
    cosines = exact / (queries.norm(dim=1)[:, None] * lengths.sqrt()).numpy()
    near_cosine = float(np.take_along_axis(cosines, wanted, 1).min(axis=1).mean())
    for count in LISTS:
        centroids = lloyd(points[torch.from_numpy(rng.permutation(len(points))[:_LEARNT_FROM])], count, rng)
        owner = torch.cat([(part @ centroids.T).argmax(dim=1) for part in points.split(_BLOCK)]).numpy()
        order = np.argsort(-(queries @ centroids.T).numpy(), axis=1)
        yield {
            "what": "gradients",
            "lists": count,
            "sample": len(rows),
            "gates": int(asked.shape[1]),
            **shares(held(owner, order, wanted)),
            "cosine_of_the_100th": near_cosine,
        }


@compiled
def one_plane(words, step, planes, units, out):  # type: ignore[no-untyped-def]
    """The product's `sign_products` by the highest bit alone."""
    count, length = words.shape
    most = np.int64(64 * length)
    for i in range(count):
        row = words[i]
        for q in range(len(planes)):
            third = planes[q, 2]
            differ = np.int64(0)
            for j in range(length):
                differ += _ones(row[j] ^ third[j])
            out[q, i] = step[i] * units[q] * np.float32(most - 2 * differ)


@compiled
def twice(words, step, planes, units, least, out):  # type: ignore[no-untyped-def]
    """The highest bit, and the others where that says so."""
    count, length = words.shape
    most = np.int64(64 * length)
    for i in range(count):
        row = words[i]
        size = np.sqrt(step[i])
        for q in range(len(planes)):
            first, second, third = planes[q, 0], planes[q, 1], planes[q, 2]
            differ = np.int64(0)
            for j in range(length):
                differ += _ones(row[j] ^ third[j])
            agree = np.float32(most - 2 * differ)
            if size * agree <= least[q]:
                out[q, i] = step[i] * units[q] * agree
            else:
                rest = np.int64(0)
                for j in range(length):
                    rest += _ones(row[j] ^ first[j]) + (_ones(row[j] ^ second[j]) << 1)
                out[q, i] = step[i] * units[q] * np.float32(7 * most - 2 * (rest + 4 * differ))


def kernels(projections: Projections, ground: Ground, planes: np.ndarray, units: np.ndarray, times: int):
    """Processor time of scans, for one query and for eight that share them."""
    words = np.tile(np.asarray(projections.codes).view(np.uint64), (times, 1))
    step = np.tile(np.asarray(projections.step), times)
    coarse = ground.products(ground.bits[:, 2]) * ground.size
    least = np.quantile(coarse, 1 - SCREENED, axis=1).astype(np.float32)
    for count in (1, 8):
        out = np.empty((count, len(words)), np.float32)
        own = planes[:count], units[:count]
        tasks: dict[str, Callable[[], Any]] = {
            "all bits": lambda own=own, out=out: sign_products(words, step, *own, out),
            "highest bit": lambda own=own, out=out: one_plane(words, step, *own, out),
            "twice": lambda own=own, out=out, count=count: twice(words, step, *own, least[:count], out),
        }
        for task in tasks.values():
            task()
        seconds, _ = interleave(tasks, 7)
        each = {name: 1e9 * float(np.median(found)) / out.size for name, found in seconds.items()}
        yield {
            "chunks": len(words),
            "queries": count,
            "nanoseconds": each,
            "over_all_bits": {name: value / each["all bits"] for name, value in each.items()},
        }


def reading(projections: Projections, gradients: Sequence[torch.Tensor], times: int) -> dict[str, Any]:
    """Choosing 200 chunks to read for one query of an index `times` as large."""
    larger = Projections(
        np.tile(np.asarray(projections.codes), (times, 1)),
        np.tile(np.asarray(projections.step), times),
        projections.seed,
    )
    n, rng = len(larger), np.random.default_rng(0)
    asked = larger.asked(gradients)
    columns = rng.integers(0, 1000, (n, 10), dtype=np.uint16)
    none = dict.fromkeys(("duality_gap", "relative_gap", "r_squared", "intercept"), 0.0)
    penalty = {"lambda_": 1.0, "lambda_max": 2.0, "lambda_ratio": 0.5, "n_passes": 1, "n_epochs": 1}
    residual = rng.standard_normal(1000)
    solution = Solution(np.array([7]), np.ones(1), residual=residual, n_chunks=n, **none, **penalty)

    def seconds_of(parts: Any) -> SecondEstimates:
        return SecondEstimates(n, None, *parts, np.ones(1), np.ones(1, bool))

    def of_all() -> Any:
        with mock.patch.object(direct_readout, "_SCANNED_TWICE", n):
            return direct_readout._standardised([asked], n)

    def choose(parts: Any) -> np.ndarray:
        found = seconds_of(parts)
        return candidates([columns], solution, 200, found.guide(0), found.alone(0)).chunks

    whole, sampled = of_all(), direct_readout._standardised([asked], n)
    seconds, results = interleave(
        {
            "scan": lambda: [asked.estimates(at, min(at + (1 << 18), n)) for at in range(0, n, 1 << 18)],
            "means and spreads of all": of_all,
            "of a sample": lambda: direct_readout._standardised([asked], n),
            "choosing": lambda: choose(sampled),
            "choosing by means of all": lambda: choose(whole),
            "choosing by the recovery": lambda: candidates([columns], solution, 200),
        },
        5,
    )
    median = {name: float(np.median(found)) for name, found in seconds.items()}
    same = np.isin(results["choosing"], results["choosing by means of all"]).mean()
    return {
        "chunks": n,
        "nanoseconds_a_chunk": {name: 1e9 * value / n for name, value in median.items()},
        "scans": {name: value / median["scan"] for name, value in median.items()},
        "same_chunks": float(same),
    }


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    workspace = Workspace.open(given.index, device="cpu")
    operators = Operators.from_index(workspace.index)
    kept = operators.projections
    assert kept is not None
    steered = SteeredModel.of(workspace.model, operators)
    queries = read_queries(workspace, given.queries)
    gradients = query_gradients(steered, [queries.batch(rows) for rows in queries.groups(2048)])
    asked = torch.cat(gradients, dim=1)
    folded = _folding(asked.shape[1], 8 * kept.size, kept.seed)([asked])
    planes, units, _ = bit_planes(folded)
    bits = np.unpackbits(planes.view(np.uint8).reshape(len(folded), 3, -1), axis=2).astype(np.float32) * 2 - 1
    signs = np.unpackbits(np.asarray(kept.codes), axis=1).astype(np.int8) * 2 - 1
    ground = Ground(signs, np.sqrt(np.asarray(kept.step)), folded, bits)
    about = {"index_chunks": len(kept), "bytes": kept.size, "queries": len(queries)}
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "screens": lambda: screens(ground),
        "kernel": lambda: kernels(kept, ground, planes, units, given.times),
        "reading": lambda: iter([reading(kept, [asked[:1]], given.times)]),
        "lists": lambda: lists(ground),
        "gradients": lambda: gradient_lists(workspace, steered, asked.numpy(), given.sample),
    }
    for part in given.parts or parts:
        note(part)
        for record in parts[part]():
            yield {"benchmark": "coarse", "part": part, **about, **record}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks coarse", description=__doc__)
    parser.add_argument("--index", type=Path, required=True, help="with operators and projections")
    parser.add_argument("--queries", type=Path, required=True, help="JSON Lines")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="chunks whose gradients are listed")
    parser.add_argument("--times", type=int, default=16, help="how much larger an index is timed")
    parser.add_argument("--parts", nargs="+", choices=("screens", "kernel", "reading", "lists", "gradients"))
    given = parser.parse_args(arguments)
    command = f"python -m tests.benchmarks coarse --index {given.index.name} --queries {given.queries.name}"
    about = machine("numpy", "numba", "torch")
    for record in run(given):
        emit(record | {"command": command} | about)
