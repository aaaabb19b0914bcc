"""Make a model in OUT.partial, which survives a kill and becomes OUT by one rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from index_format.durable import (
    DirectoryLock,
    copy_file,
    make_directory,
    put_in_place,
    replace_file,
    storage,
    sync_files,
    sync_tree,
)
from stride_cli.errors import ModelError, UsageError
from stride_cli.models.configuration import quiet_transformers
from stride_cli.models.language.language_recipe import FILE_NAME, Recipe

LOG_NAME = "training_log.jsonl"
_REQUEST = "training.json"


class RunDirectory:
    """OUT.partial while a model is trained: the request, the state to resume from, and the model so far.

    Parameters
    ----------
    out : Path             where the model goes
    request : mapping      all that was asked for, corpus fingerprint included; JSON values. A partial run is
                           gone on with only if its request is the same
    overwrite : bool       discard another request's partial run, and replace what is at `out` once the new
                           model is whole

    Raises
    ------
    UsageError      something is at `out`, or the unfinished run there is of another request
    IndexBusy       another process is training there
    """

    def __init__(self, out: Path, request: Mapping[str, Any], *, overwrite: bool) -> None:
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.model = self.partial / "model"
        self.tokenizer = self.partial / "tokenizer"
        self.state = self.partial / "state.pt"
        self._overwrite = overwrite
        refuse_existing(self.out, overwrite=overwrite)
        text = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        self._lock = DirectoryLock(self.partial)
        try:
            self.resumes = self._adopt(key, request)
        except BaseException:
            self._lock.release()
            raise

    def _adopt(self, key: str, request: Mapping[str, Any]) -> bool:
        """Take up a run of this request (True), or start an empty one (False).

        The request is written before anything else: where it is torn, nothing has been trained.
        """
        file = self.partial / _REQUEST
        found: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(file.read_text(encoding="utf-8"))
        if found.get("key") == key:
            return True
        if found and not self._overwrite:
            raise UsageError(
                f"{self.partial} is an unfinished training with other settings or another corpus"
                f"{_difference(found['request'], request)}",
                fix="rerun it with the same settings to finish it, or --overwrite to discard it",
            )
        for entry in self.partial.iterdir():
            if entry.name != DirectoryLock.NAME:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        make_directory(self.model)
        replace_file(file, json.dumps({"key": key, "request": request}, indent=1).encode())
        return False

    def save_recipe(self, recipe: Recipe) -> None:
        """Record what defaults were resolved to, so that a resumed run does not choose again."""
        replace_file(self.model / FILE_NAME, recipe.to_json().encode())

    def load_recipe(self) -> Recipe | None:
        """Load the recipe of the run that is resumed; None if it did not get that far."""
        file = self.model / FILE_NAME
        try:
            return Recipe.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValueError as error:
            raise ModelError(
                f"{file} cannot be read: {error}", fix="start afresh with --overwrite"
            ) from error

    @staticmethod
    def marks(steps: int, checkpoints: int) -> set[int]:
        """Space checkpoints evenly: the last of `checkpoints` + 1 equal parts ends with the model itself."""
        parts = checkpoints + 1
        return {round(steps * part / parts) for part in range(1, parts)} - {0}

    def checkpoint(self, step: int) -> Path:
        """Name the directory of a checkpoint, and remove what a kill left of it."""
        directory = self.model / "checkpoints" / f"step-{step:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def clear(self) -> None:
        """Remove what a kill may have left of the finished model: all but the recipe and the checkpoints."""
        for entry in self.model.iterdir():
            if entry.is_file() and entry.name != FILE_NAME:
                entry.unlink()

    def save_log(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the loss curve, as JSON Lines beside the weights."""
        text = "".join(json.dumps(point) + "\n" for point in log)
        replace_file(self.model / LOG_NAME, text.encode())

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Keep a tokenizer that was trained for the run; the model will have these very files.

        Read and saved again, as a resumed run would have to, they would be written differently.
        """
        shutil.rmtree(self.tokenizer, ignore_errors=True)
        make_directory(self.tokenizer)
        with storing(self.tokenizer):
            tokenizer.save_pretrained(self.tokenizer)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer that was kept; ModelError if it cannot be read."""
        from transformers import AutoTokenizer

        kept = self.tokenizer
        try:
            return AutoTokenizer.from_pretrained(kept, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ModelError(
                f"the tokenizer of the unfinished training in {kept} cannot be read",
                fix="start afresh with --overwrite",
            ) from error

    def publish(self) -> None:
        """Make the model appear at `out`, whole, and remove what it was made with."""
        sync_files(self.model)
        sync_tree(self.model)
        put_in_place(self.model, self.out, self.partial)
        shutil.rmtree(self.partial)
        self._lock.release()

    def release(self) -> None:
        """Let go of what is unfinished, for another to go on with."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise UsageError when something is at `out` and may not be replaced."""
    if overwrite and out.exists() and not _is_model(out):
        raise UsageError(f"'{out}' exists and is not a model directory", fix="choose another --out")
    if out.exists() and not overwrite:
        raise UsageError(f"'{out}' exists", fix="choose another --out, or replace it with --overwrite")


def save_model(model: Any, tokenizer: Any, directory: Path, weights: dict[str, Any] | None = None) -> None:
    """Write weights, config and tokenizer, so that AutoModelForCausalLM and AutoTokenizer load them.

    Parameters
    ----------
    tokenizer : of transformers; or the directory where one was saved, whose files are copied
    weights : take the place of the model's own state dict

    Raises
    ------
    StorageFull
        No space left.
    """
    make_directory(directory)
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with storing(directory, n_bytes), quiet_transformers():
        model.save_pretrained(directory, state_dict=weights)
        if not isinstance(tokenizer, Path):
            tokenizer.save_pretrained(directory)
            return
        for file in sorted(tokenizer.iterdir()):
            copy_file(file, directory / file.name)


@contextmanager
def storing(directory: Path, n_bytes: int = 0) -> Iterator[None]:
    """Wrap `storage` around libraries that report a full disk with error classes of their own."""
    with storage(directory, n_bytes):
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) or "No space left" not in str(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path.is_dir() and not any(path.iterdir()))


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not names:
        return ""
    told = [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names[:3] if name != "corpus"]
    return f" ({'; '.join(told)})" if told else " (the documents differ)"
