"""From a file to ranked training rows, on the command line and through the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli import api
from stride_cli.errors import QueryError
from tests.stride_cli.commands.conftest import run_stride


def run(line: str) -> tuple[int, list[dict[str, Any]], str]:
    """`stride LINE`: exit code, records, stderr."""
    found = run_stride(line)
    return found.code, found.records, found.err


def test_another_label_is_another_question(digits_index: Path) -> None:
    session = api.Session.open(digits_index)
    own = session.query("505")
    predicted = session.query("505", response="predicted")
    assert predicted.query.generated and not own.query.generated
    other = "0" if own.query.response != "0" else "1"
    against = session.query("505", response=other)
    assert against.query.response == other and against.loss > predicted.loss
    with pytest.raises(QueryError, match="'seven' is no class"):
        session.query("505", response="seven")


def test_the_whole_way(digits_file: Path, tmp_path: Path) -> None:
    model, index = tmp_path / "model", tmp_path / "run.stride"
    code, (record,), err = run(
        f"model train {digits_file} --out {model} --network mlp --width 16 --rows 300 --holdout 20 --epochs 5"
    )
    assert code == 0 and record["rows"] == 300 and record["held_out_accuracy"] > 0.5
    assert f"stride index build {digits_file} --model {model}" in err
    for flag in ("--block-size 64", "--no-text", "--on-bad skip", "--field text=body"):
        code, found, err = run(f"index build {digits_file} --model {model} --out {index} {flag}")
        name = flag.replace("text=body", "text=") if "text=" in flag else flag.split()[0]
        assert code == 2 and not found and f"{name} is an option of a corpus of text" in err
        assert f"leave out {name}" in err and not index.exists()
    assert run(f"index build {digits_file} --model {model} --out {index} --subsets 200")[0] == 0
    code, (record,), _ = run(f"train --index {index}")
    assert code == 0 and record["space"] == "head-matrix+linear-matrix" and record["coverage"] == 1.0
    code, (answer,), _ = run(f"query 305 --index {index} --top 3 --bottom 2")
    assert code == 0 and len(answer["hits"]) == 3 and answer["prompt"] == "row 305 → "
    assert all(hit["label"] in "0123456789" for hit in answer["hits"] + answer["opposers"])
    assert {hit["sign"] for hit in answer["opposers"]} == {"opposes"}
    code, answers, _ = run(f"query held-out --index {index} --top 1")
    assert code == 0 and len(answers) == 20
    # why this class and not that one: the difference of the two classes' influences
    (own,), (other,), (compared,) = (
        run(f"STRIDE_QUERY_SHRINK=false query 305 --index {index} --top 300 --response {asked}")[1]
        for asked in ("3", "8", "3 --instead 8")
    )
    assert compared["comparison"]["token"] == "3" and compared["comparison"]["other_token"] == "8"
    assert compared["comparison"]["other_probability"] == pytest.approx(np.exp(-other["loss"]), rel=1e-4)
    assert compared["loss"] == pytest.approx(own["loss"], rel=1e-4)
    code, _, err = run(f"query 305 --index {index} --response 3 --instead 3")
    assert code == 2 and "no token in which" in err
    code, (together,), _ = run(f"query held-out --index {index} --pool --top 1")
    assert code == 0 and together["pooled"] == 20
    file = np.load(digits_file)
    np.savez(tmp_path / "rows.npz", images=file["images"][305:307], labels=file["labels"][305:307])
    code, answers, _ = run(f"query --file {tmp_path}/rows.npz --index {index} --top 3 --bottom 2")
    assert code == 0 and [hit["document"] for hit in answers[0]["hits"]] == [
        hit["document"] for hit in answer["hits"]
    ]
    code, (record,), _ = run(f"model info {model}")
    assert code == 0 and record["architecture"] == "MLP" and record["vocabulary"] == 10


def test_a_file_without_labels_asks_for_the_prediction(
    digits_file: Path, digits_index: Path, tmp_path: Path
) -> None:
    """As an array of several inputs, as one alone, and as a picture; each answers as the row itself does."""
    image = pytest.importorskip("PIL.Image")
    images = np.load(digits_file)["images"]
    np.savez(tmp_path / "rows.npz", images=images[505:507])
    np.savez(tmp_path / "row.npz", images=images[505])
    image.fromarray(images[505]).save(tmp_path / "row.png")
    image.fromarray(images[505, :4]).save(tmp_path / "half.png")
    asked = f"--index {digits_index} --top 3"
    code, (expected,), _ = run(f"query 505 --response predicted {asked}")
    assert code == 0
    for name, count in (("rows.npz", 2), ("row.npz", 1), ("row.png", 1)):
        code, answers, err = run(f"query --file {tmp_path}/{name} {asked}")
        assert code == 0 and len(answers) == count, err
        assert answers[0]["response"] == expected["response"] and answers[0]["generated"] is True
        assert [hit["document"] for hit in answers[0]["hits"]] == [
            hit["document"] for hit in expected["hits"]
        ]
    code, answers, err = run(f"query --file {tmp_path}/half.png {asked}")
    assert code == 2 and not answers and "4 × 8 pixels" in err and "8 × 8" in err
    (tmp_path / "broken.png").write_bytes(b"no picture")
    assert run(f"query --file {tmp_path}/broken.png {asked}")[0] == 2
