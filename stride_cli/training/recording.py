"""Record what a `Trainer` trains on: its corpus, the order of its examples, its model's whole weights."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from index_format.durable import replacing
from stride_cli.corpus.documents import EMPTY_CORPUS, chained
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.language.language_recipe import read_recipe
from stride_cli.output import note

CORPUS = "corpus.jsonl"
_ANSWERS = ("response", "completion")  # TRL calls it the latter
_COMPARED = 100  # examples of tokens whose texts are tokenised again
_COLUMNS = "text, prompt with response or completion, messages, or input_ids"


@dataclass(frozen=True)
class Recorded:
    """A corpus that was written: how many documents, and its fingerprint (an index's of it)."""

    documents: int
    fingerprint: str


def write_corpus(examples: Sequence[Mapping[str, Any]], tokenizer: Any, path: Path) -> Recorded:
    """Write the examples of a dataset as JSON Lines, in its order: document i is example i.

    An example has a text, a prompt with its response or completion, or messages (both in TRL's ways); one
    that has been tokenised already is decoded, its prompt being what its labels leave out. Ids are those of a
    column "id" of different strings or numbers, else row numbers.

    Raises
    ------
    UsageError      an example has none of that
    CorpusError     one is empty, or no text (names the line, which is the row from 1)
    """
    ids = _ids(examples)
    decoded = False
    with replacing(path) as fresh, fresh.open("x", encoding="utf-8") as out:
        for row in range(len(examples)):
            example = examples[row]
            record = _record(example, tokenizer) if isinstance(example, Mapping) else None
            if record is None:
                has = ", ".join(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
                raise UsageError(
                    f"example {row} of the training dataset has {has} (expected {_COLUMNS})",
                    fix="give the dataset as it was before it was tokenised: StrideCallback(out, dataset=…)",
                )
            decoded = decoded or ("input_ids" in example and "text" in record and "text" not in example)
            out.write(json.dumps({"id": ids[row] if ids else str(row), **record}) + "\n")
    if decoded:
        _compare(examples, tokenizer)
    documents = read_documents([str(path)], ReadOptions(max_document_bytes=1 << 40))
    return Recorded(len(examples), chained(EMPTY_CORPUS, documents))


def _ids(examples: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Read the ids of examples; None where they have none, or two are the same."""
    if not len(examples) or "id" not in examples[0]:
        return None
    column = examples["id"] if hasattr(examples, "column_names") else [each.get("id") for each in examples]  # type: ignore[call-overload]
    ids = [str(each) for each in column if isinstance(each, str | int) and not isinstance(each, bool)]
    return ids if len(set(ids)) == len(examples) and all(ids) else None


def _record(example: Mapping[str, Any], tokenizer: Any) -> dict[str, Any] | None:
    """Turn an example into a corpus record; None where it has no text."""
    prompt = example.get("prompt")
    answer = next((example[name] for name in _ANSWERS if example.get(name) is not None), None)
    if example.get("messages") is not None:
        return {"messages": _messages(example["messages"])}
    if prompt is not None and answer is not None:
        if isinstance(prompt, str) and isinstance(answer, str):
            return {"prompt": prompt, "response": answer}
        return {"messages": _messages([*prompt, *answer])}
    if example.get("text") is not None:
        return {"text": example["text"]}
    if example.get("input_ids") is not None:
        return _decoded(example, tokenizer)
    return None


def _messages(messages: Sequence[Any]) -> list[Any]:
    """Keep role and content of each; anything else stays as it is, and the reader refuses it."""
    return [
        {"role": each.get("role"), "content": each.get("content")} if isinstance(each, Mapping) else each
        for each in messages
    ]


def _decoded(example: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    tokens = [int(token) for token in example["input_ids"]]
    labels = tokens if example.get("labels") is None else [int(label) for label in example["labels"]]
    if example.get("attention_mask") is not None:
        kept = [place for place, seen in enumerate(example["attention_mask"]) if seen]
        tokens, labels = [tokens[place] for place in kept], [labels[place] for place in kept]
    start = next((place for place, label in enumerate(labels) if label != -100), 0)
    if start > 1:  # more than the BOS, which nobody scores
        return {
            "prompt": tokenizer.decode(tokens[:start], skip_special_tokens=True),
            "response": tokenizer.decode(tokens[start:], skip_special_tokens=True),
        }
    return {"text": tokenizer.decode(tokens, skip_special_tokens=True)}


def _compare(examples: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """Warn where decoded texts are not tokenised to the same tokens again."""
    special = set(tokenizer.all_special_ids)
    other = 0
    for example in islice(iter(examples), _COMPARED):
        record = _decoded(example, tokenizer)
        if "text" in record:
            again = tokenizer(record["text"], add_special_tokens=False)["input_ids"]
            seen = example.get("attention_mask")
            seen = [1] * len(example["input_ids"]) if seen is None else seen
            was = [int(token) for token, there in zip(example["input_ids"], seen, strict=True) if there]
            other += again != [token for token in was if token not in special]
    if other:
        note(
            f"warning: of {min(_COMPARED, len(examples))} examples {other} are not tokenised as they were "
            "trained on once they are texts: give StrideCallback(out, dataset=…) the texts"
        )


@dataclass(frozen=True)
class RecordedRun:
    """The sources, model and block size from which a recorded training's index is built."""

    sources: list[str]
    model: str
    block_size: int


def find_run(directory: str | Path) -> RecordedRun:
    """Find the corpus of a recorded run: `StrideCallback`'s own, or the files given to `stride model train`.

    Raises
    ------
    ModelError      there is no recipe, or the corpus is gone
    """
    directory = Path(directory)
    recipe = read_recipe(directory)
    if recipe is None:
        raise ModelError(
            f"'{directory}' holds no recorded training (stride_recipe.json)",
            fix="give what StrideCallback or stride model train wrote, or a corpus and --model",
        )
    own = directory / CORPUS
    sources = [str(own)] if own.is_file() else [str(source) for source in recipe.corpus.get("sources", [])]
    if not sources or "-" in sources:
        raise ModelError(
            f"the training in '{directory}' did not record its corpus",
            fix=f"give it: stride index build CORPUS --model {directory}",
        )
    return RecordedRun(sources, str(directory), recipe.block_size)


class RecordedOrder:
    """Stands for a sampler, and keeps what it draws.

    Attributes
    ----------
    epoch : int             the pass that is drawn next
    drawn : dict            pass → numbers of examples; of one begun again, the last time. Of those that are
                            over until they are written
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epoch = 0
        self.drawn: dict[int, array[int]] = {}

    @classmethod
    def of(cls, loader: Any) -> RecordedOrder | None:
        """Take the place of a loader's sampler; None where it has none."""
        holder: Any = getattr(loader, "batch_sampler", None)
        while hasattr(holder, "batch_sampler"):  # accelerate's shards of it
            holder = holder.batch_sampler
        if not hasattr(holder, "sampler"):
            note("warning: the order of the examples is not recorded: the trainer's loader has no sampler")
            return None
        made = cls(getattr(holder.sampler, "_sampler", holder.sampler))
        holder.sampler = made
        return made

    def __iter__(self) -> Iterator[int]:
        numbers = array("q")
        self.drawn[self.epoch] = numbers
        for number in self._sampler:
            numbers.append(int(number))
            yield number

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


_FIX = "train with LoRA of floating-point weights, or save the merged model yourself (merge_and_unload)"


def lora_rank(model: Any) -> int:
    """Read the rank of a PEFT model's low-rank parts; 0 for a model that is not PEFT's."""
    if not hasattr(model, "peft_config"):
        return 0
    return int(getattr(model.peft_config[model.active_adapter], "r", 0))


def refuse_other_adapters(model: Any) -> None:
    """Raise UsageError for an adapter that `whole_model` cannot merge."""
    if not hasattr(model, "peft_config"):
        return
    config = model.peft_config[model.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or getattr(config, "use_dora", False):
        kind = "DoRA" if kind == "LORA" else kind
        raise UsageError(f"the model is trained by {kind}, and an index needs whole weights", fix=_FIX)
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not base.weight.is_floating_point():
            raise UsageError(f"the weights of {name} are quantised, and an index needs whole ones", fix=_FIX)


@torch.no_grad()
def whole_model(model: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """Return the model to save, and its weights with low-rank parts added; None: its own weights."""
    if not hasattr(model, "peft_config"):
        return model, None
    base, adapter = model.get_base_model(), model.active_adapter
    merged = {}
    for name, value in base.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        merged[name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")] = value
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
            weight = module.base_layer.weight
            merged[f"{name}.weight"] = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return base, merged
