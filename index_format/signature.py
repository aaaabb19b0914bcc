"""signature.json: which manifests a maker of an index has put his name to.

A manifest digests itself, so that it guards against accidents; whoever changes an index on purpose writes
another one. Here is what is signed and how it is kept. Keys, and the arithmetic, are for others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index_format.confined import refuse_strange_files
from index_format.durable import replace_file
from index_format.errors import IndexDamaged, IndexUnreachable
from index_format.layout import STAGE_GROUPS
from index_format.manifest import MANIFEST, parse_manifest
from index_format.metadata import decode_json, encode_json
from index_format.places import Place, is_forbidden
from index_format.problem import Problem

SIGNATURE = "signature.json"
_FORMAT = "stride-signature/1"
_MOST_BYTES = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "ask its maker for it again; stride index sign writes another"


@dataclass(frozen=True, slots=True)
class Statement:
    """What is signed: the digests of an index's manifests, which have those of all its files.

    Attributes
    ----------
    index : str       of the root's manifest, 64 hex digits
    stages : dict     group ("operators", …) → that of its manifest; of those that there are
    """

    index: str
    stages: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, "index": self.index, "stages": dict(self.stages)}

    def to_bytes(self) -> bytes:
        """The canonical bytes that a signature is of."""
        return encode_json(self.to_json())


@dataclass(frozen=True, slots=True)
class Signature:
    """What signature.json holds.

    Attributes
    ----------
    statement : Statement
    signature : bytes      64, of ed25519
    key : str              `key_fingerprint` of the public key, as whoever wrote the file says
    """

    statement: Statement
    signature: bytes
    key: str


def key_fingerprint(public_der: bytes) -> str:
    """SHA-256, in hex, of a public key's DER (SubjectPublicKeyInfo): what
    ``openssl pkey -pubin -in pub.pem -outform DER | sha256sum`` prints."""
    return hashlib.sha256(public_der).hexdigest()


def state_of(place: Place) -> Statement:
    """The statement that an index as it is now would be signed with.

    Raises
    ------
    IndexDamaged      a manifest is missing, or not what was written
    """
    groups = [group for group in STAGE_GROUPS if place.has_group(group)]
    names = {group: f"{group}/{MANIFEST}" for group in groups} | {"": MANIFEST}
    found = place.read_all(names.values())
    digests = {group: parse_manifest(found.get(name), place.path / name)[1] for group, name in names.items()}
    return Statement(digests.pop(""), digests)


def read_signature(place: Place) -> Signature | None:
    """The signature of an index, unchecked; None where it has none.

    Raises
    ------
    IndexDamaged      signature.json is not what `write_signature` writes
    """
    try:
        data = place.read(SIGNATURE)
    except FileNotFoundError:
        return None
    except IndexUnreachable as error:
        if is_forbidden(error.__cause__):  # as S3 says of what is not there, to who may not list
            return None
        raise
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise IndexDamaged(f"{place.path / SIGNATURE} is no signature of an index", fix=_REMEDY) from None


def _parse(data: bytes) -> Signature:
    if len(data) > _MOST_BYTES:
        raise ValueError("too long")
    content = decode_json(data)
    stated = content["statement"]
    statement = Statement(stated["index"], stated["stages"])
    found = Signature(statement, base64.b64decode(content["signature"], validate=True), content["key"])
    digests = (statement.index, found.key, *statement.stages.values())
    if not all(_DIGEST.fullmatch(digest) for digest in digests) or len(found.signature) != 64:
        raise ValueError("no digest or signature")
    if not set(statement.stages) <= set(STAGE_GROUPS) or data != _encode(found):
        raise ValueError("not in canonical bytes")
    return found


def _encode(signature: Signature) -> bytes:
    return encode_json(
        {
            "statement": signature.statement.to_json(),
            "signature": binascii.b2a_base64(signature.signature, newline=False).decode(),
            "key": signature.key,
        }
    )


def write_signature(directory: Path, signature: Signature) -> None:
    """Put signature.json into an index, in the place of one that is there, in one step.

    Raises
    ------
    IndexDamaged      something in the index is neither a directory nor a plain file
    StorageFull       the disk is full; the earlier signature stays
    """
    refuse_strange_files(directory)
    replace_file(directory / SIGNATURE, _encode(signature))


def find_unsigned(signed: Statement, place: Place) -> Iterator[Problem]:
    """In what an index differs from what was signed: a problem for the root and for each stage."""
    try:
        found = state_of(place)
    except IndexDamaged as error:  # and there is a problem of that already
        yield Problem(SIGNATURE, "signature", f"cannot be compared: {error.message}")
        return
    if found.index != signed.index:
        message = f"is not what was signed: its digest should be {signed.index}, is {found.index}"
        yield Problem(MANIFEST, "signature", message)
    unfinished = {name.partition("/")[0] for name in place.names() or ()}
    for group in STAGE_GROUPS:
        name = f"{group}/{MANIFEST}"
        before, now = signed.stages.get(group), found.stages.get(group)
        if before is None and now is not None:
            yield Problem(name, "signature", f"{group} were added after the index was signed")
        elif before is not None and now is None:
            yield Problem(name, "signature", f"{group} were signed, and are not there")
        elif before != now:
            message = f"{group} were made again after the index was signed: digest {before} was signed, "
            yield Problem(name, "signature", message + f"it is {now}")
        if f"{group}.partial" in unfinished:
            message = "an unfinished stage, which no signature is of; the next run would go on from it"
            yield Problem(f"{group}.partial", "signature", message)
