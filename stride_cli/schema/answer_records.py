"""The records that `stride query` and `stride report` write, and of input that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

from stride_cli.schema.derivation import key

# meanings that several records have
PROMPT = "the prompt; of several that are pooled, a line each"
RESPONSE = "the continuation that is attributed; likewise"
GENERATED = "whether the model wrote the response"
SCORED_TOKENS = "tokens of the response whose loss is attributed"
LOSS = "the model's loss on them, mean nats per scored token"
TEMPLATE = (
    'how the prompt was put to the model: "chat", in the tokenizer\'s template; "lines", with the response '
    'on the next line, as the corpus is where there is no template; "none", as it stands; null: of a '
    "classifier"
)
PASSAGE = (
    "the sentence of that chunk that carries its influence, where chunks are read; else the one most like "
    "the query"
)


class AnswerSeconds(TypedDict):
    generate: Annotated[float, "seconds"]
    measure: Annotated[float, "seconds"]
    recover: Annotated[float, "seconds"]
    read: NotRequired[Annotated[float, "seconds"]]
    rank: Annotated[float, "seconds"]


class ReportRecord(TypedDict):
    schema: Literal["stride.report/1"]
    path: Annotated[str, "the page that was written"]
    queries: Annotated[int, "queries on it"]
    bytes: Annotated[int, "its size"]
    seconds: Annotated[float, "seconds of the whole command"]


@dataclass(frozen=True, kw_only=True)
class AnswerOfHit:
    """Columns of a row of a hit that are of its answer."""

    answer: int = key("number of the answer, from 1, in the order of the prompts")
    id: str | None = key("the query's id, where its file gave one")
    verdict: str | None = key("of the answer: clear, contested, weak, guessing; empty: it has none")
    prompt: str = key(PROMPT)
    response: str = key(RESPONSE)
    loss: float = key(LOSS)
    unit: str | None = key('of influences: "nats" or "relative"')
    instead: str | None = key("with --instead: what the response is compared with")


class BadInputRecord(TypedDict):
    schema: Literal["stride.bad_input/1"]
    source: Annotated[str, 'the file; "stdin", or "arguments" of the command line']
    line: Annotated[int | None, "the line, from 1 (of arguments: which of them); null where it has none"]
    id: NotRequired[Annotated[str, "the prompt's or item's id, where it gave one"]]
    message: Annotated[str, "what is wrong"]
    fix: Annotated[str | None, "what to do about it"]


class Look(NamedTuple):
    """Says how a verdict looks: colours, a clause on its meaning, headings; whether a source is `named`."""

    colour: str
    light: str
    dark: str
    meaning: str
    heading: str = "documents that support this"
    named: bool = True
    closest: str = "closest, no stronger than noise"
    opposing: str = "documents that oppose this"
    hardly: str = "opposing, no stronger than noise"


DECIDED = 0.1  # of what the most decided token counts: from there on a word is marked
UNJUDGED = Look("dim", "", "", "")
_SURER = "the model is surer than after unrelated prompts, and the strongest documents"
_NOT = "the model is no surer than after unrelated prompts"
VERDICTS = {
    "clear": Look("green", "#00795c", "#56d4a8", f"{_SURER} have the prompt's words"),
    "contested": Look("magenta", "#8a3ab9", "#d2a8ff", "the model is torn between what two documents say"),
    "weak": Look("yellow", "#955000", "#ffa657", f"{_SURER} do not all have the prompt's words"),
    "guessing": Look("red", "#a4342b", "#ff8f85", _NOT, "no source found", False, "closest, and no source"),
}


def sections(answer: Mapping[str, Any]) -> Sequence[tuple[str, Sequence[Any], bool]]:
    """List an answer's documents by (heading, hits, quiet); quiet ones are without colours and numbers."""
    look = VERDICTS.get(answer.get("verdict") or "", UNJUDGED)
    noise = (False,) if look.named else (True, False, None)
    found = [
        (heads[quiet], [hit for hit in answer[side] if (hit.get("above_line") in noise) is quiet], quiet)
        for side, *heads in (("hits", look.heading, look.closest), ("opposers", look.opposing, look.hardly))
        for quiet in (False, True)
    ]
    return [each for each in found if each[1] or each[0] == look.heading != UNJUDGED.heading]
