"""Retrain by a user's own command or function: a mask goes in, a model comes out."""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.models.loading import Opener
from stride_cli.parallel import available_cores, die_with_parent, torch_threads
from stride_cli.training.jobs import Job, Outcome, job_key
from stride_cli.training.language_trainer import query_losses

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

# takes (D,) bool, which documents stay, and a seed; returns a model of transformers or PEFT, or a path of one
Retrain = Callable[[np.ndarray, int], Any]
_LINES = 5  # of a failed command's stderr that the error shows
_SCRIPT_BYTES = 1 << 20


@dataclass
class CommandTrainer:
    """Runs a command once a job; see `jobs.Trainer`.

    Attributes
    ----------
    words : tuple of str      the command, split as a shell would (no shell runs it). In each word {mask}
                              becomes the path of a .npy of n bools, {out} a directory to leave a checkpoint
                              in that `load_model` reads, {seed} the job's seed
    corpus : str              fingerprint of the index's corpus
    n_chunks : int
    queries : QuerySet
    opener : Opener           loads the checkpoints, which are evaluated
    keep : Path or None       checkpoints are kept here, one directory a job
    """

    words: tuple[str, ...]
    corpus: str
    n_chunks: int
    queries: QuerySet
    opener: Opener
    keep: Path | None = None
    at_once: int = 1
    peak_bytes: int = 0  # the program's own business
    on_one_gpu: int = 1
    digest: str = field(init=False)
    weights_digest: str = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps([self.words, [_script(word) for word in self.words], self.corpus, self.n_chunks])
        self.weights_digest = hashlib.sha256(text.encode()).hexdigest()
        both = self.weights_digest + self.queries.fingerprint()
        self.digest = hashlib.sha256(both.encode()).hexdigest()

    @property
    def device(self) -> str:
        return self.opener.spec.device

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run the command once per job.

        Raises
        ------
        ModelError      the command cannot be started or fails (with its last lines), or leaves no checkpoint
        """
        return [self._run(job) for job in jobs]

    def _run(self, job: Job) -> Outcome:
        kept = None if self.keep is None else self.keep / job_key(self.weights_digest, job)
        if kept is not None and kept.is_dir():
            return self._evaluate(kept)
        if kept is not None:
            make_directory(kept.parent)
        # beside its final place, so that a rename is enough
        with tempfile.TemporaryDirectory(prefix="stride-", dir=None if kept is None else kept.parent) as name:
            out = self._train(job, Path(name))
            outcome = self._evaluate(out)
            if kept is not None:
                out.rename(kept)
        return outcome

    def _train(self, job: Job, folder: Path) -> Path:
        """Train, and return the checkpoint's path, in `folder`, which is empty, or elsewhere."""
        mask, out = folder / "mask.npy", folder / "out"
        np.save(mask, np.asarray(job.mask, bool))
        out.mkdir()
        values = {"{mask}": str(mask), "{out}": str(out), "{seed}": str(job.seed)}
        words = []
        for word in self.words:
            for name, value in values.items():
                word = word.replace(name, value)
            words.append(word)
        shown = shlex.join(words)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise ModelError(
                f"the training command cannot be started: {error.strerror or error}: {shown}",
                fix="give --command a program that exists; its words are split as in a shell",
            ) from error
        with process:
            assert process.stderr is not None
            try:
                last = deque(process.stderr, maxlen=_LINES)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            told = "".join(f"\n  | {line.rstrip()}" for line in last) or " (it wrote nothing to stderr)"
            raise ModelError(
                f"the training command failed with exit code {process.returncode}: {shown}{told}",
                fix="run that command by hand until it works; what is finished is kept",
            )
        return out

    def _evaluate(self, directory: Path) -> Outcome:
        try:
            model = self.opener.load(str(directory))
        except ModelError as error:
            raise ModelError(
                f"the training left no checkpoint that can be loaded in {{out}}: {error.message}",
                fix="save the model and its tokenizer there with save_pretrained",
            ) from error
        return Outcome(query_losses(model, self.queries))


@dataclass
class FunctionTrainer(CommandTrainer):
    """Calls a function once a job, in this process; `words` are its source and the settings it uses.

    Attributes
    ----------
    function : Retrain
    owners : (n,) int64       document of each chunk
    documents : int           D, those without a chunk too
    tokenizer                 is saved beside a model that the function returns
    """

    function: Any = None
    owners: Any = None
    documents: int = 0
    tokenizer: Any = None

    def _train(self, job: Job, folder: Path) -> Path:
        from stride_cli.training.recording import refuse_other_adapters, whole_model
        from stride_cli.training.run_directory import save_model

        stays = np.ones(self.documents, bool)
        stays[self.owners[~job.mask]] = False
        with torch_threads(available_cores()):
            made = self.function(stays, job.seed)
        if isinstance(made, str | Path):
            return Path(made)
        if not hasattr(made, "save_pretrained"):
            raise UsageError(
                f"retrain returned {type(made).__name__} (expected a model of transformers, or its path)",
                fix="return trainer.model",
            )
        refuse_other_adapters(made)
        model, weights = whole_model(made)
        save_model(model, self.tokenizer, folder / "out", weights)
        return folder / "out"


def open_command_trainer(
    workspace: Workspace, queries: QuerySet, command: str | Retrain, *, keep: Path | None = None
) -> CommandTrainer:
    """Make the trainer of a command template, or of a function; see `retraining.open_trainer`.

    Raises
    ------
    UsageError      the template lacks {mask} or {out}, or cannot be split; a function has no source; the
                    index is a classifier's
    """
    refuse_classifier(workspace.index, "a command trains language models", fix="leave out --command")
    index, opener = workspace.index, Opener.like(workspace.model)
    corpus = index.attributes["fingerprints"]["corpus"]
    if not isinstance(command, str):
        made = FunctionTrainer(_identity(command), corpus, workspace.n_chunks, queries, opener, keep)
        made.function, made.tokenizer = command, workspace.model.tokenizer
        made.owners, made.documents = np.asarray(index.array("corpus/chunk_document")), index.n_documents
        return made
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--command cannot be split into words: {error}", fix="check its quotes") from error
    for name in ("{mask}", "{out}"):
        if not any(name in word for word in words):
            raise UsageError(
                f"--command has no {name}", fix="such as 'python train.py --mask {mask} --out {out}'"
            )
    return CommandTrainer(words, corpus, workspace.n_chunks, queries, opener, keep)


def _identity(function: Retrain) -> tuple[str, ...]:
    """Name a function by its source, and by what it takes from around it: values, settings, datasets."""
    try:
        used, source = inspect.getclosurevars(function), inspect.getsource(function)
    except (OSError, TypeError):
        raise UsageError(
            f"the source of retrain, {function!r}, is not known (expected a function that a file or a cell "
            "defines): what it has trained is kept under that",
            fix="def retrain(stays, seed): …",
        ) from None
    values = {**used.globals, **used.nonlocals}
    return source, *(f"{name}={_settings(each)!r}" for name, each in sorted(values.items()))


def _settings(value: Any) -> Any:
    """Return what of a value is the same in every run; of settings (a data class) no directories or seeds."""
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        value = {name: each for name, each in vars(value).items() if not name.endswith(("_dir", "seed"))}
    if isinstance(value, dict | set):
        value = sorted(value.items() if isinstance(value, dict) else value, key=repr)
    if isinstance(value, list | tuple):
        return [_settings(each) for each in value]
    plain = isinstance(value, bool | int | float | str | Path | None)
    return value if plain else getattr(value, "_fingerprint", None)  # that of a dataset


def _script(word: str) -> str:
    """Hash a file that the command names (SHA-256): a changed script is another command."""
    path = Path(word)
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= _SCRIPT_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
