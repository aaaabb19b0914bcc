"""The records that `stride train`, `stride evaluate truth` and `stride config` write."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict


class CheckpointRecord(TypedDict):
    path: Annotated[str, "a further model that takes part: its directory or hub id"]
    fingerprint: Annotated[str, "SHA-256 of its weights, hex"]
    space: Annotated[str, "as above"]
    layer: Annotated[int, "residual spaces act after this many of its blocks"]
    step_agreement: Annotated[float | None, "as above"]
    loss: Annotated[float, "as above"]
    seconds: Annotated[float, "load, fit and write"]


class TrainSeconds(TypedDict):
    load: Annotated[float, "seconds"]
    fit: Annotated[float, "seconds"]
    write: Annotated[float, "seconds"]


class TrainRecord(TypedDict):
    schema: Literal["stride.train/1"]
    index: Annotated[str, "path of the index"]
    fit: Annotated[str, '"closed" or "sgd"']
    space: Annotated[str, "operator space, or spaces joined by +"]
    layer: Annotated[int, "residual spaces act after this many blocks"]
    subsets: Annotated[int, "K"]
    gate_size: Annotated[int, "gates of one operator, summed over its spaces"]
    project: Annotated[int, "bytes that are kept of every chunk's own gradient; 0: none"]
    projected: Annotated[int, "chunks of which they are kept"]
    coverage: Annotated[float, "share of the chunks that the fit has seen"]
    step: Annotated[float, "share of the gates at which exact measurement takes its differences"]
    step_agreement: Annotated[float | None, "correlation of exact and linear responses there; null: by SGD"]
    loss: Annotated[float, "closed: mean loss of the corpus; sgd: the last iteration's objective per subset"]
    checkpoints: list[CheckpointRecord]
    seconds: TrainSeconds


class EstimatedSeconds(TypedDict):
    bases: Annotated[float, "seconds of fitting the bases of the operator spaces"]
    corpus: Annotated[float, "seconds of the passes over the corpus"]
    calibration: Annotated[float, "seconds of asking null prompts; 0 where none are"]


class TrainEstimateRecord(TypedDict):
    schema: Literal["stride.train_estimate/1"]
    index: Annotated[str, "path of the index"]
    chunks: Annotated[int, "chunks of the corpus"]
    tokens: Annotated[int, "tokens of the corpus"]
    subsets: Annotated[int, "K"]
    gate_size: Annotated[int, "gates of one operator, summed over its spaces"]
    seconds: EstimatedSeconds
    bytes: Annotated[int, "that operators and projections will take on disk, at most"]
    memory: Annotated[int | None, "bytes held at most, the mapped model with them; null: not known"]
    timed_tokens: Annotated[int, "tokens of the first chunks, which were timed"]


class TruthRecord(TypedDict):
    schema: Literal["stride.truth/1"]
    index: Annotated[str, "path of the index"]
    subsets: Annotated[int, "random subsets of this alpha, in all"]
    seeds: Annotated[int, "models retrained on each"]
    own_seed: Annotated[bool, "from the model's own initial weights and order, instead of others"]
    alpha: Annotated[float, "share of the chunks in a subset; of an imported truth: of the documents"]
    queries: Annotated[int, "queries whose losses were measured"]
    trained: Annotated[int, "models trained by this command"]
    reused: Annotated[int, "models that had been trained before"]
    imported: Annotated[int, "models whose losses were read from a file"]
    mean_loss: Annotated[float, "mean over queries and retrained models, nats per scored token"]
    base_loss: Annotated[float, "mean over queries of the index's own model, nats per scored token"]
    seconds: Annotated[float, "seconds of the whole command"]
