"""Retrain without some documents, and without as many random ones: did a prediction depend on them?"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import replace_file
from stride_cli.errors import UsageError
from stride_cli.output import duration, note
from stride_cli.prove.options import HitOptions
from stride_cli.randomness import stream
from stride_cli.schema.verify_records import Interval
from stride_cli.training.jobs import Job, job_key
from stride_cli.training.retraining import count_missing, retrain, subset_seeds

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.schema.verify_records import RunRecord
    from stride_cli.training.jobs import Trainer

LEVEL = 0.95  # of intervals; of a hit's, over all looks at it together
_FIRST, _LATER = 0.8, 0.1  # what the first look spends of 1 − LEVEL, and a later one of the look before it
DEPENDED, NO_EVIDENCE, TOO_FEW = "depended", "no_evidence", "too_few_runs"
_NEAR = 32  # documents of similar length that a random one is drawn from, at least
_NEAR_SHARE = 50  # or one in so many of all
_SLACK = 0.02  # of the tokens that random documents may have more or fewer
_AMONG = 4  # where none is that near, one of so many is taken, so that chance still has a say
_MOST_SEEDS = 1000


def t_interval(values: np.ndarray, level: float = LEVEL) -> Interval:
    """Give the mean of independent values (S,) Student's t interval; NaN where S is 1."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, np.nan, np.nan, np.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(t.isf((1 - level) / 2, len(values) - 1)) * error
    return Interval(mean, error, mean - reach, mean + reach)


def level_of(look: int) -> float:
    """Return the level of the intervals of a look, 1 the first: 96 %, 99.6 %, 99.96 % …

    Whoever looks again with more seeds until it tells looks several times. The looks spend less than
    1 − LEVEL together, so that they mislead no more often than one look at LEVEL would.
    """
    return 1 - (1 - LEVEL) * _FIRST * _LATER ** (look - 1)


@dataclass(frozen=True, eq=False)
class HitCheck:
    """Losses of one response under models retrained without certain documents; S seeds, R random draws each.

    Every seed has random draws of its own, so that the S differences are independent of each other in the
    training noise and in the draws, and Student's t over them covers both.

    Attributes
    ----------
    seeds : (S,) int64
    full : (S,) float64                loss with every document, mean nats per scored token
    without : (S,) float64             without the documents in question
    random : (S, R) float64            without as many random ones
    removed_tokens : int               tokens of the documents in question
    random_tokens : (S, R) int64       tokens of the random ones
    effect : float                     smallest rise of the loss that would matter, nats
    trained, reused : int              models trained by this call, and found finished
    compared : bool                    the losses are −log-odds, nats, of what was said against something else
    look : int                         how many times these documents were looked at, with this one
    """

    seeds: np.ndarray
    full: np.ndarray
    without: np.ndarray
    random: np.ndarray
    removed_tokens: int
    random_tokens: np.ndarray
    effect: float = HitOptions.effect
    trained: int = 0
    reused: int = 0
    compared: bool = False
    look: int = 1

    @cached_property
    def attributed(self) -> Interval:
        """Rise of the loss without the documents, against the same seed with all of them."""
        return t_interval(self.without - self.full, self.level)

    @cached_property
    def by_chance(self) -> Interval:
        """Rise of the loss without random documents."""
        return t_interval(self.random.mean(axis=1) - self.full, self.level)

    @cached_property
    def difference(self) -> Interval:
        """Rise of the loss by removing the documents beyond that by removing random ones, paired by seed."""
        return t_interval(self.without - self.random.mean(axis=1), self.level)

    @property
    def level(self) -> float:
        """Of the intervals; those of all looks hold together with LEVEL."""
        return level_of(self.look)

    @property
    def exceeded(self) -> float:
        """Share of the random removals that raise the loss less than the documents' removal does, 0 … 1."""
        return float((self.random < self.without[:, None]).mean())

    @property
    def verdict(self) -> str:
        """ "depended": the interval of the difference lies above zero. "no_evidence": it does not, and lies
        below `effect`. "too_few_runs": it holds zero and `effect` both, or there is none."""
        found = self.difference
        if not np.isfinite(found.low):
            return TOO_FEW
        if found.low > 0:
            return DEPENDED
        return NO_EVIDENCE if found.high < self.effect else TOO_FEW

    @property
    def seeds_needed(self) -> int | None:
        """Count about how many seeds bring the interval of the next look within ± effect / 2, or, should the
        mean stay, above zero; None with one, or beyond 1,000."""
        from scipy.stats import t

        count = len(self.seeds)
        if count < 2:
            return None
        more = np.arange(count + 1, _MOST_SEEDS + 1)
        spread = self.difference.se * math.sqrt(count)
        half = t.isf((1 - level_of(self.look + 1)) / 2, more - 1) * spread / np.sqrt(more)
        enough = (half <= self.effect / 2) | (half < self.difference.mean)
        return int(more[np.argmax(enough)]) if enough.any() else None

    def sentence(self) -> str:
        """Put the verdict in words, with the numbers it rests on."""
        found, count = self.difference, len(self.seeds)
        unit = "nats" if self.compared else "nats a token"
        if count < 2:
            about = f"difference {found.mean:+.3f} {unit}, removing them against removing random ones"
            return f"Too few runs to tell: with one seed there is no interval ({about})."
        numbers = (
            f"{found.mean:+.3f} {unit}, {100 * self.level:g}% interval {found.low:+.3f} to "
            f"{found.high:+.3f}, {count} seeds × {self.random.shape[1]} random draws, look {self.look}"
        )
        if self.verdict == DEPENDED:
            moves = f"its {'log-odds fall' if self.compared else 'loss rises'} by more than without as many"
            return f"The prediction depended on them: without them {moves} random documents ({numbers})."
        if self.verdict == NO_EVIDENCE:
            lower, rise = ("log-odds are higher", "fall") if self.compared else ("loss is lower", "rise")
            found_out = f"its {lower} without them than without random ones"
            if found.high >= 0:
                least = f"{self.effect:g} nats or more beyond that of random ones"
                found_out = f"a {rise} of {least} is ruled out"
            return f"No evidence that the prediction depended on them: {found_out} ({numbers})."
        more = self.seeds_needed or f"more than {_MOST_SEEDS:,}"
        return (
            f"Too few runs to tell: neither no effect nor one of {self.effect:g} nats is ruled out "
            f"({numbers}); about {more} seeds would tell."
        )

    def runs(self) -> list[RunRecord]:
        """List every retrained model: seed, what was removed, its tokens, loss, rise of the loss."""
        rows: list[RunRecord] = []
        for place, seed in enumerate(self.seeds.tolist()):
            full = float(self.full[place])
            models = [("nothing", 0, 0, full), ("hits", 0, self.removed_tokens, float(self.without[place]))]
            drawn = zip(self.random_tokens[place].tolist(), self.random[place].tolist(), strict=True)
            models += [("random", draw, *each) for draw, each in enumerate(drawn)]
            for what, draw, tokens, loss in models:
                about: Any = {"seed": seed, "removed": what, "draw": draw, "tokens": tokens}
                rows.append(about | {"loss": loss, "rise": loss - full})
        return rows


def matched_documents(lengths: np.ndarray, chosen: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw as many other documents, at random, with nearly as many tokens in all.

    Each is drawn from those nearest in length to one of the chosen; then, in turn, each is exchanged within
    its neighbourhood for one of those that bring the sum nearest, until it is within 2 %.

    Parameters
    ----------
    lengths : (D,) int64      tokens of every document
    chosen : (m,) int64       documents, each once
    generator : numpy Generator

    Returns
    -------
    (m,) int64      documents, none of them chosen

    Raises
    ------
    UsageError      the documents are not more than twice as many as the chosen
    """
    if len(lengths) <= 2 * len(chosen):
        raise UsageError(
            f"removing {len(chosen)} documents, and as many random ones, takes more than {2 * len(chosen)}; "
            f"the index has {len(lengths)}",
            fix=f"try --top {max(1, (len(lengths) - 1) // 2)}",
        )
    # 1. the other documents by length; lots before sorting: among those of one length, which are near is no
    # matter of their number
    free = np.ones(len(lengths), bool)
    free[chosen] = False
    others = np.flatnonzero(free)
    others = others[generator.permutation(len(others))]
    others = others[np.argsort(lengths[others], kind="stable")]
    width = max(_NEAR, 2 * len(chosen), len(others) // _NEAR_SHARE)
    sorted_lengths = lengths[others]
    # 2. for each of the chosen one of its neighbourhood; the long ones, which have few neighbours, first
    taken: list[int] = []
    near = []
    for document in chosen[np.argsort(-lengths[chosen], kind="stable")]:
        place = (
            sum(np.searchsorted(sorted_lengths, lengths[document], side) for side in ("left", "right")) // 2
        )
        start = int(np.clip(place - width // 2, 0, max(0, len(others) - width)))
        near.append(others[start : start + width])
        left = near[-1][~np.isin(near[-1], taken)]
        taken.append(int(left[generator.integers(len(left))]))
    # 3. in turn, one is exchanged for another of its neighbourhood that brings the sum nearer
    found = np.array(taken, np.int64)
    total = int(lengths[chosen].sum())
    slack = round(_SLACK * total)
    for place in generator.permutation(len(found)):
        missing = total - int(lengths[found].sum())
        left = near[place][~np.isin(near[place], found)]
        if abs(missing) <= slack or len(left) == 0:
            continue
        off = np.abs(missing - (lengths[left] - lengths[found[place]]))
        enough = max(slack, int(np.partition(off, min(_AMONG, len(off)) - 1)[min(_AMONG, len(off)) - 1]))
        better = left[off <= min(enough, abs(missing) - 1)]
        if len(better):
            found[place] = better[generator.integers(len(better))]
    return found


def verify_documents(
    trainer: Trainer,
    documents: Sequence[int] | np.ndarray,
    check: HitOptions,
    *,
    chunk_document: np.ndarray,
    chunk_lengths: np.ndarray,
    store: Path,
    seed: int = 0,
    shares: Sequence[float] = (1.0,),
) -> HitCheck:
    """Retrain with all documents, without the given ones, and without as many random ones, from every seed.

    Trains S (2 + R) models; those that the store holds are not trained again.

    Parameters
    ----------
    trainer : Trainer                  whose queries are the response, or its parts
    documents : (m,) ints              each once
    check : HitOptions                 S and R, the smallest rise that would matter, where to train
    chunk_document : (n,) int64        document of each chunk
    chunk_lengths : (n,) int64         its tokens
    store : Path                       as for `retraining.retrain`
    seed : int                         names the seeds of retraining (`subset_seeds`) and the random sets
    shares : one a query               the loss is the sum of theirs times these; negative: of what the
                                       response is compared with

    Raises
    ------
    UsageError      too few documents; what `retrain` raises
    """
    chosen = np.asarray(documents, np.int64)
    if len(chosen) == 0 or len(np.unique(chosen)) < len(chosen):
        said = "the documents to remove must be one or more, each given once"
        raise UsageError(said, fix="name other documents (--documents)")
    seeds = subset_seeds(seed, check.seeds)
    lengths = np.bincount(chunk_document, weights=chunk_lengths).astype(np.int64)
    # of every seed: with all documents, without the given ones, and without each random set
    jobs, tokens = [], []
    for number, start in enumerate(seeds.tolist()):
        removed = [np.zeros(0, np.int64), chosen]
        for draw in range(check.random):
            generator = stream(seed, "verify-hit random", number, draw)
            removed.append(matched_documents(lengths, chosen, generator))
        jobs += [Job(~np.isin(chunk_document, rows), start) for rows in removed]
        tokens.append([int(lengths[rows].sum()) for rows in removed])
    missing = count_missing(trainer, jobs, store=store)
    takes = (
        f", {duration(missing * timed())}" if missing and (timed := getattr(trainer, "seconds", None)) else ""
    )
    note(f"{len(jobs):,} models, {missing:,} of them to be retrained{takes}; kept in {store}")
    outcomes = retrain(trainer, jobs, store=store, engine=check.engine, workers=check.workers)
    losses = np.array([outcome.losses @ np.array(shares) for outcome in outcomes]).reshape(len(seeds), -1)
    # one seed has no interval: it is no look
    look = _count_looks(store, job_key(trainer.digest, jobs[1]), check) if len(seeds) > 1 else 1
    return HitCheck(
        seeds=seeds,
        full=losses[:, 0],
        without=losses[:, 1],
        random=losses[:, 2:],
        removed_tokens=int(lengths[chosen].sum()),
        random_tokens=np.array(tokens)[:, 2:],
        effect=check.effect,
        trained=missing,
        reused=len(jobs) - missing,
        compared=min(shares) < 0,
        look=look,
    )


def _count_looks(store: Path, key: str, check: HitOptions) -> int:
    """Keep in the store that these documents are looked at; count the looks up to the first of this kind."""
    name = f"{check.seeds}x{check.random}"
    looks = [path.name.rpartition(".")[2] for path in sorted(store.glob(f"{key}.look*"))]
    if name not in looks:
        looks.append(name)
        replace_file(store / f"{key}.look{len(looks):03}.{name}", b"")
    return looks.index(name) + 1


def find_documents(index: Index, ids: Sequence[str]) -> np.ndarray:
    """Find the numbers of documents by their ids, in the order given: (m,) int64.

    Raises
    ------
    UsageError      an id is not in the index (names the nearest), is given twice, or there is none
    """
    if not ids:
        raise UsageError("no document is given", fix="for example --documents doc-1,doc-2")
    wanted = dict.fromkeys(ids)
    if len(wanted) < len(ids):
        twice = next(name for name in wanted if list(ids).count(name) > 1)
        raise UsageError(f"document '{twice}' is given twice", fix="give each document once")
    known = {index.document_id(number): number for number in range(index.n_documents)}
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            guess = f" (did you mean '{near[0]}'?)" if near else ""
            said = f"there is no document '{name}' in index '{index.path}'{guess}"
            raise UsageError(said, fix="take the ids from the hits of stride query")
    return np.array([known[name] for name in ids], np.int64)
