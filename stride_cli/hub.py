"""Datasets of the Hugging Face hub: their addresses, and the errors of its client with a remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from stride_cli.errors import CorpusError, StrideError, UsageError, first_line, required

HUB = "hf://"  # what addresses of the hub begin with
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(convert/[^/?]+|pr/\d+)|[^/?]+))?(/(?P<path>[^?]*))?(\?(?P<query>.*))?"
)
_SPLIT_KEYS = ("split", "config")


@dataclass(frozen=True)
class HubAddress:
    """``hf://datasets/OWNER/NAME[@REVISION][/PATH][?split=…&config=…]``, in its parts; "" where one lacks."""

    repository: str
    revision: str = ""
    path: str = ""
    split: str = ""
    config: str = ""

    @classmethod
    def parse(cls, given: str) -> HubAddress:
        """Parse an address; UsageError where it is none."""
        found = _ADDRESS.fullmatch(given)
        if found is None:
            raise UsageError(
                f"'{given}' is no dataset of the hub (expected hf://datasets/OWNER/NAME)",
                fix="for example hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME@main/train.parquet",
            )
        return cls(
            found["repository"],
            unquote(found["revision"] or ""),
            (found["path"] or "").strip("/"),
            **split_and_config(found["query"] or "", given),
        )

    def __str__(self) -> str:
        asked = "&".join(f"{key}={getattr(self, key)}" for key in _SPLIT_KEYS if getattr(self, key))
        revision = f"@{self.revision}" if self.revision else ""
        path, question = self.path and f"/{self.path}", asked and f"?{asked}"
        return f"{HUB}datasets/{self.repository}{revision}{path}{question}"


def split_and_config(query: str, given: str) -> dict[str, str]:
    """Parse the query of a corpus; UsageError where it is neither ``split=`` nor ``config=``."""
    found = dict(parse_qsl(query, keep_blank_values=True))
    for key, value in found.items():
        if key not in _SPLIT_KEYS or not value:
            raise UsageError(
                f"'{given}' asks for '{key}={value}' (expected split=NAME or config=NAME)",
                fix="for example '…?split=train', in quotes: a shell takes the ? for itself",
            )
    return found


def hub_api() -> Any:
    """Make a `huggingface_hub.HfApi`; `HF_ENDPOINT` and `HF_TOKEN` count, its bars are for terminals only.

    Raises
    ------
    MissingExtraError
    """
    huggingface_hub = required("huggingface_hub", "datasets")
    huggingface_hub.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub.HfApi(library_name="stride")


@contextmanager
def hub_errors(address: HubAddress) -> Iterator[None]:
    """Turn what the hub's client raises into a CorpusError with a remedy."""
    try:
        yield
    except StrideError:
        raise
    except Exception as error:
        known = _in_words(error, address)
        if known is None:
            raise
        raise CorpusError(known[0], fix=known[1]) from error


def _in_words(error: Exception, address: HubAddress) -> tuple[str, str] | None:
    """Return (message, remedy); None where the error is not of the network or the hub."""
    from huggingface_hub import errors

    name = f"{HUB}datasets/{address.repository}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    log_in = "hf auth login (or set HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: its owners give access on request", f"ask on its page, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no dataset {address.repository}, or it is private",
            f"check the name; where it is private: {log_in}",
        )
    if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
        return f"the hub refuses access to {name}", log_in
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision '{address.revision}'", "leave out @REVISION for its main branch"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{name} cannot be reached: HF_HUB_OFFLINE is set", "unset it, or copy the files here"
    if isinstance(error, errors.LocalEntryNotFoundError) or type(error).__module__.startswith(
        ("httpx", "httpcore", "requests", "urllib3", "aiohttp")
    ):
        return f"the hub cannot be reached for {name}: {first_line(error)}", "check the network; HF_ENDPOINT"
    if isinstance(error, errors.EntryNotFoundError):
        remedy = f"see what it has: hf download {address.repository} --dry-run"
        return f"{name} has no '{address.path}'", remedy
    if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
        return f"the hub refuses {name}: {first_line(error)}", "see its status: https://status.huggingface.co"
    return None
