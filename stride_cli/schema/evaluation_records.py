"""The keys of the records that `stride evaluate` and `stride baseline` write."""

from __future__ import annotations

from typing import Any

_WHAT = "null where the method failed"
_METHOD = ("string", "the method with its options, as given")
_ERROR = ("string", "why the method failed", "optional")


def _mean(what: str) -> dict[str, Any]:
    """A mean with its uncertainty."""
    return {
        "mean": ("number", f"{what}; {_WHAT}"),
        "se": ("number", "bootstrap standard error"),
        "low": ("number", "2.5 % of the bootstrap"),
        "high": ("number", "97.5 % of the bootstrap"),
    }


def _spread(over: str) -> dict[str, Any]:
    spread = _mean("")
    del spread["mean"]
    return {key: (kind, f"{text}, over {over} only") for key, (kind, text) in spread.items()}


_LDS: dict[str, Any] = {
    "method": _METHOD,
    "error": _ERROR,
    "response": ("string", '"loss" or "margin": what the retrained models were asked'),
    "alpha": ("number", "share of the chunks in a subset"),
    "subsets": ("integer", "retrained subsets it is judged on: not those that it was fitted on"),
    "seeds": ("integer", "trainings of each subset"),
    "own_seed": ("boolean", "from the model's own initial weights and order, instead of others"),
    "queries": ("integer", "queries"),
    "spearman": _mean("LDS: rank correlation over subsets, mean over queries, −1 … 1; both are resampled"),
    "pearson": _mean("the same with Pearson's correlation"),
    "kendall": _mean("the same with Kendall's τ_a"),
    "over_queries": _spread("queries"),
    "over_subsets": _spread("subsets"),
    "constant_queries": ("number", "queries whose scores predict the same for every subset; they count as 0"),
    "ceiling": ("number", "the highest LDS that the noise between seeds allows; null with one seed"),
    "seconds": {
        "fit": ("number", "seconds before the first query"),
        "query": ("number", "seconds a query"),
    },
    "bytes_per_chunk": ("number", "what the method keeps for later queries, bytes a chunk"),
    "tracking": {
        "reliability": ("number", "mean over queries of the reliability they were given; null without any"),
        **_mean("rank correlation over queries between reliability and true LDS; interval over queries"),
    },
}
_GROUP: dict[str, Any] = {
    "group": ("string", "what the ids of these queries begin with, up to the first /"),
    "queries": ("integer", "queries"),
    "mean": ("number", "mean over them"),
    "se": ("number", "standard error over queries"),
}
EVALUATION_RECORDS: dict[str, dict[str, Any]] = {
    "stride.lds/1": {"schema": ("string", "stride.lds/1"), **_LDS},
    "stride.comparison/1": {
        "schema": ("string", "stride.comparison/1"),
        **_LDS,
        "reference": ("string", "the first method, which differences are taken to"),
        "difference": _mean("LDS minus the reference's, on the same resamples; null for the reference"),
        "groups": [_GROUP],
        "partial": {
            "given": ("string or null", "the method whose part is taken out of both; null without --given"),
            **{key: _GROUP[key] for key in ("queries", "mean", "se")},
            "groups": [_GROUP],
        },
        "peak_memory": ("number", "growth of resident memory over fit and queries, bytes, at its peak"),
        "peak_device_memory": ("number", "the same on the GPU; null without one"),
    },
    "stride.distribution/1": {
        "schema": ("string", "stride.distribution/1"),
        "method": _METHOD,
        "error": _ERROR,
        "chunks": ("integer", "n"),
        "queries": ("integer", "queries"),
        "sparsity": ("number", f"share of scores that are exactly zero, mean over queries; {_WHAT}"),
        "gini": ("number", "Gini coefficient of |scores|, mean over queries that have any"),
        "top10_coverage": ("number", "part of Σ|score| that the top 10 % of the chunks hold, mean"),
        "active_mean": ("number", "scores that are not zero, mean over queries"),
        "active_p50": ("number", "their median"),
        "active_p90": ("number", "their 90th percentile"),
        "empty_queries": ("number", "queries whose scores are all zero"),
        "curve": [
            {
                "share": ("number", "this share of the chunks, highest |score| first"),
                "mass": ("number", "holds this part of Σ|score|, mean over queries"),
            }
        ],
    },
    "stride.tail_patch/1": {
        "schema": ("string", "stride.tail_patch/1"),
        "method": _METHOD,
        "k": ("integer", "chunks of a step"),
        "lift": _mean("attributed − random, nats per scored token; > 0: attributed chunks help more"),
        "attributed": _mean("Δ log p of a query by one step on its top k"),
        "random": _mean("Δ log p by one step on k random chunks"),
        "helped": ("number", "share of the queries with a lift above zero"),
        "queries": ("integer", "queries"),
        "draws": ("integer", "random batches"),
        "lr": ("number", "learning rate of the step"),
    },
    "stride.removal/1": {
        "schema": ("string", "stride.removal/1"),
        "method": _METHOD,
        "k": ("integer", "chunks removed"),
        "attributed": _mean(
            "rise of a query's loss without its top k, nats per scored token; > 0: it suffers"
        ),
        "random": _mean("rise without k random chunks"),
        "advantage": _mean("attributed − random"),
        "probability_attributed": _mean(
            "fall of the probability (label's; exp(−loss) for text) without the top k"
        ),
        "probability_random": _mean("fall without k random chunks"),
        "queries": ("integer", "queries"),
        "seeds": ("integer", "trainings of every set"),
        "draws": ("integer", "random removals"),
    },
    "stride.loo/1": {
        "schema": ("string", "stride.loo/1"),
        "method": _METHOD,
        "spearman": _mean("rank correlation over left-out chunks, mean over queries; both are resampled"),
        "pearson": _mean("the same with Pearson's correlation"),
        "kendall": _mean("the same with Kendall's τ_a"),
        "chunks": ("integer", "chunks left out one by one"),
        "seeds": ("integer", "trainings without each"),
        "queries": ("integer", "queries"),
        "constant_queries": ("integer", "queries whose sampled scores are all the same; they count as 0"),
        "ceiling": ("number", "the highest correlation that the noise between seeds allows; null with one"),
    },
    "stride.method/1": {
        "schema": ("string", "stride.method/1"),
        "method": ("string", "the method's name"),
        "needs": ("string", '"text", "model", or "truth" (models retrained on subsets)'),
        "description": ("string", "one line"),
    },
    "stride.ranking/1": {
        "schema": ("string", "stride.ranking/1"),
        "query": ("string", "the query's id"),
        "method": _METHOD,
        "hits": [
            {
                "rank": ("number", "position, 1 = highest; ties share their mid-rank"),
                "document": ("string", "the document's id"),
                "score": ("number", "summed over its chunks; > 0 supports; units differ by method"),
            }
        ],
    },
}
