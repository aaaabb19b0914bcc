"""Retrain without the documents that a method names for a group of queries.

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
from stride_cli.output import note
from stride_cli.prove.verify_hit import t_interval
from stride_cli.research.evaluation.query_groups import GroupRule, QueryGroup, check_rules
from stride_cli.research.evaluation.ranking import random_chunks, top_chunks
from stride_cli.research.evaluation.scoring import document_blocks, fitted_method
from stride_cli.training.jobs import Job
from stride_cli.training.retraining import count_missing, retrain

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.options import RemovalOptions
    from stride_cli.research.evaluation.records import GroupRemovalRecord, RemovedGroup, SeededRecord
    from stride_cli.training.jobs import Trainer

CAUSES, RANDOM = "causes", "random"  # entries beside the methods


@dataclass(frozen=True)
class Named:
    """Documents that a method names for every group.

    Attributes
    ----------
    method : its spec, "causes" or "random"
    documents : of every group, (N,) int64, highest first; at least as many as are removed
    causes_score : (G,) float64, optional      the causes' scores, added up, in the method's unit
    """

    method: str
    documents: list[np.ndarray]
    causes_score: np.ndarray | None = None


@dataclass(frozen=True)
class GroupState:
    """State of G groups under models of S seeds, (G, S) float64 each, means over a group's queries.

    Attributes
    ----------
    odds : log-odds of the token in which a response and `instead` differ, nats; NaN without `instead`
    loss : of the response, nats a token
    shown : share of the queries whose response's token is the likelier; NaN without `instead`
    """

    odds: np.ndarray
    loss: np.ndarray
    shown: np.ndarray


@dataclass(frozen=True)
class GroupEffect:
    """Effect of removing documents on groups of queries; G groups, S seeds.

    Attributes
    ----------
    named : Named
    k : (G,) int64                        documents removed
    causes : (G,) int64, optional         how many of them are causes
    odds, loss : (G, S) float64           fall of the log-odds, rise of the loss
    shown : (G, S) float64                after the removal
    """

    named: Named
    k: np.ndarray
    causes: np.ndarray | None
    odds: np.ndarray
    loss: np.ndarray
    shown: np.ndarray

    @property
    def method(self) -> str:
        return self.named.method


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
        """Parse how many documents are removed of each group: (G,) int64 for each number of `top`.

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
        """Name the `most` highest documents of every group; one fit for each method's rules."""
        rules = [GroupRule.of(spec) for spec in specs]
        check_rules(rules, self.sets)
        index = self.workspace.index
        scores: dict[str, dict[str, np.ndarray]] = {}
        for method in dict.fromkeys(rule.method for rule in rules):
            mine = [rule for rule in rules if rule.method == method]
            wanted = dict.fromkeys(name for rule in mine for name in rule.sets)
            with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
                opened = fitted_method(self.workspace, method)
                scores[method] = {
                    name: np.concatenate(list(document_blocks(opened, self.sets[name], index)))
                    for name in self.sets
                    if name in wanted
                }
            for _ in mine:
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
        """Retrain without the named documents, and compare with models of the same seeds on everything.

        Trains seeds × (1 + groups × methods + draws) models for each of `sizes`, those of the same documents
        once; what the store holds is not trained again.

        Parameters
        ----------
        trainer : Trainer      whose queries are those of `sets`, one set after the other
        sizes : numbers of documents, as of `sizes`
        seeds : of retraining, S
        options : random removals, and where models are retrained
        store : as for `retraining.retrain`

        Returns
        -------
        before : GroupState
        effects : for each of `sizes`, of every method; of the causes, where so many are removed; of random
            documents
        """
        # 1. number the models: documents that are removed, ascending → number
        removed: dict[tuple[int, ...], int] = {(): 0}

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
        pairs: list[list[tuple[Named, list[list[int]]]]] = []  # per size: who names, each group's models
        for own in sizes:
            together: list[tuple[Named, list[list[int]]]] = [
                (each, [[model(rows[:k])] for rows, k in zip(each.documents, own, strict=True)])
                for each in [*named, *self.known(own)]
            ]
            pairs.append([*together, (Named(RANDOM, []), [draws[int(k)] for k in own])])
        # 2. retrain: (models, S, sets, Q)
        jobs = [Job(~np.isin(self.owner, rows), int(number)) for rows in removed for number in seeds]
        missing = count_missing(trainer, jobs, store=store)
        note(f"{len(jobs):,} models, {missing:,} of them to be retrained; kept in {store}")
        outcomes = retrain(trainer, jobs, store=store, engine=options.engine, workers=options.workers)
        losses = np.array([outcome.losses for outcome in outcomes])
        losses = losses.reshape(len(removed), len(seeds), len(self.sets), -1)
        # 3. compare
        before = self._state([[0]] * len(self.groups), losses)
        effects = [
            [self._effect(each, own, self._state(models, losses), before) for each, models in together]
            for own, together in zip(sizes, pairs, strict=True)
        ]
        return before, effects

    def known(self, sizes: np.ndarray) -> list[Named]:
        """Name the causes; nothing where groups have not so many (G,) of them."""
        causes = [group.causes for group in self.groups]
        same = [len(own) == k for own, k in zip(causes, sizes, strict=True)]
        return [Named(CAUSES, causes)] if all(same) else []

    def _state(self, models: Sequence[Sequence[int]], losses: np.ndarray) -> GroupState:
        """Average every group over its queries and its models."""
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
        return GroupEffect(named, k, causes, before.odds - after.odds, after.loss - before.loss, after.shown)


def group_records(
    bench: GroupBench, before: GroupState, effects: Sequence[GroupEffect], draws: int
) -> list[GroupRemovalRecord]:
    """Make ``stride.group_removal/1`` of every effect of one number of documents, random ones among them."""
    chance = next(each for each in effects if each.method == RANDOM)
    records = []
    for effect in effects:
        compared = bool(np.isfinite(effect.odds).all())
        others = [
            (each.method, each.odds if compared else each.loss)
            for each in effects
            if each.method not in (CAUSES, RANDOM) and each is not effect
        ]
        own = effect.odds if compared else effect.loss
        best = max(others, key=lambda each: float(each[1].mean()), default=None)
        record: GroupRemovalRecord = {
            "schema": "stride.group_removal/1",
            "method": effect.method,
            "k": int(effect.k[0]) if len(set(effect.k.tolist())) == 1 else None,
            "odds": _seeded(effect.odds),
            "odds_beyond_random": _seeded(effect.odds - chance.odds),
            "loss": _seeded(effect.loss),
            "loss_beyond_random": _seeded(effect.loss - chance.loss),
            "shown": _seeded(effect.shown),
            "best_other": None if best is None else best[0],
            "difference": _seeded(own - (np.nan if best is None else best[1])),
            "groups": [_group(group, place, before, effect) for place, group in enumerate(bench.groups)],
            "documents": bench.n_documents,
            "queries": sum(len(group.rows) for group in bench.groups),
            "seeds": effect.loss.shape[1],
            "draws": draws,
        }
        records.append(record)
    return records


def _group(group: QueryGroup, place: int, before: GroupState, effect: GroupEffect) -> RemovedGroup:
    score = effect.named.causes_score

    def mean(values: np.ndarray) -> float | None:
        return _or_none(float(values[place].mean()))

    return {
        "group": group.name,
        "queries": len(group.rows),
        "k": int(effect.k[place]),
        "causes_removed": None if effect.causes is None else int(effect.causes[place]),
        "causes_score": None if score is None else float(score[place]),
        "odds_before": mean(before.odds),
        "odds": mean(effect.odds),
        "loss_before": mean(before.loss),
        "loss": mean(effect.loss),
        "shown_before": mean(before.shown),
        "shown": mean(effect.shown),
    }


def _seeded(values: np.ndarray) -> SeededRecord:
    """Average (G, S) with Student's t over groups, and the standard error over seeds beside it."""
    over, seeds = t_interval(values.mean(axis=1)), t_interval(values.mean(axis=0))
    return {
        "mean": _or_none(over.mean),
        "se": _or_none(over.se),
        "low": _or_none(over.low),
        "high": _or_none(over.high),
        "seed_se": _or_none(seeds.se),
    }


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
