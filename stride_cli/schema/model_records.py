"""The records that `stride model` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from stride_cli.schema.derivation import key


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


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier that was trained, and how well; losses and accuracies are of the finished model."""

    schema: ClassVar[str] = "stride.classifier/1"

    path: str = key("directory of the model")
    network: str = key('"mlp", "resnet9", "logistic" or "adapter" (a file of one\'s own)')
    parameters: int = key("numbers that training changes")
    classes: int = key("classes")
    rows: int = key("rows that it was trained on")
    loss: float = key("mean loss on them, nats")
    accuracy: float = key("share of them that is classified right")
    held_out: int = key("rows kept as queries")
    held_out_loss: float | None = key("mean loss on those, nats; null where there is none")
    held_out_accuracy: float | None = key("share of those that is classified right; null where there is none")
    epochs: int = key("passes over the rows")
    seconds: float = key("seconds of the whole command")


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
