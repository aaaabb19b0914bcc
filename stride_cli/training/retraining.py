"""Retrain models on subsets: jobs in, outcomes out, each kept as soon as it is there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stride_cli.errors import NumericalError, UsageError
from stride_cli.output import progress
from stride_cli.parallel import Workers, check_engine, default_workers
from stride_cli.randomness import stream_key
from stride_cli.training.jobs import Job, Outcome, OutcomeStore, Trainer, job_key

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.language_recipe import Recipe
    from stride_cli.training.command_trainer import Retrain


def open_trainer(
    workspace: Workspace,
    queries: QuerySet,
    *,
    recipe: Recipe | str | Path | None = None,
    command: str | Retrain | None = None,
    keep: Path | None = None,
) -> Trainer:
    """Make the trainer of a workspace's model.

    Parameters
    ----------
    workspace : Workspace
    queries : QuerySet            whose losses are wanted of every retrained model
    recipe : Recipe or path of one, optional
        Default: the recipe stored with the model.
    command : optional            train by this command or function instead; see `command_trainer`
    keep : Path, optional         keep the retrained weights here, and use those that are there already

    Raises
    ------
    ModelError      there is no recipe, or it is of another corpus, block size or tokenizer than the index
    UsageError      both a recipe and a command are given; what `open_command_trainer` refuses
    """
    # imported here: each brings the libraries of its kind of model
    if command is not None:
        from stride_cli.training.command_trainer import open_command_trainer

        if recipe is not None:
            raise UsageError("a recipe and a command both say how to train", fix="give one of the two")
        return open_command_trainer(workspace, queries, command, keep=keep)
    if workspace.model.kind == "classifier":
        # research retrains classifiers, many at once; the product does not import it
        module = import_module("stride_cli.research.training.classifier_trainer")
        trainer: Trainer = module.open_classifier_trainer(workspace, queries, recipe=recipe)
        return trainer
    from stride_cli.training.language_trainer import open_language_trainer

    return open_language_trainer(workspace, queries, recipe=recipe, keep=keep)


def store_of(index: Index) -> Path:
    """Locate the outcomes of an index: INDEX.retraining beside it; IndexReadOnly for a URL or zip."""
    return index.directory.with_name(index.directory.name + ".retraining")


def retrain(
    trainer: Trainer, jobs: Sequence[Job], *, store: Path, engine: str = "local", workers: int | None = None
) -> list[Outcome]:
    """Return the outcomes of jobs, in order; those in the store are not trained again.

    Every group of jobs is kept as soon as it is done, so that a run that was interrupted anywhere goes on
    with what is missing, and ends with the same bits.

    Parameters
    ----------
    trainer : Trainer
    jobs : sequence of Job      equal ones are trained once
    store : Path                directory of the outcomes, as from `store_of`
    engine : "local" or "ray"   processes of this machine, or tasks of a Ray cluster
    workers : int, optional     models (or groups of them) trained at the same time; default: all that the
                                machine, or the cluster, has room for

    Raises
    ------
    UsageError        an unknown engine, or a mask of another length than the corpus
    NumericalError    a retrained model's loss is not finite
    IndexBusy         another process is using the store
    and what training raises
    """
    check_engine(engine)
    if any(job.mask.shape != (trainer.n_chunks,) for job in jobs):
        raise UsageError(f"a mask lacks the shape of the corpus, ({trainer.n_chunks},)")
    keys = [job_key(trainer.digest, job) for job in jobs]
    with OutcomeStore(store) as kept:
        # 1. What is there already
        found = {key: outcome for key in set(keys) if (outcome := kept.read(key)) is not None}
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in found}
        if not missing:
            return [found[key] for key in keys]
        # 2. Groups of jobs, as a run that was never interrupted has them
        if engine == "local":
            workers = workers or default_workers(
                device=trainer.device,
                peak_bytes=trainer.peak_bytes,
                most_on_gpu=trainer.on_one_gpu,
                doing="training one",
            )
        groups = _groups(list(dict.fromkeys(keys)), max(1, trainer.at_once), workers)
        groups = [group for whole in groups if (group := [name for name in whole if name in missing])]
        # 3. Train, and keep each group as soon as it is done
        count = workers and min(workers, len(groups))
        with (
            progress("retraining", len(keys), unit="models") as bar,
            Workers(
                trainer.run, count, engine=engine, device=trainer.device, peak_bytes=trainer.peak_bytes
            ) as pool,
        ):
            bar.advance(len(keys) - len(missing))
            for number, outcomes in pool.as_done([missing[key] for key in group] for group in groups):
                if not all(np.isfinite(outcome.losses).all() for outcome in outcomes):
                    raise NumericalError(
                        "a retrained model's loss on a query is not finite",
                        fix="train the base model with a lower --lr, and build the index again",
                    )
                kept.add(groups[number], outcomes)
                found.update(zip(groups[number], outcomes, strict=True))
                bar.advance(len(outcomes))
    return [found[key] for key in keys]


def _groups(names: list[str], most: int, workers: int | None) -> list[list[str]]:
    """Group jobs that are trained together, so that no worker waits while another has a whole group left. All
    jobs are grouped, not the missing ones: a resumed run has the same groups."""
    count = -(-len(names) // most)
    if workers is not None:  # each as many groups as the others
        count = min(len(names), -(-count // workers) * workers)
    ends = [len(names) * number // count for number in range(count + 1)] if count else []
    return [names[start:stop] for start, stop in itertools.pairwise(ends)]


def subset_seeds(seed: int, count: int) -> np.ndarray:
    """Draw seeds of retraining, (count,) int64 below 2³¹; a larger count begins with the same ones."""
    keys = [stream_key(seed, "truth seed", number) % (1 << 31) for number in range(count)]
    return np.asarray(keys, np.int64)


def count_missing(trainer: Trainer, jobs: Sequence[Job], *, store: Path) -> int:
    """Count the distinct models that `retrain` would train."""
    keys = {job_key(trainer.digest, job) for job in jobs}
    with OutcomeStore(store) as kept:
        return sum(kept.read(key) is None for key in keys)
