"""The records that `stride index` writes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

# meanings that several records have
SubsetSize = Annotated[float, "n·d / K, the mean size of a subset"]
Neighbours = Annotated[
    float, "other chunks that share at least d − 1 of a chunk's subsets, expected: hardly told apart from it"
]
Overlapping = Annotated[float, "other chunks that share d / 3 or more, expected"]


class IndexSummary(TypedDict):
    index: Annotated[str, "path of the index"]
    documents: Annotated[int, "documents"]
    chunks: Annotated[int, "n"]
    tokens: Annotated[int, "tokens of all chunks; of a classifier, two a row"]
    scored_tokens: Annotated[int | None, "tokens whose loss is trained on"]
    unscored_documents: Annotated[int | None, "documents without any; nothing can be attributed to them"]
    unscored_chunks: Annotated[int | None, "chunks without a scored token; null: not counted"]
    conversations: NotRequired[
        Annotated[
            int | None,
            "documents that are prompts with responses, or messages: where most are, queries are put so too",
        ]
    ]
    skipped_records: Annotated[int | None, "records left out, with --on-bad skip"]
    subsets: Annotated[int, "K"]
    degree: Annotated[int, "d, the subsets of a chunk"]
    block_size: Annotated[int, "most tokens of a chunk"]
    bytes: Annotated[int, "size on disk"]


class IndexRecord(IndexSummary):
    schema: Literal["stride.index/1"]
    seconds: Annotated[float, "seconds of the whole command"]


class IndexInfoRecord(IndexSummary):
    schema: Literal["stride.index_info/1"]
    seed: Annotated[int, "of the design"]
    chunks_per_subset: SubsetSize
    expected_neighbours: Neighbours
    expected_overlapping: Overlapping
    texts: Annotated[bool, "whether the documents' texts are in the index"]
    operators: Annotated[dict[str, Any] | None, "how they were fitted; null: stride train has not been run"]
    truth: Annotated[dict[str, Any] | None, "models retrained on random subsets; null where there are none"]
    form: Annotated[dict[str, Any] | None, "how prompts and responses became text; null: it is not recorded"]
    fingerprints: Annotated[dict[str, Any], "SHA-256 of corpus, tokenizer, model and its settings, hex"]
    model_path: Annotated[str | None, "where the model is, from the index's directory; or its hub id"]
    created_by: Annotated[str | None, "program and version"]
    format_version: Annotated[int, "of the index format"]
    config: Annotated[dict[str, Any] | None, "the options it was built with"]


class IndexPlanRecord(TypedDict):
    schema: Literal["stride.index_plan/1"]
    n_documents: Annotated[int | None, "documents; null with --chunks"]
    n_chunks: Annotated[int, "n"]
    n_tokens: Annotated[int | None, "tokens; null with --chunks"]
    n_subsets: Annotated[int, "K"]
    degree: Annotated[int, "d, the subsets of a chunk"]
    chunks_per_subset: SubsetSize
    coverage_closed: Annotated[float, "share of the chunks that the closed form sees"]
    coverage_sgd: Annotated[float, "share that the published recipe is expected to see"]
    expected_neighbours: Neighbours
    expected_overlapping: Overlapping
    gate_dimension: Annotated[int, "p, numbers of one operator"]
    gate_bytes: Annotated[int, "K·p numbers on disk, of 4 bytes or about 1, and bases; of all models"]
    projection_bytes: Annotated[int, "what --project keeps on disk; of all models"]
    pass_bytes: Annotated[
        int, "a byte a chunk, and of a fine-tuned model a byte a token: how sure the model before it was"
    ]
    bytes: Annotated[dict[str, Any], "array → bytes on disk"]
    total_bytes: Annotated[int, "their sum, with what describes them, without gates and projections"]
    build_memory_bytes: Annotated[int, "what the build holds at most, beside the tokenizer"]
    fit_memory_bytes: Annotated[
        int, "what fitting holds beside the model and a batch (2 GB at most): K·p numbers of 4 bytes"
    ]
    query_memory_bytes: Annotated[int, "what stays in the page cache for fast queries"]


class ShownTokens(TypedDict):
    ids: list[Annotated[int, "token ids; of a classifier, two a row"]]
    pieces: list[Annotated[str, "what each token is alone; none of a classifier"]]
    scored: list[Annotated[int, "1 where a token's loss counts"]]


class ShownChunk(ShownTokens):
    chunk: Annotated[int, "its number in the index"]
    subsets: list[Annotated[int, "its d subsets, ascending: its column of the design matrix"]]


class IndexDocumentRecord(TypedDict):
    schema: Literal["stride.index_document/1"]
    number: Annotated[int, "its number in the index"]
    document: Annotated[str, "its id"]
    chunks: list[Annotated[int, "its chunks: the first, and the one after the last"]]
    text: Annotated[str | None, "null where the index was built without texts"]
    form: NotRequired[Annotated[dict[str, Any] | None, "with --tokens: how it became text, and who says so"]]
    tokens: NotRequired[list[ShownChunk]]


class QueryTokensRecord(ShownTokens):
    schema: Literal["stride.query_tokens/1"]
    prompt: Annotated[str, "as it was asked"]
    response: Annotated[str, "given, or what the model wrote"]
    form: Annotated[dict[str, Any], "how both became one text, and who says so"]


class IndexVerifyRecord(TypedDict):
    schema: Literal["stride.index_verify/1"]
    index: Annotated[str, "path of the index"]
    whole: Annotated[bool, "true: nothing is wrong, the only record; false: a record for each problem"]
    stages: NotRequired[
        list[
            Annotated[
                str,
                'of what is whole, what it has beside corpus and design: "operators" …; one that is gone '
                "altogether is no damage",
            ]
        ]
    ]
    path: NotRequired[Annotated[str, "of a problem: the file, array or group inside the index"]]
    kind: NotRequired[Annotated[str, 'of a problem: "missing", "extra", "length", "content" or "invariant"']]
    message: NotRequired[Annotated[str, "of a problem: what was expected and found"]]
