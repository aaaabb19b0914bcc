"""The records that `stride tune` writes."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from stride_cli.research.evaluation.records import EstimateRecord, Number


class SettingsRecord(TypedDict):
    space: Annotated[str, "operator space, or spaces joined by +"]
    layer: Annotated[int, "residual spaces act after this many blocks"]
    rank: Annotated[Number, "of every space; null for each space's default"]
    damping: Annotated[
        Number, "γ relative to the mean eigenvalue of the Fisher matrix; null: training time instead"
    ]
    subsets: Annotated[int, "K"]
    degree: Annotated[int, "d, subsets of each chunk"]


class TrialRecord(SettingsRecord):
    schema: Literal["stride.trial/1"]
    trial: Annotated[int, "1, 2, …"]
    score: Annotated[Number, "criterion: mean over queries, −1 … 1; null where the trial failed"]
    se: Annotated[Number, "bootstrap standard error over queries"]
    best: Annotated[bool, "the highest so far, and by two standard errors better than the first"]
    kept: Annotated[bool, "found finished from an earlier run"]
    error: NotRequired[Annotated[str, "why the trial failed"]]
    seconds: Annotated[float, "seconds of fit and scoring"]


class TuneSeconds(TypedDict):
    responses: Annotated[float, "seconds of measuring the subsets' effect"]
    trials: Annotated[float, "seconds of the trials, those of earlier runs included"]


class TuneRecord(SettingsRecord):
    schema: Literal["stride.tune/1"]
    index: Annotated[str, "path of the index"]
    criterion: Annotated[str, '"continued" (the model trained further), "retrained" or "truth"']
    queries: Annotated[int, "queries"]
    responses: Annotated[int, "random subsets whose effect was measured"]
    score: Annotated[
        EstimateRecord, {"mean": "of the chosen settings: mean over queries of Spearman's ρ over subsets"}
    ]
    gain: Annotated[EstimateRecord, {"mean": "the chosen settings' score minus that of the settings before"}]
    trials: Annotated[int, "fits that were scored"]
    written: Annotated[
        str,
        "what was (with --dry-run, would be) written: a line of section.key: value each; empty where nothing "
        "is gained by other settings",
    ]
    path: Annotated[
        str, "where they were written; empty with --dry-run, without any, and where there is a file"
    ]
    next: Annotated[str, "the command that puts them to use; empty where nothing has to be fitted anew"]
    seconds: TuneSeconds
