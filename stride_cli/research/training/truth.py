"""Measure queries' losses after retraining on random subsets; keep them in the index's ``truth/`` group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from index_format.errors import IndexMismatch
from index_format.reader import Index
from index_format.writer import GroupWriter
from stride_cli.data.query_set import QuerySet
from stride_cli.errors import QueryError, UsageError
from stride_cli.output import note
from stride_cli.randomness import stream
from stride_cli.research.training.options import TruthOptions, per_mille
from stride_cli.training.jobs import Job, Outcome
from stride_cli.training.retraining import count_missing, open_trainer, retrain, store_of, subset_seeds

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.training.jobs import Trainer

_FIX = "stride evaluate truth --index {} --queries QUERIES.jsonl"


@dataclass(frozen=True, eq=False)
class Truth:
    """R random subsets of the chunks and the losses of models that were retrained on them.

    Attributes
    ----------
    masks : (R, n) bool                 subset r, of round(α_r · n) chunks; an imported one: of the chunks of
                                        its documents
    alpha : (R,) float64                its share of the chunks; an imported one's: of the documents of all
    losses : (R, S, Q) float64          mean nats per scored token of query q under seed s
    margins : (R, S, Q) float64 | None  classifiers: logit of the label − logsumexp of the others
    base_losses : (Q,) float64          of the model that was trained on everything
    queries : QuerySet
    seeds : (S,) int64                  of initial weights and order; never the base model's own, unless
    own_seed : bool                     that is the only one
    trainer : str                       digest of recipe, corpus and queries
    trained, reused : int               of the call that made this: models trained, and found finished
    """

    masks: np.ndarray
    alpha: np.ndarray
    losses: np.ndarray
    margins: np.ndarray | None
    base_losses: np.ndarray
    queries: QuerySet
    seeds: np.ndarray
    own_seed: bool = False
    trainer: str = ""
    trained: int = 0
    reused: int = 0

    @property
    def n_subsets(self) -> int:
        return len(self.masks)

    @property
    def n_seeds(self) -> int:
        return len(self.seeds)

    def take(self, rows: np.ndarray | Sequence[int]) -> Truth:
        """Keep the given subsets only."""
        return replace(
            self,
            masks=self.masks[rows],
            alpha=self.alpha[rows],
            losses=self.losses[rows],
            margins=None if self.margins is None else self.margins[rows],
        )

    @classmethod
    def from_index(cls, index: Index) -> Truth:
        """Read the truth of an index, every α.

        Raises
        ------
        StageMissing       there is none
        IndexMismatch      the index was appended to since
        """
        attributes = index.group_attributes("truth")  # StageMissing where there is none
        with index.understanding("truth"):
            n = int(attributes["n_chunks"])
        if n != index.n_chunks:
            raise IndexMismatch(
                f"the truth of index {index.path} is of {n:,} chunks, by now it has {index.n_chunks:,}",
                fix=_FIX.format(index.path) + " --overwrite",
            )
        with index.understanding("truth"):
            arrays = {
                name.removeprefix("truth/"): np.asarray(index.array(name)) for name in index.names("truth")
            }
            offsets = arrays["query_offsets"]
            pairs = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
            queries = QuerySet(
                [arrays["query_ids"][start:stop] for start, stop in pairs],
                [arrays["query_weights"][start:stop] for start, stop in pairs],
                attributes["names"],
                attributes["texts"],
            )
            return cls(
                masks=np.unpackbits(arrays["masks"], axis=1, count=n).astype(bool),
                alpha=np.array(arrays["alpha"]),
                losses=np.array(arrays["losses"]),
                margins=np.array(arrays["margins"]) if "margins" in arrays else None,
                base_losses=np.array(arrays["base_losses"]),
                queries=queries,
                seeds=np.asarray(attributes["seeds"], np.int64),
                own_seed=bool(attributes.get("own_seed", False)),
                trainer=str(attributes["trainer"]),
            )


def build_truth(workspace: Workspace, queries: QuerySet, options: TruthOptions = TruthOptions()) -> Truth:
    """Retrain on random subsets, and put the queries' losses into the index's truth/ group.

    There will be at least R subsets of this α and at least S seeds of every subset; what the group has
    already stays, with its row numbers. Finished models are kept in `store_of(index)`, so that an interrupted
    call goes on, and nothing is trained twice.

    Returns
    -------
    Truth      all of the group, of every α

    Raises
    ------
    UsageError      other queries or another recipe than the group's, without `overwrite`
    ModelError      the model cannot be retrained; see `open_trainer`
    and what `retrain` raises
    """
    share, own_seed = per_mille(options.alpha), options.own_seed
    trainer = open_trainer(
        workspace, queries, recipe=options.recipe, command=options.command, keep=options.keep
    )
    own = _seed_of(trainer) if own_seed else None
    old = None if options.overwrite else _stored(workspace, queries, trainer, own_seed)
    shares = [] if old is None else _per_mille(old.alpha).tolist()
    shares += [share] * max(0, options.n_subsets - shares.count(share))
    n_seeds = max(options.n_seeds, 0 if old is None else old.n_seeds)
    seeds = subset_seeds(workspace.index.seed, n_seeds) if own is None else np.array([own], np.int64)
    numbers = [shares[:row].count(value) for row, value in enumerate(shares)]
    masks = np.stack(
        [
            subset_mask(workspace.index.seed, workspace.n_chunks, value / 1000, number)
            for value, number in zip(shares, numbers, strict=True)
        ]
    )
    if old is not None and not np.array_equal(old.masks, masks[: old.n_subsets]):
        raise UsageError(
            f"the stored subsets of index {workspace.index.path} are not those that its seed gives",
            fix=_FIX.format(workspace.index.path) + " --overwrite",
        )
    n_old, s_old = (0, 0) if old is None else (old.n_subsets, old.n_seeds)
    wanted = [
        (row, s) for row in range(len(masks)) for s in range(n_seeds) if row >= n_old or s >= s_old
    ]  # whatever the group has is not asked for again, even when the store is gone
    jobs = [Job(masks[row], int(seeds[s])) for row, s in wanted]
    store = store_of(workspace.index)
    missing = count_missing(trainer, jobs, store=store)
    if missing:
        there = len(masks) * n_seeds - missing
        note(f"retraining {missing:,} models, {there:,} more are there; kept in {store}")
    outcomes = retrain(trainer, jobs, store=store, engine=options.engine, workers=options.workers)
    losses, margins = _fill(old, wanted, outcomes, (len(masks), n_seeds, len(queries)))
    truth = Truth(
        masks=masks,
        alpha=np.asarray(shares, np.float64) / 1000,
        losses=losses,
        margins=margins,
        base_losses=base_losses(workspace, queries),
        queries=queries,
        seeds=seeds,
        own_seed=own_seed,
        trainer=trainer.digest,
        trained=missing,
        reused=len(masks) * n_seeds - missing,
    )
    if old is None or jobs:
        store_truth(workspace, truth)
    return truth


def subset_mask(seed: int, n_chunks: int, alpha: float, number: int) -> np.ndarray:
    """Draw random subset `number` of a share α: (n,) bool with round(α·n) ones, at least 1, at most n − 1.

    It depends on nothing but the arguments, so that more subsets can be added later.
    """
    size = min(max(1, round(alpha * n_chunks)), max(1, n_chunks - 1))
    mask = np.zeros(n_chunks, bool)
    mask[stream(seed, "truth subset", per_mille(alpha), number).permutation(n_chunks)[:size]] = True
    return mask


def seeds_in_words(count: int, own: bool) -> str:
    """Name the seeds of a truth in words."""
    return "the model's own seed" if own else f"{count} seed{'s' if count > 1 else ''}"


def _per_mille(alpha: np.ndarray) -> np.ndarray:
    return np.round(alpha * 1000).astype(np.int64)


def _seed_of(trainer: Trainer) -> int:
    """Read the model's own seed; UsageError where it is not known."""
    recipe = getattr(trainer, "recipe", None)
    if recipe is None:
        raise UsageError(
            "--own-seed needs the recipe of the model, and --command trains it without",
            fix="drop --own-seed, and let the command start from the model's own seed",
        )
    return int(recipe.seed)


def _stored(workspace: Workspace, queries: QuerySet, trainer: Trainer, own_seed: bool) -> Truth | None:
    """Read the truth that the index has, if it can be extended."""
    index = Index.open(
        workspace.index.path
    )  # a stage that the task's own index has open would stay as it was
    if not index.has("truth"):
        return None
    old = Truth.from_index(index)
    again = "replace it with --overwrite"
    if old.queries.fingerprint() != queries.fingerprint():
        raise UsageError(
            f"index {index.path} has a truth of {len(old.queries)} other queries "
            f"({', '.join(old.queries.names[:3])} …)",
            fix=f"give the same queries to extend it, or {again}",
        )
    if old.trainer != trainer.digest:
        raise UsageError(
            f"index {index.path} has a truth that another recipe or command retrained "
            f"({old.trainer[:12]}, now {trainer.digest[:12]})",
            fix=f"give the same recipe or command to extend it, or {again}",
        )
    if old.own_seed != own_seed:
        kinds = ("from other seeds than the model's own", "from the model's own seed")
        raise UsageError(
            f"index {index.path} has a truth that was retrained {kinds[old.own_seed]}",
            fix=f"{'give' if old.own_seed else 'drop'} --own-seed to extend it, or {again}",
        )
    return old


def base_losses(workspace: Workspace, queries: QuerySet) -> np.ndarray:
    """Compute the losses of the index's own model, (Q,) float64, mean nats per scored token."""
    from stride_cli.training.language_trainer import query_losses

    return query_losses(workspace.model, queries)


def _fill(
    old: Truth | None,
    wanted: Sequence[tuple[int, int]],
    outcomes: Sequence[Outcome],
    shape: tuple[int, int, int],
) -> tuple[np.ndarray, np.ndarray | None]:
    """Join old and new losses and margins."""
    losses = np.full(shape, np.nan)
    has_margins = outcomes[0].margins is not None if outcomes else old is not None and old.margins is not None
    margins = np.full(shape, np.nan) if has_margins else None
    if old is not None:
        losses[: old.n_subsets, : old.n_seeds] = old.losses
        if margins is not None and old.margins is not None:
            margins[: old.n_subsets, : old.n_seeds] = old.margins
    for (row, s), outcome in zip(wanted, outcomes, strict=True):
        losses[row, s] = outcome.losses
        if margins is not None:
            margins[row, s] = outcome.margins
    return losses, margins


def match_queries(queries: QuerySet, known: QuerySet) -> np.ndarray:
    """Find each query in a set that was measured, by its tokens and scored positions.

    Returns
    -------
    (len(queries),) int64

    Raises
    ------
    QueryError      a query is not among the measured ones; names it
    """
    positions = {_content(known, row): row for row in reversed(range(len(known)))}
    found = []
    for row, name in enumerate(queries.names):
        position = positions.get(_content(queries, row))
        if position is None:
            raise QueryError(
                f"query '{name}' is not among the {len(known)} that the retrained models were measured on",
                fix="leave --queries out, or measure these: stride evaluate truth --queries FILE",
            )
        found.append(position)
    return np.array(found, np.int64)


def _content(queries: QuerySet, row: int) -> tuple[bytes, bytes]:
    return queries.ids[row].tobytes(), (queries.weights[row] > 0).tobytes()


def own_inputs(model: AttributableModel, queries: QuerySet) -> tuple[QuerySet, np.ndarray | None]:
    """Keep queries of a file of their own readable when the model is opened again.

    Returns
    -------
    (queries, inputs (A, …) float64 or None) : the inputs that are in no row of the index's file, each once,
    and the queries numbered as a fresh table numbers them once these inputs are the first that it is given
    """
    table = model.table
    if table is None:
        return queries, None
    first = table.n_chunks + len(table.data)
    numbers = [int(ids[0]) for ids in queries.ids]
    added = list(dict.fromkeys(number for number in numbers if number >= first))
    if not added:
        return queries, None
    place = {number: first + row for row, number in enumerate(added)}
    ids = [np.array([place.get(int(ids[0]), int(ids[0])), int(ids[1])]) for ids in queries.ids]
    renumbered = QuerySet(ids, queries.weights, queries.names, queries.texts)
    return renumbered, np.asarray(table.take(np.array(added)), np.float64)


def store_truth(workspace: Workspace, truth: Truth) -> None:
    """Put a truth into the index's truth/ group, in place of what is there."""
    path = workspace.index.path
    queries, inputs = own_inputs(workspace.model, truth.queries)
    packed = np.packbits(truth.masks, axis=1)
    key = hashlib.sha256(truth.trainer.encode() + packed.tobytes() + truth.seeds.tobytes()).hexdigest()
    lengths = [len(ids) for ids in queries.ids]
    # all that is in it is in the store as well: an unfinished write is not worth keeping
    with GroupWriter(path, "truth", key, overwrite=True) as writer:
        writer.append("truth/masks", packed)
        writer.append("truth/alpha", truth.alpha)
        writer.append("truth/losses", truth.losses)
        if truth.margins is not None:
            writer.append("truth/margins", truth.margins)
        writer.append("truth/base_losses", truth.base_losses)
        writer.append("truth/query_ids", np.concatenate(queries.ids))
        writer.append("truth/query_offsets", np.cumsum([0, *lengths], dtype=np.int64))
        writer.append("truth/query_weights", np.concatenate(queries.weights))
        if inputs is not None:
            writer.append("truth/query_inputs", inputs)
        writer.publish(
            {
                "n_chunks": int(truth.masks.shape[1]),
                "seeds": truth.seeds.tolist(),
                "own_seed": truth.own_seed,
                "names": queries.names,
                "texts": queries.texts,
                "trainer": truth.trainer,
            }
        )
