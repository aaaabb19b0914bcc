"""Retrain by a user's own command: a mask goes in, a checkpoint comes out."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from index_format.durable import make_directory
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.kinds import refuse_classifier
from stride_cli.models.loading import load_model
from stride_cli.models.spec import ModelSpec
from stride_cli.parallel import die_with_parent
from stride_cli.training.jobs import Job, Outcome, job_key
from stride_cli.training.language_trainer import query_losses

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

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
    device, dtype : str       what checkpoints are evaluated on
    keep : Path or None       checkpoints are kept here, one directory a job
    """

    words: tuple[str, ...]
    corpus: str
    n_chunks: int
    queries: QuerySet
    device: str = "cpu"
    dtype: str = "auto"
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
            mask, out = Path(name) / "mask.npy", Path(name) / "out"
            np.save(mask, np.asarray(job.mask, bool))
            out.mkdir()
            self._execute({"{mask}": str(mask), "{out}": str(out), "{seed}": str(job.seed)})
            outcome = self._evaluate(out)
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
                out.rename(kept)
        return outcome

    def _execute(self, values: dict[str, str]) -> None:
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

    def _evaluate(self, directory: Path) -> Outcome:
        try:
            model = load_model(ModelSpec(directory, device=self.device, dtype=self.dtype))
        except ModelError as error:
            raise ModelError(
                f"the training command left no checkpoint that can be loaded in {{out}}: {error.message}",
                fix="save the model and its tokenizer there with save_pretrained",
            ) from error
        return Outcome(query_losses(model, self.queries))


def open_command_trainer(
    workspace: Workspace, queries: QuerySet, command: str, *, keep: Path | None = None
) -> CommandTrainer:
    """Make the trainer of a command template; see `CommandTrainer` and `retraining.open_trainer`.

    Raises
    ------
    UsageError      the template lacks {mask} or {out}, cannot be split, or the index is a classifier's
    """
    refuse_classifier(workspace.index, "a command trains language models", fix="leave out --command")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--command cannot be split into words: {error}", fix="check its quotes") from error
    for name in ("{mask}", "{out}"):
        if not any(name in word for word in words):
            raise UsageError(
                f"--command has no {name}",
                fix="for example --command 'python train.py --mask {mask} --out {out}'",
            )
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return CommandTrainer(
        words,
        workspace.index.attributes["fingerprints"]["corpus"],
        workspace.n_chunks,
        queries,
        str(workspace.model.device),
        names.get(str(workspace.model.dtype), "auto"),
        keep,
    )


def _script(word: str) -> str:
    """Hash a file that the command names (SHA-256): a changed script is another command."""
    path = Path(word)
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= _SCRIPT_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
