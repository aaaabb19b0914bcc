"""The record that `stride verify-hit` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired, TypedDict

from stride_cli.schema.answer_records import GENERATED, PROMPT, TEMPLATE
from stride_cli.schema.derivation import key


class RemovedDocument(TypedDict):
    document: Annotated[str, "id of a document that was removed"]
    influence: Annotated[float | None, "as `stride query` has it, in `unit`; null where documents were given"]
    tokens: Annotated[int, "its tokens"]


@dataclass(frozen=True)
class Interval:
    """A mean with its standard error and interval."""

    mean: float = key()
    se: float = key("standard error; null with one seed")
    low: float = key("lower end of the interval")
    high: float = key("upper end of the interval")


class RunRecord(TypedDict):
    seed: Annotated[int, "of the initial weights and order"]
    removed: Annotated[str, '"nothing", "hits" or "random"']
    draw: Annotated[int, "which of the seed's random sets; 0 for the others"]
    tokens: Annotated[int, "tokens that were removed"]
    loss: Annotated[float, "of the response under the retrained model, nats per scored token"]
    rise: Annotated[float, "that, minus the loss under the same seed with every document"]


class VerifyHitRecord(TypedDict):
    schema: Literal["stride.verify_hit/1"]
    index: Annotated[str, "path of the index"]
    prompt: Annotated[str, PROMPT]
    response: Annotated[str, "the continuation whose loss is looked at; likewise"]
    instead: NotRequired[Annotated[str, "with --instead: what the response is compared with"]]
    pooled: NotRequired[Annotated[int, "with --file: prompts that are tested as one"]]
    compared: NotRequired[
        Annotated[
            bool,
            "true where responses are compared with others: losses are then the log-odds of the token in "
            "which the two part, times -1, nats",
        ]
    ]
    template: NotRequired[Annotated[str | None, TEMPLATE]]
    generated: Annotated[bool, GENERATED]
    documents: list[RemovedDocument]
    unit: NotRequired[Annotated[str, 'of influences: "nats" or "relative"']]
    verdict: Annotated[str, '"depended", "no_evidence" or "too_few_runs"']
    sentence: Annotated[str, "the verdict in words"]
    difference: Annotated[Interval, {"mean": "loss without them − without random ones, nats a scored token"}]
    attributed: Annotated[Interval, {"mean": "rise of the loss without them, nats per scored token"}]
    by_chance: Annotated[Interval, {"mean": "rise of the loss without random documents"}]
    level: Annotated[float, "of the intervals: Student's t over seeds, each with random draws of its own"]
    look: NotRequired[Annotated[int, "which look at these documents: all looks hold together with 95 %"]]
    effect: Annotated[float, "smallest rise of the loss that would matter, nats per scored token"]
    exceeded: Annotated[float, "share of random removals that raise the loss less than theirs, 0 … 1"]
    seeds_needed: Annotated[float | None, "about how many seeds would tell; null: cannot be estimated"]
    seeds: Annotated[int, "trainings of every set of documents"]
    random: Annotated[int, "random sets of documents of each seed"]
    trained: Annotated[int, "models trained by this command"]
    reused: Annotated[int, "models that had been trained before"]
    runs: list[RunRecord]
    seconds: Annotated[float, "seconds of the whole command"]
