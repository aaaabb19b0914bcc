"""Record what a `Trainer` trains on: its corpus, the order of its examples, its model's whole weights."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from index_format.durable import replacing
from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import EMPTY_CORPUS, Document, chained, content_text
from stride_cli.corpus.forms import PLAIN, Form, shared_prefix, template_of
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.language.language_recipe import Recipe, read_recipe
from stride_cli.output import note

CORPUS = "corpus.jsonl"
RUN = "stride_run.json"
_ANSWERS = ("response", "completion")  # TRL calls it the latter
_COMPARED = 100  # examples whose tokens are compared with those of every form
_ENDS = 24  # characters of a text by which an example is known
_COLUMNS = "text, prompt with response or completion, messages, or input_ids"

Tokens = tuple[list[int], list[list[int]]]  # ids, and first and stop of what is scored


@dataclass(frozen=True)
class Recorded:
    """A corpus that was written: how many documents, tokens of the longest, an index's fingerprint, form."""

    documents: int
    longest: int
    fingerprint: str
    form: Form


def write_corpus(
    examples: Sequence[Mapping[str, Any]], tokenizer: Any, path: Path, trained: Callable[[int], Tokens]
) -> Recorded:
    """Write the examples of a dataset as JSON Lines, in its order: document i is example i.

    An example has a text, a prompt with its response or completion, or messages (both in TRL's ways); one
    that has been tokenised already is decoded, its prompt being what is not scored. Ids are those of a
    column "id" of different strings or numbers, else row numbers.

    Parameters
    ----------
    trained : gives the tokens of example i, and which are scored, as the trainer has them: an index gets them

    Raises
    ------
    UsageError      an example has none of that; most of the texts are others than the trainer's
    CorpusError     one is empty, or no text (names the line, which is the row from 1)
    """
    ids, decoded, longest = _ids(examples), False, 0
    with replacing(path) as fresh, fresh.open("x", encoding="utf-8") as out:
        for row in range(len(examples)):
            example = examples[row]
            record = _record(example) if isinstance(example, Mapping) else None
            if record is None:
                has = ", ".join(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
                raise UsageError(
                    f"example {row} of the training dataset has {has} (expected {_COLUMNS})",
                    fix="give the dataset as it was before it was tokenised: StrideCallback(out, dataset=…)",
                )
            tokens, scored = trained(row)
            longest = max(longest, len(tokens))
            decoded = not record
            record = {"id": ids[row] if ids else str(row), **(record or _decoded(tokens, scored, tokenizer))}
            record["trained_on"] = {"input_ids": tokens, "scored": scored}
            if isinstance(title := example.get("title"), str):
                record["title"] = title
            out.write(json.dumps(record) + "\n")
    reading = ReadOptions(max_document_bytes=1 << 40)
    digest = chained(EMPTY_CORPUS, read_documents([str(path)], reading))
    first = list(islice(read_documents([str(path)], reading), _COMPARED))
    if not decoded and 2 * sum(_is_other(document, tokenizer) for document in first) > len(first):
        raise UsageError(
            "the texts of the dataset are not those of the trainer's examples, row by row (shuffled?)",
            fix="give StrideCallback the dataset in the trainer's order, or none",
        )
    return Recorded(len(examples), longest, digest, find_form(first, tokenizer, decoded))


def _is_other(document: Document, tokenizer: Any) -> bool:
    """Tell whether neither the beginning nor the end of a text is in the tokens that the trainer had."""
    assert document.tokens is not None
    parts = [document.text] if document.text is not None else map(content_text, document.turns)
    first, *_, last = 2 * [part.strip() for part in parts]
    written = str(tokenizer.decode(document.tokens[0]))
    return first[:_ENDS] not in written and last[-_ENDS:] not in written


def collated(loader: Any) -> Callable[[int], Tokens]:
    """Return what gives an example as the trainer's own collator does, each alone; no random state changes.

    Raises
    ------
    UsageError      on the call: several texts are packed in one example, or it has no token ids
    """

    def tokens(row: int) -> Tokens:
        example = loader.dataset[row]
        states = random.getstate(), np.random.get_state()  # noqa: NPY002
        with torch.random.fork_rng(devices=[]):
            batch = loader.collate_fn([example])
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        if isinstance(example, Mapping) and len(example.get("seq_lengths") or ()) > 1:
            raise UsageError(f"example {row} is several texts, packed", fix="train with packing=False")
        if "input_ids" not in batch or len(batch["input_ids"]) != 1:
            raise UsageError(f"the collator makes no token ids of example {row}", fix="train on text alone")
        ids, labels = (
            torch.as_tensor(batch.get(key, batch["input_ids"]))[0] for key in ("input_ids", "labels")
        )
        seen = batch.get("attention_mask")
        kept = torch.ones_like(ids) > 0 if seen is None else torch.as_tensor(seen)[0] > 0
        scored = torch.nn.functional.pad((labels[kept] != -100).int(), (1, 1)).diff()
        starts, stops = ((scored == sign).nonzero().flatten().tolist() for sign in (1, -1))
        return ids[kept].tolist(), [list(span) for span in zip(starts, stops, strict=True)]

    return tokens


def find_form(documents: Sequence[Document], tokenizer: Any, decoded: bool) -> Form:
    """Find the form in which a trainer had documents: the one whose tokens are most often the trainer's.

    What it has beyond the last answer (an end of text), or was cut off, is no difference. Of documents that
    were decoded from tokens, a conversation is known by the tokens that the template begins with.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    begins = any(each.tokens[0][:1] == [bos] for each in documents if each.tokens)
    forms = [replace(PLAIN, bos=begins, between=between) for between in (None, "", "\n")]
    if template_of(tokenizer):
        now = datetime.now().isoformat(timespec="minutes")
        clock = now if "strftime_now" in template_of(tokenizer) else None
        forms.append(Form("chat", bos=begins, clock=clock))
    alike = {form: sum(_alike(each, tokenizer, form, decoded) for each in documents) for form in forms}
    best = max(forms, key=alike.__getitem__)
    if left := len(documents) - alike[best]:
        how = "the chat template" if best.name == "chat" else "that form: prompt and response joined"
        note(
            f"warning: {left} of {len(documents)} examples are not what their texts give in {how}; the "
            "index gets the trainer's tokens, but prompts are asked so"
        )
    return replace(best, source="run")


def _alike(document: Document, tokenizer: Any, form: Form, decoded: bool) -> bool:
    """Tell whether a form gives a document the tokens that the trainer had."""
    assert document.tokens is not None
    had = document.tokens[0]
    cutter = DocumentTokenizer(tokenizer, block_size=2, form=form, skip=True)
    if decoded and form.name == "chat":
        one, other = (cutter.prompt_tokens(Document("", prompt=text)) for text in "a7")
        frame = shared_prefix(one, other)
        return frame > (one[0] == cutter.bos) and had[:frame] == one[:frame]
    (encoded,) = cutter.encode_batch([replace(document, tokens=None)])
    same = min(len(encoded.tokens), len(had))
    return same > 1 and encoded.tokens[:same].tolist() == had[:same]


def _ids(examples: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Read the ids of examples; None where they have none, or two are the same."""
    if not len(examples) or "id" not in examples[0]:
        return None
    column = examples["id"] if hasattr(examples, "column_names") else [each.get("id") for each in examples]  # type: ignore[call-overload]
    ids = [str(each) for each in column if isinstance(each, str | int) and not isinstance(each, bool)]
    return ids if len(set(ids)) == len(examples) and all(ids) else None


def _record(example: Mapping[str, Any]) -> dict[str, Any] | None:
    """Turn an example into a corpus record; empty where it has only tokens, None where it has neither."""
    prompt = example.get("prompt")
    answer = next((example[name] for name in _ANSWERS if example.get(name) is not None), None)
    if example.get("messages") is not None:
        tools = {key: example[key] for key in ("tools", "chat_template_kwargs") if example.get(key)}
        return {"messages": _messages(example["messages"]), **tools}
    if prompt is not None and answer is not None:
        if isinstance(prompt, str) and isinstance(answer, str):
            return {"prompt": prompt, "response": answer}
        return {"messages": _messages([*prompt, *answer])}
    if example.get("text") is not None:
        return {"text": example["text"]}
    return None if example.get("input_ids") is None else {}


def _messages(messages: Sequence[Any]) -> list[Any]:
    """Leave out the nulls that a table has where a message has no field."""
    return [
        {key: value for key, value in each.items() if value is not None}
        if isinstance(each, Mapping)
        else each
        for each in messages
    ]


def _decoded(tokens: list[int], scored: list[list[int]], tokenizer: Any) -> dict[str, Any]:
    """Turn tokens into a corpus record, whose prompt is what comes before the first that is scored."""
    start = scored[0][0] if scored else 0
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    if start > 1:  # more than the BOS, which nobody scores
        return {"prompt": decode(tokens[:start]), "response": decode(tokens[start:])}
    return {"text": decode(tokens)}


@dataclass(frozen=True)
class RecordedRun:
    """The sources, recipe and form from which a recorded training's index is built."""

    sources: list[str]
    recipe: Recipe
    form: Form | None


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
    told = json.loads((directory / RUN).read_text()) if (directory / RUN).is_file() else {}
    return RecordedRun(sources, recipe, Form.recorded(told))


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


def lora_ranks(model: Any) -> dict[str, int]:
    """Read the ranks of a PEFT model's low-rank parts, by the names that their layers have without PEFT."""
    layers = model.get_base_model().named_modules() if hasattr(model, "peft_config") else ()
    ranks = ((name, layer.r) for name, layer in layers if isinstance(getattr(layer, "r", None), dict))
    return {name: int(r[model.active_adapter]) for name, r in ranks if model.active_adapter in r}


def refuse_other_adapters(model: Any) -> None:
    """Raise UsageError for an adapter that `whole_model` cannot merge."""
    if not hasattr(model, "peft_config"):
        return
    config = model.peft_config[model.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or getattr(config, "use_dora", False):
        kind = "DoRA" if kind == "LORA" else kind
        raise UsageError(f"the model is trained by {kind}, and an index needs whole weights", fix=_FIX)
    ties = bool(getattr(model.get_base_model().config.get_text_config(), "tie_word_embeddings", False))
    ends = {model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings()}
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None:
            continue
        why = "is tied to another matrix, and LoRA parts the two" if ties and module in ends else ""
        if getattr(config, "lora_bias", False):
            why = "is trained with lora_bias, which is not recorded"
        if hasattr(module, "parameter_name"):
            why = "(fused experts) is trained by LoRA, and is not recorded whole"
        elif not base.weight.is_floating_point():
            why = "has quantised weights, and an index needs whole ones"
        if why:
            raise UsageError(f"{name} {why}", fix=_FIX)


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
            # 16 bits would round most of a small change off
            merged[f"{name}.weight"] = weight.float() + module.get_delta_weight(adapter).float()
    return base, merged
