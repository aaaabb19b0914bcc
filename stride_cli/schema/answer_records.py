"""The records that `stride query` and `stride report` write, and of input that cannot be used."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

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
Prompt = Annotated[str, PROMPT]
Response = Annotated[str, RESPONSE]
Generated = Annotated[bool, GENERATED]
ScoredTokens = Annotated[int, SCORED_TOKENS]
Loss = Annotated[float, LOSS]
Template = Annotated[str | None, TEMPLATE]
Passage = Annotated[
    str,
    "the sentence of that chunk that carries its influence, where chunks are read; else the one most like "
    "the query",
]


class HitRecord(TypedDict):
    rank: Annotated[float, "position, 1 = most influential; ties share their mid-rank"]
    document: Annotated[str, "the document's id"]
    influence: Annotated[
        float,
        "how much training on the document moves the response's loss, in the answer's unit, summed over its "
        "chunks; > 0 supports (lowers it), < 0 opposes",
    ]
    share: Annotated[float, "|influence| / Σ|influence of every chunk|, 0 … 1"]
    above_line: NotRequired[
        Annotated[bool | None, "whether it is above the line of `judged`; null without one"]
    ]
    sign: Annotated[str, '"supports" or "opposes"']
    chunk: Annotated[int, "the document's most influential chunk, numbered in the index"]
    passage: Passage
    label: NotRequired[Annotated[str, "of a classifier: the training row's label"]]
    trained: NotRequired[Annotated[bool, "false: the model was not trained on it, by its own record"]]
    seen: Annotated[bool, "whether the fit of the operators has seen that chunk"]
    neighbours: Annotated[
        int, "other chunks that share all but one of its subsets: not told apart from it, unless it was read"
    ]
    backfilled: Annotated[
        bool, "not in the sparse solution: ranked by correlation with what it leaves unexplained"
    ]
    read: NotRequired[
        Annotated[
            bool | None,
            "that chunk's influence is from its own gradient; false: recovered from subsets; null: all are",
        ]
    ]


class AnswerSeconds(TypedDict):
    generate: Annotated[float, "seconds"]
    measure: Annotated[float, "seconds"]
    recover: Annotated[float, "seconds"]
    read: NotRequired[Annotated[float, "seconds"]]
    rank: Annotated[float, "seconds"]


class RecallRecord(TypedDict):
    top: Annotated[int, "the chunks of largest influence that this is about"]
    at_least: Annotated[int, "so many of them are among those that were read, or more"]
    confidence: Annotated[float, "share of queries of which that is true, at least"]


class ReportRecord(TypedDict):
    schema: Literal["stride.report/1"]
    path: Annotated[str, "the page that was written"]
    queries: Annotated[int, "queries on it"]
    bytes: Annotated[int, "its size"]
    seconds: Annotated[float, "seconds of the whole command"]


class _AnswerOfHit(TypedDict):
    answer: Annotated[int, "number of the answer, from 1, in the order of the prompts"]
    id: Annotated[str | None, "the query's id, where its file gave one"]
    verdict: Annotated[str | None, "of the answer: clear, weak, guessing; empty: it has none"]
    prompt: Prompt
    response: Response
    generated: Generated
    scored_tokens: ScoredTokens
    loss: Loss
    unit: Annotated[str | None, 'of influences: "nats" or "relative"']
    instead: Annotated[str | None, "with --instead: what the response is compared with"]
    pooled: Annotated[int | None, "with --pool: prompts that are answered as one"]
    list: Annotated[str, '"hits" or "opposers": which of the answer\'s lists the document is on']


class HitRow(_AnswerOfHit, HitRecord):
    """One row of ``stride query --format csv`` and `Answer.to_frame`: all keys but "schema" are columns."""

    schema: Literal["stride.hit_row/1"]


class BadInputRecord(TypedDict):
    schema: Literal["stride.bad_input/1"]
    source: Annotated[str, 'the file; "stdin", or "arguments" of the command line']
    line: Annotated[int | None, "the line, from 1 (of arguments: which of them); null where it has none"]
    id: NotRequired[Annotated[str, "the prompt's or item's id, where it gave one"]]
    message: Annotated[str, "what is wrong"]
    fix: Annotated[str | None, "what to do about it"]
