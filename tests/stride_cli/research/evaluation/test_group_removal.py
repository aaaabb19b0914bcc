"""Removal for groups of queries: rules by hand, and a trainer whose losses are known in closed form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stride_cli.data.query_set import QuerySet
from stride_cli.errors import CorpusError, QueryError
from stride_cli.research.evaluation.cause_queries import CauseQuery
from stride_cli.research.evaluation.group_removal import GroupBench, Named, group_records
from stride_cli.research.evaluation.options import RemovalOptions
from stride_cli.research.evaluation.query_groups import GroupRule, QueryGroup, find_groups
from stride_cli.research.evaluation.ranking import random_chunks
from tests.stride_cli.research.evaluation.test_removal import AdditiveTrainer

DOCUMENTS, QUERIES = 20, 4
OWNER = np.repeat(np.arange(DOCUMENTS), 2)  # of 40 chunks
GROUPS = [
    QueryGroup("one", np.array([0, 2]), np.array([1, 4])),
    QueryGroup("two", np.array([1, 3]), np.array([5, 6, 7])),
]


def asked(name: str, causes: list[int], group: str | None = None) -> CauseQuery:
    return CauseQuery(name, "p", "r", np.array(causes, np.int64), f"file:{name}", group=group)


def bench(*names: str) -> GroupBench:
    """Of an index that has documents of two chunks each, and queries of no content."""
    index = SimpleNamespace(array=lambda name: OWNER, n_documents=DOCUMENTS)
    workspace: Any = SimpleNamespace(index=index, seed=3)
    ids = [np.array([0, number]) for number in range(QUERIES)]
    same = QuerySet(ids, [np.array([0.0, 1.0])] * QUERIES, [str(n) for n in range(QUERIES)])
    return GroupBench(workspace, GROUPS, dict.fromkeys(names, same))


@given(arrays(np.float64, (2, QUERIES, 6), elements=st.floats(-9, 9)))
def test_scores_of_groups(values: np.ndarray) -> None:
    found = {"token": values[0], "instead": values[1], "response": values[0]}
    odds = values[0] - values[1]
    for rule, expected in (
        (GroupRule("m"), values[0]),
        (GroupRule("m", "odds"), odds),
        (GroupRule("m", "odds", "support"), np.where(odds > 0, odds, 0)),
    ):
        scores = rule.scores(found, GROUPS)
        assert scores == pytest.approx(np.stack([expected[[0, 2]].sum(0), expected[[1, 3]].sum(0)]))
    assert (GroupRule("m", add="support").scores(found, GROUPS) >= 0).all()


def test_groups_are_named_or_share_causes() -> None:
    by_cause = find_groups([asked("a", [1]), asked("b", [2]), asked("c", [1])])
    assert [(each.name, each.rows.tolist(), each.causes.tolist()) for each in by_cause] == [
        ("a", [0, 2], [1]),
        ("b", [1], [2]),
    ]
    named = find_groups([asked("a", [1], "x"), asked("b", [1], "y")])
    assert [each.name for each in named] == ["x", "y"]
    with pytest.raises(QueryError, match="other causes than 'a'"):
        find_groups([asked("a", [1], "x"), asked("b", [2], "x")])
    with pytest.raises(CorpusError, match="'b' has no 'group'"):
        find_groups([asked("a", [1], "x"), asked("b", [1])])


def test_what_is_measured_is_what_was_removed(tmp_path: Path) -> None:
    """Losses that are sums over the chunks: falls and rises are the sums of what was taken away."""
    influence = np.random.default_rng(0).normal(size=(3 * QUERIES, len(OWNER))) * 0.1
    trainer = AdditiveTrainer(influence)
    trainer.n_chunks = len(OWNER)
    groups = bench("response", "token", "instead")
    sizes = groups.sizes("causes")
    own = Named("mine", [np.array([4, 9, 0]), np.array([2, 6, 7])], np.array([1.5, 2.5]))
    options = RemovalOptions(seeds=2, draws=3, workers=1)
    before, effects = groups.measure(trainer, [own], sizes, [5, 6], options, store=tmp_path / "store")
    (effects,) = effects
    assert [each.method for each in effects] == ["mine", "causes", "random"]
    # both groups remove nothing, two sets of documents each, and random ones of two sizes; of two seeds
    assert trainer.trained == 2 * (1 + 2 + 2 + 3 + 3)

    def taken(documents: np.ndarray, group: int) -> tuple[float, float]:
        """Fall of the log-odds, and rise of the loss, without these documents."""
        removed = influence[:, np.isin(OWNER, documents)].sum(axis=1).reshape(3, QUERIES)
        rows = GROUPS[group].rows
        return float((removed[1] - removed[2])[rows].mean()), float(removed[0][rows].mean())

    mine, causes, chance = effects
    for place, group in enumerate(GROUPS):
        k = len(group.causes)
        for effect, sets in (
            (mine, [own.documents[place][:k]]),
            (causes, [group.causes]),
            (chance, list(random_chunks(DOCUMENTS, k, 3, seed=3, name="group removal random"))),
        ):
            odds, loss = np.mean([taken(documents, place) for documents in sets], axis=0)
            assert effect.odds[place] == pytest.approx([odds, odds])
            assert effect.loss[place] == pytest.approx([loss, loss])
    records = group_records(groups, before, effects, draws=3)
    assert [record["method"] for record in records] == ["mine", "causes", "random"]
    first = records[0]
    assert first["odds"]["mean"] == pytest.approx(mine.odds.mean()) and first["odds"]["seed_se"] < 1e-12
    assert first["odds_beyond_random"]["mean"] == pytest.approx((mine.odds - chance.odds).mean())
    assert [each["causes_removed"] for each in first["groups"]] == [1, 2]
    assert [each["causes_score"] for each in first["groups"]] == [1.5, 2.5]
    assert first["k"] is None and first["best_other"] is None and records[1]["best_other"] == "mine"
    again = AdditiveTrainer(influence)
    again.n_chunks = len(OWNER)
    groups.measure(again, [own], sizes, [5, 6], options, store=tmp_path / "store")
    assert again.trained == 0
