"""Which documents taught the model this habit? Retrain without those that a method names for it.

A method names the k documents of highest score for all queries of a group together. Models are trained anew
without them, without as many random ones, and without those that are known to be causes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import UsageError
from stride_cli.prove.resampling import Interval
from stride_cli.prove.verify_hit import t_interval
from stride_cli.research.evaluation.query_groups import GroupRule, QueryGroup, check_rules
from stride_cli.research.evaluation.ranking import random_chunks, top_chunks
from stride_cli.research.evaluation.scoring import document_blocks
from stride_cli.training.jobs import Job
from stride_cli.training.options import EngineOptions
from stride_cli.training.retraining import count_missing, retrain

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.options import RemovalOptions
    from stride_cli.research.evaluation.records import GroupRemovalRecord, SeededRecord
    from stride_cli.training.jobs import Trainer

CAUSES, RANDOM = "causes", "random"  # entries beside the methods


@dataclass(frozen=True)
class Named:
    """The documents that a method names for every group.

    Attributes
    ----------
    method : its spec, or "causes"
    documents : of every group, (N,) int64, highest first; at least as many as are removed
    causes_score : (G,) float64, optional      the causes' scores, added up, in the method's unit
    """

    method: str
    documents: list[np.ndarray]
    causes_score: np.ndarray | None = None


@dataclass(frozen=True)
class GroupEffect:
    """What removing documents does to groups of queries; G groups, S seeds.

    Attributes
    ----------
    method : its spec, "causes" or "random"
    k : (G,) int64                        documents removed
    causes : (G,) int64, optional         how many of them are causes
    causes_score : (G,) float64, optional
    odds, loss, shown : (G, S) float64
        Fall of the log-odds of the token in which a response and `instead` differ, nats; rise of the
        response's loss, nats a token; share of the queries whose response's token stays the likelier. Means
        over a group's queries; odds and shown are NaN where there is no `instead`.
    """

    method: str
    k: np.ndarray
    causes: np.ndarray | None
    causes_score: np.ndarray | None
    odds: np.ndarray
    loss: np.ndarray
    shown: np.ndarray


@dataclass(frozen=True)
class GroupState:
    """Log-odds, loss and share shown of every group under some models: (G, S) float64."""

    odds: np.ndarray
    loss: np.ndarray
    shown: np.ndarray


class GroupBench:
    """Methods on the same groups of queries of one index.

    Parameters
    ----------
    workspace : Workspace
    groups : of the queries
    sets : of `query_groups.build_asked`
    """

    def __init__(self, workspace: Workspace, groups: Sequence[QueryGroup], sets: dict[str, QuerySet]) -> None:
        self.workspace, self.groups, self.sets = workspace, list(groups), sets
        self.owner = np.asarray(workspace.index.array("corpus/chunk_document"))

    @property
    def n_documents(self) -> int:
        return self.workspace.index.n_documents

    def sizes(self, top: str) -> list[np.ndarray]:
        """How many documents are removed of each group, (G,) int64 for each number of `top`.

        Raises
        ------
        UsageError      no number and not "causes"; more than there are documents; "causes" without any
        """
        found = []
        for part in dict.fromkeys(piece.strip() for piece in top.split(",")):
            known = [len(group.causes) for group in self.groups]
            if part == CAUSES and not all(known):
                raise UsageError("--top is causes, and queries have none", fix='give them "causes"')
            if part != CAUSES and not part.isdecimal():
                raise UsageError(
                    f"--top is '{top}' (expected whole numbers separated by commas, or causes: as many as "
                    "a group has)",
                    fix="try --top 10,50",
                )
            sizes = np.array(known if part == CAUSES else [int(part)] * len(self.groups), np.int64)
            if not 1 <= sizes.min() <= sizes.max() < self.n_documents:
                raise UsageError(
                    f"--top is {part}, and removing that from {self.n_documents:,} documents leaves nothing",
                    fix=f"use 1 to {self.n_documents - 1:,}",
                )
            found.append(sizes)
        return found

    def name(
        self, specs: Sequence[str], most: int, *, advance: Callable[[], None] = lambda: None
    ) -> list[Named]:
        """What methods name, the `most` highest documents of every group; one fit for each method's rules."""
        from stride_cli.research.methods.registry import open_method

        rules = [GroupRule.of(spec) for spec in specs]
        check_rules(rules, self.sets)
        scores: dict[str, dict[str, np.ndarray]] = {}
        for method in dict.fromkeys(rule.method for rule in rules):
            wanted = {name for rule in rules if rule.method == method for name in rule.sets}
            with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
                opened = open_method(method)
                opened.fit(self.workspace)
                scores[method] = {
                    name: np.concatenate(list(document_blocks(opened, queries, self.workspace.index)))
                    for name, queries in self.sets.items()
                    if name in wanted
                }
            for rule in rules:
                if rule.method == method:
                    advance()
        found = []
        for spec, rule in zip(specs, rules, strict=True):
            added = rule.scores(scores[rule.method], self.groups)
            tops = top_chunks([added], most, seed=self.workspace.seed)
            own = [row[group.causes].sum() for row, group in zip(added, self.groups, strict=True)]
            found.append(Named(spec, list(tops), np.array(own)))
        return found

    def measure(
        self,
        trainer: Trainer,
        named: Sequence[Named],
        sizes: Sequence[np.ndarray],
        seeds: Sequence[int],
        options: RemovalOptions,
        *,
        store: Path,
    ) -> tuple[GroupState, list[list[GroupEffect]]]:
        """Retrain without what was named, and compare with models of the same seeds on everything.

        Parameters
        ----------
        trainer : Trainer      whose queries are those of `sets`, one set after the other
        named : what methods name
        sizes : numbers of documents, as of `sizes`
        seeds : of retraining, S
        options : random removals, and where models are retrained
        store : as for `retraining.retrain`

        Trains seeds × (1 + groups × methods + draws) models for each of `sizes`, those of the same documents
        once; what the store holds is not trained again.

        Returns
        -------
        before : GroupState
        effects : for each of `sizes`, of every method; of the causes, where so many are removed; of random
            documents
        """
        removed: dict[tuple[int, ...], int] = {(): 0}  # documents, ascending → number of the model

        def model(documents: np.ndarray) -> int:
            return removed.setdefault(tuple(sorted(documents.tolist())), len(removed))

        draws = {
            int(k): [
                model(rows)
                for rows in random_chunks(
                    self.n_documents,
                    int(k),
                    options.draws,
                    seed=self.workspace.seed,
                    name="group removal random",
                )
            ]
            for k in np.unique(np.concatenate(list(sizes)))
        }
        entries = [[*named, *self.known(own)] for own in sizes]
        tops = [
            [[[model(rows[:k])] for rows, k in zip(each.documents, own, strict=True)] for each in together]
            for own, together in zip(sizes, entries, strict=True)
        ]
        losses = self._losses(trainer, list(removed), seeds, options, store)
        before = self._of([[0]] * len(self.groups), losses)
        effects = []
        for own, together, models in zip(sizes, entries, tops, strict=True):
            pairs = [*zip(together, models, strict=True), (Named(RANDOM, []), [draws[int(k)] for k in own])]
            effects.append(
                [self._effect(each, own, self._of(without, losses), before) for each, without in pairs]
            )
        return before, effects

    def _losses(
        self,
        trainer: Trainer,
        removed: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        options: RemovalOptions,
        store: Path,
    ) -> np.ndarray:
        """Losses of every set's queries under every model: (models, S, sets, Q)."""
        from stride_cli.output import note

        jobs = [
            Job(~np.isin(self.owner, documents), int(number)) for documents in removed for number in seeds
        ]
        missing = count_missing(trainer, jobs, store=store)
        note(f"{len(jobs):,} models, {missing:,} of them to be retrained; kept in {store}")
        where: EngineOptions = options
        outcomes = retrain(trainer, jobs, store=store, engine=where.engine, workers=where.workers)
        losses = np.array([outcome.losses for outcome in outcomes])
        return losses.reshape(len(removed), len(seeds), len(self.sets), -1)

    def _of(self, models: Sequence[Sequence[int]], losses: np.ndarray) -> GroupState:
        """Log-odds, loss and share shown of every group under its models, mean over these: (G, S) each."""
        places = {name: place for place, name in enumerate(self.sets)}
        found = []
        for group, own in zip(self.groups, models, strict=True):
            mine = losses[list(own)][..., group.rows]  # (models, S, sets, q)
            odds = np.full(mine.shape[:2] + mine.shape[3:], np.nan)
            if "instead" in places:
                odds = mine[:, :, places["instead"]] - mine[:, :, places["token"]]
            shown = np.where(np.isnan(odds), np.nan, odds > 0)
            each = (odds, mine[:, :, places["response"]], shown)
            found.append([values.mean(axis=(0, 2)) for values in each])
        return GroupState(*(np.array(values) for values in zip(*found, strict=True)))

    def _effect(self, named: Named, k: np.ndarray, after: GroupState, before: GroupState) -> GroupEffect:
        causes = None
        if named.documents:
            pairs = zip(self.groups, named.documents, k, strict=True)
            causes = np.array([np.isin(rows[:count], group.causes).sum() for group, rows, count in pairs])
        return GroupEffect(
            named.method,
            k,
            causes,
            named.causes_score,
            before.odds - after.odds,
            after.loss - before.loss,
            after.shown,
        )

    def known(self, sizes: np.ndarray) -> list[Named]:
        """The causes, named by whoever knows them; none where groups have not so many (G,) of them."""
        causes = [group.causes for group in self.groups]
        same = [len(own) == k for own, k in zip(causes, sizes, strict=True)]
        return [Named(CAUSES, causes)] if all(same) else []


def group_records(
    bench: GroupBench, before: GroupState, effects: Sequence[GroupEffect], draws: int
) -> list[GroupRemovalRecord]:
    """``stride.group_removal/1`` of every effect of one number of documents, random ones among them."""
    chance = next(each for each in effects if each.method == RANDOM)
    return [_record(bench, before, each, chance, effects, draws) for each in effects]


def _record(
    bench: GroupBench,
    before: GroupState,
    effect: GroupEffect,
    chance: GroupEffect,
    effects: Sequence[GroupEffect],
    draws: int,
) -> GroupRemovalRecord:
    compared = bool(np.isfinite(effect.odds).all())
    others = [each for each in effects if each.method not in (CAUSES, RANDOM) and each is not effect]

    def judged(each: GroupEffect) -> np.ndarray:
        return each.odds if compared else each.loss

    best = max(others, key=lambda each: float(judged(each).mean()), default=None)
    groups = bench.groups
    record: GroupRemovalRecord = {
        "schema": "stride.group_removal/1",
        "method": effect.method,
        "k": int(effect.k[0]) if len(set(effect.k.tolist())) == 1 else None,
        "odds": _seeded(effect.odds),
        "odds_beyond_random": _seeded(effect.odds - chance.odds),
        "loss": _seeded(effect.loss),
        "loss_beyond_random": _seeded(effect.loss - chance.loss),
        "shown": _seeded(effect.shown),
        "best_other": None if best is None else best.method,
        "difference": _seeded(judged(effect) - (np.nan if best is None else judged(best))),
        "groups": [
            {
                "group": group.name,
                "queries": len(group.rows),
                "k": int(effect.k[place]),
                "causes_removed": None if effect.causes is None else int(effect.causes[place]),
                "causes_score": None if effect.causes_score is None else float(effect.causes_score[place]),
                "odds_before": _mean(before.odds[place]),
                "odds": _mean(effect.odds[place]),
                "loss_before": _mean(before.loss[place]),
                "loss": _mean(effect.loss[place]),
                "shown_before": _mean(before.shown[place]),
                "shown": _mean(effect.shown[place]),
            }
            for place, group in enumerate(groups)
        ],
        "documents": bench.n_documents,
        "queries": sum(len(group.rows) for group in groups),
        "seeds": effect.loss.shape[1],
        "draws": draws,
    }
    return record


def _seeded(values: np.ndarray) -> SeededRecord:
    """Of (G, S): the mean with Student's t over groups, and the standard error over seeds beside it."""
    over: Interval = t_interval(values.mean(axis=1))
    seeds = t_interval(values.mean(axis=0))
    return {
        "mean": _or_none(over.mean),
        "se": _or_none(over.se),
        "low": _or_none(over.low),
        "high": _or_none(over.high),
        "seed_se": _or_none(seeds.se),
    }


def _mean(values: np.ndarray) -> float | None:
    return _or_none(float(values.mean()))


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
