"""`stride index push` and `pull`: the real client of the hub, and a small server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from index_format.reader import Index
from index_format.verify import verify
from stride_cli.corpus.build import IndexedModel, build_index
from stride_cli.corpus.options import BuildOptions
from tests.hub_server import Hub, only_hub

from .conftest import run_stride

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow  # indexes go over a socket file by file, verified on both sides


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with only_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("index")
    lines = "".join(f'{{"id": "{number}", "text": "Document {number} says this."}}\n' for number in range(30))
    (folder / "corpus.jsonl").write_text(lines)
    model = IndexedModel(tokenizer, tokenizer_fingerprint="t" * 64, fingerprint="m" * 64)
    build_index(
        [str(folder / "corpus.jsonl")], model, folder / "run.stride", BuildOptions(n_subsets=8, degree=2)
    )
    return folder / "run.stride"


def test_an_index_goes_to_the_hub_and_comes_back(hub: Hub, index: Path, tmp_path: Path, monkeypatch) -> None:
    hub.commit("me/shared", {"README.md": b"hello", "run.stride/old": b"of another index"})
    pushed = run_stride(f"index push {index} hf://datasets/me/shared")
    assert pushed.code == 0, pushed.err
    files = hub.files("me/shared")
    assert files["README.md"] == b"hello" and "run.stride/old" not in files
    assert {name.removeprefix("run.stride/") for name in files} - {"README.md"} == {
        path.relative_to(index).as_posix() for path in index.rglob("*") if path.is_file()
    }
    assert hub.uploads  # by LFS, some of them
    monkeypatch.chdir(tmp_path)
    pulled = run_stride("index pull hf://datasets/me/shared")
    assert pulled.code == 0, pulled.err
    assert pulled.records[0]["address"] == pushed.records[0]["address"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.stride"]
    assert not list(verify(tmp_path / "run.stride")) and Index.open("run.stride").n_documents == 30
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    again = run_stride("index pull hf://datasets/me/shared")
    assert again.code == 2 and "'run.stride' exists" in again.err
    sha = pushed.records[0]["address"].partition("@")[2].partition("/")[0]
    other = run_stride(f"index pull hf://datasets/me/shared@{sha}/run.stride --out run.stride --overwrite")
    assert other.code == 0 and [path.name for path in tmp_path.iterdir()] == ["run.stride"]


def test_a_dataset_is_made_and_nothing_is_sent_twice(hub: Hub, index: Path) -> None:
    hub.uploads.clear()
    run_stride(f"index push {index} hf://datasets/me/new/a/b.stride")
    assert "a/b.stride/zarr.json" in hub.files("me/new")
    hub.asked.clear()
    assert run_stride(f"index push {index} hf://datasets/me/new/a/b.stride").code == 0
    assert not [path for _, path in hub.asked if "/upload/" in path]


def test_an_interrupted_pull_goes_on(hub: Hub, index: Path, tmp_path: Path) -> None:
    run_stride(f"index push {index} hf://datasets/me/parts")
    hub.failures = 1
    broken = run_stride(f"index pull hf://datasets/me/parts --out {tmp_path}/got.stride")
    hub.failures = 0
    assert broken.code == 2 and "error: " in broken.err and not (tmp_path / "got.stride").exists()
    hub.asked.clear()
    assert run_stride(f"index pull hf://datasets/me/parts --out {tmp_path}/got.stride").code == 0
    fetched = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert len(fetched) < len([path for path in index.rglob("*") if path.is_file()])
    assert [path.name for path in tmp_path.iterdir()] == ["got.stride"]


def test_what_was_changed_on_the_way_is_refused(hub: Hub, index: Path, tmp_path: Path) -> None:
    run_stride(f"index push {index} hf://datasets/me/changed")
    name = next(name for name in hub.files("me/changed") if "/c/" in name and "tokens" in name)
    hub.commit("me/changed", {name: bytes(len(hub.files("me/changed")[name]))})
    result = run_stride(f"index pull hf://datasets/me/changed --out {tmp_path}/got.stride")
    assert result.code == 3 and "what came from hf://datasets/me/changed" in result.err
    assert not (tmp_path / "got.stride").exists()


def test_what_cannot_be_sent_or_fetched_is_named(hub: Hub, index: Path, tmp_path: Path, monkeypatch) -> None:
    hub.commit("me/two", {"a/zarr.json": b"", "b/zarr.json": b"", "b/corpus/zarr.json": b""})
    for line, message in (
        ("pull hf://datasets/me/two", "found in the dataset: a, b"),
        ("pull hf://datasets/me/two/c", "found in the dataset: a, b"),
        ("pull hf://datasets/me/absent", "the hub has no dataset me/absent"),
        ("pull hf://datasets/me/two?split=a", "an index has none"),
        ("pull run.stride", "is no dataset of the hub"),
        (f"push {tmp_path} hf://datasets/me/two", "no index"),
    ):
        result = run_stride(f"index {line}")
        assert result.code in (2, 3) and message in result.err, result.err
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    result = run_stride(f"index push {index} hf://datasets/me/two")
    assert result.code == 2 and "refuses access" in result.err and "hf auth login" in result.err, result.err
