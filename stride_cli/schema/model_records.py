"""The records that `stride model` writes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict


class ContinuationRecord(TypedDict):
    beginning: Annotated[str, "first tokens of a chunk of the corpus"]
    continuation: Annotated[str, "what the model says after them, by itself"]


class ModelRecord(TypedDict):
    schema: Literal["stride.model/1"]
    path: Annotated[str, "directory of the model"]
    parameters: Annotated[int, "numbers that the model is made of"]
    loss: Annotated[float, "mean loss of the last steps, nats per scored token"]
    loss_before: NotRequired[Annotated[float, "of a fine-tuned model: that loss before, on the same tokens"]]
    steps: Annotated[int, "optimizer steps"]
    epochs: Annotated[float, "passes over the corpus"]
    tokens: Annotated[int, "tokens of the corpus"]
    documents: Annotated[int, "documents of the corpus"]
    chunks: Annotated[int, "chunks of the corpus"]
    seconds: Annotated[float, "seconds of the whole command"]
    # of a model trained from scratch
    entropy: NotRequired[
        Annotated[float, "of the corpus's tokens, nats: the loss of who knows only how frequent they are"]
    ]
    pairs_alone: NotRequired[
        Annotated[float, "share of the corpus's pairs of neighbouring tokens that stand in one chunk only"]
    ]
    speaks: NotRequired[
        Annotated[bool, "whether it learnt its corpus (loss), and the corpus is more than recited (pairs)"]
    ]
    continuations: NotRequired[list[ContinuationRecord]]


class ClassifierRecord(TypedDict):
    schema: Literal["stride.classifier/1"]
    path: Annotated[str, "directory of the model"]
    network: Annotated[str, '"mlp", "resnet9", "logistic" or "adapter" (a file of one\'s own)']
    parameters: Annotated[int, "numbers that training changes"]
    classes: Annotated[int, "classes"]
    rows: Annotated[int, "rows that it was trained on"]
    loss: Annotated[float, "mean loss on them, nats"]
    accuracy: Annotated[float, "share of them that is classified right"]
    held_out: Annotated[int, "rows kept as queries"]
    held_out_loss: Annotated[float | None, "mean loss on those, nats; null where there is none"]
    held_out_accuracy: Annotated[
        float | None, "share of those that is classified right; null where there is none"
    ]
    epochs: Annotated[int, "passes over the rows"]
    seconds: Annotated[float, "seconds of the whole command"]


class ModelInfoRecord(TypedDict):
    schema: Literal["stride.model_info/1"]
    path: Annotated[str, "checkpoint directory, .gguf file or hub id, as given"]
    architecture: Annotated[str, "name of its class"]
    parameters: Annotated[int, "numbers"]
    layers: Annotated[int | None, "blocks; null for a classifier that would have to run Python code"]
    width: Annotated[int | None, "of the residual stream; of a classifier, of its features; null as layers"]
    vocabulary: Annotated[int, "tokens; of a classifier, classes"]
    context: Annotated[int | None, "tokens of the longest sequence"]
    fingerprint: Annotated[str, "SHA-256 of the weights, hex"]
    tokenizer_fingerprint: Annotated[str, "SHA-256 of the tokenizer (of the classes), hex"]
    settings_fingerprint: Annotated[
        str | None, "SHA-256 of settings that change answers, hex; null for classifiers, whose own has them"
    ]
    checkpoints: list[Annotated[str, "directory of a model kept along the way"]]
    recipe: Annotated[dict[str, Any] | None, "how STRIDE trained it; null where it did not"]
