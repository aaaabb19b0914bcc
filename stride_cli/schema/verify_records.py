"""The keys of the record that `stride verify-hit` writes."""

from __future__ import annotations

from typing import Any

_MEAN = {
    "mean": ("number", "mean over seeds, nats per scored token"),
    "se": ("number", "standard error; null with one seed"),
    "low": ("number", "lower end of the interval"),
    "high": ("number", "upper end of the interval"),
}
VERIFY_RECORDS: dict[str, dict[str, Any]] = {
    "stride.verify_hit/1": {
        "schema": ("string", "stride.verify_hit/1"),
        "index": ("string", "path of the index"),
        "prompt": ("string", "the prompt"),
        "response": ("string", "the continuation whose loss is looked at"),
        "generated": ("boolean", "whether the model wrote the response"),
        "documents": [
            {
                "document": ("string", "id of a document that was removed"),
                "influence": ("number", "as `stride query` has it; null where the documents were given"),
                "tokens": ("integer", "its tokens"),
            }
        ],
        "verdict": ("string", '"depended", "no_evidence" or "too_few_runs"'),
        "sentence": ("string", "the verdict in words"),
        "difference": {
            **_MEAN,
            "mean": ("number", "loss without them − loss without random ones, nats per scored token"),
        },
        "attributed": {**_MEAN, "mean": ("number", "rise of the loss without them, nats per scored token")},
        "by_chance": {**_MEAN, "mean": ("number", "rise of the loss without random documents")},
        "level": ("number", "of the intervals: Student's t over seeds, each with random draws of its own"),
        "effect": ("number", "smallest rise of the loss that would matter, nats per scored token"),
        "exceeded": ("number", "share of random removals that raise the loss less than theirs, 0 … 1"),
        "seeds_needed": ("number", "about how many seeds would tell; null where that cannot be estimated"),
        "seeds": ("integer", "trainings of every set of documents"),
        "random": ("integer", "random sets of documents of each seed"),
        "trained": ("integer", "models trained by this command"),
        "reused": ("integer", "models that had been trained before"),
        "runs": [
            {
                "seed": ("integer", "of the initial weights and order"),
                "removed": ("string", '"nothing", "hits" or "random"'),
                "draw": ("integer", "which of the seed's random sets; 0 for the others"),
                "tokens": ("integer", "tokens that were removed"),
                "loss": ("number", "of the response under the retrained model, nats per scored token"),
                "rise": ("number", "that, minus the loss under the same seed with every document"),
            }
        ],
        "seconds": ("number", "seconds of the whole command"),
    }
}
