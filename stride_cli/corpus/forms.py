"""Turn documents and prompts into the text that a model reads, and say which characters of it are scored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

from stride_cli.characters import UNSPACED
from stride_cli.corpus.documents import Document, content_text
from stride_cli.errors import CorpusError, UsageError

Span = tuple[int, int]  # first and after the last, of characters or tokens
CLOCK = "2024-07-26T00:00:00"  # the day that Llama 3's templates write where they are told none
_MARK = "\ue0a1"  # a private-use character behind the contents that a template is given
_PLAIN_KEYS = {"role", "content", "name", "weight", "train", "loss"}
_MASKS = ("train", "loss", "weight")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_CLOSED = re.compile(r"</[^<>\s]+>|\[/[^\[\]\s]+\]")  # the tag that ends a piece of reasoning
_ENDS_WORD = re.compile(r"[^\W_][,;:!?]?$")


@dataclass(frozen=True)
class Form:
    """Says how a prompt and its response, or messages, become one text.

    Attributes:
        name: "text": joined, and scored whole; "concat": joined, and scored on the answers; "chat": in the
            tokenizer's chat template, and scored on the answers.
        between: Joins them outside of a template; None: a space, only between words of scripts with spaces.
        clock: Date and time (ISO) that the template is told; None: it asks for none.
        bos: False: no BOS is put in front where the text has none.
        source: "corpus", "option" or "run": by what it was decided.
    """

    name: Literal["text", "concat", "chat"] = "concat"
    between: str | None = None
    clock: str | None = None
    bos: bool = True
    source: str = "corpus"

    @classmethod
    def choose(cls, tokenizer: Any, name: str | None = None) -> Form:
        """Choose the form of a corpus: `name`, else chat where there is a template, else line by line.

        UsageError where it is to be "chat", and the tokenizer has no template.
        """
        template = template_of(tokenizer)
        if name == "chat" and not template:
            found = "--form chat needs a tokenizer with a chat template, and this model's has none"
            fix = "give --form concat (or text), or the tokenizer that the model was trained with"
            raise UsageError(found, fix=fix)
        made = cls(source="corpus" if name is None else "option")
        if name in ("text", "bare", "concat"):
            return replace(made, name="concat" if name == "concat" else "text", bos=name != "bare")
        if not template:
            return replace(made, between="\n")
        return replace(made, name="chat", clock=CLOCK if "strftime_now" in template else None)

    @classmethod
    def recorded(cls, attributes: Mapping[str, Any]) -> Form | None:
        """Read the form of an index; None of one that was built before it was recorded."""
        found = attributes.get("form")
        return cls(**found) if isinstance(found, Mapping) else None

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of what it makes of a text, whoever decided it."""
        told = json.dumps([self.name, self.between, self.clock, self.bos])
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def label(self) -> str:
        """Name the form as answers do: "chat", "lines" (a line break between), or "none" (as it stands)."""
        return "chat" if self.name == "chat" else "lines" if self.between else "none"


PLAIN = Form()  # a response behind its prompt


def template_of(tokenizer: Any, form: Form | None = None) -> str:
    """Return the chat template of a tokenizer, in which `form`'s clock has stopped; empty: there is none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):  # by name
        found = found.get("default") or next(iter(found.values()), None)
    return _stopped(str(found or ""), form.clock if form else None)


@lru_cache(maxsize=16)
def _stopped(template: str, clock: str | None) -> str:
    if clock is None:
        return template
    now = datetime.fromisoformat(clock)
    return _NOW.sub(lambda found: repr(now.strftime(found[2])), template)


def joiner(left: str, right: str) -> str:
    """Return what stands between two texts: a space only between words of scripts that have spaces."""
    before = _ENDS_WORD.search(left[-2:])
    if not before or not right[:1].isalnum() or (before[0].isdigit() and right[0].isdigit()):
        return ""
    return "" if re.search(UNSPACED, before[0][0] + right[0]) else " "


def is_scored(message: Mapping[str, Any]) -> bool:
    """Tell whether a message is trained on: as its `train`, `loss` or `weight` says, else by its role."""
    said = next((message[name] for name in _MASKS if message.get(name) is not None), None)
    return message["role"] == "assistant" if said is None else bool(said)


def unprinted(tokenizer: Any, form: Form, documents: Iterable[Document]) -> list[str]:
    """List the fields of messages that neither the template prints nor a mask is, one for each message."""
    template = template_of(tokenizer) if form.name == "chat" else ""
    keys = (key for each in documents if each.messages for message in each.messages for key in message)
    return [key for key in keys if key not in _PLAIN_KEYS and key not in template]


def render(
    document: Document, form: Form, tokenizer: Any, ends: bool = True
) -> tuple[str, list[Span] | None]:
    """Return the text to tokenise, and the characters of its answers; None when all of it is scored.

    CorpusError where the template refuses the document, or rewrites its answers.

    Args:
        ends: With an answer goes the token that the template ends it with: stopping is a part of it.
    """
    if document.text is not None:
        return document.text, None
    messages = document.turns
    if form.name == "chat":
        return _templated(messages, document, form, tokenizer, ends)
    text, spans = "", []
    for number, message in enumerate(messages):
        content = content_text(message)
        if number:
            text += joiner(text, content) if form.between is None else form.between
        if is_scored(message) and content:
            spans.append((len(text), len(text) + len(content)))
        text += content
    return text, None if form.name == "text" else spans


def render_prompt(document: Document, form: Form, tokenizer: Any) -> str:
    """Return the text after which the model is to answer."""
    if form.name == "chat":
        return _apply(document, form, tokenizer, document.turns, add_generation_prompt=True)
    return render(document, replace(form, name="text"), tokenizer)[0] + (form.between or "")


def _templated(
    messages: list[dict[str, Any]], document: Document, form: Form, tokenizer: Any, ends: bool
) -> tuple[str, list[Span]]:
    """Render messages by the template, and find the answers in what it wrote."""
    apply = partial(_apply, document, form, tokenizer)
    text = apply(messages)
    wanted = [number for number, message in enumerate(messages) if is_scored(message)]
    # 1. the template says itself what the assistant wrote
    template = template_of(tokenizer, form)
    if ends and _GENERATION.search(template):
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**tokenizer.special_tokens_map, **(document.template or {}), "chat_template": template}
        _, (marks,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if answers == wanted or len(marks) == len(answers):  # some mark more, such as the end of a text
            kept = [True] * len(marks) if answers == wanted else [n in wanted for n in answers]
            return text, [(a, b) for (a, b), own in zip(marks, kept, strict=True) if own]
    # 2. a mark behind each content shows where the template put it, white space around it or not
    spans: dict[int, Span | None] = {}
    simple = [n for n in wanted if messages[n].keys() <= _PLAIN_KEYS and messages[n].get("content")]
    contents = {n: messages[n]["content"] for n in simple if isinstance(messages[n]["content"], str)}
    for cores in (contents, {n: content.rstrip() for n, content in contents.items()}):
        marked = [{**m, "content": cores[n] + _MARK} if n in cores else m for n, m in enumerate(messages)]
        pieces = apply(marked).split(_MARK) if cores else []
        if "".join(pieces) == text and len(pieces) == len(cores) + 1:
            ended_at = zip(cores.items(), accumulate(map(len, pieces)), strict=False)
            spans = {n: _left_of(core, text, stop) for (n, core), stop in ended_at}
            break
    # 3. else from where the prompt of the messages before it ends: its content, or all up to its end
    ended, end_of, found = set[int](), _end_token(tokenizer), []
    for number in wanted:
        if spans.get(number) is None and (number not in contents or contents[number].strip()):
            begin = shared_prefix(apply(messages[:number], add_generation_prompt=True), text)
            core, after = contents.get(number, "").strip(), apply(messages[: number + 1]).rstrip()
            turn = None if core or text.startswith(after) else end_of.search(text, begin)
            behind = number == 0 or begin >= len(apply(messages[:number]).rstrip())
            first = text.find(core, begin) if behind else -1
            if first < 0 or not (core or turn or text.startswith(after)):
                raise CorpusError(
                    f"{document.source}:{document.line}: the model's chat template rewrites the answers of "
                    f"document '{document.id}', so its answer tokens cannot be told from the others",
                    fix="give it as one 'text', use a tokenizer with a plainer template, or --on-bad skip",
                )
            spans[number] = (first, first + len(core) if core else turn.end() if turn else len(after))
            ended |= set() if core else {number}
        if (span := spans.get(number)) and span[1] - span[0] < len(contents.get(number, "").strip()):
            # the white space before what is left of it is the template's, as far as the prompt has it too
            begin = shared_prefix(apply(messages[:number], add_generation_prompt=True), text)
            span = (min(max(span[0], begin), span[1]), span[1])
        if span and span[0] < span[1]:
            stop = end_of.match(text, span[1]) if ends and number not in ended else None
            found.append((span[0], stop.end() if stop else span[1]))
    return text, found


@lru_cache(maxsize=4)
def _end_token(tokenizer: Any) -> re.Pattern[str]:
    """Match what ends a turn: a special token; or the one that ends a text, behind white space too."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    known = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    end = getattr(tokenizer, "eos_token", None)
    return re.compile(f"(?:{known or '(?!)'})" + (rf"|\s+{re.escape(end)}" if end else ""))


def shared_prefix(one: Sequence[Any], other: Any) -> int:
    """Count the characters, or tokens, that two sequences begin with."""
    both = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in both if a != b), min(len(one), len(other)))


def _left_of(core: str, text: str, place: int) -> Span | None:
    """Find what the template left of a content that ends at `place`; None: it was rewritten."""
    cut = len(core) - shared_prefix(core[::-1], text[max(0, place - len(core)) : place][::-1])
    # templates leave out white space, and reasoning up to the tag that ends it
    tags = [tag.end() for tag in _CLOSED.finditer(core) if not core[tag.end() : cut].strip()]
    if core[:cut].strip() and not tags:
        return None
    return place - len(core) + (max(cut, tags[0]) if core[:cut].strip() else cut), place


def _apply(
    document: Document, form: Form, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any
) -> str:
    options |= {**(document.template or {}), "chat_template": template_of(tokenizer, form)}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # jinja2 errors, and whatever the template raises itself
        where = f"{document.source}:{document.line}: the model's chat template refuses document"
        fix = "correct the roles (most templates take user and assistant in turn), or leave it out"
        raise CorpusError(f"{where} '{document.id}': {error}", fix=fix) from None
