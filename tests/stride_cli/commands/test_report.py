"""`stride report` and `stride query --verbose` on a small real run."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.prepared import Prepared

PROMPT = '"The French Revolution began in"'
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_read")]


def text_of(page: Path) -> str:
    text = re.sub(r"<(style|script)>.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", text))


@pytest.mark.usefixtures("as_by_default")
def test_prompts_become_a_page(run, workspace: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = run(
        f'report {PROMPT} "The Thirty" --index {workspace}/run.stride --out {out} --top 3 --bottom 2'
    )
    assert result.code == 0, result.err
    (record,) = result.records
    assert record["schema"] == "stride.report/1" and record["queries"] == 2
    assert record["path"] == str(out) and record["bytes"] == out.stat().st_size
    text, page = text_of(out), out.read_text(encoding="utf-8")
    for part in ("run.stride", "The French Revolution began in", "The Thirty", "history/french-revolution"):
        assert part in text
    assert page.count("<svg") == 2 and page.count('class="token"') > 2
    assert 6 <= page.count('class="hit"') <= 10  # fewer than two may oppose a prompt
    marked = [
        unescape(re.sub("<[^>]*>", "", found)) for found in re.findall("<mark>(.*?)</mark>", page, re.S)
    ]
    assert marked[0] == "Highlighted" and "1789" in marked[1]
    lines = (workspace / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    corpus = [json.loads(line)["text"] for line in lines]
    assert all(any(passage in document for document in corpus) for passage in marked[1:])


def test_tokens_add_up_to_what_is_read_of_a_chunk(workspace: Path) -> None:
    """To first order the steered difference is the product of the chunk's gate gradient with the query's."""
    import numpy as np

    from stride_cli.api import QueryOptions, Session
    from stride_cli.attribution.passages import direction_of, token_influence
    from stride_cli.operators.gradients import chunk_gradients, gate_gradients

    session = Session.open(workspace / "run.stride")
    answer = session.query("The French Revolution began in", QueryOptions(top=60))
    assert answer.measured is not None and np.corrcoef(answer.responses, answer.measured)[0, 1] > 0.9
    steered, reader = session.steered[0], session.workspace.chunks
    batch = reader.batch(np.arange(session.index.n_chunks))
    found = token_influence(steered, direction_of(steered, answer.query, answer.responses), batch)
    sums = np.array([values.sum() for values in found])
    asked, whole = gate_gradients(steered, answer.query.batch())[0], replace(steered, normalized=0.0)
    read = chunk_gradients(whole, batch)[0]  # of memorised tokens as on average over training
    products = sum((part @ query[0]).numpy() for part, query in zip(read, asked, strict=True))
    assert np.corrcoef(products * batch.scored.numpy(), sums)[0, 1] > 0.99
    hit = answer.supporters[0]
    assert sums[hit.chunk] > 0 and int(sums.argmax()) == hit.chunk
    # the passage is the sentence with the largest part, wherever it stands
    assert "1789" in answer.passages[hit.chunk]


def test_the_example_script(run, workspace: Path, tmp_path: Path, prepared: Prepared) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    root = Path(__file__).parents[3]
    (tmp_path / "prompts.txt").write_text("The French Revolution began in\n")
    asked = run(f"query {PROMPT} --index {workspace}/run.stride --top 2")
    (tmp_path / "answers.jsonl").write_text(asked.out)
    script = ["bash", str(root / "examples/report.sh"), f"{workspace}/run.stride"]
    done = prepared.script([*script, "prompts.txt", "answers.jsonl"], tmp_path)
    records = map(json.loads, done.stdout.splitlines())
    made = [(record["path"], record["queries"]) for record in records]
    assert made == [("report.html", 1), ("clear.html", 1)]
    assert "Clear cases" in text_of(tmp_path / "clear.html")
