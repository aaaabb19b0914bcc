"""`stride evaluate …` and `stride baseline` on a real tiny task: 40 chunks, models retrained on subsets."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from stride_cli.schema import json_schema
from tests.prepared import Prepared
from tests.stride_cli.commands.conftest import Outcome, one_is_killed

DEMO = Path(__file__).parents[4] / "stride_cli" / "demo" / "corpus.jsonl"
N, QUERIES, SUBSETS = 40, 4, 6
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small trained model, run.stride with truth of two α, queries.jsonl; bare.stride
    without a truth."""
    folder = tmp_path_factory.mktemp("measured")
    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:N]]
    rows = {
        "corpus": [{"id": d["id"], "text": d["text"][:160]} for d in documents],
        "queries": [{"id": f"q{n}", "text": d["text"][40:160]} for n, d in enumerate(documents[:QUERIES])],
        "others": [{"id": "stranger", "text": "Nobody has measured this sentence."}],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sizes = "--layers 2 --width 32 --heads 2 --vocab 512 --context 128 --epochs 2 --batch-tokens 512"
    truth = f"evaluate truth --index {folder}/run.stride --queries {folder}/queries.jsonl --workers 1"
    for line in (
        f"model train {folder}/corpus.jsonl --out {folder}/model {sizes} --device cpu",
        f"index build {folder}/corpus.jsonl --model {folder}/model --out {folder}/run.stride",
        f"{truth} --alpha 0.5 --subsets {SUBSETS} --seeds 2",
        f"{truth} --alpha 0.3 --subsets 3 --seeds 2",
    ):
        result = run(line)
        assert result.code == 0, result.err
    shutil.copytree(folder / "run.stride", folder / "bare.stride", ignore=shutil.ignore_patterns("truth"))
    return folder


def check(record: dict[str, Any]) -> None:
    """A record has exactly the keys that `stride schema` promises."""
    jsonschema.validate(record, json_schema(record["schema"]))


def test_lds_is_the_correlation_of_sums_with_losses(run, measured: Path, tmp_path: Path) -> None:
    """Against scipy, from the score matrix that `stride baseline` writes."""
    from scipy.stats import spearmanr

    from index_format.reader import Index
    from stride_cli.research.training.truth import Truth

    index = f"--index {measured}/run.stride"
    result = run(f"baseline bm25 {index} --top 2 --scores {tmp_path}/scores.npy")
    assert result.code == 0, result.err
    scores = np.load(tmp_path / "scores.npy")
    assert scores.shape == (QUERIES, N) and scores.dtype == np.float32
    truth = Truth.from_index(Index.open(measured / "run.stride"))
    truth = truth.take(np.flatnonzero(truth.alpha == 0.5))
    expected = [
        spearmanr(
            truth.masks @ scores[query].astype(float), -truth.losses[:, :, query].mean(axis=1)
        ).statistic
        for query in range(QUERIES)
    ]
    record = run(f"evaluate lds {index} --method bm25 --alpha 0.5 --draws 100").records[0]
    assert record["spearman"]["mean"] == pytest.approx(np.mean(expected))


def prepared_run(prepared: Prepared, line: str) -> Outcome:
    """`stride LINE` in a process that need not import what its methods' processes do."""
    done = prepared.run(["stride", *shlex.split(line)])
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_compare_goes_on_after_a_failure(prepared: Prepared, measured: Path, tmp_path: Path) -> None:
    """Each method in a process of its own; one lacks what it needs."""
    page = tmp_path / "page.html"
    result = prepared_run(
        prepared,
        f"evaluate compare --index {measured}/run.stride --methods tfidf,airrep:model={tmp_path}/no,graddot "
        f"--draws 100 --alpha 0.5 --html {page}",
    )
    assert result.code == 0, result.err
    first, failed, third = result.records
    for record in result.records:
        check(record)
        assert record["reference"] == "tfidf"
    assert "error" not in first and first["difference"]["mean"] is None
    assert failed["error"] and failed["spearman"]["mean"] is None and "failed:" in result.err
    assert third["difference"]["mean"] == pytest.approx(third["spearman"]["mean"] - first["spearman"]["mean"])
    assert third["difference"]["low"] <= third["difference"]["mean"] <= third["difference"]["high"]
    for record in (first, third):
        assert record["peak_memory"] > 0 and record["seconds"]["fit"] >= 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2 and "graddot" in text and "http:" not in text and "https:" not in text


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs each time: seconds and memory."""
    return [
        {key: value for key, value in each.items() if key not in ("seconds", "peak_memory")}
        for each in records
    ]


def test_methods_that_run_at_the_same_time_are_compared_as_one_after_the_other(
    run, prepared: Prepared, measured: Path, tmp_path: Path
) -> None:
    """Also where the process that runs them is killed, and where one fails."""
    methods = f"graddot,tfidf,airrep:model={tmp_path}/no,chance"
    line = f"evaluate compare --index {measured}/run.stride --draws 100 --alpha 0.5 --methods {methods}"
    alone = prepared_run(prepared, line)
    with one_is_killed(lambda: [each.pid or 0 for each in multiprocessing.active_children()]):
        two = run(f"{line} --workers 2")
    assert alone.code == two.code == 0, two.err
    assert "a worker was killed" in two.err
    close(numbers(two.records), numbers(alone.records))
    assert all(each["peak_memory"] > 0 for each in two.records if "error" not in each)


def close(found: Any, expected: Any) -> None:
    """Numbers to 1e-6, all else exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each, value in zip(found, expected, strict=True):
            close(each, value)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert found == expected


def test_removal_and_its_resumption(run, measured: Path) -> None:
    copy = measured / "removal.stride"
    shutil.copytree(measured / "run.stride", copy)
    line = f"evaluate removal --index {copy} --method tfidf --top 12.5% --limit 2 --seeds 1 --draws 1"
    result = run(line)
    assert result.code == 0, result.err
    (record,) = result.records
    check(record)
    assert (record["queries"], record["k"]) == (2, 5) and "2 of 4 queries" in result.err
    advantage = record["attributed"]["mean"] - record["random"]["mean"]
    assert record["advantage"]["mean"] == pytest.approx(advantage)
    store = Path(str(copy) + ".retraining")
    kept = {path: path.stat().st_mtime_ns for path in store.glob("*.outcome")}
    assert len(kept) == 1 + 2 + 1
    assert run(line).records == result.records
    assert {path: path.stat().st_mtime_ns for path in store.glob("*.outcome")} == kept


@pytest.mark.parametrize(
    ("line", "message", "fix"),
    [
        ("lds --index {w}/bare.stride", "truth", "stride evaluate truth --index {w}/bare.stride"),
        ("lds --index {w}/run.stride --alpha 0.7", "none of 0.7", "stride evaluate truth"),
        ("lds --index {w}/run.stride --methods tfidf,nosuch", "no attribution method 'nosuch'", "tfidf"),
        ("lds --index {w}/run.stride --response margin", "losses only", "--response loss"),
        (
            "lds --index {w}/run.stride --queries {w}/others.jsonl",
            "query 'stranger'",
            "stride evaluate truth",
        ),
        ("compare --index {w}/run.stride --html {w}/no/page.html", "there is no directory", "--html"),
        ("distribution --index {w}/bare.stride", "no queries are given", "--queries"),
        ("tail-patch --index {w}/run.stride --top 41", "k is 41, and there are 40 chunks", "1 to 40"),
        ("removal --index {w}/run.stride --method chance --top 40", "leaves nothing", "1 to 39"),
    ],
)
def test_bad_input_is_named_with_a_remedy(run, measured: Path, line: str, message: str, fix: str) -> None:
    result = run("evaluate " + line.format(w=measured))
    assert result.code in (2, 3), result.err
    assert message in result.err and "fix: " in result.err
    assert fix.format(w=measured) in result.err.partition("fix: ")[2]
    assert result.out == ""


def test_classifiers(run, tmp_path: Path) -> None:
    """By loss and by margin, on rows that were held out and on a file of queries; text methods say no."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(130, 6)).astype(np.float32)
    labels = (inputs[:, 0] + 0.5 * generator.normal(size=130) > 0).astype(np.int64)
    np.savez(tmp_path / "data.npz", x=inputs, y=labels)
    np.savez(tmp_path / "queries.npz", x=generator.normal(size=(5, 6)).astype(np.float32), y=labels[:5])
    model = (
        f"model train {tmp_path}/data.npz --network mlp --rows 120 --holdout 6 --epochs 3 --out {tmp_path}/m"
    )
    assert run(f"{model} --device cpu").code == 0
    for name, queries, count in (("rows", "held-out", 6), ("file", f"{tmp_path}/queries.npz", 5)):
        index = tmp_path / f"{name}.stride"
        assert run(f"index build {tmp_path}/data.npz --model {tmp_path}/m --out {index}").code == 0
        given = f"--index {index} --queries {queries}"
        assert run(f"evaluate truth {given} --subsets 30 --seeds 2 --alpha 0.5 --workers 1").code == 0
        for response in ("loss", "margin"):
            result = run(f"evaluate lds {given} --methods graddot,tfidf --response {response} --draws 100")
            assert result.code == 0, result.err
            good, failed = result.records
            check(good)
            assert good["response"] == response and good["queries"] == count
            assert good["spearman"]["mean"] > 0.2
            assert "tfidf" in failed["error"]
    result = run(f"evaluate removal {given} --method graddot --top 20 --limit 2 --seeds 1 --draws 1")
    assert result.code == 0 and result.records[0]["probability_attributed"]["mean"] is not None
    assert run(f"evaluate compare {given} --methods graddot --draws 100").records[0]["spearman"]["mean"] > 0.2
    refused = run(f"baseline graddot {given} --chat")  # rows have no prompts
    assert refused.code == 2 and "leave --chat out" in refused.err
