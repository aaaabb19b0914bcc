"""Responses that settings are judged by: losses after the model was trained further on random halves.

The model goes on from its own weights, on each of R random halves of the corpus, for a few passes; queries
are in none of the halves. It is a stand-in for retraining: the optimizer is AdamW whatever trained the model,
a few passes forget little of the other half, and noise between halves is not averaged over seeds.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.data.batches import ChunkReader
from stride_cli.data.query_files import read_queries
from stride_cli.data.workspace import WorkspacePath
from stride_cli.errors import UsageError
from stride_cli.models.kinds import Kind
from stride_cli.randomness import stream
from stride_cli.training.jobs import Job, Outcome

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

EPOCHS: dict[Kind, float] = {"language": 2.0, "classifier": 10.0}
_STEP = 0.03  # of a typical weight that AdamW moves each in a step, at first
_BATCHES = 64  # in a pass over a subset, of so many of its longest chunks at least
_FEWEST_CHUNKS = 4
MOST_TOKENS = 4096  # of a batch of further training


class WithheldChunks(ChunkReader):
    """Chunks of an index with some of them unscored, so that they leave no trace in operators.

    Parameters
    ----------
    withheld : (m,) int64      chunks without loss weights
    """

    def __init__(self, index: Index, withheld: np.ndarray) -> None:
        super().__init__(index)
        self.loss_start = np.array(self.loss_start)
        self.loss_start[withheld] = self.lengths[withheld]


def withheld_queries(workspace: Workspace, count: int) -> tuple[QuerySet, np.ndarray]:
    """Draw chunks of the corpus as queries; also their numbers, (m,) int64, ascending.

    Raises
    ------
    UsageError      that would be more than a quarter of the chunks with a scored token
    """
    from stride_cli.data.query_set import QuerySet

    order = stream(workspace.seed, "tuning queries").permutation(workspace.n_chunks)
    scored = [int(row) for row in order if workspace.chunks.chunk(int(row))[1][1:].any()]
    if not 1 <= count <= len(scored) // 4:
        raise UsageError(
            f"--held-out is {count}, and the index has {len(scored)} chunks with a scored token "
            f"(expected 1 to {len(scored) // 4}, a quarter)",
            fix="give fewer, or queries of your own: --queries FILE",
        )
    rows = np.sort(scored[:count]).astype(np.int64)
    pairs = [workspace.chunks.chunk(int(row)) for row in rows]
    queries = QuerySet(
        [np.asarray(ids, np.int64) for ids, _ in pairs],
        [weights for _, weights in pairs],
        [f"chunk {row}" for row in rows],
    )
    return queries, rows


def random_halves(workspace: Workspace, withheld: np.ndarray, count: int) -> np.ndarray:
    """Draw random halves of the chunks that are not withheld, (R, n) bool; more can be added later."""
    rest = np.setdiff1d(np.arange(workspace.n_chunks), withheld)
    masks = np.zeros((count, workspace.n_chunks), bool)
    for number, mask in enumerate(masks):
        order = stream(workspace.seed, "tuning halves", number).permutation(len(rest))
        mask[rest[order[: len(rest) // 2]]] = True
    return masks


@dataclass
class ContinuedTrainer:
    """Trains the index's model further on subsets; see `stride_cli.training.jobs.Trainer`.

    Attributes
    ----------
    where : WorkspacePath             opened anew in every process: the weights change
    queries : QuerySet           of a classifier, rows of its own file
    n_chunks : int               n
    fingerprints : str           of model and corpus
    epochs : float               passes over the subset
    lr : float, optional         of AdamW, falling to zero; default: 3 % of a typical weight
    source : Path, optional      file of the queries: a classifier has to read it to know their inputs
    peak_bytes : int             about what training takes; 0 = not known
    """

    where: WorkspacePath
    queries: QuerySet
    n_chunks: int
    fingerprints: str
    epochs: float
    lr: float | None = None
    source: Path | None = None
    peak_bytes: int = 0
    at_once: int = 1
    on_one_gpu: int = 1
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = ["continued/1", self.fingerprints, self.n_chunks, self.epochs, self.lr]
        text = json.dumps([*parts, self.queries.fingerprint()])
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._opened: tuple[Workspace, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def device(self) -> str:
        return self.where.model.device

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Train further on each job's chunks, in order, and measure the queries' losses."""
        from stride_cli.training.language_trainer import query_losses

        if self._opened is None:
            workspace = self.where.open()
            if self.source is not None and workspace.model.table is not None:  # inputs by number
                read_queries(workspace, self.source)
            self._opened = workspace, copy.deepcopy(workspace.model.model.state_dict())
        workspace, weights = self._opened
        found = []
        for job in jobs:
            workspace.model.model.load_state_dict(weights)
            self._train(workspace, job)
            found.append(Outcome(query_losses(workspace.model, self.queries)))
        return found

    def _train(self, workspace: Workspace, job: Job) -> None:
        import torch

        model: Any = workspace.model
        parameters = [value for value in model.model.parameters() if value.is_floating_point()]
        for value in parameters:
            value.requires_grad_(True)
        lr = self.lr or _STEP * _typical_weight(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        rows = np.flatnonzero(job.mask)
        tokens = int(workspace.chunks.lengths[rows].sum())
        least = _FEWEST_CHUNKS * int(workspace.chunks.lengths[rows].max(initial=1))
        at_once = int(np.clip(tokens // _BATCHES, least, max(least, MOST_TOKENS)))
        plan: list[np.ndarray] = []
        generator = stream(job.seed, "continued training")
        left = self.epochs
        while left > 0:
            order = rows[generator.permutation(len(rows))]
            plan += workspace.chunks.plan(at_once, order[: max(1, round(min(1.0, left) * len(order)))])
            left -= 1
        for step, group in enumerate(plan):
            batch = workspace.chunks.batch(group)
            ids = batch.ids.to(model.device)
            at, before = torch.nonzero(batch.weights[:, 1:], as_tuple=True)
            if len(at) == 0:
                continue
            for entry in optimizer.param_groups:
                entry["lr"] = lr * (1 - step / len(plan))
            final = model.continue_from(model.hidden(ids, 0), 0)
            logits = model.logits(final[at, before]).float()  # (N, V)
            loss = torch.nn.functional.cross_entropy(logits, ids[at, before + 1])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()


def _typical_weight(parameters: Sequence[Any]) -> float:
    """Compute the median over weight matrices of the root mean square of their entries."""
    matrices = [value for value in parameters if value.ndim > 1] or list(parameters)
    return float(np.median([value.detach().double().square().mean().sqrt().item() for value in matrices]))
