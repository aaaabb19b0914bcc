"""Sets of DATE-LM and scores of other tools in `stride evaluate causes`: what comes out, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from stride_cli.errors import StrideError
from stride_cli.research.evaluation.date_lm import convert
from stride_cli.research.evaluation.score_files import read_scores, write_scores
from stride_cli.schema import json_schema


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


TEXTS = {"prompt": "The capital is", "response": "Velmora"}
PARIS, ROME = ({"counterfactual_entity": "Velmora", "true_entity": name} for name in ("Paris", "Rome"))
FACTS = [{**TEXTS, "facts": facts} for facts in (["a", "b"], ["c"], [], ["b", "b"])]
KINDS = [{**TEXTS, "type": kind} for kind in ("Benign", "Unsafe", "Benign")]


@pytest.mark.parametrize(
    ("task", "train", "ref", "expected"),
    [
        (
            "counterfact",
            [{**TEXTS, **PARIS}, {**TEXTS, **ROME}, {**TEXTS, **PARIS}],
            [{**TEXTS, **ROME}, {**TEXTS, **PARIS}, {**TEXTS, **PARIS, "true_entity": "Oslo"}],
            {"0": ["1"], "1": ["0", "2"]},
        ),
        ("ftrace", FACTS, [FACTS[3], FACTS[2], FACTS[0]], {"0": ["0", "3"], "2": ["0"]}),
        ("toxicity", KINDS, [TEXTS, KINDS[0]], {"0": ["1"], "1": ["1"]}),
    ],
)
def test_causes_of_each_task(tmp_path: Path, task: str, train: list, ref: list, expected: dict) -> None:
    write(tmp_path / "set/train.jsonl", train)
    write(tmp_path / "set/ref.json", ref)
    found = convert(tmp_path / "set", tmp_path / "out")
    assert (found.task, found.n_train, found.n_ref) == (task, len(train), len(ref))
    queries = lines(found.queries)
    assert {query["id"]: query["causes"] for query in queries} == expected
    assert found.n_queries == len(expected)
    assert [row["id"] for row in lines(found.train)] == [str(row) for row in range(len(train))]
    assert queries[0]["prompt"] == TEXTS["prompt"] and set(lines(found.train)[0]) == {"id", *TEXTS}


def test_layouts_give_the_same(tmp_path: Path) -> None:
    """Shards of Parquet as the hub has them, a folder that `datasets` saved, JSON Lines called .json."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = convert(_set(tmp_path / "plain", FACTS, FACTS[:1]), tmp_path / "1")
    hub = tmp_path / "hub/data"
    hub.mkdir(parents=True)
    for number, rows in enumerate((FACTS[:3], FACTS[3:])):
        pq.write_table(pa.Table.from_pylist(rows), hub / f"train-0000{number}-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(FACTS[:1]), hub / "ref-00000-of-00001.parquet")
    saved = {"train": FACTS, "ref": FACTS[:1]}
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in saved.items()})
    made.save_to_disk(tmp_path / "saved")
    for number, folder in enumerate(("hub", "saved"), start=2):
        other = convert(tmp_path / folder, tmp_path / str(number))
        assert other.train.read_bytes() == plain.train.read_bytes()
        assert other.queries.read_bytes() == plain.queries.read_bytes()
    (hub / "ref-00000-of-00001.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(StrideError, match=r"ref-00000-of-00001.parquet: expected a readable Parquet file"):
        convert(tmp_path / "hub", tmp_path / "4")
    with pytest.raises(StrideError) as caught:
        convert(tmp_path, tmp_path / "4")
    assert "has no split train" in caught.value.message and "name one of its subsets" in caught.value.fix


def _set(folder: Path, train: list[Any], ref: list[Any]) -> Path:
    write(folder / "train.json", train)
    write(folder / "ref.jsonl", ref)
    return folder


@pytest.mark.parametrize(
    ("train", "ref", "message"),
    [
        ([TEXTS], [TEXTS], "train.json:1: expected counterfactual_entity and true_entity"),
        ([*FACTS, {**TEXTS, "facts": "b"}], FACTS, "train.json:5: 'facts' is 'b'"),
        (FACTS, [FACTS[0], {"facts": ["a"], "prompt": "x"}], "ref.jsonl:2: 'response' is missing"),
        (FACTS, [FACTS[2]], "no row of ref has a cause in train"),
        (KINDS[1:2], [TEXTS], "ref.jsonl:1: all 1 rows of train are its causes"),
    ],
)
def test_bad_sets_are_told_with_file_row_and_remedy(
    tmp_path: Path, train: list[Any], ref: list[Any], message: str
) -> None:
    with pytest.raises(StrideError) as caught:
        convert(_set(tmp_path / "set", train, ref), tmp_path / "out")
    assert message in caught.value.message and caught.value.fix


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("PK\x03", "expected JSON, found"),
        ("{}", "found {} (expected a list of 2 lists, one a query, of 3 scores"),
        ("[[1, 2], [1, 2], [1, 2]]", "found 3 lists"),
        ("[[1, 2, 3], [1, 2]]", ": list 1: found 2 scores (expected 3"),
        ("[[1, 2, 3], [1, NaN, 3]]", ": list 1: score 1 is nan"),
        ("[1, 2]", ": found 2 scores (expected 3"),
        (f"[[1, 2, {10**400}], null]", ": list 0: score 2 is 1000"),
    ],
)
def test_bad_scores_are_told_with_file_and_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "scores.json"
    path.write_text(content)
    with pytest.raises(StrideError) as caught:
        read_scores(path, 2, 3)
    assert caught.value.message.startswith(str(path)) and message in caught.value.message
    assert caught.value.fix and ("other way round" in caught.value.fix) == (content.count("[1, 2]") == 3)


def test_scores_come_back(tmp_path: Path) -> None:
    rows = list(np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32))
    write_scores(tmp_path / "made/scores.json", [rows[0], None, rows[1]])
    first, second, third = read_scores(tmp_path / "made/scores.json", 3, 5)
    assert second is None and first.astype(np.float32).tolist() == rows[0].tolist()
    assert third.astype(np.float32).tolist() == rows[1].tolist()
    write_scores(tmp_path / "one.json", rows, one_list=True)
    one = read_scores(tmp_path / "one.json", 4, 5)
    assert len(one) == 4 and one[3] == pytest.approx(np.mean(rows, axis=0))


@pytest.fixture(scope="module")
def toxic(workspace: Path) -> Path:
    """A set of the toxicity task out of the workspace's corpus: 20 documents, of which 4 are Unsafe."""
    documents = [document["text"].split() for document in lines(workspace / "corpus.jsonl")[:20]]
    rows = [{"prompt": " ".join(words[:6]), "response": " ".join(words[6:12])} for words in documents]
    train = [{**row, "type": "Benign" if number % 5 else "Unsafe"} for number, row in enumerate(rows)]
    return _set(workspace / "toxic", train, [{**rows[number], "type": "Unsafe"} for number in (0, 5, 10)])


@pytest.mark.slow  # an index is built and fitted
def test_a_set_in_one_command_and_back(
    run, workspace: Path, toxic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexed, fitted, judged; scores written in the set's own format judge the same when read."""
    for name, value in (("SPACE", "logit"), ("RANK", "2"), ("NULLS", "40")):  # what the fit is matters little
        monkeypatch.setenv(f"STRIDE_TRAIN_{name}", value)
    line = f"evaluate causes --date-lm {toxic} --model {workspace}/model --at 4 --draws 100"
    first = run(f"{line} --methods tfidf,chance --write-scores {tmp_path}/scores")
    assert first.code == 0, first.err
    assert "DATE-LM (toxicity): 20 rows of train, 3 of ref" in first.err
    assert (workspace / "toxic.stride").is_dir() and (
        workspace / "toxic.stride.date-lm/train.jsonl"
    ).is_file()
    judged = [record for record in first.records if record["schema"] == "stride.causes/1"]
    for record in first.records:
        jsonschema.validate(record, json_schema(record["schema"]))
    assert [record["documents"] for record in judged] == [20, 20]
    # one list, the mean over the queries, as DATE-LM's own evaluation of this task reads it
    written = json.loads((tmp_path / "scores/tfidf.json").read_text())
    assert len(written) == 20 and all(isinstance(value, float) for value in written)
    # kept, with its scores; and the file as a method of its own, against the others
    shutil.copy(tmp_path / "scores/tfidf.json", tmp_path / "tfidf.pt")
    again = run(f"{line} --methods tfidf,chance --scores {tmp_path}/tfidf.pt")
    assert again.code == 0, again.err
    by_method = {r["method"]: r for r in again.records if r["schema"] == "stride.causes/1"}
    assert by_method["tfidf"]["pooled"] == judged[0]["pooled"]
    assert by_method["tfidf"]["seconds"]["fit"] is None
    read = by_method[f"scores:{tmp_path}/tfidf.pt"]
    assert read["pooled"]["average_precision"] == pytest.approx(judged[0]["pooled"]["average_precision"])
    assert read["seconds"] == {"fit": None, "query": None}
    for record in again.records:
        jsonschema.validate(record, json_schema(record["schema"]))
    wrong = run(f"{line} --queries x.jsonl")
    assert wrong.code == 2 and "--date-lm is corpus and queries" in wrong.err
    assert run(f"evaluate causes --index {workspace}/run.stride").code == 2


def test_scores_of_a_file_of_queries(run, workspace: Path, tmp_path: Path) -> None:
    """A list a query of the file, kept as they are judged; queries of the same causes, added up, are judged
    as one; a query that does not count may be null."""
    from sklearn.metrics import average_precision_score

    documents = lines(workspace / "corpus.jsonl")
    sets = [[documents[number]["id"] for number in each] for each in ((3, 5, 9), (7, 8))]
    rows: list[dict] = []
    for number, named in ((3, 0), (7, 1), (5, 0), (8, 1)):
        words = documents[number]["text"].split()
        texts = {"prompt": " ".join(words[:6]), "response": " ".join(words[6:9])}
        rows.append({"id": f"q{number}", **texts, "causes": sets[named]})
    queries = write(tmp_path / "queries.jsonl", rows)
    line = f"evaluate causes --index {workspace}/run.stride --queries {queries} --at 1 --draws 100"
    first = run(f"{line} --methods chance --write-scores {tmp_path}")
    assert first.code == 0, first.err
    written = json.loads((tmp_path / "chance.json").read_text())
    assert [len(row) for row in written] == [60] * 4
    pooled = first.records[-1]["pooled"]
    expected = [
        average_precision_score(
            [document["id"] in causes for document in documents], np.sum(written[place::2], axis=0)
        )
        for place, causes in enumerate(sets)
    ]
    assert pooled["average_precision"] == pytest.approx(np.mean(expected)) and pooled["groups"] == 2
    alone = run(f"{line} --methods chance --queries {write(tmp_path / 'odd.jsonl', rows[:3])}")
    assert "pooled" not in alone.records[-1]  # one of them shares its causes with none
    again = run(f"{line} --methods chance --scores {tmp_path}/chance.json")
    ranks = [record for record in again.records if record["schema"] == "stride.cause_ranks/1"]
    assert [record["causes"] for record in ranks[:4]] == [record["causes"] for record in ranks[4:]]
    read, kept = again.records[-2:]
    assert read["method"] == f"scores:{tmp_path}/chance.json" and kept["seconds"]["fit"] is None
    assert read["pooled"] == kept["pooled"] == pooled
    assert read["seconds"] == {"fit": None, "query": None} and ranks[0]["seconds"] is None
    for record in again.records:
        jsonschema.validate(record, json_schema(record["schema"]))
    (tmp_path / "gap.json").write_text(json.dumps([written[0], None, *written[2:]]))
    gap = run(f"{line} --methods chance --scores {tmp_path}/gap.json")
    assert gap.code == 2 and "list 1, the scores of query 'q7', is null" in gap.err
