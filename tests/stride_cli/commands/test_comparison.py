"""Why this and not that; many prompts as one: influences are linear in the loss that is asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stride_cli import api
from stride_cli.attribution.options import QueryOptions
from stride_cli.data.queries import Query
from stride_cli.errors import UsageError
from stride_cli.recovery.problem import dense

pytestmark = pytest.mark.slow
PROMPT = "The French Revolution began in"
READ_ALL = QueryOptions(read=10**9, shrink=False, top=60, passages="none", decisive=False)


@pytest.fixture(scope="module")
def session(workspace: Path) -> api.Session:
    return api.Session.open(workspace / "run.stride")


def influences(answer: api.Answer) -> np.ndarray:
    return dense([answer.solution])[0]


def scored_at(query: Query, ids: np.ndarray, place: int) -> Query:
    weights = np.zeros(len(ids), np.float32)
    weights[place] = 1.0
    return replace(query, ids=ids, weights=weights, parts=(), comparison=None)


def test_a_comparison_is_the_difference_of_two_tokens(session: api.Session) -> None:
    answer = session.query(PROMPT, READ_ALL, response="1789, when the", instead="1917, when the")
    own, other = answer.query.parts
    place = int(np.flatnonzero(own.weights)[0])
    assert own.ids[:place].tolist() == other.ids[:place].tolist() and own.ids[place] != other.ids[place]
    alone = [session.query(scored_at(answer.query, part.ids, place), READ_ALL) for part in (own, other)]
    np.testing.assert_allclose(
        influences(answer), influences(alone[0]) - influences(alone[1]), rtol=1e-3, atol=1e-6
    )
    # packed gates are asked with gradients of three bits, which are rounded apart
    wanted = alone[0].responses - alone[1].responses
    np.testing.assert_allclose(answer.responses, wanted, atol=0.05 * np.abs(wanted).max())
    assert (answer.loss, answer.other_loss) == pytest.approx((alone[0].loss, alone[1].loss), rel=1e-5)
    turned = session.query(PROMPT, READ_ALL, response="1917, when the", instead="1789, when the")
    np.testing.assert_allclose(influences(turned), -influences(answer), rtol=1e-3, atol=1e-6)


PROMPTS = [
    {"prompt": PROMPT},
    {"prompt": "The Berlin Wall fell in", "response": "1989"},
    {"prompt": "The Roman Empire", "response": "fell", "instead": "rose"},
]


def test_prompts_as_one_have_the_mean_influence(session: api.Session) -> None:
    together = session.query_pooled(PROMPTS, READ_ALL, add="all")
    alone = list(session.query_all(PROMPTS, READ_ALL))
    wanted = np.mean([influences(each) for each in alone], axis=0)
    np.testing.assert_allclose(influences(together), wanted, rtol=1e-3, atol=1e-6)
    assert together.loss == pytest.approx(np.mean([each.loss for each in alone]), rel=1e-5)
    assert together.verdict is None and together.scale is None
    again = session.query_pooled(PROMPTS[:1], READ_ALL, add="all")
    np.testing.assert_allclose(influences(again), influences(alone[0]), rtol=1e-4, atol=1e-7)
    weighed = session.query_pooled(PROMPTS[:2], replace(READ_ALL, decisive=True), add="all")
    assert weighed.loss == pytest.approx(np.mean([each.loss for each in alone[:2]]), rel=1e-5)
    bad = list(session.outcomes([PROMPTS[0], {"promt": "A"}, {"prompt": 5}, {"messages": 5}], READ_ALL))
    assert [isinstance(each, api.QueryError) for each in bad] == [False, True, True, True]


@pytest.mark.parametrize("read", [10**9, 0])
def test_what_supports_prompts_is_added_up(session: api.Session, read: int) -> None:
    """The mean of documents' influences above zero on each; no verdict, recall, unit, backfilled document."""
    options = replace(READ_ALL, read=read)
    together = session.query_pooled(PROMPTS, options, add="support")
    alone = list(session.query_all(PROMPTS, options))
    owners = session.chunk_document
    sums = [np.bincount(owners, influences(each)) for each in alone]
    by_document = np.mean(np.maximum(sums, 0), axis=0)
    np.testing.assert_allclose(np.bincount(owners, influences(together)), by_document, rtol=1e-3, atol=1e-6)
    order = np.argsort(-by_document, kind="stable")[: len(together.supporters)]
    assert [hit.document for hit in together.supporters[:10]] == order[:10].tolist()
    assert together.loss == pytest.approx(np.mean([each.loss for each in alone]), rel=1e-5)
    assert together.solution.relative_gap == max(each.solution.relative_gap for each in alone)
    assert not any(hit.backfilled for hit in together.supporters) and together.opposers == []
    assert together.verdict is None and together.scale is None and together.recall is None
    record = together.to_record()
    assert (record["pooled"], record["added"], record["unit"]) == (3, "support", "relative")
    with pytest.raises(UsageError, match="opposers are not asked for"):
        session.query_pooled(PROMPTS, replace(options, bottom=3), add="support")
    for some, added in ((PROMPTS, "all"), (PROMPTS[2:], "support"), ([*PROMPTS[2:]] * 2, "support")):
        assert session.query_pooled(some, replace(options, top=1)).added == added


def test_on_the_command_line(run, workspace: Path, tmp_path: Path) -> None:
    at = f"--index {workspace}/run.stride --json --read 15"
    result = run(f'query "{PROMPT}" --response "1789" --instead "1917" {at}')
    assert result.code == 0, result.err
    (answer,) = result.records
    comparison = answer["comparison"]
    assert answer["instead"] == " 1917" and comparison["token"] != comparison["other_token"]
    assert 0 <= comparison["other_probability"] < comparison["probability"] <= 1
    assert answer["verdict"] is None and answer["scored_tokens"] == 1 and answer["unit"] == "relative"

    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT}, {"prompt": 7}, {"prompt": "The Berlin Wall fell in", "response": "1989"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(f"query --file {file} --pool --on-bad record {at}")
    assert result.code == 2, result.err
    bad, answer = result.records
    assert bad["schema"] == "stride.bad_input/1" and bad["line"] == 2
    assert answer["added"] == "all" and "added" not in bad
    assert answer["pooled"] == 2 and answer["prompt"].splitlines() == [PROMPT, "The Berlin Wall fell in"]
    assert "comparison" not in answer and "instead" not in answer and answer["verdict"] is None
    result = run(f"query --file {file} --pool {at}")
    assert result.code == 2 and f"{file}:2:" in result.err and not result.out
