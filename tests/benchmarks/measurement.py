"""Linear against exact measurement on a real model: do they agree, and what does each cost?

`--index` has operators; `--queries` is JSON Lines of documents, cut to `--tokens` tokens. Agreement: Pearson
over the K subsets between the first-order and the exact responses, and Spearman between the influences that
the Lasso recovers from them (over chunks that are non-zero in either), per query. Cost, in processor seconds,
interleaved: `linear` and its two parts (gradient; product with the K × p gates) in units of a raw forward
pass of the same tokens, the product also in units of one pass over the gates' bytes; `exact` against the
arithmetic of its K continuations, as a share of the fastest of the matrix products that occur in it, timed in
the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from stride_cli.api import Session
from stride_cli.attribution.options import RecoveryOptions
from stride_cli.data.query_files import read_texts
from stride_cli.data.query_set import QuerySet
from stride_cli.operators.exact_response import measure_exact, pearson
from stride_cli.operators.gates import PackedGates, gate_responses
from stride_cli.operators.gradients import gate_gradients
from stride_cli.operators.linear_response import measure_linear
from stride_cli.output import emit
from tests.benchmarks._machine import interleave, machine

_ANY_LENGTH = 1 << 20  # queries are cut to --tokens afterwards


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    session = Session.open(given.index)
    model, operators = session.model, session.operators
    chosen = read_texts(model, given.queries, block_size=_ANY_LENGTH)
    chosen = chosen.take(np.linspace(0, len(chosen) - 1, min(given.count, len(chosen))).astype(int))
    queries = QuerySet(
        [ids[: given.tokens] for ids in chosen.ids],
        [weights[: given.tokens] for weights in chosen.weights],
        chosen.names,
    )
    size = {
        "parameters": model.n_parameters,
        "layers": model.n_layers,
        "layer": operators.layer,
        "vocabulary": model.vocab_size,
        "space": operators.space_name,
        "fit": operators.fit,
        "subsets": operators.n_subsets,
        "gates": operators.gate_size,
        "chunks": session.index.n_chunks,
        "queries": len(queries),
        "tokens": given.tokens,
        "torch_threads": torch.get_num_threads(),
    }
    about = machine("torch", "transformers", "numpy")
    batches = list(queries.batches(1))
    steered = session.steered[0]
    exact, seconds = [], []
    for batch in batches:
        began = time.process_time()
        exact.append(measure_exact(steered, batch, batch_size=given.batch_size)[0])
        seconds.append(time.process_time() - began)
    linear = [measure_linear(steered, batch)[0] for batch in batches]
    yield _agreement(session, exact, linear) | size | about
    yield _cost_of_linear(session, batches[0], given.repeats) | size | about
    work = [_flops(session, batch) for batch in batches]
    peak = _matrix_product_rate(session, batches[0], given.batch_size)
    reached = max(flops / spent for flops, spent in zip(work, seconds, strict=True))
    yield (
        {
            "benchmark": "measurement",
            "what": "cost of exact",
            "processor_seconds": float(np.median(seconds)),
            "gigaflop": float(np.median(work)) / 1e9,
            "gigaflops": reached / 1e9,
            "gigaflops_of_matrix_products": {name: rate / 1e9 for name, rate in peak.items()},
            "share_of_fastest": reached / max(peak.values()),
            "continuations": operators.n_subsets * (2 if operators.fit == "closed" else 1),
            "batch_size": given.batch_size,
        }
        | size
        | about
    )


def _agreement(session: Session, exact: list[np.ndarray], linear: list[np.ndarray]) -> dict[str, Any]:
    attributor = session.attributor(RecoveryOptions(read=0, estimate="subsets"))
    correlation = [pearson(a, b) for a, b in zip(exact, linear, strict=True)]
    ranks, top = [], []
    for pair in zip(exact, linear, strict=True):
        dense = np.zeros((2, session.index.n_chunks))
        for row, responses in zip(dense, pair, strict=True):
            solution = attributor.influences(None, [], responses[None])[0].solution
            row[solution.indices] = solution.values
        either = np.flatnonzero(dense.any(axis=0))
        ranks.append(float(spearmanr(dense[0, either], dense[1, either]).statistic))
        best = [set(np.argsort(-row, kind="stable")[:10].tolist()) for row in dense]
        top.append(len(best[0] & best[1]) / 10)
    return {
        "benchmark": "measurement",
        "what": "agreement of linear with exact",
        "pearson_least": min(correlation),
        "pearson_median": float(np.median(correlation)),
        "recovered_spearman_least": min(ranks),
        "recovered_spearman_median": float(np.median(ranks)),
        "shared_top_10_mean": float(np.mean(top)),
        "step": session.operators.step,
    }


def _cost_of_linear(session: Session, batch: Any, repeats: int) -> dict[str, Any]:
    model, operators, steered = session.model, session.operators, session.steered[0]
    vectors = [np.ones((1, gate.shape[1]), np.float32) for gate in operators.gates]
    stored = [_words(gate.values if isinstance(gate, PackedGates) else gate) for gate in operators.gates]

    def forward() -> None:
        with torch.no_grad():
            model.model(input_ids=batch.ids, use_cache=False)

    tasks = {
        "forward": forward,
        "linear": lambda: measure_linear(steered, batch),
        "gradient": lambda: gate_gradients(steered, batch),
        "product": lambda: [
            gate_responses(gate, vector) for gate, vector in zip(operators.gates, vectors, strict=True)
        ],
        "memory": lambda: [np.bitwise_or.reduce(words) for words in stored],
    }
    interleave(tasks, 2)  # warm
    seconds, _ = interleave(tasks, repeats)
    least = {name: min(values) for name, values in seconds.items()}
    return {
        "benchmark": "measurement",
        "what": "cost of linear",
        "forward_passes": {name: value / least["forward"] for name, value in least.items()},
        "processor_seconds": least,
        "product_in_memory_passes": least["product"] / least["memory"],
        "gate_megabytes": sum(gate.nbytes for gate in operators.gates) / 1e6,
        "repeats": repeats,
    }


def _words(values: np.ndarray) -> np.ndarray:
    """The bytes of an array in machine words."""
    flat = values.reshape(-1).view(np.uint8)
    return flat[: len(flat) // 8 * 8].view(np.uint64)


def _flops(session: Session, batch: Any) -> float:
    """Multiplications and additions of the K continuations of one query: the blocks from the first that is
    steered over all tokens, head at scored positions, shifts."""
    model, operators = session.model, session.operators
    scored = torch.nonzero(batch.weights[0, 1:]).flatten()
    length, heads = int(scored[-1]) + 1, len(scored)
    flops = 0.0
    for space in operators.spaces:  # one product with the gates; the bases are applied once more per copy
        positions = heads if space.site == "logit" else length
        basis = sum(p.numel() for p in space.parameters())
        flops += 2 * positions * (basis + space.gate_size)
    if any(space.site != "logit" for space in operators.spaces):
        above = model.blocks[session.steered[0].first_block :]
        flops += 2 * length * sum(p.numel() for p in above.parameters())
        flops += 4 * length * length * model.d_model * len(above)
        flops += 2 * heads * model.d_model * model.vocab_size
    return flops * operators.n_subsets * (2 if operators.fit == "closed" else 1)


def _matrix_product_rate(session: Session, batch: Any, batch_size: int) -> dict[str, float]:
    """FLOP per processor second of products of shapes that occur in `exact`."""
    model = session.model
    rows, width = batch_size * batch.ids.shape[1], model.d_model
    shapes = {"mlp": (rows, width, 4 * width), "vocabulary": (rows, width, model.vocab_size)}
    shapes["square 1024"] = (1024, 1024, 1024)
    rates = {}
    for name, (m, k, n) in shapes.items():
        a, b = torch.randn(m, k), torch.randn(k, n)
        times = max(1, int(2e9 / (2 * m * k * n)))

        def work(a: torch.Tensor = a, b: torch.Tensor = b, times: int = times) -> None:
            for _ in range(times):
                a @ b

        seconds, _ = interleave({"work": work}, 7)
        rates[name] = 2.0 * m * k * n * times / min(seconds["work"])
    return rates


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks measurement", description=__doc__)
    parser.add_argument("--index", required=True)
    parser.add_argument("--queries", required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    for record in run(parser.parse_args(arguments)):
        emit(record)
