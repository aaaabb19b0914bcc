"""Methods that rank the documents of an index for queries with known causes, and how well they do it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory, storage
from index_format.errors import IndexReadOnly
from index_format.location import local_directory
from stride_cli.errors import CorpusError
from stride_cli.output import progress
from stride_cli.research.evaluation.cause_measures import Places, measure_all, measure_names
from stride_cli.research.evaluation.query_groups import GroupRule, check_rules
from stride_cli.research.evaluation.records import estimate_record
from stride_cli.research.evaluation.resampling import DRAWS, mean_interval
from stride_cli.research.evaluation.scoring import document_blocks, failure, fitted_method
from stride_cli.research.methods.registry import METHODS
from stride_cli.version import __version__

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.cause_queries import CauseQuery
    from stride_cli.research.evaluation.records import (
        CauseMeasureRecord,
        CauseRanksRecord,
        CausesRecord,
        EstimateRecord,
        FoundCauses,
    )
    from stride_cli.research.methods.protocol import Method

# every kind of evidence; what needs retrained models, or an encoder trained for it, is asked for by name
DEFAULT_METHODS = (
    "direct", "pairs", "tfidf", "bm25", "embeddings", "rds", "graddot", "logra", "ekfac", "trackstar", "less",
    "chance",
)  # fmt: skip


# options that let something decide that `KeptRanks.key` does not cover
_NOT_KEPT = ("checkpoints=", "model=", "mix=")


def default_methods(index: Index) -> list[str]:
    """List STRIDE, with the index's operators where it has them, and every kind of other method."""
    stride = "stride:stored=true" if index.has("operators") else "stride"
    return [stride, *DEFAULT_METHODS]


@dataclass(frozen=True)
class Ranked:
    """One query's causes in one method's ranking.

    Attributes
    ----------
    places : Places
    seconds : float, optional     that this took, the fit left out; None: the scores were read from a file
    scores : (D,) float32         of all documents, where they are wanted
    """

    places: Places
    seconds: float | None
    scores: np.ndarray | None = None

    def to_keep(self) -> dict[str, Any]:
        """Make the line of `KeptRanks`."""
        above, level = self.places.above.tolist(), self.places.level.tolist()
        kept = {"above": above, "level": level, "seconds": self.seconds}
        if self.scores is not None:
            kept["scores"] = base64.b64encode(self.scores.astype("<f4").tobytes()).decode()
        return kept

    @classmethod
    def kept(cls, found: Any, n_causes: int, n_documents: int, *, with_scores: bool) -> Ranked | None:
        """Read a line; None where it cannot be, or lacks the scores that are wanted."""
        scores = None
        try:
            above, level = (np.array(found[name], np.int64) for name in ("above", "level"))
            seconds = float(found["seconds"])
            if with_scores:
                scores = np.frombuffer(base64.b64decode(found["scores"]), "<f4")
        except (TypeError, KeyError, ValueError):
            return None
        if scores is not None and len(scores) != n_documents:
            return None
        whole = len(above) == len(level) == n_causes and (above >= 0).all() and (level >= 1).all()
        return cls(Places(above, level, n_documents), seconds, scores) if whole else None


class KeptRanks:
    """Results kept in INDEX.causes, so that a stopped evaluation goes on: JSON Lines, a file a method.

    A line is written when a query is scored. Its key covers what decides the result: the index's content, the
    model's precision, the method with its options, the query's tokens, its causes, this package's version.
    Where what is at a path decides, or what else is asked, nothing is kept. A line that a kill has cut counts
    as missing.

    Parameters
    ----------
    fresh : bool      ignore what is there
    """

    def __init__(self, workspace: Workspace, *, fresh: bool = False) -> None:
        self._index, self._fresh = workspace.index, fresh
        self.directory: Path | None = None
        with contextlib.suppress(IndexReadOnly):  # read over the network, or from a zip: nothing is kept
            place = local_directory(self._index.path)
            self.directory = place.with_name(place.name + ".causes")
        prints, dtype = self._index.attributes["fingerprints"], str(workspace.model.dtype)
        about = [__version__, prints, self._index.n_chunks, self._index.seed, dtype]
        self._digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def key(self, spec: str, texts: Sequence[tuple[np.ndarray, np.ndarray]], causes: np.ndarray) -> str:
        """Hash what decides a method's ranks of a query's causes: SHA-256 in hex.

        Parameters
        ----------
        texts : ids and weights of all scored parts of the query
        """
        # what the index has beside its corpus matters to those methods that read it
        stages = ["operators"] if "stored=" in spec else []
        entry = METHODS.get(spec.partition(":")[0])
        if "train=truth" in spec or (entry is not None and entry.needs == "truth"):
            stages.append("truth")
        read = [self._index.group_digest(stage) for stage in stages if self._index.has(stage)]
        digest = hashlib.sha256("/".join([self._digest, spec, *read, ""]).encode())
        for part in (*chain.from_iterable(texts), np.asarray(causes, np.int64)):
            digest.update(np.int64(len(part)).tobytes() + part.tobytes())
        return digest.hexdigest()

    def read(self, spec: str) -> dict[str, Any]:
        """Read the results of a method, by key."""
        path = self._path(spec)
        if path is None or self._fresh or not path.is_file():
            return {}
        found = {}
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                found[str(record["key"])] = record["found"]
        return found

    def add(self, spec: str, found: Mapping[str, Any]) -> None:
        """Keep results, by key, in one write that has reached the disk."""
        path = self._path(spec)
        if path is None:
            return
        make_directory(path.parent)
        lines = [json.dumps({"key": key, "found": value}) for key, value in found.items()]
        # a line before that a kill has cut is ended first
        data = ("\n" + "\n".join(lines) + "\n").encode()
        with storage(path, len(data)), path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _path(self, spec: str) -> Path | None:
        name, _, options = spec.partition(":")
        if self.directory is None or any(mark in options for mark in _NOT_KEPT):
            return None
        return self.directory / f"{name}-{hashlib.sha256(spec.encode()).hexdigest()[:16]}.jsonl"


@dataclass(frozen=True)
class CauseEntry:
    """One method's result, or its failure.

    Attributes
    ----------
    method : str                  its spec
    ranked : list of Ranked       for every query
    values : dict                 measure → (Q,) float64
    fit_seconds : float           None where all was kept, or read from a file
    pooled : dict, optional       measure → its value of the scores of queries with the same causes, added
                                  up; mean over such groups, where every query is in one
    error, fix : str, optional    why it failed; nothing else is there then
    """

    method: str
    ranked: list[Ranked]
    values: dict[str, np.ndarray]
    fit_seconds: float | None = None
    pooled: dict[str, float] | None = None
    error: str | None = None
    fix: str | None = None

    def without_scores(self) -> CauseEntry:
        """Drop the scores of all documents."""
        return replace(self, ranked=[replace(each, scores=None) for each in self.ranked])


class CauseBench:
    """Methods on the same queries of the same index, one after the other.

    Parameters
    ----------
    workspace : Workspace
    asked : the queries that count, with their causes
    sets : of `query_groups.build_asked`, of these queries
    kept : KeptRanks
    ks : of Recall@k
    with_scores : bool      entries hold the scores of all documents
    """

    def __init__(
        self,
        workspace: Workspace,
        asked: Sequence[CauseQuery],
        sets: Mapping[str, QuerySet],
        kept: KeptRanks,
        ks: Sequence[int],
        *,
        with_scores: bool = False,
    ) -> None:
        self.workspace, self.asked, self.sets, self.ks = workspace, asked, dict(sets), list(ks)
        shared: dict[bytes, list[int]] = {}
        for place, query in enumerate(asked):
            shared.setdefault(query.causes.tobytes(), []).append(place)
        # queries of the same causes; none where a query has causes of its own
        self.groups = list(shared.values()) if min(map(len, shared.values())) > 1 else []
        self._kept, self._with_scores = kept, with_scores or bool(self.groups)
        self._fitted: tuple[str, Method, float] | None = None

    @property
    def n_documents(self) -> int:
        return self.workspace.index.n_documents

    def run(self, spec: str) -> CauseEntry:
        """Rank all causes by one method; a failure becomes an entry, so that the other methods go on.

        Parameters
        ----------
        spec : as `query_groups.GroupRule.of` takes it
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
                return self._run(spec)
        except Exception as error:
            message, fix = failure(error)
            return CauseEntry(spec, [], {}, error=message, fix=fix)

    def _run(self, spec: str) -> CauseEntry:
        rule = GroupRule.of(spec)
        check_rules([rule], self.sets)
        sets = [self.sets[name] for name in rule.sets]
        causes = [query.causes for query in self.asked]
        keys = [
            self._kept.key(spec, [(each.ids[row], each.weights[row]) for each in sets], numbers)
            for row, numbers in enumerate(causes)
        ]
        there = self._kept.read(spec)
        found = [
            Ranked.kept(there.get(key), len(numbers), self.n_documents, with_scores=self._with_scores)
            for key, numbers in zip(keys, causes, strict=True)
        ]
        missing = [row for row, ranked in enumerate(found) if ranked is None]
        fit_seconds = None
        if missing:
            with progress(f"scoring with {spec}", len(self.asked), unit="queries") as bar:
                bar.advance(len(self.asked) - len(missing))
                method, fit_seconds = self._fit(rule.method)
                left, begin = iter(missing), time.perf_counter()
                for scores in self._scored(method, rule, missing):
                    spent = (time.perf_counter() - begin) / len(scores)
                    lines = {}
                    for row, values in zip(islice(left, len(scores)), scores, strict=True):
                        wanted = values.astype(np.float32) if self._with_scores else None
                        ranked = Ranked(Places.of(values, causes[row]), spent, wanted)
                        found[row], lines[keys[row]] = ranked, ranked.to_keep()
                    self._kept.add(spec, lines)
                    bar.advance(len(scores))
                    begin = time.perf_counter()
        return self._entry(spec, [each for each in found if each is not None], fit_seconds, rule)

    def _fit(self, spec: str) -> tuple[Method, float]:
        """Fit a method, or take the last one where only `asked=` differs; and the seconds of the fit."""
        if self._fitted is None or self._fitted[0] != spec:
            self._fitted = None  # before the next one takes memory
            begin = time.perf_counter()
            method = fitted_method(self.workspace, spec)
            self._fitted = spec, method, time.perf_counter() - begin
        return self._fitted[1:]

    def _scored(self, method: Method, rule: GroupRule, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Score all documents for some of the queries, in order: blocks of (q, D) float64."""
        parts = {name: self.sets[name].take(rows) for name in rule.sets}
        index = self.workspace.index
        if len(parts) == 1:
            yield from document_blocks(method, parts[rule.sets[0]], index)
            return
        # what is compared comes one set after the other, each at once: a method may pass over the corpus
        yield rule.each(
            {name: np.concatenate(list(document_blocks(method, part, index))) for name, part in parts.items()}
        )

    def take(self, path: str | Path, scores: Sequence[np.ndarray | None]) -> CauseEntry:
        """Judge a file's scores as one more method ``scores:PATH``; see `score_files.read_scores`.

        Raises
        ------
        CorpusError      it has no scores of a query that counts
        """
        ranked = []
        for query in self.asked:
            row = scores[query.row]
            if row is None:
                raise CorpusError(
                    f"{path}: list {query.row}, the scores of query '{query.id}', is null",
                    fix="score every query that has causes",
                )
            ranked.append(Ranked(Places.of(row, query.causes), None, row.astype(np.float32)))
        return self._entry(f"scores:{path}", ranked, None, GroupRule("scores"))

    def write(self, entry: CauseEntry, folder: Path, n_rows: int, *, one_list: bool = False) -> Path:
        """Write an entry's scores as `score_files.read_scores` reads them: a list a row, of `n_rows`."""
        from stride_cli.research.evaluation.score_files import scores_path, write_scores

        rows: list[np.ndarray | None] = [None] * n_rows
        for query, ranked in zip(self.asked, entry.ranked, strict=True):
            rows[query.row] = ranked.scores
        path = scores_path(folder, entry.method)
        write_scores(path, rows, one_list=one_list)
        return path

    def _entry(
        self, spec: str, ranked: list[Ranked], fit_seconds: float | None, rule: GroupRule
    ) -> CauseEntry:
        measured = [measure_all(each.places, self.ks) for each in ranked]
        values = {
            name: np.array([each[name] for each in measured], np.float64) for name in measure_names(self.ks)
        }
        pooled = None
        if self.groups:
            each_group = [self._added_up(group, ranked, rule) for group in self.groups]
            pooled = {name: float(np.mean([found[name] for found in each_group])) for name in values}
        return CauseEntry(spec, ranked, values, fit_seconds, pooled)

    def _added_up(self, group: Sequence[int], ranked: Sequence[Ranked], rule: GroupRule) -> dict[str, float]:
        """Measure the summed scores of queries that have the same causes."""
        added = np.zeros(self.n_documents)
        for place in group:
            scores = ranked[place].scores
            assert scores is not None
            added += rule.counted(scores)
        return measure_all(Places.of(added, self.asked[group[0]].causes), self.ks)


def ranks_records(bench: CauseBench, entry: CauseEntry) -> Iterator[CauseRanksRecord]:
    """Make ``stride.cause_ranks/1`` of every query of one method."""
    index = bench.workspace.index
    for row, (query, ranked) in enumerate(zip(bench.asked, entry.ranked, strict=False)):
        pairs = zip(query.causes.tolist(), ranked.places.ranks.tolist(), strict=True)
        yield {
            "schema": "stride.cause_ranks/1",
            "query": query.id,
            "method": entry.method,
            "causes": [{"document": index.document_id(number), "rank": rank} for number, rank in pairs],
            "documents": bench.n_documents,
            **_found({name: float(values[row]) for name, values in entry.values.items()}, bench.ks),
            "seconds": ranked.seconds,
        }


def causes_records(
    bench: CauseBench, entries: Sequence[CauseEntry], *, asked: int, draws: int = DRAWS
) -> list[CausesRecord]:
    """Make ``stride.causes/1`` of every method, each against the best of the others.

    Parameters
    ----------
    asked : queries of the file, those that do not count among them
    draws : bootstrap resamples of the queries, the same for all methods and measures
    """
    records = []
    for entry in entries:
        own = {
            name: _measure(entry, entries, name, draws=draws, seed=bench.workspace.seed)
            for name in measure_names(bench.ks)
        }
        seconds = [each.seconds for each in entry.ranked if each.seconds is not None]
        record: CausesRecord = {
            "schema": "stride.causes/1",
            "method": entry.method,
            "queries": asked,
            "counted": len(bench.asked),
            "documents": bench.n_documents,
            "recall": [{"k": k, **own[f"recall@{k}"]} for k in bench.ks],
            "mrr": own["mrr"],
            "auprc": own["auprc"],
            "seconds": {"fit": entry.fit_seconds, "query": float(np.mean(seconds)) if seconds else None},
        }
        if entry.pooled is not None:
            record["pooled"] = {"groups": len(bench.groups), **_found(entry.pooled, bench.ks)}
        if entry.error is not None:
            record["error"] = entry.error
        records.append(record)
    return records


def _found(values: Mapping[str, float], ks: Sequence[int]) -> FoundCauses:
    return {
        "recall": [{"k": k, "value": values[f"recall@{k}"]} for k in ks],
        "reciprocal_rank": values["mrr"],
        "average_precision": values["auprc"],
    }


def _measure(
    entry: CauseEntry, entries: Sequence[CauseEntry], name: str, *, draws: int, seed: int
) -> CauseMeasureRecord:
    """Average one measure, and its lead over the best other method, query by query."""

    def estimate(values: np.ndarray | None) -> EstimateRecord:
        if values is None:
            return estimate_record(None)
        # one name: the same resamples of the queries for every method and measure
        return estimate_record(mean_interval(values, draws=draws, seed=seed, name="queries of causes"))

    others = [each for each in entries if each.error is None and each is not entry]
    best = max(others, key=lambda each: float(each.values[name].mean()), default=None)
    own = None if entry.error is not None else entry.values[name]
    ahead = None if own is None or best is None else own - best.values[name]
    record: CauseMeasureRecord = {
        **estimate(own),
        "best_other": None if ahead is None or best is None else best.method,
        "difference": estimate(ahead),
    }
    return record
