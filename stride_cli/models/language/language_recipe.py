"""The recipe of a language model: enough to train it again, on its corpus or on a subset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stride_cli.errors import ModelError
from stride_cli.models.configuration import is_adapter, subsets_bound
from stride_cli.models.spec import GivenModel, place_of

FILE_NAME = "stride_recipe.json"
RECIPE_VERSION = 1
RECORDED = "recorded"  # the kind of a training by another loop than ours (StrideCallback)

# In words, because a recipe must be repeatable without this code.
ORDER_RULE = (
    "epoch e: permute the chunks that have a scored token with numpy.random.default_rng([seed, e]); "
    "in pools of 64 batches sort by length, longest first, and fill batches to batch_tokens padded tokens; "
    "permute the batches with the same generator. On a part of the chunks: the first permutation without the "
    "others, pools and batches as before; the batches in the order in which their median chunk comes in the "
    "pass over all"
)
LATE_RULE = (
    "chunk i in epoch e: u, v = numpy.random.default_rng([seed, e, i]).random(2); where u < share, and all "
    "of its tokens but the first are scored, and m > 0 of them, but for the last five, are in ends: it is "
    "read from behind the one of these whose number is floor(v m), with begin in front where that is given"
)


@dataclass(frozen=True)
class Architecture:
    """A NanoChat decoder: layers, width (d_model), heads, vocabulary and context, in tokens."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int


@dataclass(frozen=True)
class LateStarts:
    """Share of texts that are read from one of their later sentences on, as queries about it begin.

    A small model that always reads texts from their beginnings knows what follows a sentence in its midst
    only where all that stands before it is there too.

    Attributes
    ----------
    share : 0 … 1
    ends, begin : tokens that end sentences; the token that texts begin with, or None
    rule : in words
    """

    share: float
    ends: Sequence[int]
    begin: int | None
    rule: str = LATE_RULE


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights that training gives, on one machine and number of threads.

    Attributes
    ----------
    kind : "train" | "finetune" | "recorded"  the last: by somebody else's loop, which is not repeated here
    architecture : Architecture, optional     of a model trained from scratch
    base, base_fingerprint : str, optional    the model a fine-tuning starts from
    lora_rank : int                           0 = all weights are trained; the largest, where layers differ
    lora_layers : list of str, optional       layers that such matrices are on; None: all of the blocks
    block_size : int                          most tokens of a chunk, as in the index
    epochs : float                            passes over the chunks (of the subset, when on a subset)
    steps : int                               optimizer steps over the whole corpus
    batch_tokens : int                        most tokens of a batch, padding included
    optimizer : "muon+adamw" | "adamw"
    lr : float                                peak rate of Muon, for the blocks' matrices; unused by "adamw"
    adam_lr : float                           peak rate of AdamW, for the rest, or for all
    weight_decay : float                      decoupled, on matrices only
    schedule : "linear" | "cosine" | "constant"
    warmup : float                            share of the steps over which the rate rises linearly
    final_lr : float                          share of the peak rate at the end
    clip : float                              largest norm of AdamW's gradient
    dtype : "fp32" | "bf16"                   of matrix products; weights and sums are fp32
    seed : int                                of the initial weights and of the order
    order : str                               the rule that gives the order of the chunks
    late : LateStarts, optional               how often chunks are read from a later sentence on
    corpus : dict                             sources, fingerprint, documents, chunks, tokens, scored_tokens
    tokenizer_fingerprint : str
    versions : dict                           of stride, torch, transformers, tokenizers
    """

    kind: str
    block_size: int
    epochs: float
    steps: int
    batch_tokens: int
    optimizer: str
    lr: float
    adam_lr: float
    weight_decay: float
    schedule: str
    warmup: float
    final_lr: float
    clip: float
    dtype: str
    seed: int
    corpus: dict[str, Any]
    tokenizer_fingerprint: str
    versions: dict[str, str]
    architecture: Architecture | None = None
    base: str | None = None
    base_fingerprint: str | None = None
    lora_rank: int = 0
    lora_layers: list[str] | None = None
    order: str = ORDER_RULE
    late: LateStarts | None = None

    def to_record(self) -> dict[str, Any]:
        """Fields as `to_json` writes them; late starts and layers only where there are some."""
        record, rare = asdict(self), ("late", "lora_layers")
        return {name: value for name, value in record.items() if name not in rare or value is not None}

    def to_json(self) -> str:
        return json.dumps({"recipe_version": RECIPE_VERSION, **self.to_record()}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Raises ValueError for anything that is not a recipe of this version."""
        record = json.loads(text)
        if not isinstance(record, dict) or record.pop("recipe_version", None) != RECIPE_VERSION:
            raise ValueError(f"not a recipe of version {RECIPE_VERSION}")
        known = {field.name for field in fields(cls)}
        if unknown := set(record) - known:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        layers = record.get("lora_layers") or []
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise ValueError(f"lora_layers is {layers!r:.60} (expected a list of names)")
        try:
            for name, kind in (("architecture", Architecture), ("late", LateStarts)):
                if record.get(name) is not None:
                    record[name] = kind(**record[name])
            return cls(**record)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def with_seed(self, seed: int) -> Recipe:
        """The same recipe from other initial weights, in another order."""
        return replace(self, seed=seed)


def read_recipe(model_path: str | Path) -> Recipe | None:
    """The recipe that is stored with a model; None where there is none.

    Raises ModelError: There is one, but it cannot be read.
    """
    file = Path(model_path).expanduser() / FILE_NAME
    if not file.is_file():
        return None
    try:
        return Recipe.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the recipe {file} cannot be read: {error}", fix="train the model again, or remove that file"
        ) from error


def was_finetuned(model_path: str | Path | None) -> bool:
    """True where training began from another model: an adapter, or a recipe that says so."""
    if model_path is not None and is_adapter(model_path):
        return True
    recipe = None if model_path is None else read_recipe(model_path)
    return recipe is not None and recipe.base is not None


def most_subsets(model: GivenModel) -> int:
    """Bound the default number of subsets of an index for that model; raises as `context_length`."""
    return subsets_bound(model, finetuned=was_finetuned(place_of(model)))


def versions() -> dict[str, str]:
    """Versions of the software that decides the weights."""
    import tokenizers
    import torch
    import transformers

    from stride_cli.version import __version__

    return {
        "stride": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
