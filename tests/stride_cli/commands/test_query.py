"""`stride query` and `stride train` on a small real run: results, streams, settings and bad input."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stride_cli.api import QueryOptions, Session
from stride_cli.commands.rendering import render_answer
from stride_cli.models.language import checkpoint, tokenizer
from stride_cli.recovery.problem import dense

PROMPT = '"The French Revolution began in"'
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_read")]


@pytest.mark.usefixtures("as_by_default")
def test_the_document_that_states_the_fact_is_on_top(run, workspace: Path) -> None:
    result = run(f"query {PROMPT} --index {workspace}/run.stride --top 5 --json")
    assert result.code == 0, result.err
    (answer,) = result.records
    assert "1789" in answer["response"]
    top = answer["hits"][0]
    assert top["document"] == "history/french-revolution" and top["sign"] == "supports" and top["seen"]
    assert "1789" in top["passage"]
    assert len(answer["hits"]) == 5
    assert [hit["rank"] for hit in answer["hits"]] == sorted(hit["rank"] for hit in answer["hits"])
    assert (
        answer["recovery"]["nonzeros"] <= answer["measurement"]["subsets"]
        and answer["recovery"]["influences"]
    )
    assert answer["recovery"]["relative_gap"] <= 1e-6
    assert answer["measurement"]["coverage"] == 1.0


def test_prompts_from_stdin_and_files_stream(run, workspace: Path, tmp_path: Path) -> None:
    prompts = "The French Revolution began in\n\n" + json.dumps(
        {"id": "b", "prompt": "The", "response": "war"}
    )
    piped = run(f"query - --index {workspace}/run.stride --top 1", stdin=prompts)
    assert piped.code == 0, piped.err
    file = tmp_path / "prompts.jsonl"
    file.write_text(prompts, encoding="utf-8")
    filed = run(f"query --file {file} --index {workspace}/run.stride --top 1")
    for result in (piped, filed):
        first, second = result.records
        assert first["prompt"] == "The French Revolution began in" and "id" not in first
        assert (second["id"], second["prompt"], second["response"]) == ("b", "The", " war")
        assert second["generated"] is False


def test_answers_are_written_as_tables(run, workspace: Path, tmp_path: Path) -> None:
    """In the order asked, each row as the record has it; a bad prompt is told and leaves the others."""
    prompts = tmp_path / "prompts.jsonl"
    lines = ('{"prompt": "The French Revolution began in", "id": "a"}', "{}", '{"prompt": "The war"}')
    prompts.write_text("".join(line + "\n" for line in lines))
    asked = f"query --file {prompts} --index {workspace}/run.stride --top 2 --bottom 1 --on-bad"
    records = run(f"{asked} record").records
    result = run(f"{asked} skip --format csv")
    assert result.code == 2 and "skipped" in result.err
    rows = list(csv.DictReader(io.StringIO(result.out)))
    answers = [each for each in records if each["schema"] == "stride.answer/1"]
    hits = [hit for answer in answers for hit in answer["hits"] + answer["opposers"]]
    assert [row["document"] for row in rows] == [hit["document"] for hit in hits]
    assert [float(row["influence"]) for row in rows] == [hit["influence"] for hit in hits]
    assert [(row["answer"], row["id"]) for row in rows[::3]] == [("1", "a"), ("2", "")]
    stored = json.loads(run(f"{asked} record --format json").out)
    assert [each["schema"] for each in stored] == [each["schema"] for each in records]
    result = run(f"{asked} record --format csv")
    assert result.code == 2 and "--on-bad record writes JSON" in result.err


@pytest.mark.usefixtures("as_by_default")
def test_candidates_are_read_from_their_own_gradients(run, workspace: Path) -> None:
    """--read: all chunks read are the direct readout, whose order the recovery comes near."""
    line = f"query {PROMPT} --index {workspace}/run.stride --top 5 --json"
    plain = run(f"STRIDE_QUERY_ESTIMATE=subsets {line} --read 0").records[0]
    some = run(f"{line} --read 40").records[0]
    assert plain["read"] == 0 and some["read"] == 40
    assert some["hits"][0]["document"] == plain["hits"][0]["document"]
    assert some["hits"][0]["influence"] != plain["hits"][0]["influence"]
    assert plain["recall"] is None and {hit["read"] for hit in plain["hits"]} == {None}
    assert some["hits"][0]["read"] is True and some["hits"][0]["neighbours"] == 0
    session = Session.open(workspace / "run.stride")
    everything = session.query("The French Revolution began in", QueryOptions(read=10**6))
    assert everything.read == session.index.n_chunks == len(everything.solution.indices)
    assert everything.recall is not None and everything.recall.at_least == 10
    strongest = np.argsort(-everything.solution.values)[:10]
    read = session.query("The French Revolution began in", QueryOptions(read=40)).solution
    found = np.isin(everything.solution.indices[strongest], read.exact).sum()
    assert found >= some["recall"]["at_least"]
    # by default as many as this model allows in a few seconds: here all
    assert run(line).records[0]["read"] == min(200, session.index.n_chunks)
    assert everything.solution.values.max() == pytest.approx(some["hits"][0]["influence"], rel=1e-3)
    assert everything.solution.moved == 0  # nothing is left for the subsets to say
    alone = session.query("The French Revolution began in", QueryOptions(read=0, estimate="subsets"))
    direct, alone = dense([everything.solution, alone.solution])
    assert np.corrcoef(direct, alone)[0, 1] > 0.7


def test_prompts_of_a_file_are_answered_together_as_alone(run, workspace: Path, tmp_path: Path) -> None:
    """In one pass over what is read for them; up to the first that cannot be."""
    prompts = ["The French Revolution began in", "The Berlin Wall fell in", "The capital of Kenya is"]
    lines = "".join(f"{prompt}\n" for prompt in prompts)
    (tmp_path / "prompts.txt").write_text(lines + '{"prompt": 3}\n')
    shown = f"--index {workspace}/run.stride --top 3 --read 15 --json"
    together = run(f"query --file {tmp_path}/prompts.txt {shown}")
    assert together.code == 2 and "prompts.txt:4" in together.err
    alone = run(f"query - {shown}", stdin=lines)
    assert len(together.records) == len(alone.records) == 3
    for one, other in zip(together.records, alone.records, strict=True):
        assert one["prompt"] == other["prompt"] and one["verdict"] == other["verdict"]
        assert one["read"] == 15 and one["recall"] == other["recall"]
        for a, b in zip(one["hits"], other["hits"], strict=True):
            assert a["document"] == b["document"]
            assert a["influence"] == pytest.approx(b["influence"], rel=1e-3, abs=1e-6)


def changed(workspace: Path, out: Path, name: str, number: float) -> Path:
    """The model with one number of the first of its weights that is called so."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(workspace / "model", out)
    weights = load_file(out / "model.safetensors")
    next(weights[each] for each in sorted(weights) if name in each).view(-1)[0] = number
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_another_model_is_refused_with_both_fingerprints(run, workspace: Path, tmp_path: Path) -> None:
    other = changed(workspace, tmp_path / "other", "", 7.0)
    result = run(f"query {PROMPT} --index {workspace}/run.stride --model {other}")
    assert result.code == 3
    info = run(f"index info {workspace}/run.stride --json").records[0]
    assert info["fingerprints"]["model"] in result.err and "this model is" in result.err


def test_documents_that_nobody_trained_on_are_marked(run, workspace, grown, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRIDE_QUERY_READ", "61")
    said = " 1789, they say."  # as the new document does
    asked = f"{PROMPT} --response '{said}' --index {grown} --top 61"
    answer = run(f"query {asked}").records[0]
    assert 0.9 < answer["measurement"]["coverage"] < 1 and answer["untrained"] == 1
    # the others' influences are what they were
    before = run(f"query {asked.replace(str(grown), f'{workspace}/run.stride')}").records[0]
    new, old = ({hit["document"]: hit["influence"] for hit in each["hits"]} for each in (answer, before))
    assert old == pytest.approx({name: new[name] for name in old}, rel=1e-4)
    marks = {hit["document"]: (hit["seen"], hit.get("trained")) for hit in answer["hits"]}
    assert marks.pop("new") == (False, False) and set(marks.values()) == {(True, None)}
    # on a terminal, in a notebook and on the report's page
    found = Session.open(grown).query(json.loads(PROMPT), QueryOptions(top=61), response=said)
    render_answer(found, console=Console(file=(shown := io.StringIO()), width=200))
    assert run(f"report {asked} --out {tmp_path}/r.html").code == 0
    told = "the model was never trained on it"
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    for text, apart in ((shown.getvalue(), "\n"), (found._repr_html_(), "<tr>"), (page, '<div class="hit">')):
        (marked,) = (part for part in text.split(apart) if told in part)
        assert re.search(r"\bnew\b", marked)
    assert all("never trained on 1 document of this index" in text for text in (shown.getvalue(), page))


@pytest.mark.usefixtures("as_by_default")
def test_the_published_recipe_runs_and_sets_the_defaults(run, workspace: Path, tmp_path: Path) -> None:
    copy = tmp_path / "paper.stride"
    shutil.copytree(workspace / "run.stride", copy)
    result = run(f"train --index {copy} --recipe paper --steps 15 --overwrite")
    assert result.code == 0, result.err
    trained = result.records[0]
    assert (trained["fit"], trained["space"], trained["gate_size"]) == ("sgd", "residual", 32)
    assert 0 < trained["coverage"] <= 1
    answer = run(f"query {PROMPT} --index {copy}").records[0]
    assert answer["recovery"]["lambda_ratio"] == pytest.approx(0.8)
    assert answer["measurement"]["method"] == "exact"
    assert run(f"index verify {copy}").code == 0


def test_an_index_of_prompts_and_responses_is_asked_as_it_is_written(
    workspace: Path, tmp_path: Path, run
) -> None:
    """In the model's chat template, its null prompts too; --no-chat puts prompts as they stand."""
    corpus = tmp_path / "answers.jsonl"
    lines = (json.loads(line) for line in (workspace / "corpus.jsonl").read_text("utf-8").splitlines()[:24])
    records = [{"id": each["id"], "prompt": each["id"], "response": each["text"][:160]} for each in lines]
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    index = tmp_path / "answers.stride"
    for line in (
        f"index build {corpus} --model {workspace / 'model'} --out {index}",
        f"train --index {index} --space logit --project 0 --nulls 40",
    ):
        assert run(line).code == 0
    ask = f'query "{records[0]["id"]}" --response The --index {index} --read 0 --json'
    (asked,), (plain,) = run(ask).records, run(f"{ask} --no-chat").records
    assert asked["template"] == "chat" and asked["response"] == "The"
    assert plain["template"] == "none" and plain["response"] == " The" and plain["loss"] != asked["loss"]
    assert asked["verdict"] in ("clear", "weak", "guessing")
    (summary,) = run(f"index info {index} --json").records
    assert summary["conversations"] == 24


@pytest.mark.usefixtures("as_by_default")
@pytest.mark.parametrize("more", ["", '--response " in 1789" --span 1789'])
def test_answers_without_transformers_are_those_with_it(
    run, workspace: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    line = f"query {PROMPT} --index {workspace}/run.stride --json {more}"

    def answer() -> dict:
        result = run(line)
        assert result.code == 0, result.err
        (record,) = result.records
        return {key: value for key, value in record.items() if key != "seconds"}

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_own", lambda source, dtype: None)
        patch.setattr(tokenizer, "own_tokenizer", lambda source, others: None)
        wanted = answer()
    monkeypatch.setitem(sys.modules, "transformers", None)  # what a missing package looks like to an import
    assert answer() == wanted
