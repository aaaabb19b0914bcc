"""Why it works: how additive retraining is, and how well steered losses predict retrained ones.

`datamodel`: responses of the index's retrained subsets, each query's regressed on the masks (ridge, penalty
by leaving out one of the fitting subsets), held-out R² against the number of fitting subsets,
and the R² that the seeds' noise leaves possible. What is missing between the two is not additive, or not yet
learnt.

`complements`: the retrained subsets' complements are retrained too. Were retraining additive, loss(S) +
loss(complement) would be the same for every S; its variance is that of interactions of even order, pairs
first, and the variance of the differences that of the additive part (and of interactions of three, five, …).
No model of the effects takes part.

`steered`: one operator for every retrained subset, in closed form, and the loss changes that it causes,
measured by steering (``exact``) and to first order (``linear``): correlation over subsets with what
retraining did, mean over queries with the joint bootstrap standard error over queries and subsets. No
recovery takes part.

`bands`: the chunks of every query in the order of a method's scores, and the share of the variance over
subsets that the 10 first account for, the next 40, …; and the same of what the method's prediction leaves.
Two subsets that share more of a band's chunks answer the more alike, the more those chunks matter:
products of responses regressed on what subsets share (Haseman and Elston, Behavior Genetics 2, 1972), over
all queries together. Nobody needs to know the effect of a single chunk for it. Standard errors by leaving out
one subset at a time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stride_cli.data.workspace import Workspace, WorkspacePath
from stride_cli.operators.closed import fit_closed
from stride_cli.operators.exact_response import measure_exact
from stride_cli.operators.fitting import set_step
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import emit, note
from stride_cli.prove.resampling import Resampler
from stride_cli.randomness import stream
from stride_cli.research.evaluation.metrics import (
    correlate,
    measured_response,
    predicted_response,
    row_pearson,
)
from stride_cli.research.methods.protocol import score_all
from stride_cli.research.methods.registry import open_method
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import open_trainer, retrain, store_of
from stride_cli.training.truth import Truth
from tests.benchmarks._machine import machine

_HELD_OUT = 0.2
_BANDS = (0, 10, 50, 200, 800)  # and the rest
_QUERY_TOKENS = 4096


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    task = WorkspacePath(Path(given.index), given.model).open()
    truth = Truth.from_index(task.index, alpha=given.alpha)
    about = {
        "benchmark": "additivity",
        "suite": given.suite,
        "chunks": task.n_chunks,
        "subsets_retrained": truth.n_subsets,
        "seeds": truth.n_seeds,
        "queries": len(truth.queries),
    } | machine("torch", "numpy")
    if given.datamodel:
        for row in datamodels(truth, task.index.seed):
            yield {"what": "datamodel", **row} | about
    for spec in given.bands or ():
        for row in bands(task, truth, spec):
            yield {"what": "bands", "method": spec, **row} | about
    differences = None
    if given.complements:
        row, differences = complements(task, truth, given.complements, given.workers)
        yield row | about
    if not given.steered:
        return
    note("one operator a retrained subset")
    settings = resolve_settings(ClosedOptions(), task.model, task.index)
    operators = fit_closed(task.model, task.chunks, columns_of(truth.masks), 1 + truth.n_subsets, settings)
    operators.gates = [gates[: truth.n_subsets] for gates in operators.gates]
    set_step(SteeredModel.of(task.model, operators), task.chunks, settings.seed)
    measured = measured_response(truth.losses)
    resampler = Resampler(measured, seed=task.index.seed)
    responses = {}
    for name, measure in (("linear", measure_linear), ("exact", measure_exact)):
        groups = truth.queries.groups(_QUERY_TOKENS)
        found = [measure(task.model, operators, truth.queries.batch(rows)) for rows in groups]
        responses[name] = np.concatenate(found)
        spearman = correlate(responses[name], measured).spearman
        pearson = row_pearson(responses[name], measured)
        drawn = resampler.draw("spearman", responses[name], spearman).estimate()
        yield {
            "what": "steered",
            "measure": name,
            "space": "+".join(settings.spaces),
            "gates": sum(gates.shape[1] for gates in operators.gates),
            "spearman": drawn.mean,
            "spearman_se": drawn.joint.se,
            "pearson": float(pearson.mean()),
            "r2": float((pearson**2).mean()),
            "linear_against_exact": float(row_pearson(responses["linear"], responses[name]).min()),
        } | about
        if differences is not None:
            odd = responses[name][:, : differences.shape[1]]
            found = correlate(odd, differences).spearman
            yield {
                "what": "steered, additive part",
                "measure": name,
                "spearman": float(found.mean()),
                "spearman_se": float(found.std(ddof=1) / np.sqrt(len(found))),
                "pearson": float(row_pearson(odd, differences).mean()),
            } | about


def complements(
    task: Workspace, truth: Truth, count: int, workers: int | None
) -> tuple[dict[str, Any], np.ndarray]:
    """Retrain what the first `count` subsets leave out.

    Returns the record, and half the differences of the responses, (Q, count): the odd part of the effects.
    """
    count = min(count, truth.n_subsets)
    if truth.n_seeds < 2:
        raise SystemExit("one seed cannot tell noise from effects: stride evaluate truth … --seeds 2")
    trainer = open_trainer(task, truth.queries)
    if trainer.digest != truth.trainer:
        raise SystemExit("the index's truth was made by another recipe, or of another corpus")
    jobs = [Job(~mask, int(seed)) for mask in truth.masks[:count] for seed in truth.seeds]
    found = retrain(trainer, jobs, store=store_of(task.index), workers=workers)
    left = np.stack([outcome.losses for outcome in found]).reshape(count, truth.n_seeds, -1)
    kept = truth.losses[:count]  # (count, S, Q)
    odd, even = variance((kept - left) / 2), variance((kept + left) / 2)
    row = {
        "what": "complements",
        "pairs": count,
        # shares of the variance over subsets that is not the seeds' noise, over all queries together and the
        # mean of each query's own
        "odd_share": float(odd.sum() / (odd + even).sum()),
        "odd_share_mean": float(np.mean(odd / (odd + even))),
        "r2_ceiling": reliability(kept),
        "odd_ceiling": reliability((kept - left) / 2),
    }
    return row, measured_response((kept - left) / 2)


def variance(losses: np.ndarray) -> np.ndarray:
    """Variance over subsets of what the seeds of losses (R, S, Q) share, (Q,): covariance of their pairs."""
    centred = losses - losses.mean(axis=0)
    seeds = losses.shape[1]
    pairs = [(a, b) for a in range(seeds) for b in range(a)]
    together = [(centred[:, a] * centred[:, b]).sum(axis=0) for a, b in pairs]
    return np.mean(together, axis=0) / (len(losses) - 1)


def bands(task: Workspace, truth: Truth, spec: str) -> Iterator[dict[str, Any]]:
    """Shares of the responses' variance over subsets by the rank of chunks under a method, before and after
    its prediction: all of it first, then band by band."""
    method = open_method(spec)
    method.fit(task)
    scores = score_all(method, truth.queries)
    responses = measured_response(truth.losses)  # (Q, R)
    responses = responses - responses.mean(axis=1, keepdims=True)
    responses /= responses.std(axis=1, keepdims=True)
    predicted = predicted_response(scores, truth.masks)
    predicted = predicted - predicted.mean(axis=1, keepdims=True)
    slopes = (predicted * responses).sum(axis=1) / (predicted**2).sum(axis=1)
    left = responses - slopes[:, None] * predicted
    yield {
        "of": "all",
        "share": reliability(truth.losses),  # not the seeds' noise
        "explained": float(1 - (left**2).mean()),
        "pearson": float(row_pearson(predicted, responses).mean()),
    }
    edges = [edge for edge in _BANDS if edge < task.n_chunks] + [task.n_chunks]
    order = np.argsort(-scores, axis=1, kind="stable")
    found = {
        name: components(truth.masks, order, edges, of) for name, of in (("", responses), ("left", left))
    }
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        share, share_se = found[""][:, number]
        rest, rest_se = found["left"][:, number]
        yield {
            "of": f"{first + 1} to {last}",
            "share": share,
            "share_se": share_se,
            "left": rest,
            "left_se": rest_se,
        }


def components(masks: np.ndarray, order: np.ndarray, edges: list[int], values: np.ndarray) -> np.ndarray:
    """Variance over subsets by bands of chunks, and jackknife standard errors over subsets: (2, bands).

    Parameters
    ----------
    masks : (R, n) bool
    order : (Q, n) int      chunks of every query, by rank
    edges : of bands        in ranks, 0 first and n last
    values : (Q, R)         responses of mean 0
    """
    signs = np.where(masks, 1.0, -1.0)
    signs -= signs.mean(axis=0)
    count = len(edges)  # the bands and a constant: what means taken off make of noise
    apart = ~np.eye(len(masks), dtype=bool)
    normal, moment = np.zeros((len(masks), count, count)), np.zeros((len(masks), count))
    for row, value in zip(order, values, strict=True):
        kernels = [np.ones(apart.shape)]
        for first, last in itertools.pairwise(edges):
            part = signs[:, row[first:last]]
            kernels.append(part @ part.T / (last - first))
        inputs = np.stack(kernels[1:] + kernels[:1]) * apart  # (bands + 1, R, R)
        normal += np.einsum("arc,brc->rab", inputs, inputs)  # by subset
        moment += np.einsum("arc,rc->ra", inputs, np.outer(value, value))
    whole = np.linalg.solve(normal.sum(axis=0), moment.sum(axis=0))
    # a pair stands in the sums of both of its subsets
    without = [
        np.linalg.solve(normal.sum(axis=0) - 2 * own, moment.sum(axis=0) - 2 * part)
        for own, part in zip(normal, moment, strict=True)
    ]
    spread = np.sqrt((len(masks) - 1) * np.var(without, axis=0))
    return np.stack([whole, spread])[:, :-1]


def columns_of(masks: np.ndarray) -> np.ndarray:
    """The design (n, d) of subsets (R, n) of any sizes: a chunk that is in fewer of them than others fills up
    with one subset more, number R, which nobody asks about."""
    degrees = masks.sum(axis=0)
    columns = np.full((masks.shape[1], max(1, int(degrees.max()))), len(masks), np.uint32)
    for chunk, degree in enumerate(degrees.tolist()):
        columns[chunk, :degree] = np.flatnonzero(masks[:, chunk])
    return columns


def datamodels(truth: Truth, seed: int) -> Iterator[dict[str, Any]]:
    """Held-out R² of ridge datamodels on 100, 200, … subsets."""
    masks = truth.masks.astype(np.float64) - truth.masks.mean()
    responses = measured_response(truth.losses).T  # (R, Q)
    order = stream(seed, "additivity").permutation(len(masks))
    held = order[: round(_HELD_OUT * len(order))]
    rest = order[len(held) :]
    ceiling = reliability(truth.losses[held])
    sizes = [size for size in (100, 200, 400, 800, 1600, 3200) if size < len(rest)] + [len(rest)]
    for size in sizes:
        predicted = ridge(masks[rest[:size]], responses[rest[:size]], masks[held])
        centred = responses[held] - responses[held].mean(axis=0)
        error = ((responses[held] - predicted) ** 2).sum(axis=0)
        explained = 1 - error / (centred**2).sum(axis=0)  # (Q,)
        yield {
            "fitted_on": size,
            "r2": float(explained.mean()),
            "r2_se": float(explained.std(ddof=1) / np.sqrt(len(explained))),
            "r2_ceiling": ceiling,
            "pearson": float(row_pearson(predicted.T, responses[held].T).mean()),
        }


def ridge(inputs: np.ndarray, targets: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Ridge regression with an intercept, the penalty of each target by leaving out one subset."""
    from sklearn.linear_model import RidgeCV

    penalties = np.geomspace(1e-4, 1e4, 33) * inputs.var(axis=0).sum()
    model = RidgeCV(alphas=penalties, alpha_per_target=True).fit(inputs, targets)
    return np.asarray(model.predict(wanted))


def reliability(losses: np.ndarray) -> float | None:
    """Share of the variance over subsets of losses (R, S, Q), averaged over seeds, that is not noise: mean
    over queries. What a seed does to all subsets alike is none."""
    if losses.shape[1] < 2:
        return None
    losses = losses - losses.mean(axis=0)
    noise = losses.var(axis=1, ddof=1).mean(axis=0) / losses.shape[1]
    return float((1 - noise / losses.mean(axis=1).var(axis=0, ddof=1)).mean())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks additivity", description=__doc__)
    parser.add_argument("index", help="an index with operators' model and retrained subsets")
    parser.add_argument("--model", help="where the model is, if not where the index says")
    parser.add_argument("--suite", required=True, help="name, for the record")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--datamodel", action="store_true", help="fit datamodels (hundreds of subsets)")
    parser.add_argument("--bands", action="append", metavar="METHOD", help="whose ranks say what a band is")
    parser.add_argument("--complements", type=int, metavar="N", help="retrain the complements of N subsets")
    parser.add_argument("--workers", type=int, help="models retrained at the same time")
    parser.add_argument("--no-steered", dest="steered", action="store_false")
    for record in run(parser.parse_args(arguments)):
        emit(record)
