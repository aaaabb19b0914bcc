"""Corpora that are datasets: of the Hugging Face hub, or folders of Arrow and Parquet files on disk.

The hub's client fetches files, and `datasets` says which belong to a split. They are read here as files on
disk are, so that a bad row is named by file and row.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from stride_cli.corpus.documents import bad
from stride_cli.errors import CorpusError, first_line, require_extra
from stride_cli.hub import HubAddress, hub_api, hub_errors, is_hub_address, split_and_config

_READ = re.compile(r".*\.(parquet|pq|arrow|(jsonl|ndjson|json)(\.gz|\.zst)?)", re.IGNORECASE)
_COMMIT = re.compile("[0-9a-f]{40}")
_SAVE_AGAIN = "save it again with save_to_disk; a copy may have been cut off"


def pinned(given: str) -> str:
    """Pin a dataset of the hub to the commit that its revision is now; other sources stay as they are.

    So an index records what it was built from, and the files of one build are of one commit.

    Raises:
        CorpusError, UsageError, MissingExtraError
    """
    if not is_hub_address(given):
        return given
    address = HubAddress.parse(given)
    if _COMMIT.fullmatch(address.revision):
        return given
    api = hub_api()
    with hub_errors(address):
        found = api.dataset_info(address.repository, revision=address.revision or None)
    return str(replace(address, revision=str(found.sha)))


def fetch_files(given: str) -> list[tuple[str, Path]]:
    """Fetch the files of a dataset of the hub into the hub's cache; return each with its name in errors.

    Of a path: the file, or all files below it that can be read. Without one: the files of a split, as
    `datasets` finds them: ``?split=`` (default: train, or the only one), ``?config=``.

    Raises:
        CorpusError: There is no such dataset, file or split, or the hub cannot be reached.
        UsageError: No address of a dataset.
        MissingExtraError
    """
    address = HubAddress.parse(pinned(given))
    with hub_errors(address):
        names = _below(address) if address.path else _of_split(address)
        api, found = hub_api(), []
        for name in names:
            local = api.hf_hub_download(
                address.repository, name, repo_type="dataset", revision=address.revision
            )
            found.append((str(HubAddress(address.repository, address.revision[:12], name)), Path(local)))
        return found


def _below(address: HubAddress) -> list[str]:
    if address.split or address.config:
        raise bad(str(address), "a split of a dataset, or a path in it", "both", "leave out one of them")
    api = hub_api()
    files = sorted(api.list_repo_files(address.repository, repo_type="dataset", revision=address.revision))
    if address.path in files:
        return [address.path]
    below = [name for name in files if name.startswith(f"{address.path}/") and _READ.fullmatch(name)]
    if not below:
        shown = ", ".join(files[:5]) + (", …" if len(files) > 5 else "")
        raise CorpusError(
            f"{address}: the dataset has no such file, and no folder of Parquet, Arrow or JSON Lines",
            fix=f"it has: {shown or 'nothing'}",
        )
    return below


def _of_split(address: HubAddress) -> list[str]:
    """List the files of a split, which `datasets` finds by names and the card; no code of it runs."""
    try:
        import datasets
    except ImportError:
        raise require_extra("datasets", "datasets") from None
    try:
        builder = datasets.load_dataset_builder(
            address.repository, address.config or None, revision=address.revision
        )
    except (ValueError, FileNotFoundError, RuntimeError) as error:  # no such config; no data; only a script
        raise CorpusError(
            f"{address}: expected a dataset of files, found: {first_line(error)}",
            fix="name the configuration with ?config=NAME, or files with a path behind the name",
        ) from error
    files: dict[str, Any] = {str(split): found for split, found in (builder.config.data_files or {}).items()}
    start = f"hf://datasets/{address.repository}@{address.revision}/"
    names = files[_chosen(list(files), address.split, str(address))]
    return [str(name).removeprefix(start) for name in names]


def _chosen(splits: list[str], wanted: str, where: str) -> str:
    """Choose the split to read: the one asked for, the only one, or "train"."""
    if wanted in splits:
        return wanted
    if not wanted and (len(splits) == 1 or "train" in splits):
        return splits[0] if len(splits) == 1 else "train"
    found = f"no split '{wanted}'" if wanted else "several splits, and none is called train"
    fix = "choose it behind the name, in quotes: '…?split=NAME'"
    raise bad(where, f"one of {', '.join(splits) or 'no splits'}", found, fix)


def find_folder(given: str) -> list[Path] | None:
    """List the files of a folder that `datasets` saved, or of one of tables; None for anything else.

    ``FOLDER?split=NAME`` chooses one of a `DatasetDict`; default: train, or the only one.

    Raises:
        CorpusError: It is damaged, or the split is not there.
    """
    folder, wanted = Path(given), ""
    if not _is_folder(folder):
        name, _, query = given.rpartition("?")
        folder = Path(name)
        if not query.startswith("split=") or not _is_folder(folder):
            return None
        wanted = split_and_config(query, given).get("split", "")
    if (folder / "dataset_dict.json").is_file():
        splits = _read_list(folder / "dataset_dict.json", "splits", str)
        folder = folder / _chosen(splits, wanted, given)
    elif wanted:
        raise bad(given, "a folder with splits (dataset_dict.json)", "none", "leave out ?split=")
    if (folder / "state.json").is_file():
        return _saved(folder)
    tables = [sorted(path for path in folder.glob(f"*{suffix}")) for suffix in (".parquet", ".arrow")]
    return tables[0] or tables[1] or None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _saved(folder: Path) -> list[Path]:
    """List the files of a dataset saved by `save_to_disk`, in its order."""
    state = folder / "state.json"
    names = [entry.get("filename") for entry in _read_list(state, "_data_files", dict)]
    if json.loads(state.read_bytes()).get("_indices_data_files"):
        fix = "write it again: load_from_disk(FOLDER).flatten_indices().save_to_disk(OTHER)"
        raise bad(str(folder), "a dataset whose rows are in order", "one of selected rows", fix)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CorpusError(
                f"{state}: expected names of files in it, found {name!r}"[:300], fix=_SAVE_AGAIN
            )
    return [folder / name for name in names]


def _read_list(file: Path, key: str, kind: type) -> list[Any]:
    """Read the list under a key of a small file of JSON."""
    try:
        found = json.loads(file.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(f"{file}: cannot be read: {first_line(error)}", fix=_SAVE_AGAIN) from None
    if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
        raise bad(str(file), f"a list in '{key}'", "something else", _SAVE_AGAIN)
    return found
