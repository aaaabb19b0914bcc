"""Indexes built apart, merged, are the index of their corpora built in one go."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format.errors import IndexMismatch, StorageFull
from index_format.reader import Index
from index_format.verify import verify
from index_format.writer import IndexWriter
from stride_cli.corpus.build import append_to_index, compare_corpus
from stride_cli.corpus.merge import merge_indexes
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import CorpusError, UsageError

from .test_build import small_index, some_records

NUMBERED = ReadOptions(number_ids=True)


@pytest.fixture
def tokenizer(make_tokenizer: Any, chatml: str) -> Any:
    return make_tokenizer(chat_template=chatml)


def arrays(index: Index) -> dict[str, bytes]:
    """Every file of the arrays, and their metadata."""
    return {
        file.relative_to(index.path).as_posix(): file.read_bytes()
        for group in ("corpus", "design")
        for file in (index.directory / group).rglob("*")
        if file.is_file()
    }


def same_but_for_what_it_was_made_of(merged: Index, whole: Index) -> None:
    assert verify(merged.path) == []
    assert arrays(merged) == arrays(whole)
    ours, theirs = dict(merged.attributes), dict(whole.attributes)
    for attributes in (ours, theirs):
        del attributes["build_key"], attributes["config"]
    assert ours == theirs
    for key, value in whole.attributes["config"].items():
        assert merged.attributes["config"][key] == value, key


@pytest.mark.parametrize("reading", [ReadOptions(), NUMBERED], ids=["read", "numbered"])
def test_ranges_merged_are_one_build(tmp_path: Path, tokenizer: Any, write_jsonl: Any, reading: Any) -> None:
    """Whatever the number of ranges, in whatever order they are named; masks begin where they begin."""
    source = write_jsonl(some_records(31, conversations=False))
    whole = small_index([source], tokenizer, tmp_path / "whole", reading, seed=5)
    assert whole.n_chunks > 60
    parts = [
        small_index([source], tokenizer, tmp_path / "parts" / str(n), reading, seed=5, range=f"{n}/3").path
        for n in (3, 1, 2)
    ]
    merged = merge_indexes(parts, tmp_path / "merged")
    same_but_for_what_it_was_made_of(merged, whole)
    assert [part["range"] for part in merged.attributes["config"]["merged"]] == ["1/3", "2/3", "3/3"]
    assert merged.attributes["config"]["sources"] == ["../corpus.jsonl"]
    with pytest.raises(IndexMismatch, match="1/3 lacking") as caught:
        merge_indexes([parts[0], parts[2]], tmp_path / "again")
    assert "--range 1/3" in str(caught.value.fix)
    with pytest.raises(UsageError, match="given twice"):
        merge_indexes([*parts, parts[1]], tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


def test_conversations_and_masks(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    """Arrays are those of one build; the fingerprint is of the parts, for texts alone do not tell how a
    conversation was read, and the corpus is known by it."""
    records = some_records(30)
    first, second = write_jsonl(records[:20], "a.jsonl"), write_jsonl(records[20:], "b.jsonl")
    whole = small_index([first, second], tokenizer, tmp_path / "whole", n_subsets=9)
    parts = [
        small_index([source], tokenizer, tmp_path / Path(source).stem, n_subsets=9)
        for source in (first, second)
    ]
    assert whole.has("corpus/loss_mask") and not parts[0].has("corpus/loss_mask")
    merged = merge_indexes([part.path for part in parts], tmp_path / "merged")
    assert arrays(merged) == arrays(whole)
    assert merged.attributes["counts"] == whole.attributes["counts"]
    assert merged.attributes["fingerprints"]["corpus"] != whole.attributes["fingerprints"]["corpus"]
    third = write_jsonl(some_records(3, seed=8), "c.jsonl")
    assert compare_corpus(merged, [first, second]) == ("same", 30)
    assert compare_corpus(merged, [first, second, third]) == ("grown", 33)
    assert compare_corpus(merged, [second, first])[0] == "other"
    longer = append_to_index(
        merged.path, [third], tokenizer=tokenizer, tokenizer_fingerprint="t" * 64, commit_seconds=0
    )
    assert compare_corpus(longer, [first, second, third]) == ("same", 33)
    assert compare_corpus(longer, [first, third, second])[0] == "other"
    source = write_jsonl(records, "all.jsonl")
    ranges = [
        small_index([source], tokenizer, tmp_path / f"{n}", NUMBERED, range=f"{n}/2").path for n in (1, 2)
    ]
    merged = merge_indexes(ranges, tmp_path / "numbered")
    assert compare_corpus(merged, [source], NUMBERED) == ("same", 30)


def test_an_interrupted_merge_goes_on(
    tmp_path: Path, tokenizer: Any, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(some_records(20, conversations=False))
    whole = small_index([source], tokenizer, tmp_path / "whole")
    parts = [small_index([source], tokenizer, tmp_path / f"p{n}", range=f"{n}/2").path for n in (1, 2)]
    append, calls = IndexWriter.append, 0

    def failing(self: Any, name: str, values: np.ndarray) -> None:
        nonlocal calls
        calls += name == "corpus/tokens"
        if calls == 2:
            raise KeyboardInterrupt
        append(self, name, values)

    with monkeypatch.context() as patched:
        patched.setattr(IndexWriter, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            merge_indexes(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists() and (tmp_path / "merged.partial").exists()
    same_but_for_what_it_was_made_of(merge_indexes(parts, tmp_path / "merged"), whole)
    assert not (tmp_path / "merged.partial").exists()


def test_what_differs_is_named(tmp_path: Path, tokenizer: Any, write_jsonl: Any) -> None:
    source = write_jsonl(some_records(6, conversations=False))
    other = write_jsonl(some_records(6, conversations=False, seed=1), "other.jsonl")
    first = small_index([source], tokenizer, tmp_path / "first", n_subsets=8, form="text")
    for number, (options, expected, fix) in enumerate(
        [
            ({"model_print": "n" * 64}, "fingerprint of the model is " + "n" * 64, "one model"),
            ({"n_subsets": 7}, "number of subsets K is 7, expected 8", "--subsets 8"),
            ({"block_size": 10}, "chunk length is 10, expected 12", "--block-size 12"),
            ({"store_text": False}, "keeping of texts is no, expected yes", "--no-text"),
            ({"form": "bare"}, "form is text (", "one --form"),  # without a BOS
        ]
    ):
        options = {"n_subsets": 8, "form": "text"} | options
        part = small_index([other], tokenizer, tmp_path / f"p{number}", **options)
        with pytest.raises(IndexMismatch) as caught:
            merge_indexes([first.path, part.path], tmp_path / "merged")
        said = caught.value.message
        assert said.startswith(f"{part.path} cannot be merged with {first.path}: its {expected}"), said
        assert fix in str(caught.value.fix)
    twice = write_jsonl([{"id": "x", "text": "Paris"}, {"id": "d0-4", "text": "Paris is"}], "twice.jsonl")
    part = small_index([twice], tokenizer, tmp_path / "twice", n_subsets=2, degree=1)
    with pytest.raises(UsageError, match="two indexes or more"):
        merge_indexes([first.path], tmp_path / "merged")
    shutil.copytree(part.path, tmp_path / "same")
    with pytest.raises(CorpusError, match="id 'x' of document 0 again, first as document 0 of") as caught:
        merge_indexes([part.path, tmp_path / "same"], tmp_path / "merged")
    assert "twice.jsonl" in caught.value.message and str(tmp_path / "same") in caught.value.message
    assert not list(tmp_path.glob("merged*"))


def test_no_room(tmp_path: Path, tokenizer: Any, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(some_records(6, conversations=False))
    parts = [small_index([source], tokenizer, tmp_path / f"p{n}", range=f"{n}/2").path for n in (1, 2)]
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100))
    with pytest.raises(StorageFull, match=r"merging into .*merged needs about [\d,]+ bytes, and .* has 100"):
        merge_indexes(parts, tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))
