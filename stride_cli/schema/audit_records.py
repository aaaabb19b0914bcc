"""The records that `stride audit` writes."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict


class PresenceRecord(TypedDict):
    found: Annotated[
        str, 'what a document holds: "item", "prompt", "response", a "part", it in "other words", or nothing'
    ]
    share: Annotated[
        float, "share of its three-word sequences by rarity, in runs of five words or more of one document"
    ]
    loose_share: Annotated[float, "the same in runs of any length"]
    numbers: Annotated[float, "share of its numbers that stand there; 1 where it has none"]
    longest_run: Annotated[int, "words of the longest run that it shares with that document"]
    document: Annotated[str, "the document most like it; empty where there is none"]
    documents: Annotated[int, "documents as like it, at most 8"]
    passage: Annotated[str, "what that document and the item have in common, with some text on each side"]
    differences: list[
        list[Annotated[str, "[item's words, document's words]; [how they are set, empty] where words agree"]]
    ]


class EffectRecord(TypedDict):
    loss: Annotated[
        float, "mean nats per scored token: of a copy as it stands in the corpus, else of the item"
    ]
    base_loss: Annotated[
        float | None, "the same of the model that this one was fine-tuned from; null where there is none"
    ]
    control_loss: Annotated[
        float | None, "mean loss of the controls; of made ones, of the item's own versions"
    ]
    influence: Annotated[
        float | None, "influence of its documents, as a query's by the subsets alone; null: none holds it"
    ]
    influence_share: Annotated[float | None, "the same / Σ|influence of every chunk|, at least 0"]
    strongest_document: Annotated[str, "document of the chunk of highest influence; empty: none"]
    strongest_share: Annotated[float | None, "its influence / Σ|influence of every chunk|"]


class ControlsRecord(TypedDict):
    kind: Annotated[str, '"file", "absent" (items without a copy) or "made" (versions of items)']
    like: Annotated[str, 'put as what: "item", "versions", "prompt, upper case", …; empty: as they are']
    count: Annotated[int, "controls that the item was ranked among"]
    sources: Annotated[int, "texts that these come from; below 20 nothing is decided"]
    power: Annotated[float, "share of items that would have p ≤ level, had learning halved their loss"]
    together: Annotated[
        int | None, "items that have to be unusual together for q < level, with so many controls"
    ]


class AuditRecord(TypedDict):
    schema: Literal["stride.audit/2"]
    item: Annotated[str, "the item's id"]
    line: Annotated[int, "its line in the benchmark, from 1"]
    verdict: Annotated[str, '"leaked and learnt", "present, no effect", "undecided" or "no evidence"']
    reason: Annotated[str, "why nothing was decided; else empty"]
    p: Annotated[
        float | None,
        "rank among the controls / (controls + 1), ties at their middle: of a copy, by what changing a few "
        "words costs; of an item in other words, by its loss; null where it is not tested",
    ]
    q: Annotated[
        float | None,
        "false-discovery rate at which the item would just be reported, among the items of which there are "
        "copies, those in other words, or (controls from a file) the others",
    ]
    presence: PresenceRecord
    effect: EffectRecord
    controls: ControlsRecord
