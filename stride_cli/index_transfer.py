"""An index to the Hugging Face hub and back: in one commit there, by one rename here, whole or not at all."""

from __future__ import annotations

import glob
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from index_format.confined import is_inside
from index_format.durable import (
    DirectoryLock,
    exchange,
    make_directory,
    rename_new,
    sync_directory,
    sync_files,
    sync_tree,
)
from index_format.errors import IndexDamaged, IndexExists
from index_format.reader import Index
from index_format.verify import verify
from stride_cli.errors import UsageError
from stride_cli.hub import HubAddress, hub_api, hub_errors

_ROOT = "zarr.json"  # every index has one, and so has no other directory above it
_STAGED = ".pull"  # beside the index: what is fetched, until all of it is there and right


@dataclass(frozen=True)
class Transfer:
    """What was sent or fetched.

    Attributes
    ----------
    address : where it is on the hub, at its commit
    files, bytes : of the index
    """

    address: HubAddress
    files: int
    bytes: int


def push_index(path: Path, address: HubAddress, *, public: bool = False) -> Transfer:
    """Send an index to a dataset of the hub, which is made, private, where there is none.

    It goes into a folder, by default of its own name, and takes the place of what is in that. What was sent
    before an interruption is not sent again; others see all of it or nothing, for it is one commit.

    Parameters
    ----------
    public : a dataset that is made can be read by everybody (an index holds its corpus' texts)

    Raises
    ------
    IndexDamaged            its bytes are not what its manifests say
    StorageError            the hub refuses, or cannot be reached
    MissingExtraError       huggingface_hub is not installed
    """
    _refuse_splits(address)
    api = hub_api("hub")
    Index.open(path)
    problems = list(verify(path))
    if problems:
        raise IndexDamaged(
            f"index {path} is not sent, it is damaged: {problems[0].path}: {problems[0].message}",
            fix=f"stride index verify {path} says all of it: restore it from a copy, or build it again",
        )
    address = replace(address, path=address.path or path.absolute().name)
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    with hub_errors(address):
        api.create_repo(address.repository, repo_type="dataset", private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=address.repository,
            repo_type="dataset",
            folder_path=path,
            path_in_repo=address.path,
            revision=address.revision or None,
            delete_patterns="*",  # what the index that was there has and this one has not
            commit_message=f"index {path.absolute().name}",
        )
    return Transfer(replace(address, revision=str(done.oid)), len(sizes), sum(sizes))


def pull_index(address: HubAddress, out: Path | None, *, overwrite: bool = False) -> tuple[Path, Transfer]:
    """Fetch an index from a dataset of the hub, and compare every byte with its manifests.

    Interrupted, the same call goes on with the files that are not here yet. What is in the index is read as
    one from anybody is: nothing of it is run.

    Parameters
    ----------
    address : without a path, that of the only index in the dataset
    out : where it goes; None: its name on the hub, here

    Returns
    -------
    (where it is, what was fetched)

    Raises
    ------
    IndexExists             something is at `out`, and is not to be replaced
    IndexDamaged            what came is not what the manifests say
    UsageError              there is no index, or several and none is named
    StorageError            the hub refuses, or cannot be reached
    MissingExtraError       huggingface_hub is not installed
    """
    _refuse_splits(address)
    api = hub_api("hub")
    with hub_errors(address):
        sha = api.dataset_info(address.repository, revision=address.revision or None).sha
        address = replace(address, revision=str(sha))
        names = api.list_repo_files(address.repository, repo_type="dataset", revision=address.revision)
    address, names = _index_among(address, list(names))
    out = out if out is not None else Path(address.path.rpartition("/")[2] or "run.stride")
    if out.exists() and not overwrite:
        raise IndexExists(f"'{out}' exists", fix="choose another --out, or replace it with --overwrite")
    staged = out.with_name(out.name + _STAGED)
    lock = DirectoryLock(staged)
    try:
        with hub_errors(address):
            api.snapshot_download(
                address.repository,
                repo_type="dataset",
                revision=address.revision,
                local_dir=staged,
                allow_patterns=[glob.escape(name) for name in names],
            )
        fetched = staged / address.path if address.path else _apart(staged, names)
        _refuse_damage(fetched, staged, address)
        sizes = [(staged / name if address.path else fetched / name).stat().st_size for name in names]
        sync_files(fetched)
        sync_tree(fetched)
        if out.exists():
            exchange(fetched, out, staged / "replaced")
        else:
            make_directory(out.absolute().parent)
            rename_new(fetched, out)
        sync_directory(out.absolute().parent)
        shutil.rmtree(staged)
    finally:
        lock.release()
    return out, Transfer(address, len(names), sum(sizes))


def _refuse_splits(address: HubAddress) -> None:
    if address.split or address.config:
        raise UsageError(
            f"'{address}' names a split, and an index has none", fix="leave out what is behind the ?"
        )


def _index_among(address: HubAddress, names: list[str]) -> tuple[HubAddress, list[str]]:
    """The address with its path, and the files of the index there."""
    roots = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == _ROOT}
    # of an index its groups have one too
    tops = sorted(root for root in roots if not any(_below(root, other) for other in roots - {root}))
    if address.path not in roots and (address.path or len(tops) != 1):
        found = ", ".join(tops) or "none"
        raise UsageError(
            f"{address}: expected an index, found in the dataset: {found}",
            fix="name one: hf://datasets/OWNER/NAME/PATH; stride index push puts one there",
        )
    address = replace(address, path=address.path or tops[0])
    inside = [name for name in names if _below(name, address.path)]
    if address.path == "":  # with what else a dataset has in its root
        inside = [name for name in inside if "/" in name or name.endswith(".json")]
        inside = [name for name in inside if not name.startswith(".")]
    if not all(map(is_inside, inside)):
        raise UsageError(f"{address} has names that lead out of it", fix="do not trust who made it")
    return address, inside


def _below(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _apart(staged: Path, names: list[str]) -> Path:
    """An index in the root of a dataset, apart from what the hub's client keeps beside it."""
    apart = staged / ".index"
    shutil.rmtree(apart, ignore_errors=True)
    for name in names:
        make_directory((apart / name).parent)
        (staged / name).rename(apart / name)
    return apart


def _refuse_damage(fetched: Path, staged: Path, address: HubAddress) -> None:
    """IndexDamaged where what came is no index whose bytes are right; then all of it is fetched anew."""
    try:
        Index.open(fetched)
        problems: list[Any] = list(verify(fetched))
    except Exception:
        _clear(staged)
        raise
    if problems:
        _clear(staged)
        raise IndexDamaged(
            f"what came from {address} is damaged: {problems[0].path}: {problems[0].message}",
            fix="pull it again; where it stays so, it was sent so: ask who pushed it",
        )


def _clear(staged: Path) -> None:
    for entry in staged.iterdir():
        if entry.name != DirectoryLock.NAME:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
