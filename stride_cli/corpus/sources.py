"""Find the files of a corpus: names, globs, folders of tables, datasets of the hub, stdin.

Files of the hub, of a split as `datasets` says, are read as those on disk: a bad row has its file and row.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stride_cli import output
from stride_cli.corpus.documents import bad, listed
from stride_cli.corpus.options import Share
from stride_cli.errors import CorpusError, MissingExtraError, first_line, required
from stride_cli.hub import HUB, HubAddress, hub_api, hub_errors, split_and_config

Kind = Literal["jsonl", "text", "parquet", "arrow"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    ".arrow": "arrow",
}
_PACKED_SUFFIXES = {".gz", ".zst"}
# formats that hold many records or no text; reading one as a single plain-text document is never meant
_REFUSED_SUFFIXES = {
    ".csv", ".tsv", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".feather", ".npy", ".npz",
    ".pkl", ".pt", ".bin", ".safetensors", ".gguf", ".pdf", ".docx", ".xlsx", ".db", ".sqlite",
}  # fmt: skip
# undoes a suffix, or a magic number, that is not read here
UNPACK = {".bz2": "bzip2 -dc", ".xz": "xz -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "LZ4": "lz4 -dc"}
CONVERT = "convert it to JSON Lines: one object a line with 'id' and 'text'"
SKIPS_TOLD = 10


@dataclass(frozen=True, slots=True)
class Source:
    """One input of a corpus.

    Attributes:
        name: As the user gave it.
        path: None for stdin.
        share: What is read of it; None: all.
    """

    name: str
    path: Path | None
    kind: Kind
    share: Share | None = None


class ReadLog:
    """Counts what a read leaves out, and how far it has come.

    Args:
        on_bad: "error" raises the first bad record; "skip" counts it, and tells about the first ten.
        tell: Takes what is said about skipped records; default: stderr.

    Attributes:
        skipped: Records left out so far.
        bytes_total: Bytes of all sources on disk; None where one has no size (stdin, a pipe).
        unread: How many records have which other fields, each with the lacking one that may be meant.
    """

    def __init__(self, on_bad: str = "error", tell: Callable[[str], None] = output.note) -> None:
        self.on_bad = on_bad
        self.skipped = 0
        self.bytes_total: int | None = None
        self.unread: Counter[tuple[str, str]] = Counter()
        self._tell = tell
        self._bytes_before = 0
        self._position: Callable[[], int] | None = None
        self._share: Share | None = None

    def reject(self, error: CorpusError) -> None:
        """Raise the error, or count it as a skipped record."""
        if self.on_bad == "error":
            raise error
        self.skipped += 1
        if self.skipped <= SKIPS_TOLD:
            self._tell(f"skipped {error.message}")

    def finish(self) -> None:
        """Tell how many records were left out in all, and which fields were perhaps meant to be read."""
        for (key, meant), count in self.unread.items():
            if meant:
                self._tell(f"{listed([key])} of {count:,} records is not read (is '{meant}' meant?)")
        if self.skipped:
            self._tell(f"skipped {self.skipped} bad record{'s' if self.skipped > 1 else ''} in all")

    @property
    def bytes_done(self) -> int:
        """Bytes read so far, before decompression."""
        position = self._position() if self._position else 0
        if self._share is not None:
            position = min(max(position, self._share.low), self._share.high) - self._share.low
        return self._bytes_before + position

    def enter(self, source: Source, position: Callable[[], int] | None) -> None:
        """Begin a source; `position` returns its bytes read so far."""
        self._position, self._share = position, source.share

    def leave(self) -> None:
        """End the source."""
        self._bytes_before = self.bytes_done
        self._position = self._share = None


def find_sources(sources: Sequence[str]) -> list[Source]:
    """List the inputs that file names, globs, folders of tables, hub addresses and `-` stand for, in order.

    The matches of a glob are sorted by name.

    Raises:
        CorpusError: Nothing given, no such file, a glob without a match, a directory, a format that is not
            read, stdin named twice, or a dataset of the hub that cannot be fetched (`fetch_files`).
    """
    if not sources:
        raise CorpusError("no corpus given", fix="name a file, a glob, or '-' for stdin")
    if sources.count("-") > 1:
        raise CorpusError("'-' (stdin) is given twice; it can be read once", fix="give '-' once")
    found: list[Source] = []
    for given in sources:
        if given == "-":
            found.append(Source("<stdin>", None, "jsonl"))
        elif given.startswith(HUB):
            found += [Source(name, path, _kind(path, True)) for name, path in fetch_files(given)]
        elif (files := find_folder(given)) is not None:
            found += [_source(str(path)) for path in files]
        elif _state_of(given) is None and glob.has_magic(given):
            found += [_source(name) for name in _matches(given)]
        else:
            found.append(_source(given))
    return found


def file_bytes(source: Source) -> int | None:
    """Return the bytes of a source on disk; None of a stream."""
    state = None if source.path is None else _state_of(str(source.path))
    return None if state is None or not stat.S_ISREG(state.st_mode) else state.st_size


def _source(name: str) -> Source:
    state = _state_of(name)
    if state is None:
        shown = name.replace("\0", "\\0")
        fix = f"check the name: ls -l {shlex.quote(str(Path(shown).parent))}; '-' reads from stdin"
        raise CorpusError(f"{shown}: no such file", fix=fix)
    if stat.S_ISDIR(state.st_mode):
        kind = "txt" if glob.glob(f"{glob.escape(name)}/*.txt") else "jsonl"  # noqa: PTH207
        fix = f"name its files: '{name.rstrip('/')}/*.{kind}'; tables, and what datasets saved, are read"
        raise bad(name, "a file of documents", "a directory", fix)
    return Source(name, Path(name), _kind(Path(name), stat.S_ISREG(state.st_mode)))


def _state_of(given: str) -> os.stat_result | None:
    """Return what the operating system knows of a path; None where there is nothing."""
    try:
        return Path(given).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return None
    except OSError as error:
        raise unreadable(given, error) from None


def _matches(pattern: str) -> list[str]:
    """List the files that a pattern matches, sorted by name."""
    # not Path.glob: the names must stay as given, for they become ids of text files
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207
    if not (files := sorted(name for name in names if Path(name).is_file())):
        fix = f"list what is there: ls {Path(pattern).parent}; in quotes, '**' goes into sub-directories"
        raise CorpusError(f"{pattern}: the pattern matches no file", fix=fix)
    return files


def unreadable(name: str, error: OSError, doing: str = "opened") -> CorpusError:
    """Make the error for a source that the operating system refuses."""
    fix = "check what stdin is connected to" if name == "<stdin>" else f"check it: ls -l {shlex.quote(name)}"
    return CorpusError(f"{name}: cannot be {doing}: {error.strerror or error}", fix=fix)


def _kind(path: Path, regular: bool) -> Kind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _REFUSED_SUFFIXES:
        fix = piped(UNPACK[last], str(path)) if last in UNPACK else CONVERT
        wanted = "JSON Lines (.jsonl, .gz, .zst), Parquet or plain text"
        raise bad(str(path), wanted, f"'{last}'", fix)
    # a named pipe or /dev/fd/63 of `<(…)` has no suffix and holds records, as stdin does
    return _KINDS.get(last, "text" if regular else "jsonl")


def piped(command: str, name: str) -> str:
    """Say how to unpack a source on the way in."""
    shown = "FILE" if name == "<stdin>" else shlex.quote(name)
    return f"unpack it on the way in: {command} {shown} | stride index build - --model MODEL"


_READ = re.compile(r".*\.(parquet|pq|arrow|(jsonl|ndjson|json)(\.gz|\.zst)?)", re.IGNORECASE)
_COMMIT = re.compile("[0-9a-f]{40}")


def pinned(given: str) -> str:
    """Pin a dataset of the hub to the commit that its revision is now; other sources stay as they are.

    So an index records what it was built from, and the files of one build are of one commit.

    Raises:
        CorpusError, UsageError, MissingExtraError
    """
    if not given.startswith(HUB):
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
        of = {"repo_id": address.repository, "repo_type": "dataset", "revision": address.revision}
        for name in names:
            shown = HubAddress(address.repository, address.revision[:12], name)
            found.append((str(shown), Path(api.hf_hub_download(filename=name, **of))))
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
        found = "the dataset has no such file, and no folder of Parquet, Arrow or JSON Lines"
        raise CorpusError(f"{address}: {found}", fix=f"it has: {listed(files)}")
    return below


def _of_split(address: HubAddress) -> list[str]:
    """List the files of a split, which `datasets` finds by names and the card; no code of it runs."""
    config = address.config or None
    try:
        datasets = required("datasets", "datasets")
        builder = datasets.load_dataset_builder(address.repository, config, revision=address.revision)
    except (ValueError, FileNotFoundError, RuntimeError) as error:  # no such config; no data; only a script
        fix = "name the configuration with ?config=NAME, or files with a path behind the name"
        raise bad(str(address), "a dataset of files", first_line(error), fix) from error
    files: dict[str, Any] = {str(split): found for split, found in (builder.config.data_files or {}).items()}
    start = f"hf://datasets/{address.repository}@{address.revision}/"
    names = files[_chosen(list(files), address.split, str(address))]
    return [str(name).removeprefix(start) for name in names]


def _chosen(splits: list[str], wanted: str, where: str) -> str:
    """Choose the split to read: the one asked for, the only one, or "train"."""
    chosen = wanted or (splits[0] if len(splits) == 1 else "train")
    if chosen in splits:
        return chosen
    found = f"no split '{wanted}'" if wanted else "several splits, and none is called train"
    fix = "choose it behind the name, in quotes: '…?split=NAME'"
    raise bad(where, f"one of {', '.join(splits) or 'no splits'}", found, fix)


def find_folder(given: str) -> list[Path] | None:
    """List the files of a folder that `datasets` saved, or of one of tables; None for anything else.

    ``FOLDER?split=NAME`` chooses one of a `DatasetDict`; default: train, or the only one.

    Raises:
        CorpusError: It is damaged, or the split is not there.
    """
    # os.path, which takes a name that is too long, or has a NUL, for no folder
    folder, wanted = Path(given), ""
    if not os.path.isdir(given):  # noqa: PTH112
        name, _, query = given.rpartition("?")
        if not query.startswith("split=") or not os.path.isdir(name):  # noqa: PTH112
            return None
        folder, wanted = Path(name), split_and_config(query, given).get("split", "")
    splits = (folder / "dataset_dict.json").is_file()
    if wanted and not splits:
        raise bad(given, "a folder with splits (dataset_dict.json)", "none", "leave out ?split=")
    if not splits and not (folder / "state.json").is_file():
        tables = [sorted(path for path in folder.glob(f"*{suffix}")) for suffix in (".parquet", ".arrow")]
        return tables[0] or tables[1] or None
    try:
        found = required("datasets", "datasets").load_from_disk(str(folder), keep_in_memory=False)
    except MissingExtraError:
        raise
    except Exception as error:  # of JSON, its keys, pyarrow …
        fix = "save it again with save_to_disk; a copy may have been cut off"
        raise CorpusError(f"{folder}: cannot be read: {first_line(error)}", fix=fix) from None
    if splits:
        split = _chosen(list(found), wanted, given)
        folder, found = folder / split, found[split]
    if json.loads((folder / "state.json").read_bytes()).get("_indices_data_files"):  # of datasets 1
        fix = "write it again: load_from_disk(FOLDER).flatten_indices().save_to_disk(OTHER), by datasets 1"
        raise bad(str(folder), "a dataset whose rows are in order", "one of selected rows", fix)
    return [folder / Path(file["filename"]).name for file in found.cache_files]
