from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format.design import build_columns, offsets_of, row_sizes
from index_format.errors import IndexIncomplete, IndexMismatch
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import IndexWriter
from stride_cli.corpus import build as module
from stride_cli.corpus.build import IndexedModel, append_to_index, build_index, survey_corpus
from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.options import BuildOptions, PlanOptions
from stride_cli.corpus.plan import plan_index
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.errors import CorpusError
from tests.same_fit import contents

TEXT = "Water boils at one hundred degrees and Paris is the capital of France since long ago"
SMALL: dict[str, Any] = {"block_size": 12, "degree": 3}
WORDS = [*TEXT.split(), "漢字", "🙂"]


def some_records(count: int, *, conversations: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of many lengths; with conversations, the last third has prompts and answers in turn."""
    rng = random.Random(seed)

    def words(longest: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))

    records: list[dict[str, Any]] = []
    for number in range(count):
        if not conversations or number < 2 * count // 3:
            records.append({"id": f"d{seed}-{number}", "text": words(40)})
        elif number % 2:
            records.append({"id": f"d{seed}-{number}", "prompt": words(20), "response": words(20)})
        else:
            turns = [
                {"role": role, "content": words(9)} for role in ("user", "assistant", "user", "assistant")
            ]
            records.append({"id": f"d{seed}-{number}", "messages": turns})
        records[-1] |= {"title": f"The  {WORDS[number % len(WORDS)]}\n"} if number % 5 == 3 else {}
    return records


def small_index(
    sources: list[str], tokenizer: Any, out: Path, reading: ReadOptions = ReadOptions(), **options: Any
) -> Index:
    """Of short chunks, for a model that is nowhere."""
    model = IndexedModel(tokenizer, "t" * 64, options.pop("model_print", "m" * 64))
    return build_index(sources, model, out, BuildOptions(**SMALL | options), reading)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small corpus has many of them."""
    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 4)
    monkeypatch.setattr("index_format.shards._BLOCK_VALUES", 7 * module._BLOCK_WIDTH)


@pytest.fixture
def tokenizer(make_tokenizer: Any, chatml: str) -> Any:
    return make_tokenizer(chat_template=chatml)


def expected_arrays(source: str, chunker: DocumentTokenizer) -> dict[str, np.ndarray]:
    """The corpus arrays, written down the plain way."""
    documents = list(read_documents([source]))
    encoded = chunker.encode_batch(documents)
    pieces = [chunker.chunks(one) for one in encoded]
    chunks = [chunk for some in pieces for chunk in some]
    masks = []
    for chunk in chunks:
        mask = np.zeros(len(chunk.tokens), np.uint8)
        mask[chunk.loss_start :] = 1
        masks.append(mask if chunk.loss_mask is None else chunk.loss_mask)
    offsets = lambda lengths: np.cumsum([0, *lengths])  # noqa: E731
    return {
        "tokens": np.concatenate([chunk.tokens for chunk in chunks]),
        "chunk_offsets": offsets(len(chunk.tokens) for chunk in chunks),
        "chunk_document": np.repeat(np.arange(len(documents)), [len(some) for some in pieces]),
        "loss_start": np.array([chunk.loss_start for chunk in chunks]),
        "loss_mask": np.concatenate(masks),
        "document_offsets": offsets(len(some) for some in pieces),
        "document_id_bytes": np.frombuffer("".join(d.id for d in documents).encode(), np.uint8),
        "document_id_offsets": offsets(len(d.id.encode()) for d in documents),
        "title_bytes": np.frombuffer("".join(d.title for d in documents).encode(), np.uint8),
        "title_offsets": offsets(len(d.title.encode()) for d in documents),
        "text_bytes": np.frombuffer("".join(d.plain_text for d in documents).encode(), np.uint8),
        "text_offsets": offsets(len(d.plain_text.encode()) for d in documents),
    }


def test_an_index_holds_the_corpus_and_its_design(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    source = write_jsonl(some_records(31))
    index = small_index([source], tokenizer, tmp_path / "x.stride", seed=5)
    assert verify(index.path) == []
    expected = expected_arrays(source, DocumentTokenizer(tokenizer, block_size=12))
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(index.array(f"corpus/{name}")), values, err_msg=name)
    n = index.n_chunks
    assert n == len(expected["loss_start"]) and index.n_subsets == n and index.degree == 3
    columns = build_columns(0, n, n_subsets=n, degree=3, seed=5)
    offsets = offsets_of(row_sizes(columns, n))
    np.testing.assert_array_equal(np.asarray(index.array("design/columns")), columns)
    np.testing.assert_array_equal(np.asarray(index.array("design/row_offsets")), offsets)
    counts = index.attributes["counts"]
    assert counts == {
        "documents": 31,
        "chunks": n,
        "tokens": index.n_tokens,
        "scored_tokens": int(expected["loss_mask"].sum()),
        "unscored_documents": 0,
        "unscored_chunks": int((expected["loss_start"] == np.diff(expected["chunk_offsets"])).sum()),
        "conversations": 11,
        "skipped_records": 0,
    }
    assert index.attributes["fingerprints"]["model"] == "m" * 64
    assert index.attributes["config"]["sources"] == ["../corpus.jsonl"]
    assert not Path(f"{index.path}.partial").exists()


class Killed(BaseException):
    """As a kill -9: nothing in the program handles it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, commits: int) -> None:
    """End a build in the middle of the work that follows its commit number `commits`."""
    done = 0
    commit, append = IndexWriter.commit, IndexWriter.append

    def counting_commit(self: IndexWriter, state: dict[str, Any]) -> None:
        nonlocal done
        commit(self, state)
        done += 1

    def killing_append(self: IndexWriter, name: str, values: np.ndarray) -> None:
        append(self, name, values)
        if done >= commits and name in ("corpus/loss_start", "design/row_offsets"):
            raise Killed

    monkeypatch.setattr(IndexWriter, "commit", counting_commit)
    monkeypatch.setattr(IndexWriter, "append", killing_append)


@pytest.mark.parametrize("commits", [0, 1, 3, 6, 8])  # the eighth is the last, the design follows
def test_a_resumed_build_is_the_uninterrupted_one(
    commits: int, tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str], monkeypatch: Any
) -> None:
    build = partial(small_index, [write_jsonl(some_records(28))], tokenizer, commit_seconds=0)
    whole = contents(build(tmp_path / "whole").path)
    with monkeypatch.context() as patch:
        kill_after(patch, commits)
        with pytest.raises(Killed):
            build(tmp_path / "killed")
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "killed.partial").exists() == (commits > 0)
    tokenised: list[str] = []
    encode = DocumentTokenizer.encode_batch

    def counting_encode(self: DocumentTokenizer, documents: Any) -> Any:
        tokenised.extend(document.id for document in documents)
        return encode(self, documents)

    monkeypatch.setattr(DocumentTokenizer, "encode_batch", counting_encode)
    assert contents(build(tmp_path / "killed").path) == whole
    # what was committed is not tokenised again
    assert len(tokenised) == 28 - 4 * min(commits, 7)
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.parametrize("change", ["other text", "fewer", "order"])
def test_a_corpus_that_changed_is_not_resumed(
    change: str,
    tmp_path: Path,
    tokenizer: Any,
    write_jsonl: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = some_records(28)
    build = lambda **more: small_index(  # noqa: E731
        [write_jsonl(records)], tokenizer, tmp_path / "x", commit_seconds=0, **more
    )
    with monkeypatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(Killed):
            build()
    if change == "other text":
        records[5]["text"] += "."
    elif change == "fewer":
        del records[10:]
    else:
        records[4], records[5] = records[5], records[4]
    with pytest.raises(CorpusError, match="first 12 documents again, found others or fewer") as error:
        build()
    assert "--overwrite" in (error.value.fix or "")
    assert not (tmp_path / "x").exists()
    with pytest.raises(IndexIncomplete):
        build(seed=1)
    index = build(seed=1, overwrite=True)
    assert index.n_documents == len(records) and index.seed == 1 and verify(index.path) == []


# Append


@pytest.mark.parametrize("conversations", [(False, False), (False, True), (True, False)])
def test_append_is_one_build_of_both(
    conversations: tuple[bool, bool], tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    old = write_jsonl([{"id": "bad"}, *some_records(17, conversations=conversations[0])], "1.jsonl")
    new = write_jsonl(some_records(14, conversations=conversations[1], seed=1), "2.jsonl")
    reading, grown = ReadOptions(on_bad="skip"), conversations[1]
    both = small_index([old, new], tokenizer, tmp_path / "both", reading, n_subsets=20)
    first = small_index([old], tokenizer, tmp_path / "x", reading, n_subsets=20)
    path, fingerprint = first.path, first.attributes["fingerprints"]["corpus"]
    how: dict[str, Any] = {"tokenizer_fingerprint": "t" * 64, "reading": reading, "grown": grown}
    extended = append_to_index(path, [old, new] if grown else [new], tokenizer=tokenizer, **how)
    assert verify(path) == []
    own = ("zarr.json", "manifest.json")
    wanted = {name: data for name, data in contents(both.path).items() if name not in own}
    assert {name: data for name, data in contents(path).items() if name not in own} == wanted
    assert extended.attributes["fingerprints"] == both.attributes["fingerprints"]
    assert extended.attributes["fingerprints"]["corpus"] != fingerprint
    assert extended.attributes["counts"] == both.attributes["counts"]
    assert extended.attributes["config"]["appended"][0]["first_document"] == 17


@pytest.mark.parametrize("commits", [0, 1, 4])
def test_a_resumed_append_is_the_uninterrupted_one(
    commits: int, tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str], monkeypatch: Any
) -> None:
    old = write_jsonl(some_records(17), "1.jsonl")
    new = write_jsonl(some_records(14, seed=1), "2.jsonl")
    places = [small_index([old], tokenizer, tmp_path / name).path for name in ("whole", "killed")]
    before = contents(places[1])

    def append(path: Path) -> dict[str, bytes]:
        options: dict[str, Any] = {"tokenizer_fingerprint": "t" * 64, "commit_seconds": 0}
        return contents(append_to_index(path, [new], tokenizer=tokenizer, **options).path)

    with monkeypatch.context() as patch:
        kill_after(patch, commits)
        with pytest.raises(Killed):
            append(places[1])
    assert contents(places[1]) == before  # the old index is as it was
    assert append(places[1]) == append(places[0])


def test_append_refuses_another_tokenizer_and_known_ids(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    source = write_jsonl(some_records(5))
    path = small_index([source], tokenizer, tmp_path / "x").path
    before = contents(tmp_path)
    with pytest.raises(IndexMismatch, match=r"t{64}.*u{64}"):
        append_to_index(path, [source], tokenizer=tokenizer, tokenizer_fingerprint="u" * 64)
    with pytest.raises(CorpusError, match="first at the index that is appended to"):
        append_to_index(path, [source], tokenizer=tokenizer, tokenizer_fingerprint="t" * 64)
    assert contents(path) == {
        name.removeprefix("x/"): data for name, data in before.items() if name.startswith("x/")
    }


# Plans


def test_a_plan_says_what_the_build_makes(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    source = write_jsonl(some_records(31))
    counts = survey_corpus([source], tokenizer=tokenizer, block_size=12)
    plan = plan_index(counts, PlanOptions(degree=3), vocabulary=len(tokenizer))
    index = small_index([source], tokenizer, tmp_path / "x")
    found = {name: index.array(name).nbytes for group in ("corpus", "design") for name in index.names(group)}
    assert plan["bytes"] == found
    made = index.n_chunks, index.n_subsets, index.degree
    assert (plan["n_chunks"], plan["n_subsets"], plan["degree"]) == made
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(CorpusError, match="refuses"):
        survey_corpus([source], tokenizer=tokenizer)
    assert survey_corpus([source], tokenizer=tokenizer, reading=ReadOptions(on_bad="skip")).documents == 31


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, make_tokenizer: Any, write_jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the text is longer, a ninth at most is more of memory: 4 MB and 400 kB, measured 60."""
    import tracemalloc

    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 1 << 17)
    peaks = []
    for count in (50, 250):
        source = write_jsonl([{"id": n, "text": f"{TEXT} " * 210} for n in range(count)])
        tracemalloc.start()
        index = small_index([source], make_tokenizer(), tmp_path / str(count), block_size=512)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert index.array("corpus/text_bytes").nbytes > 4_400_000
    assert peaks[1] - peaks[0] < 400_000


def test_an_index_knows_what_its_model_was_not_trained_on(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    from dataclasses import replace

    from stride_cli.models.language.language_recipe import FILE_NAME
    from stride_cli.training.finetuning import finetuning_recipe
    from stride_cli.training.index_changes import untrained_documents
    from stride_cli.training.options import FinetuneOptions
    from stride_cli.training.runs import cut, read_corpus

    records = some_records(12)
    source = write_jsonl(records)
    index = small_index([source], tokenizer, tmp_path / "x.stride")
    chunks, corpus = cut(read_corpus([source], ReadOptions()), tokenizer, block_size=12)
    recipe = finetuning_recipe(chunks, FinetuneOptions(), 10**8, block_size=12, dtype="fp32")
    assert recipe.steps == 80 and recipe.batch_tokens < 2048 and recipe.adam_lr == pytest.approx(9e-5)

    def of(**changed: Any) -> frozenset[int] | None:
        written = replace(recipe, tokenizer_fingerprint="t" * 64, corpus={**corpus, **changed})
        (tmp_path / FILE_NAME).write_text(written.to_json())
        return untrained_documents(index, tmp_path)

    assert of() is None and untrained_documents(index, tmp_path / "elsewhere") is None
    other = write_jsonl([*records[:3], *records[5:]], "other.jsonl")
    assert of(sources=[other], fingerprint="0" * 64) == {3, 4}
    assert of(sources=["gone.jsonl"], fingerprint="0" * 64) == frozenset()
    assert of(sources=[source], documents=7, fingerprint="0" * 64) == {7, 8, 9, 10, 11}  # it has grown since


def test_a_corpus_that_differs_is_told_by_its_documents(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    records = some_records(12)
    index = small_index([write_jsonl(records)], tokenizer, tmp_path / "x.stride")
    changed = [{**records[0], "text": "Paris"}, *records[1:9], {"id": "more", "text": "Water"}]
    told = module.difference(index, [write_jsonl(changed, "changed.jsonl")])
    last = ", ".join(f"'{record['id']}'" for record in records[9:11])
    assert told == f"1 changed ('{records[0]['id']}'), 3 gone ({last}, …), 1 new ('more')"


def test_fields_of_messages_that_no_token_has_are_named(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str], capsys: pytest.CaptureFixture
) -> None:
    turns = [
        {"role": "user", "content": "Paris", "mood": "x", "weight": 0},
        {"role": "assistant", "content": "is"},
    ]
    small_index(
        [write_jsonl([{"id": str(n), "messages": turns} for n in range(9)])], tokenizer, tmp_path / "x"
    )
    assert "'mood' of 9 messages is in no token" in capsys.readouterr().err


def test_the_form_is_recorded_and_later_documents_have_it(
    tmp_path: Path, tokenizer: Any, write_jsonl: Callable[..., str]
) -> None:
    pair = {"prompt": "What is", "response": "Paris"}
    source = write_jsonl([{"id": str(n), **pair} for n in range(12)])
    for name, text in (("concat", "<s>What is Paris"), ("bare", "What is Paris"), ("chat", None)):
        index = small_index([source], tokenizer, tmp_path / f"{name}.stride", form=name, block_size=64)
        assert index.attributes["form"] == {
            "name": name.replace("bare", "text"), "between": None, "clock": None, "bos": name != "bare",
            "source": "option",
        }  # fmt: skip
        more = write_jsonl([{"id": "more", **pair}], "more.jsonl")
        longer = append_to_index(index.path, [more], tokenizer=tokenizer, tokenizer_fingerprint="t" * 64)
        tokens = longer.chunk_tokens(12).tolist()
        assert tokens == longer.chunk_tokens(0).tolist()
        assert text is None or tokenizer.decode(tokens) == text
