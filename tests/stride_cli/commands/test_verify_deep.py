"""`stride index verify --deep`: an index whose digests are right, and whose maker was nobody's friend."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format.manifest import MANIFEST, encode_manifest, read_manifest
from index_format.reader import Index
from index_format.writer import GroupWriter


@pytest.fixture
def index(workspace: Path, tmp_path: Path) -> Path:
    """A copy of the workspace's index, at the same distance from its model."""
    (tmp_path / "model").symlink_to(workspace / "model")
    return Path(shutil.copytree(workspace / "run.stride", tmp_path / "run.stride"))


def remake(index: Path, name: str, data: bytes) -> None:
    """Give a file other content, and have the manifest above it say that it is right so."""
    root = next(index / top for top in (name.partition("/")[0], "") if (index / top / MANIFEST).is_file())
    files, _ = read_manifest(root)
    (index / name).write_bytes(data)
    relative = (index / name).relative_to(root).as_posix()
    entry = (len(data), hashlib.sha256(data).hexdigest())
    (root / MANIFEST).write_bytes(encode_manifest({**files, relative: entry})[0])


def change_array(name: str, dtype: Any, change: Callable[[np.ndarray], None]) -> Callable[[Path], None]:
    def apply(index: Path) -> None:
        (file,) = (path for path in (index / name / "c").rglob("*") if path.is_file())
        values = np.frombuffer(file.read_bytes(), dtype).copy()
        change(values)
        remake(index, file.relative_to(index).as_posix(), values.tobytes())

    return apply


def change_attributes(group: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(index: Path) -> None:
        name = f"{group}zarr.json"
        content = json.loads((index / name).read_bytes())
        change(content["attributes"]["stride"])
        remake(index, name, json.dumps(content).encode())

    return apply


def put(place: Any, value: Any) -> Callable[[Any], None]:
    def apply(values: Any) -> None:
        values[place] = value

    return apply


def ids_alike(index: Path) -> None:
    """The second id becomes the first, whose length it must have."""
    offsets = np.frombuffer((index / "corpus/document_id_offsets/c/0").read_bytes(), np.int64).copy()
    file = index / "corpus/document_id_bytes/c/0"
    data = bytearray(file.read_bytes())
    first = data[: offsets[1]]
    longer = offsets[2] - offsets[1] - len(first)
    offsets[2] -= longer  # the rest of it goes to the third
    data[offsets[1] : offsets[2]] = first
    remake(index, "corpus/document_id_bytes/c/0", bytes(data))
    remake(index, "corpus/document_id_offsets/c/0", offsets.tobytes())


def into_a_character(index: Path) -> None:
    """All texts joined are UTF-8, and one of them ends inside a character."""
    offsets = np.frombuffer((index / "corpus/text_offsets/c/0").read_bytes(), np.int64)
    file = index / "corpus/text_bytes/c/0"
    data = bytearray(file.read_bytes())
    data[offsets[3] - 1 : offsets[3] + 1] = "é".encode()
    remake(index, "corpus/text_bytes/c/0", bytes(data))


def chosen_subsets(index: Path) -> None:
    """Two chunks change places in the design, its transpose too."""
    from index_format.design import build_rows

    content = json.loads((index / "design/columns/zarr.json").read_bytes())
    file = index / "design/columns/c/0/0"
    columns = np.frombuffer(file.read_bytes(), np.uint16).reshape(content["shape"]).copy()
    columns[[4, 9]] = columns[[9, 4]]
    attributes = json.loads((index / "zarr.json").read_bytes())["attributes"]["stride"]
    offsets, members = build_rows(columns, attributes["n_subsets"])
    remake(index, "design/columns/c/0/0", columns.tobytes())
    remake(index, "design/row_offsets/c/0", offsets.tobytes())
    remake(index, "design/row_members/c/0", members.tobytes())


def hidden_link(index: Path) -> None:
    (index / "truth.partial").mkdir()
    (index / "truth.partial" / "lock").symlink_to("/etc/passwd")


def gates_of(index: Path) -> str:
    names = json.loads((index / "operators/zarr.json").read_bytes())["attributes"]["stride"]["arrays"]
    return next(name for name in names if name.endswith("gates") or name.endswith("gate_scale"))


def endless_gates(index: Path) -> None:
    change_array(gates_of(index), np.float32, put(7, np.nan))(index)


def truth_of(n_chunks: int | None) -> Callable[[Path], None]:
    """Losses, and nothing else, of so many chunks, or of those that there are."""

    def apply(index: Path) -> None:
        with GroupWriter(index, "truth", "t") as writer:
            writer.append("truth/losses", np.ones((3, 2)))
            writer.publish({"n_chunks": n_chunks or Index.open(index).n_chunks})

    return apply


def checkpoint_of_my_own(index: Path) -> None:
    attributes = json.loads((index / "operators/zarr.json").read_bytes())["attributes"]["stride"]
    entry = {"path": "../model", "model_fingerprint": "0" * 64, "design_seed": 1}
    assert not attributes.get("checkpoints")
    change_attributes("operators/", lambda stated: stated.update(checkpoints=[entry]))(index)


MAKERS = {
    "text": (change_array("corpus/text_bytes", np.uint8, put(9, 0xFF)), "corpus/text_bytes", "document 0"),
    "end of a text": (into_a_character, "corpus/text_bytes", "of document 3 is no UTF-8"),
    "id": (change_array("corpus/document_id_bytes", np.uint8, put(0, 0x80)), "corpus/document_id", "UTF-8"),
    "same ids": (ids_alike, "corpus/document_id_bytes", "of document 1 is that of document 0, too"),
    "token": (
        change_array("corpus/tokens", np.uint16, put(5, 60_000)),
        "corpus/tokens",
        "token 5 is 60000, and the model has 1,0",
    ),
    "subsets": (chosen_subsets, "design/columns", "chunk 4 is not in the subsets that seed"),
    "seed": (change_attributes("", put("seed", -1)), "zarr.json", "draws no design: seed must be"),
    "design": (change_attributes("", put("design", "mine")), "design/columns", "is of kind 'mine'"),
    "path": (
        change_attributes("", put("model_path", "/home/somebody/model")),
        "zarr.json",
        "attribute model_path has the absolute path '/home/somebody/model'",
    ),
    "path of Windows": (
        change_attributes("", lambda stated: stated["config"].update(sources=["C:\\corpus.jsonl"])),
        "zarr.json",
        "attribute config.sources[0]",
    ),
    "block size": (change_attributes("", put("block_size", 3)), "corpus/chunk_offsets", "has "),
    "link": (hidden_link, ".", "truth.partial/lock is a link"),
    "gates": (endless_gates, "operators/", "row 0 has numbers that are not finite"),
    "layer": (change_attributes("operators/", put("layer", "x")), "operators", "not what stride train wr"),
    "scale": (change_attributes("operators/", put("direct_scale", True)), "operators", "no finite number"),
    "seen": (change_array("operators/seen", np.uint8, put(2, 7)), "operators/seen", "entry 2 is neither"),
    "checkpoint": (checkpoint_of_my_own, "operators/zarr.json", "subsets of checkpoint 1 are drawn from 1"),
    "truth": (truth_of(1 << 70), "truth", "the truth of index"),
    "truth without queries": (truth_of(None), "truth", "not what stride evaluate truth writes"),
    "calibration": (
        change_array("calibration/null_scored", np.int64, lambda values: values[::-1].sort()),
        "calibration",
        "do not rise",
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_maker_has_done_is_found(run, index: Path, kind: str) -> None:
    harm, path, words = MAKERS[kind]
    harm(index)
    if kind == "block size":  # of arrays nothing is wrong
        assert run(f"index verify {index}").code == 0
    result = run(f"index verify {index} --deep --json")
    assert result.code == 1, result.err
    found = [(record["path"], record["message"]) for record in result.records if record["kind"] == "maker"]
    assert all(record["deep"] and not record["whole"] for record in result.records)
    assert any(where.startswith(path) and words in message for where, message in found), result.records
    assert "what no build of stride writes" in result.err


@pytest.mark.slow
def test_what_stride_has_made_is_fine(run, workspace: Path, tmp_path: Path) -> None:
    index = workspace / "run.stride"
    here = run(f"index verify {index} --deep --json")
    assert here.code == 0, here.records
    whole = {"schema": "stride.index_verify/1", "index": str(index), "whole": True, "deep": True}
    assert here.records == [whole | {"stages": ["operators", "calibration"]}]
    assert "not compared" not in here.err
    packed = shutil.make_archive(str(tmp_path / "run.stride"), "zip", index)
    there = run(f"index verify {packed} --deep --model {workspace}/model --json")
    assert there.code == 0 and there.records[0]["whole"], there.out
    link = tmp_path / "link.stride"
    link.symlink_to(index)
    assert run(f"index verify {link} --deep --model {workspace}/model").code == 0


def test_the_model_is_one_of_this_machine_and_the_index_s_own(
    run, workspace: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("STRIDE_GENERAL_ALLOW_DOWNLOAD", "1")  # is not asked: nothing is fetched
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse_network)
    (index.parent / "model").unlink()
    without = run(f"index verify {index} --deep")
    assert without.code == 0 and "not compared with a vocabulary" in without.err
    change_attributes("", put("model_path", "somebody/model"))(index)
    without = run(f"index verify {index} --deep")
    assert without.code == 0 and "'somebody/model' is not on this machine" in without.err
    missing = run(f"index verify {index} --deep --model somebody/model")
    assert missing.code == 2 and "is not on this machine" in missing.err
    other = shutil.copytree(workspace / "model", tmp_path / "other")
    weights = next(other.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    mismatch = run(f"index verify {index} --deep --model {other}")
    assert mismatch.code == 3 and "was built for model" in mismatch.err
    assert run(f"index verify {index} --model {other}").code == 2


def refuse_network(name: str, *, local_files_only: bool = False, **_: Any) -> str:
    assert local_files_only, "the network is asked"
    raise FileNotFoundError(name)


def test_damage_is_told_and_nothing_is_read_deeply(run, index: Path) -> None:
    tokens = index / "corpus/tokens/c/0"
    tokens.write_bytes(b"\xff" + tokens.read_bytes()[1:])
    result = run(f"index verify {index} --deep --json")
    assert result.code == 1 and [record["kind"] for record in result.records] == ["content"]
    assert "nobody has looked any closer" in result.err


def test_a_classifier_s_rows_are_compared(run, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 17, (24, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", images=images, labels=np.arange(24) % 3)
    model, index = tmp_path / "mlp", tmp_path / "run.stride"
    assert run(f"model train {tmp_path}/digits.npz --out {model} --width 4 --epochs 1").code == 0
    assert run(f"index build {tmp_path}/digits.npz --model {model} --out {index}").code == 0
    assert run(f"index verify {index} --deep").code == 0
    change_array("corpus/tokens", np.uint16, put(9, 3))(index)
    result = run(f"index verify {index} --deep --json")
    assert result.code == 1 and "of row 4 are [4, 3]" in result.records[0]["message"]


def test_links_in_an_index_are_not_followed(run, index: Path) -> None:
    os.mkfifo(index / "signature.json")
    result = run(f"index verify {index} --json")
    assert result.code == 1 and "is a FIFO" in result.records[0]["message"]
