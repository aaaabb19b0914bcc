"""The keys of the records that `stride model` writes."""

from __future__ import annotations

from typing import Any

_SECONDS = ("number", "seconds of the whole command")
_PATH = ("string", "directory of the model")
MODEL_RECORDS: dict[str, dict[str, Any]] = {
    "stride.model/1": {
        "schema": ("string", "stride.model/1"),
        "path": _PATH,
        "parameters": ("integer", "numbers that the model is made of"),
        "loss": ("number", "mean loss of the last steps, nats per scored token"),
        "steps": ("integer", "optimizer steps"),
        "epochs": ("number", "passes over the corpus"),
        "tokens": ("integer", "tokens of the corpus"),
        "documents": ("integer", "documents of the corpus"),
        "chunks": ("integer", "chunks of the corpus"),
        "seconds": _SECONDS,
    },
    "stride.classifier/1": {
        "schema": ("string", "stride.classifier/1"),
        "path": _PATH,
        "network": ("string", '"mlp", "resnet9", "logistic" or "adapter" (a file of one\'s own)'),
        "parameters": ("integer", "numbers that training changes"),
        "classes": ("integer", "classes"),
        "rows": ("integer", "rows that it was trained on"),
        "loss": ("number", "mean loss on them, nats"),
        "accuracy": ("number", "share of them that is classified right"),
        "held_out": ("integer", "rows kept as queries"),
        "held_out_loss": ("number", "mean loss on those, nats; null where there is none"),
        "held_out_accuracy": ("number", "share of those that is classified right; null where there is none"),
        "epochs": ("integer", "passes over the rows"),
        "seconds": _SECONDS,
    },
    "stride.model_info/1": {
        "schema": ("string", "stride.model_info/1"),
        "path": ("string", "checkpoint directory, .gguf file or hub id, as given"),
        "architecture": ("string", "name of its class"),
        "parameters": ("integer", "numbers"),
        "layers": ("integer", "blocks"),
        "width": ("integer", "of the residual stream; of a classifier, of its features"),
        "vocabulary": ("integer", "tokens; of a classifier, classes"),
        "context": ("integer or null", "tokens of the longest sequence"),
        "fingerprint": ("string", "SHA-256 of the weights, hex"),
        "tokenizer_fingerprint": ("string", "SHA-256 of the tokenizer (of the classes), hex"),
        "checkpoints": [("string", "directory of a model kept along the way")],
        "recipe": ("object or null", "how STRIDE trained it; null where it did not"),
    },
}
