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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory, storage
from index_format.errors import IndexFormatError, IndexReadOnly
from index_format.location import local_directory
from stride_cli import __version__
from stride_cli.errors import CorpusError, StrideError, first_line
from stride_cli.output import progress
from stride_cli.prove.resampling import DRAWS, Interval, mean_interval
from stride_cli.research.evaluation.cause_measures import Places, measure_all, measure_names
from stride_cli.research.evaluation.query_groups import GroupRule, check_rules
from stride_cli.research.evaluation.scoring import document_blocks
from stride_cli.research.methods.registry import METHODS

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
    )
    from stride_cli.research.methods.protocol import Method

# every kind of evidence; what needs retrained models, or an encoder trained for it, is asked for by name
DEFAULT_METHODS = (
    "direct",
    "pairs",
    "tfidf",
    "bm25",
    "embeddings",
    "rds",
    "graddot",
    "logra",
    "ekfac",
    "trackstar",
    "less",
    "chance",
)


def default_methods(index: Index) -> list[str]:
    """STRIDE, with the index's operators where it has them, and what it is compared with."""
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


class KeptRanks:
    """What has been found, so that a stopped evaluation goes on: a file of JSON Lines for each method.

    They are in INDEX.causes, beside the index. A line is written when a query is scored, and holds where its
    causes stand. What decides that is in its key: the index's content, the method with its options, the
    query's tokens, its causes, this package's version. A line that a kill has cut is as if it were not there.

    Parameters
    ----------
    index : Index
    fresh : bool      what is there is not read
    """

    def __init__(self, index: Index, *, fresh: bool = False) -> None:
        self._index, self._fresh = index, fresh
        self.directory: Path | None = None
        with contextlib.suppress(IndexReadOnly):  # read over the network, or from a zip: nothing is kept
            place = local_directory(index.path)
            self.directory = place.with_name(place.name + ".causes")
        about = [__version__, index.attributes["fingerprints"], index.n_chunks, index.seed]
        self._digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def key(self, spec: str, texts: Sequence[tuple[np.ndarray, np.ndarray]], causes: np.ndarray) -> str:
        """What decides a method's ranks of a query's causes: SHA-256 in hex.

        Parameters
        ----------
        texts : ids and weights of all that is scored of it
        """
        # what the index has beside its corpus matters to those methods that read it
        stages = ["operators"] if "stored=" in spec else []
        entry = METHODS.get(spec.partition(":")[0])
        stages += ["truth"] if entry is not None and entry.needs == "truth" else []
        read = [self._index.group_digest(stage) for stage in stages if self._index.has(stage)]
        digest = hashlib.sha256("/".join([self._digest, spec, *read, ""]).encode())
        for part in (*chain.from_iterable(texts), np.asarray(causes, np.int64)):
            digest.update(np.int64(len(part)).tobytes() + part.tobytes())
        return digest.hexdigest()

    def read(self, spec: str) -> dict[str, Any]:
        """What is kept of a method, by key."""
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
        """Keep what has been found, by key, all in one write that has reached the disk."""
        path = self._path(spec)
        if path is None:
            return
        assert self.directory is not None
        make_directory(self.directory)
        lines = [json.dumps({"key": key, "found": value}) for key, value in found.items()]
        # a line before that a kill has cut is ended first
        data = ("\n" + "\n".join(lines) + "\n").encode()
        with storage(path, len(data)), path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _path(self, spec: str) -> Path | None:
        if self.directory is None:
            return None
        name = spec.partition(":")[0]
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
        """The same, without the scores of all documents."""
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
        """One method's ranks of all causes; a failure becomes an entry, so that the other methods go on.

        Parameters
        ----------
        spec : as `query_groups.GroupRule.of` takes it
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a method's library prints is talk
                return self._run(spec)
        except (StrideError, IndexFormatError) as error:
            return CauseEntry(spec, [], {}, error=error.message, fix=error.fix)
        except Exception as error:  # a method's library may raise anything
            return CauseEntry(spec, [], {}, error=f"{type(error).__name__}: {first_line(error)}")

    def _run(self, spec: str) -> CauseEntry:
        rule = GroupRule.of(spec)
        check_rules([rule], self.sets)
        sets = {name: self.sets[name] for name in rule.sets}
        causes = [query.causes for query in self.asked]
        keys = [
            self._kept.key(spec, [(each.ids[row], each.weights[row]) for each in sets.values()], numbers)
            for row, numbers in enumerate(causes)
        ]
        there = self._kept.read(spec)
        found = [
            _kept(there.get(key), len(c), self.n_documents, with_scores=self._with_scores)
            for key, c in zip(keys, causes, strict=True)
        ]
        missing = [row for row, ranked in enumerate(found) if ranked is None]
        fit_seconds = None
        if missing:
            with progress(f"scoring with {spec}", len(self.asked), unit="queries") as bar:
                bar.advance(len(self.asked) - len(missing))
                method, fit_seconds = self._fit(rule.method)
                done, begin = 0, time.perf_counter()
                for scores in self._scored(method, rule, missing):
                    rows = missing[done : done + len(scores)]
                    spent = (time.perf_counter() - begin) / len(scores)
                    for row, values in zip(rows, scores, strict=True):
                        wanted = values.astype(np.float32) if self._with_scores else None
                        found[row] = Ranked(Places.of(values, causes[row]), spent, wanted)
                    self._kept.add(spec, {keys[row]: _to_keep(found[row]) for row in rows})
                    done += len(scores)
                    bar.advance(len(scores))
                    begin = time.perf_counter()
        return self._entry(spec, [each for each in found if each is not None], fit_seconds, rule)

    def _fit(self, spec: str) -> tuple[Method, float]:
        """A fitted method, and the seconds of that: the one before, where it is asked in another way."""
        from stride_cli.research.methods.registry import open_method

        if self._fitted is None or self._fitted[0] != spec:
            self._fitted = None  # before the next one takes memory
            begin = time.perf_counter()
            method = open_method(spec)
            method.fit(self.workspace)
            self._fitted = spec, method, time.perf_counter() - begin
        return self._fitted[1:]

    def _scored(self, method: Method, rule: GroupRule, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Scores of all documents for some of the queries, in order: blocks of (q, D) float64."""
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
        """What a file's scores are worth, as one more method ``scores:PATH``; see `score_files.read_scores`.

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
        """Every measure of what counts of some queries' scores, which have the same causes, added up."""
        added = np.zeros(self.n_documents)
        for place in group:
            scores = ranked[place].scores
            assert scores is not None
            added += rule.counted(scores)
        return measure_all(Places.of(added, self.asked[group[0]].causes), self.ks)


def _to_keep(ranked: Ranked | None) -> dict[str, Any]:
    assert ranked is not None
    kept = {
        "above": ranked.places.above.tolist(),
        "level": ranked.places.level.tolist(),
        "seconds": ranked.seconds,
    }
    if ranked.scores is not None:
        kept["scores"] = base64.b64encode(ranked.scores.astype("<f4").tobytes()).decode()
    return kept


def _kept(found: Any, n_causes: int, n_documents: int, *, with_scores: bool) -> Ranked | None:
    """What a line says, if it can be so, and has the scores where they are wanted."""
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
    return Ranked(Places(above, level, n_documents), seconds, scores) if whole else None


def ranks_records(bench: CauseBench, entry: CauseEntry) -> Iterator[CauseRanksRecord]:
    """``stride.cause_ranks/1`` of every query of one method."""
    index = bench.workspace.index
    for row, (query, ranked) in enumerate(zip(bench.asked, entry.ranked, strict=False)):
        pairs = zip(query.causes.tolist(), ranked.places.ranks.tolist(), strict=True)
        yield {
            "schema": "stride.cause_ranks/1",
            "query": query.id,
            "method": entry.method,
            "causes": [{"document": index.document_id(number), "rank": rank} for number, rank in pairs],
            "documents": bench.n_documents,
            "recall": [{"k": k, "value": float(entry.values[f"recall@{k}"][row])} for k in bench.ks],
            "reciprocal_rank": float(entry.values["mrr"][row]),
            "average_precision": float(entry.values["auprc"][row]),
            "seconds": ranked.seconds,
        }


def causes_records(
    bench: CauseBench, entries: Sequence[CauseEntry], *, asked: int, draws: int = DRAWS
) -> list[CausesRecord]:
    """``stride.causes/1`` of every method, each against the best of the others.

    Parameters
    ----------
    asked : queries of the file, those that do not count among them
    draws : bootstrap resamples of the queries, the same for all methods and measures
    """
    return [_record(bench, entry, entries, asked=asked, draws=draws) for entry in entries]


def _record(
    bench: CauseBench, entry: CauseEntry, entries: Sequence[CauseEntry], *, asked: int, draws: int
) -> CausesRecord:
    def of(name: str) -> CauseMeasureRecord:
        return _measure(entry, entries, name, draws=draws, seed=bench.workspace.seed)

    query_seconds = [each.seconds for each in entry.ranked if each.seconds is not None]
    record: CausesRecord = {
        "schema": "stride.causes/1",
        "method": entry.method,
        "queries": asked,
        "counted": len(bench.asked),
        "documents": bench.n_documents,
        "recall": [{"k": k, **of(f"recall@{k}")} for k in bench.ks],
        "mrr": of("mrr"),
        "auprc": of("auprc"),
        "seconds": {
            "fit": entry.fit_seconds,
            "query": float(np.mean(query_seconds)) if query_seconds else None,
        },
    }
    if entry.pooled is not None:
        found = entry.pooled
        record["pooled"] = {
            "groups": len(bench.groups),
            "recall": [{"k": k, "value": found[f"recall@{k}"]} for k in bench.ks],
            "reciprocal_rank": found["mrr"],
            "average_precision": found["auprc"],
        }
    if entry.error is not None:
        record["error"] = entry.error
    return record


def _measure(
    entry: CauseEntry, entries: Sequence[CauseEntry], name: str, *, draws: int, seed: int
) -> CauseMeasureRecord:
    """One measure's mean, and what it is ahead of the best other method, query by query."""
    others = [each for each in entries if each.error is None and each is not entry]
    best = max(others, key=lambda each: float(each.values[name].mean()), default=None)
    own = None if entry.error is not None else entry.values[name]
    ahead = None if own is None or best is None else own - best.values[name]
    record: CauseMeasureRecord = {
        **_estimate(own, draws, seed),
        "best_other": None if ahead is None or best is None else best.method,
        "difference": _estimate(ahead, draws, seed),
    }
    return record


def _estimate(values: np.ndarray | None, draws: int, seed: int) -> EstimateRecord:
    if values is None:
        return {"mean": None, "se": None, "low": None, "high": None}
    # one name: the same resamples of the queries for every method and measure
    found: Interval = mean_interval(values, draws=draws, seed=seed, name="queries of causes")
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}
