"""`stride evaluate truth --import`: losses of others, or their models, as the truth of an index."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from index_format.reader import Index
from index_format.verify import verify
from stride_cli.errors import StrideError
from stride_cli.research.evaluation.metrics import lds
from stride_cli.research.evaluation.truth_import import read_bank, read_subsets
from stride_cli.research.training.truth import Truth
from stride_cli.schema import json_schema


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_losses_of_others_become_the_truth(run, workspace: Path, tmp_path: Path) -> None:
    """Losses that are sums of TF-IDF's scores, of a pool of 40 of the 60 documents: its LDS is 1."""
    index_path = workspace / "imported.stride"
    shutil.copytree(workspace / "run.stride", index_path, ignore=shutil.ignore_patterns("truth"))
    texts = [json.loads(line)["text"] for line in (workspace / "corpus.jsonl").read_text().splitlines()]
    # as published: no ids
    queries = write(tmp_path / "test.jsonl", [{"text": " ".join(text.split()[:12])} for text in texts[:3]])
    named = write(
        tmp_path / "named.jsonl",
        [{"id": n, **json.loads(row)} for n, row in enumerate(queries.read_text().splitlines())],
    )
    scored = run(f"baseline tfidf --index {index_path} --queries {named} --scores {tmp_path}/scores.npy")
    assert scored.code == 0, scored.err
    scores = np.load(tmp_path / "scores.npy").astype(np.float64)
    index = Index.open(index_path)
    owner = np.asarray(index.array("corpus/chunk_document"))
    generator = np.random.default_rng(3)
    pool = generator.permutation(index.n_documents)[:40]
    lines: list[dict[str, Any]] = [{"_meta": {"pool_size": 40, "alpha": 0.3}}]
    for _ in range(8):
        local = generator.permutation(40)[:12]
        mask = np.isin(owner, pool[local])
        for noise in (0.0, 1e-9):  # two models a subset
            losses = 3 - scores[:, mask].sum(axis=1) + noise
            row = {"train_subset": local.tolist(), "train_subset_global": pool[local].tolist()}
            lines.append({**row, "test_loss": losses.tolist()})
    line = f"evaluate truth --index {index_path} --queries {queries} --import"
    given = write(tmp_path / "lds.jsonl", lines)
    result = run(f"{line} {given}")
    assert result.code == 0, result.err
    (record,) = result.records
    jsonschema.validate(record, json_schema("stride.truth/1"))
    assert [record[name] for name in ("subsets", "seeds", "alpha", "queries")] == [8, 2, 0.3, 3]
    assert [record[name] for name in ("trained", "reused", "imported")] == [0, 0, 16]
    truth = Truth.from_index(Index.open(index_path))
    assert truth.losses.shape == (8, 2, 3) and truth.queries.names == ["0", "1", "2"]
    first = np.isin(owner, lines[1]["train_subset_global"])
    assert truth.masks[0].tolist() == first.tolist()
    assert truth.losses[:, 0].tolist() == [each["test_loss"] for each in lines[1::2]]
    assert verify(index_path) == []
    (lds,) = run(f"evaluate lds --index {index_path} --methods tfidf --draws 100").records
    assert lds["spearman"]["mean"] == pytest.approx(1)

    # again: the same is there already; other losses are refused, unless they are to replace it
    stamp = (index_path / "truth/manifest.json").read_bytes()
    assert run(f"{line} {given}").records[0]["imported"] == 16
    assert (index_path / "truth/manifest.json").read_bytes() == stamp
    fewer = write(tmp_path / "fewer.jsonl", lines[:9])
    refused = run(f"{line} {fewer}")
    assert refused.code == 2 and "has another truth" in refused.err and "--overwrite" in refused.err
    # an index of the pool alone has other rows
    local = run(f"{line} {fewer} --rows pool --overwrite")
    assert local.records[0]["subsets"] == 4
    masks = Truth.from_index(Index.open(index_path)).masks
    assert masks[0].tolist() == np.isin(owner, lines[1]["train_subset"]).tolist()
    other = run(f"{line} {given} --alpha 0.5")
    assert other.code == 2 and "--import reads subsets and losses from a file" in other.err
    short = run(
        f"evaluate truth --index {index_path} --queries {write(named, [{'text': 'One'}])} --import {given}"
    )
    assert short.code == 2 and "has 1 queries" in short.err and "losses of 3" in short.err


GOOD = {"train_subset": [0, 1], "train_subset_global": [4, 7], "test_loss": [1.5, 2]}
OTHER = {"train_subset": [1, 2], "train_subset_global": [7, 5], "test_loss": [1.0, 2.5]}


@pytest.mark.parametrize(
    ("rows", "message", "fix"),
    [
        ([GOOD, {**OTHER, "test_loss": [1.0]}], ":2: 'test_loss' has 1 losses, that of", "the same queries"),
        ([GOOD, {**OTHER, "test_loss": [1.0, float("nan")]}], ":2: loss 1 of 'test_loss' is nan", "diverged"),
        ([{**GOOD, "test_loss": []}], ":1: 'test_loss' is []", ""),
        ([GOOD, {**OTHER, "train_subset_global": [7, 10]}], ":2: 'train_subset_global' has row 10,", "pool"),
        ([{**GOOD, "train_subset_global": [4, -1]}], "has -1 (expected whole numbers", ""),
        ([{**GOOD, "train_subset_global": [4, 4]}], "has row 4 twice", ""),
        ([{**GOOD, "train_subset_global": [4]}], "has 2 rows, 'train_subset_global' 1", ""),
        (
            [GOOD, {**OTHER, "train_subset_global": [4, 5]}],
            ":2: row 1 of 'train_subset' is row 4 of",
            "one run",
        ),
        ([{"train_subset": [0], "test_loss": [1.0]}], "'train_subset_global' is missing", "--rows pool"),
        ([GOOD, GOOD, OTHER], ":3: its subset has 1 retrained models, another has 2", ""),
        ([GOOD, GOOD], ": every subset has all 2 documents", ""),
        ([{"_meta": {}}], ": there is no retrained model in it", ""),
    ],
)
def test_bad_files_are_told_with_file_line_and_remedy(
    tmp_path: Path, rows: list[Any], message: str, fix: str
) -> None:
    path = write(tmp_path / "lds.jsonl", rows)
    with pytest.raises(StrideError) as caught:
        read_subsets(path, 10)
    assert caught.value.message.startswith(str(path)) and message in caught.value.message
    assert caught.value.fix and fix in caught.value.fix


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """48 documents, 6 queries and a bank of twelve GPT-2s, as bergson 2.5.1 made them by bergson_bank.sh."""
    shutil.unpack_archive(Path(__file__).with_name("bergson_bank.tar.gz"), tmp_path, filter="data")
    return tmp_path


def columns(path: Path, *names: str) -> list[np.ndarray]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name]) for row in rows]) for name in names]


def test_both_tools_say_the_same_of_both_tools_scores(run, made: Path) -> None:
    """The losses, scores and correlations that bergson wrote, within the rounding of float32."""
    line, index = f"--index {made}/run.stride --queries {made}/held.jsonl", made / "run.stride"
    model = made / "bank/retrained/base"
    run(f"index build {made}/corpus.jsonl --model {model} --form bare --out {index}")
    read = run(f"evaluate truth {line} --import {made}/bank")
    assert read.code == 0, read.err
    assert [read.records[0][name] for name in ("subsets", "imported", "alpha")] == [12, 12, 0.5]
    truth = Truth.from_index(Index.open(index))
    left_out = json.loads((made / "bank/subsets.json").read_text())
    assert [np.flatnonzero(~mask).tolist() for mask in truth.masks] == [sorted(each) for each in left_out]
    (change,) = columns(made / "bank/validation.csv", "diff")
    assert (truth.base_losses - truth.losses[:, 0]).ravel() == pytest.approx(change, abs=2e-6)

    written = run(f"baseline graddot {line} --scores {made}/mine")
    assert written.code == 0 and "6 × 48 float32" in written.err, written.err
    layout = json.loads((made / "mine/info.json").read_text())
    assert layout == json.loads((made / "by_stride/info.json").read_text())
    mine, theirs = (np.fromfile(made / f"{who}/scores.bin", layout["dtype"]) for who in ("mine", "by_stride"))
    for name in layout["dtype"]["names"]:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5)
    supports = -np.stack([mine[f"score_{query}"] for query in range(6)])
    for scores, judged in ((supports, "judged"), (np.load(made / "by_bergson.npy"), "bank")):
        found = lds(scores, truth.masks, truth.losses)
        spearman, pearson = columns(made / judged / "summary.csv", "spearman_corr", "pearson_corr")
        assert found.spearman == pytest.approx(spearman) and found.pearson == pytest.approx(pearson, abs=1e-5)


def test_bad_banks_are_told_with_a_remedy(made: Path) -> None:
    bank = made / "bank"

    def told(n_documents: int = 48) -> str:
        with pytest.raises(StrideError) as caught:
            read_bank(bank, n_documents)
        assert caught.value.fix
        return caught.value.message

    assert "and the index has 40 documents" in told(40)
    (bank / "retrained/subset_3").rename(bank / "retrained/other")
    assert told().endswith("subset_3: there is no such model in the bank")
    settings = (bank / "config.yaml").read_text()
    (bank / "config.yaml").write_text(settings.replace("subset_weight: 0.0", "subset_weight: 0.5"))
    assert "were trained on with the weight 0.5 (expected 0)" in told()
    for content, found in (
        ("[[0, 0]]", "'0' has row 0 twice"),
        ("[[]]", "'0' is an empty list"),
        ("3", "int"),
    ):
        (bank / "config.yaml").write_text(settings)
        (bank / "subsets.json").write_text(content)
        assert found in told()
