"""The records that `stride query` and `stride report` write, and of input that cannot be used."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

# meanings that several records have
Prompt = Annotated[str, "the prompt; of several that are pooled, a line each"]
Response = Annotated[str, "the continuation that is attributed; likewise"]
Generated = Annotated[bool, "whether the model wrote the response"]
ScoredTokens = Annotated[int, "tokens of the response whose loss is attributed"]
Loss = Annotated[float, "the model's loss on them, mean nats per scored token"]
Template = Annotated[
    str | None,
    'how the prompt was put to the model: "chat", in the tokenizer\'s template; "lines", with the response '
    'on the next line, as the corpus is where there is no template; "none", as it stands; null: of a '
    "classifier",
]
Passage = Annotated[
    str,
    "the sentence of that chunk that carries its influence, where chunks are read; else the one most like "
    "the query",
]


class JudgedRecord(TypedDict):
    line: Annotated[
        float | None,
        "influence above which a document is stronger than any of all but a few unrelated prompts, relative "
        "to the loss; null where options make influences something else than unrelated prompts' were",
    ]
    beyond: Annotated[float, "that few, as a share of them: at most .1"]
    surer: Annotated[
        float,
        "p-value: (1 + unrelated prompts of whose response the model is as sure) / (1 + all of them), which "
        "is never 0",
    ]
    stronger: Annotated[
        float,
        "p-value, likewise, of those with a document as strong, relative to the loss, as the strongest here",
    ]
    nulls: Annotated[int, "unrelated prompts that were asked"]


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
    seen: Annotated[bool, "whether the fit of the operators has seen that chunk"]
    neighbours: Annotated[
        int, "other chunks that share all but one of its subsets: not told apart from it, unless it was read"
    ]
    backfilled: Annotated[
        bool,
        "not in the sparse solution: ranked by correlation with what it leaves unexplained",
    ]
    read: NotRequired[
        Annotated[
            bool | None,
            "that chunk's influence is from its own gradient; false: recovered from subsets; null: all are",
        ]
    ]


# a key that no class can have
_Penalty = TypedDict("_Penalty", {"lambda": Annotated[float, "ℓ1 penalty, in the unit of measurements"]})


class RecoveryRecord(_Penalty):
    """The Lasso, whose weights come before any is read from a chunk, made smaller or added to."""

    lambda_ratio: Annotated[float, "λ / λ_max"]
    nonzeros: Annotated[int, "chunks with a weight that is not zero"]
    duality_gap: Annotated[float, "upper bound on how far the objective is from its minimum"]
    relative_gap: Annotated[float, "the gap / ½‖y − ȳ‖²"]
    r_squared: Annotated[float, "share of the responses' variance that the Lasso's weights explain"]
    passes: Annotated[int, "passes over the design matrix"]
    shrink_exponent: NotRequired[
        Annotated[
            float,
            "small influences were made smaller: times (|w| / largest |w|)^(this − 1); 1: they were not",
        ]
    ]
    shrink_opposing: NotRequired[
        Annotated[
            float,
            "what negative influences were multiplied by, too; 1: they were not",
        ]
    ]


class MeasurementRecord(TypedDict):
    method: Annotated[str, '"linear" or "exact"']
    subsets: Annotated[int, "K, responses measured"]
    agreement: Annotated[
        float | None, "Pearson correlation of linear and exact responses, where both were measured"
    ]
    coverage: Annotated[float, "share of all chunks that the operators have seen"]
    models: NotRequired[Annotated[int, "that measured: the index's own and its further checkpoints"]]


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


class ScaleRecord(TypedDict):
    link: Annotated[
        str,
        '"linear": rises are in proportion to influences, and add up; "ceiling": they go by the share f of '
        "all influence that is taken out, ceiling · (1 − 2^−(f / half)²), so that the shares of documents "
        "add up and their nats do not",
    ]
    slope: Annotated[float | None, "nats per scored token for a relative influence of 1; null: not linear"]
    ceiling: Annotated[float | None, "nats per scored token that a loss rises by at most; null: linear"]
    half: Annotated[float | None, "share without which a loss rises by half of the ceiling; null: linear"]
    error: Annotated[
        float,
        "standard error of the slope, or of the ceiling, over responses; seeds of training are not in it",
    ]
    correlation: Annotated[float, "of predicted and measured rises of the loss"]
    models: Annotated[int, "that were trained again, each without a tenth of the documents"]
    pairs: Annotated[int, "rises of a response's loss that it was found by"]


class ComparisonRecord(TypedDict):
    """With ``--instead``: influences are on the log-odds of the token where the two responses part."""

    token: Annotated[str, "the first token of the response that is another there"]
    other_token: Annotated[str, "what stands there instead"]
    probability: Annotated[float, "of `token`, by the model, 0 … 1"]
    other_probability: Annotated[float, "of `other_token`, by the model, 0 … 1"]


class AnswerRecord(TypedDict):
    schema: Literal["stride.answer/1"]
    id: NotRequired[Annotated[str, "the query's id, where its file gave one"]]
    verdict: NotRequired[
        Annotated[
            str | None,
            '"clear": the model knows this, and a document above the line taught it; "weak": it knows this, '
            'and no document stands out; "guessing": it is no surer than after unrelated prompts; null: the '
            "index is not calibrated, or the answer is of another kind than unrelated prompts' were: a "
            "comparison, or pooled",
        ]
    ]
    judged: NotRequired[Annotated[JudgedRecord | None, "what the verdict goes by"]]
    prompt: Prompt
    response: Response
    instead: NotRequired[Annotated[str, "with --instead: what the response is compared with"]]
    comparison: NotRequired[ComparisonRecord]
    pooled: NotRequired[Annotated[int, "with --pool: prompts that are answered as one"]]
    added: NotRequired[
        Annotated[
            str,
            'with --pool: "support": an influence is the mean over the prompts of what is above zero of the '
            "influence on each, and the recovery is that of the prompt whose certificate is weakest; "
            '"all": it is the influence on their mean loss, and the recovery is of that',
        ]
    ]
    template: NotRequired[Template]
    generated: Generated
    scored_tokens: ScoredTokens
    loss: Loss
    unit: NotRequired[
        Annotated[
            str,
            'of influences: "nats": forecast of the rise of the loss, per scored token, when the model is '
            'trained without this document alone; "relative": comparable within this answer, and no number '
            "of nats",
        ]
    ]
    scale: NotRequired[Annotated[ScaleRecord | None, "how nats were found; null: influences are relative"]]
    read: NotRequired[
        Annotated[
            int,
            "chunks whose influence was read from their own gradients; others' are recovered from subsets",
        ]
    ]
    estimated: NotRequired[
        Annotated[
            bool,
            "chunks that were not read count with what projections, shared pairs of tokens and subsets say "
            "of them together",
        ]
    ]
    redundancy: NotRequired[
        Annotated[
            float,
            "ridge with which chunks share what they say alike, read or not; 0: each counts as if alone",
        ]
    ]
    recall: NotRequired[
        Annotated[
            RecallRecord | None,
            "how many of the strongest chunks were read; null: none were, or the index has no projections",
        ]
    ]
    hits: list[HitRecord]
    opposers: list[HitRecord]
    recovery: RecoveryRecord
    measurement: MeasurementRecord
    explanation: NotRequired[
        Annotated[
            str,
            "two sentences on what to conclude, how far to trust it and what it cannot say, with --verbose",
        ]
    ]
    seconds: AnswerSeconds
    expected: NotRequired[list[Annotated[str, "stride demo: a document that states the fact"]]]
    found: NotRequired[Annotated[bool, "stride demo: whether such a document is on top"]]


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
