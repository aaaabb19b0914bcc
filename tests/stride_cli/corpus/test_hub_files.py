"""Datasets as corpora: of a hub, by its real client against a small server, and what `datasets` saves."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stride_cli.corpus.build import IndexedModel, _config, build_index
from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.readers import ReadOptions, read_documents
from stride_cli.corpus.sources import pinned
from stride_cli.errors import CorpusError
from tests.hub_server import Hub, only_hub

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

ROWS = [
    {"id": "a", "text": "x y", "prompt": None, "response": None, "messages": None},
    {"id": "b", "text": None, "prompt": "p", "response": "r", "messages": None},
    {
        "id": "c",
        "text": None,
        "prompt": None,
        "response": None,
        "messages": [{"role": "user", "content": "h"}],
    },
]


def table(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def ids(*sources: str, **options: Any) -> list[str]:
    return [document.id for document in read_documents(sources, ReadOptions(**options))]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with only_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def facts(hub: Hub) -> str:
    """A dataset with a configuration that its card declares beside the default one."""
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "  - split: test\n    path: data/test-*\n- config_name: more\n  data_files: more/*.jsonl\n---\n"
    )
    files = {
        "README.md": card.encode(),
        "data/train-00000-of-00002.parquet": table(ROWS[0]),
        "data/train-00001-of-00002.parquet": table(ROWS[1], ROWS[2]),
        "data/test-00000-of-00001.parquet": table({"id": "t", "text": "z"}),
        "more/one.jsonl": b'{"id": "m", "text": "z"}\n',
    }
    return hub.commit("me/facts", files)


@pytest.mark.parametrize(
    ("behind", "found"),
    [
        ("", ["a", "b", "c"]),
        ("?split=test", ["t"]),
        ("?config=more", ["m"]),
        ("@main/data/test-00000-of-00001.parquet", ["t"]),
        ("/data", ["t", "a", "b", "c"]),
    ],
)
def test_a_dataset_of_the_hub_is_a_corpus(hub: Hub, facts: str, behind: str, found: list[str]) -> None:
    assert ids(f"hf://datasets/me/facts{behind}") == found


def test_a_bad_row_is_named_by_dataset_file_and_row(hub: Hub) -> None:
    sha = hub.commit("me/bad", {"train.parquet": table({"id": "a", "text": "x"}, {"id": "a", "text": "y"})})
    with pytest.raises(CorpusError, match=rf"hf://datasets/me/bad@{sha[:12]}/train.parquet:2: .* first at"):
        ids("hf://datasets/me/bad")
    assert ids("hf://datasets/me/bad", on_bad="skip") == ["a"]


def test_an_index_records_the_commit_and_a_build_goes_on(hub: Hub, tokenizer, tmp_path: Path) -> None:
    """Of the very rows that it began with; a dataset that has changed meanwhile is told."""
    rows = [{"id": str(number), "text": f"The number {number} comes here."} for number in range(40)]
    first = hub.commit("me/many", {"train.parquet": table(*rows[:30])})
    out, source = tmp_path / "run.stride", "hf://datasets/me/many"
    model = IndexedModel(tokenizer, tokenizer_fingerprint="t" * 64, fingerprint="m" * 64)
    options = BuildOptions(n_subsets=8, degree=2, commit_seconds=0)
    # a bad row ends it; what came before is kept
    broken = hub.commit("me/many", {"train.parquet": table(*rows[:30], {"id": "0", "text": "again"})})
    with pytest.raises(CorpusError, match=f"{broken[:12]}/train.parquet:31"):
        build_index([source], model, out, options)
    whole = hub.commit("me/many", {"train.parquet": table(*rows)})
    index = build_index([source], model, out, options)
    assert index.n_documents == 40
    assert index.attributes["config"]["sources"] == [f"{source}@{whole}"]
    assert pinned(f"{source}@{first}") == f"{source}@{first}"
    again = build_index([f"{source}@{whole}"], model, tmp_path / "again.stride", options)
    assert again.attributes["fingerprints"] == index.attributes["fingerprints"]
    assert _config(["-", source], out, ReadOptions())["sources"] == ["-", source]


def test_an_index_of_somebody_else_fetches_nothing(hub: Hub, facts: str) -> None:
    from stride_cli.permissions import Permissions
    from stride_cli.research.selection.stored import _from_sources

    config = {"sources": ["hf://datasets/me/facts"], "reading": {}}
    theirs: Any = SimpleNamespace(attributes={"config": config}, path=Path("run.stride"))
    hub.asked.clear()
    assert _from_sources(theirs, Permissions()) == {} and not hub.asked
    assert set(_from_sources(theirs, Permissions(allow_download=True))) == {"c"} and hub.asked


# ---- folders ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(folder / "one", num_shards=2)
    small = datasets.Dataset.from_list([{"id": "t", "text": "z"}])
    datasets.DatasetDict(train=data, test=small).save_to_disk(folder / "two")
    datasets.DatasetDict(a=data, b=small).save_to_disk(folder / "none")
    data.select([2, 0]).save_to_disk(folder / "selected")
    (folder / "tables").mkdir()
    data.to_parquet(folder / "tables" / "b.parquet")
    small.to_parquet(folder / "tables" / "a.parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("one", ["a", "b", "c"]),
        ("two", ["a", "b", "c"]),
        ("two?split=test", ["t"]),
        ("two/test", ["t"]),
        ("selected", ["c", "a"]),
        ("tables", ["t", "a", "b", "c"]),
    ],
)
def test_what_datasets_saves_is_a_corpus(saved: Path, name: str, found: list[str]) -> None:
    assert ids(f"{saved}/{name}") == found


def test_the_documents_are_those_of_json_lines(saved: Path, tmp_path: Path) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    digests = [
        [document.digest() for document in read_documents([source])]
        for source in (str(lines), f"{saved}/one", f"{saved}/tables/b.parquet")
    ]
    assert digests[0] == digests[1] == digests[2]
