"""The keys of the records that `stride tune` writes."""

from __future__ import annotations

from typing import Any

_SETTINGS = {
    "space": ("string", "operator space, or spaces joined by +"),
    "layer": ("integer", "residual spaces act after this many blocks"),
    "rank": ("number", "of every space; null for each space's default"),
    "damping": (
        "number",
        "γ relative to the mean eigenvalue of the Fisher matrix; null: training time instead",
    ),
    "subsets": ("integer", "K"),
    "degree": ("integer", "d, subsets of each chunk"),
}
TUNING_RECORDS: dict[str, dict[str, Any]] = {
    "stride.trial/1": {
        "schema": ("string", "stride.trial/1"),
        "trial": ("integer", "1, 2, …"),
        **_SETTINGS,
        "lambda_ratio": ("number", "λ / λ_max of the highest score; null where the trial failed"),
        "score": ("number", "criterion there: mean over queries, −1 … 1; null where the trial failed"),
        "se": ("number", "bootstrap standard error over queries"),
        "lambdas": [
            {
                "lambda_ratio": ("number", "λ / λ_max"),
                "score": ("number", "mean over queries"),
                "se": ("number", "bootstrap standard error over queries"),
            }
        ],
        "best": ("boolean", "the highest so far, and by two standard errors better than the first"),
        "kept": ("boolean", "found finished from an earlier run"),
        "error": ("string", "why the trial failed", "optional"),
        "seconds": ("number", "seconds of fit and scoring"),
    },
    "stride.tune/1": {
        "schema": ("string", "stride.tune/1"),
        "index": ("string", "path of the index"),
        "criterion": (
            "string",
            '"continued" (the model trained further), "retrained" or "truth"',
        ),
        "queries": ("integer", "queries"),
        "responses": ("integer", "random subsets whose effect was measured"),
        **_SETTINGS,
        "lambda_ratio": ("number", "λ / λ_max"),
        "score": {
            "mean": ("number", "of the chosen settings: mean over queries of Spearman's ρ over subsets"),
            "se": ("number", "bootstrap standard error over queries"),
            "low": ("number", "2.5 % of the bootstrap"),
            "high": ("number", "97.5 % of the bootstrap"),
        },
        "gain": {
            "mean": ("number", "the chosen settings' score minus that of the settings before"),
            "se": ("number", "bootstrap standard error over queries"),
            "low": ("number", "2.5 % of the bootstrap"),
            "high": ("number", "97.5 % of the bootstrap"),
        },
        "trials": ("integer", "fits that were scored"),
        "written": (
            "string",
            "what was (with --dry-run, would be) written: a line of section.key: value each",
        ),
        "path": ("string", "where they were written; empty with --dry-run"),
        "next": ("string", "the command that puts them to use"),
        "seconds": {
            "responses": ("number", "seconds of measuring the subsets' effect"),
            "trials": ("number", "seconds of the trials, those of earlier runs included"),
        },
    },
}
