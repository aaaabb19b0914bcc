"""Keys that indexes are signed with: ed25519, in the files that openssl and ssh-keygen write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from index_format.errors import IndexDamaged
from index_format.location import RemotePath
from index_format.places import open_place
from index_format.problem import Problem
from index_format.signature import (
    SIGNATURE,
    Signature,
    Statement,
    find_unsigned,
    key_fingerprint,
    read_signature,
    state_of,
    write_signature,
)
from stride_cli.errors import UsageError, first_line, require_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PASSWORD = "STRIDE_SIGN_PASSWORD"
_NEW_KEY = "openssl genpkey -algorithm ed25519 -out key.pem"
_PUBLIC_OF = "openssl pkey -in key.pem -pubout -out pub.pem"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Signed:
    """A signature that was just written.

    Attributes
    ----------
    statement : Statement      what it is of
    key : str                  fingerprint of the key
    replaced : str or None     that of the key of the signature in whose place it is
    """

    statement: Statement
    key: str
    replaced: str | None


def sign_index(directory: Path, key_file: str | Path) -> Signed:
    """Sign an index, and its stages, as they are now; their bytes are the caller's to verify.

    Parameters
    ----------
    directory : of the index
    key_file : PEM of an ed25519 private key; encrypted, its password is in STRIDE_SIGN_PASSWORD

    Raises
    ------
    UsageError             there is no such key in the file
    MissingExtraError      the package `cryptography` is not installed
    IndexDamaged           a manifest is damaged, or something in the index is no plain file
    StorageFull            the disk is full
    """
    key = read_private_key(key_file)
    place = open_place(directory)
    try:
        earlier = read_signature(place)
    except IndexDamaged:  # is replaced
        earlier = None
    statement = state_of(place)
    fingerprint = fingerprint_of(key.public_key())
    write_signature(directory, Signature(statement, key.sign(statement.to_bytes()), fingerprint))
    return Signed(statement, fingerprint, None if earlier is None else earlier.key)


def check_signature(index: str | Path | RemotePath, key: Ed25519PublicKey) -> list[Problem]:
    """Whether an index is as the holder of a key signed it: what is not, or nothing.

    That its files are what its manifests say is `index_format.verify`'s to find.
    """
    place = open_place(index)
    fingerprint = fingerprint_of(key)
    try:
        signature = read_signature(place)
    except IndexDamaged as error:
        return [Problem(SIGNATURE, "signature", error.message)]
    if signature is None:
        message = f"the index is not signed; it should be, by key {fingerprint}"
        return [Problem(SIGNATURE, "signature", message)]
    if not _fits(key, signature):
        if signature.key == fingerprint:
            message = f"statement and signature do not fit: one of them was altered, or key {fingerprint} "
            return [Problem(SIGNATURE, "signature", message + "has never signed this")]
        message = f"is said to be of another key: {signature.key} (the key given is {fingerprint})"
        return [Problem(SIGNATURE, "signature", message)]
    found = list(find_unsigned(signature.statement, place))
    if signature.key != fingerprint:  # that much of the file is not signed
        message = f"names key {signature.key}, and is of {fingerprint}: it was altered"
        found.append(Problem(SIGNATURE, "signature", message))
    return found


def signed_by(index: str | Path | RemotePath) -> str | None:
    """The fingerprint of the key that an index says it is signed with, unchecked; None where it is not."""
    try:
        found = read_signature(open_place(index))
    except IndexDamaged:
        return None
    return None if found is None else found.key


def fingerprint_of(key: Ed25519PublicKey) -> str:
    """What a key is called, in records and in signature.json."""
    _, serialization = _cryptography()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key_fingerprint(key.public_bytes(serialization.Encoding.DER, form))


def read_private_key(file: str | Path) -> Ed25519PrivateKey:
    """The private key in a PEM file; raises as `sign_index`."""
    ed25519, serialization = _cryptography()
    data = _read(file)
    if b"PUBLIC KEY-----" in data or data.startswith(b"ssh-"):
        raise UsageError(
            f"{file} is a public key; expected the private one to sign with", fix=f"make a pair: {_NEW_KEY}"
        )
    given = os.environ.get(PASSWORD)
    password = given.encode("utf-8", "surrogateescape") if given and b"ENCRYPTED" in data else None
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError:
        raise UsageError(
            f"{file} is encrypted, and no password is given", fix=f"set it: export {PASSWORD}=…"
        ) from None
    except Exception as error:  # ValueError, and what cryptography has of its own for unknown algorithms
        if password is not None:
            raise UsageError(
                f"{file} cannot be decrypted: {first_line(error)}", fix=f"check the password in {PASSWORD}"
            ) from error
        raise _no_key(file, "private key in PEM (PKCS#8)", error, _NEW_KEY) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _other_kind(file, key, f"make one: {_NEW_KEY}")
    return key


def read_public_key(file: str | Path) -> Ed25519PublicKey:
    """The public key in a file, PEM or as ssh-keygen writes it.

    Raises
    ------
    UsageError             there is no ed25519 public key in it
    MissingExtraError      the package `cryptography` is not installed
    """
    ed25519, serialization = _cryptography()
    data = _read(file)
    if b"PRIVATE KEY-----" in data:
        raise UsageError(
            f"{file} is a private key; expected the public one, which is all that verifying needs",
            fix=_PUBLIC_OF,
        )
    pem = data.lstrip().startswith(b"-----BEGIN")
    load = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
    try:
        key = load(data.strip())
    except Exception as error:  # as above
        raise _no_key(file, "public key, in PEM or as ssh-keygen writes it", error, _PUBLIC_OF) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _other_kind(file, key, f"ask for the public key that the index was signed with ({_PUBLIC_OF})")
    return key


def _fits(key: Ed25519PublicKey, signature: Signature) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature.signature, signature.statement.to_bytes())
    except InvalidSignature:
        return False
    return True


def _cryptography() -> tuple[Any, Any]:
    """The modules of ed25519 and of keys' files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise require_extra("cryptography", "sign") from None
    return ed25519, serialization


def _read(file: str | Path) -> bytes:
    """A key's file, also a pipe that a shell has made for `<(…)`."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"the key {file} cannot be read: {reason}", fix="check the path of --key") from error
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"{file} is no key: it has more than {_MOST_BYTES:,} bytes", fix=f"a key is made by: {_NEW_KEY}"
        )
    return data


def _no_key(file: str | Path, expected: str, error: Exception, how: str) -> UsageError:
    return UsageError(f"{file} is no key; expected an ed25519 {expected} ({first_line(error)})", fix=how)


def _other_kind(file: str | Path, key: Any, fix: str) -> UsageError:
    kind = type(key).__name__.lstrip("_").removesuffix("PrivateKey").removesuffix("PublicKey")
    return UsageError(f"{file} is a key of another kind, {kind}; expected an ed25519 key", fix=fix)
