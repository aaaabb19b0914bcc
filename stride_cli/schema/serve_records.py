"""The records that `stride serve` answers with, beside those of the commands."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from stride_cli.schema.answer_records import PASSAGE


class ServeErrorRecord(TypedDict):
    schema: Literal["stride.error/1"]
    kind: Annotated[str, "QueryError, UsageError, …: the class of the error"]
    message: Annotated[str, "what is wrong: the thing, the expected and the found"]
    fix: Annotated[str | None, "what to do next"]
    exit_code: Annotated[int, "that a command would have left with"]


class ServedIndexRecord(TypedDict):
    name: Annotated[str, "what requests call it"]
    path: Annotated[str, "where it is"]
    chunks: Annotated[int, "n"]
    documents: Annotated[int, "D"]
    subsets: Annotated[int, "K"]
    calibrated: Annotated[bool, "whether its answers have verdicts"]
    reads: Annotated[int, "chunks that a query reads from their own gradients unless told otherwise"]
    by_token: Annotated[bool, "whether influences on single tokens can be read"]
    chat: Annotated[bool, "whether its model has a chat template"]
    questions: list[Annotated[str, "a prompt to begin with: how a document of the index begins"]]


class ServedIndexesRecord(TypedDict):
    schema: Literal["stride.indexes/1"]
    version: Annotated[str, "of stride"]
    indexes: list[ServedIndexRecord]


class TrainingTimeRecord(TypedDict):
    schema: Literal["stride.training_time/1"]
    seconds: Annotated[float | None, "of training its model once more, from its first steps; null: unknown"]


class PassageRecord(TypedDict):
    document: Annotated[str, "the hit's document"]
    chunk: Annotated[int, "the hit's chunk, numbered in the index"]
    passage: Annotated[str, PASSAGE]


class PassagesRecord(TypedDict):
    schema: Literal["stride.passages/1"]
    index: Annotated[str, "the index's name"]
    prompt: Annotated[str, "the prompt"]
    response: Annotated[str, "the continuation that is attributed"]
    passages: list[PassageRecord]  # of every hit, then of every opposer, in the answer's order
    seconds: Annotated[float, "seconds"]


class PieceRecord(TypedDict):
    text: Annotated[str, "of one token of the response"]
    row: Annotated[int | None, "its row of `influence`; null: it is not scored"]


class TokensRecord(TypedDict):
    schema: Literal["stride.tokens/1"]
    index: Annotated[str, "the index's name"]
    prompt: Annotated[str, "the prompt"]
    response: Annotated[str, "the continuation that is attributed"]
    pieces: list[PieceRecord]
    documents: list[Annotated[str, "id of a document that was read, a column each"]]
    titles: list[Annotated[str, "of each document, empty where it has none"]]
    trained: list[Annotated[bool, "of each document; false: the model was not trained on it"]]
    passages: list[Annotated[str, "of each document, the sentence most like the query"]]
    influence: list[
        list[
            Annotated[
                float,
                "of a scored token (row) and a document (column): the token's part of the latter's influence "
                "on the whole response; the influence on some of its words is the sum of their rows",
            ]
        ]
    ]
    whole: list[Annotated[float, "influence on the whole response, read by itself: the sum of rows"]]
    losses: list[Annotated[float, "of each scored token, nats"]]
    unit: Annotated[
        str,
        'of influences, as in the answer: "nats" or "relative"; where the answer\'s nats do not add up (see '
        '`scale`), "relative"',
    ]
    chunks: Annotated[int, "that were read; what a document has in others is not in its column"]
    seconds: Annotated[float, "seconds"]


class OverlapRecord(TypedDict):
    start: Annotated[int, "where it begins in the document, in characters (code points)"]
    stop: Annotated[int, "where it ends"]
    words: Annotated[int, "how many words of the prompt and response stand there, verbatim"]


class DocumentChunkRecord(TypedDict):
    chunk: Annotated[int, "numbered in the index"]
    text: Annotated[str, "of its tokens"]
    influence: Annotated[float, "on the response, in the answer's unit"]
    carries: Annotated[
        list[int] | None,
        "[start, stop) characters of its sentence that carries most of the influence; null where none does",
    ]
    held: Annotated[float | None, "the part of the chunk's influence of its sign that this sentence holds"]


class DocumentRecord(TypedDict):
    schema: Literal["stride.document/1"]
    index: Annotated[str, "the index's name"]
    document: Annotated[str, "its id"]
    text: Annotated[str, "whole; of an index without texts, its chunks' tokens decoded one after the other"]
    stored: Annotated[bool, "whether the index has the text as it was"]
    overlaps: list[OverlapRecord]
    chunks: list[DocumentChunkRecord]
    influence: Annotated[float, "on the response, of all of its chunks"]


class VerificationRecord(TypedDict):
    schema: Literal["stride.verification/1"]
    id: Annotated[str, "of the job: GET /verify/{id} tells how it goes on, DELETE ends it"]
    state: Annotated[str, '"running", "done", "failed" or "cancelled"']
    done: Annotated[float, "models that are trained, of those that were missing"]
    total: Annotated[float | None, "models to train; null: not known yet"]
    message: Annotated[str, "what was told last"]
