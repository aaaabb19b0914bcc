"""`stride index sign` and `stride index verify --key`: whose an index is, and whether it is as signed."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index_format.design import build_columns
from index_format.writer import GroupWriter, IndexWriter

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

SIGNATURE = "signature.json"


def build(path: Path, texts: list[str], *, key: str = "k", extend: bool = False) -> None:
    """A whole small index, written without a tokenizer or a model; or more documents in it."""
    begun = IndexWriter.extend(path, build_key=key) if extend else IndexWriter.create(path, build_key=key)
    with begun as writer:
        if not extend:
            for name in ("corpus/chunk_offsets", "corpus/document_offsets"):
                writer.append(name, np.zeros(1, np.int64))
        first = writer.length("corpus/chunk_document")
        for number, text in enumerate(texts, first):
            writer.append_strings("corpus/document_id", [f"d{number}"])
            writer.append_strings("corpus/text", [text])
            writer.append("corpus/tokens", np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
            writer.append("corpus/chunk_offsets", np.array([writer.length("corpus/tokens")]))
            writer.append("corpus/chunk_document", np.array([number]))
            writer.append("corpus/document_offsets", np.array([number + 1]))
            writer.append("corpus/loss_start", np.array([1], np.int32))
        last = first + len(texts)
        writer.append("design/columns", build_columns(first, last, n_subsets=6, degree=2, seed=3))
        writer.append_rows_of_design(6)
        sizes = {"seed": 3, "n_subsets": 6, "degree": 2, "block_size": 64, "design": "regular"}
        marks = {"corpus": "c", "tokenizer": "t", "model": "m"}
        writer.publish({**sizes, "fingerprints": marks, "config": {}})


def add_stage(path: Path, group: Any, value: float = 1.0) -> None:
    name = {"operators": "operators/gates", "truth": "truth/losses"}[group]
    with GroupWriter(path, group, str(value)) as writer:
        writer.append(name, np.full((6, 2), value, np.float32))
        writer.publish({})


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "run.stride"
    build(path, ["water boils", "at one hundred", "degrees"])
    add_stage(path, "operators")
    return path


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """An ed25519 pair, PEM, as openssl writes it."""
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}-pub.pem"
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "own")


def problems(outcome: Any) -> list[tuple[str, str]]:
    assert outcome.code == 1, outcome.err
    return [(record["path"], record["kind"]) for record in outcome.records]


def test_signed_and_checked(run, index: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    signed = run(f"index sign {index} --key {private} --json")
    assert signed.code == 0, signed.err
    (record,) = signed.records
    assert record["stages"] == ["operators"] and record["replaced"] is None
    raw = serialization.load_pem_public_key(public.read_bytes())
    der = raw.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert record["key"] == hashlib.sha256(der).hexdigest()
    plain = run(f"index verify {index} --json")
    assert plain.code == 0 and record["key"] in plain.err and "unchecked" in plain.err
    checked = run(f"index verify {index} --key {public} --json")
    assert checked.code == 0 and checked.err == ""
    assert checked.records[0] == {
        "schema": "stride.index_verify/1",
        "index": str(index),
        "whole": True,
        "stages": ["operators"],
        "key": record["key"],
    }
    # what is signed can be checked without any of our code
    content = json.loads((index / SIGNATURE).read_text())
    statement = json.dumps(content["statement"], sort_keys=True, indent=1) + "\n"
    raw.verify(base64.b64decode(content["signature"]), statement.encode())
    manifests = {
        "index": json.loads((index / "manifest.json").read_text())["digest"],
        "stages": {"operators": json.loads((index / "operators/manifest.json").read_text())["digest"]},
    }
    assert content["statement"] == {"format": "stride-signature/1", **manifests}
    again = run(f"index sign {index} --key {private} --json")
    assert again.records[0]["replaced"] == record["key"]


def test_openssl_and_ssh_keygen_make_such_keys(run, index: Path, tmp_path: Path, monkeypatch) -> None:
    """As the help says it; with a password; and a public key as ssh-keygen writes it."""
    for program in ("openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")

    def shell(line: str) -> str:
        done = subprocess.run(line.split(" "), cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode("latin-1")

    shell("openssl genpkey -algorithm ed25519 -out key.pem")
    shell("openssl pkey -in key.pem -pubout -out pub.pem")
    assert run(f"index sign {index} --key {tmp_path}/key.pem").code == 0
    assert run(f"index verify {index} --key {tmp_path}/pub.pem").code == 0
    shell("openssl genpkey -algorithm ed25519 -aes256 -pass pass:secret -out locked.pem")
    shell("openssl pkey -in locked.pem -passin pass:secret -pubout -out locked-pub.pem")
    refused = run(f"index sign {index} --key {tmp_path}/locked.pem")
    assert refused.code == 2 and "is encrypted" in refused.err and "STRIDE_SIGN_PASSWORD" in refused.err
    monkeypatch.setenv("STRIDE_SIGN_PASSWORD", "wrong")
    refused = run(f"index sign {index} --key {tmp_path}/locked.pem")
    assert refused.code == 2 and "cannot be decrypted" in refused.err
    monkeypatch.setenv("STRIDE_SIGN_PASSWORD", "secret")
    assert run(f"index sign {index} --key {tmp_path}/locked.pem").code == 0
    assert run(f"index verify {index} --key {tmp_path}/locked-pub.pem").code == 0
    assert run(f"index sign {index} --key {tmp_path}/key.pem").code == 0  # which has none
    key = serialization.load_pem_public_key((tmp_path / "pub.pem").read_bytes())
    forms = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (tmp_path / "id.pub").write_bytes(key.public_bytes(*forms) + b" somebody@somewhere\n")
    assert run(f"index verify {index} --key {tmp_path}/id.pub").code == 0
    shell("ssh-keygen -q -t ed25519 -f other -N " + "")
    other = run(f"index verify {index} --key {tmp_path}/other.pub --json")
    assert problems(other) == [(SIGNATURE, "signature")] and "another key" in other.records[0]["message"]
    refused = run(f"index sign {index} --key {tmp_path}/other")
    assert refused.code == 2 and "PKCS#8" in refused.err


def drop(index: Path, _: tuple[Path, Path]) -> None:
    (index / SIGNATURE).unlink()


def alter(*way: str, value: Any) -> Callable[[Path, tuple[Path, Path]], None]:
    def apply(index: Path, _: tuple[Path, Path]) -> None:
        content = json.loads((index / SIGNATURE).read_text())
        inner = content
        for name in way[:-1]:
            inner = inner[name]
        inner[way[-1]] = value
        (index / SIGNATURE).write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")

    return apply


def another_key(index: Path, _: tuple[Path, Path]) -> None:
    from stride_cli.signing import sign_index

    sign_index(index, write_keys(index.parent, "other")[0])


def another_index(index: Path, _: tuple[Path, Path]) -> None:
    kept = (index / SIGNATURE).read_bytes()
    shutil.rmtree(index)
    build(index, ["something", "else", "entirely"])
    add_stage(index, "operators")
    (index / SIGNATURE).write_bytes(kept)


CHANGES: dict[str, tuple[Callable[[Path, Any], None], str, str]] = {
    "no signature": (drop, SIGNATURE, "the index is not signed"),
    "another key": (another_key, SIGNATURE, "is said to be of another key"),
    "altered signature": (
        alter("signature", value=base64.b64encode(bytes(64)).decode()),
        SIGNATURE,
        "do not fit",
    ),
    "altered statement": (alter("statement", "stages", value={}), SIGNATURE, "do not fit"),
    "altered name": (alter("key", value="0" * 64), SIGNATURE, f"names key {'0' * 64}"),
    "another index": (another_index, "manifest.json", "is not what was signed"),
    "fitted again": (
        lambda index, _: add_stage(index, "operators", 2.0),
        "operators/manifest.json",
        "operators were made again after the index was signed",
    ),
    "added": (lambda index, _: add_stage(index, "truth"), "truth/manifest.json", "truth were added after"),
    "gone": (
        lambda index, _: shutil.rmtree(index / "operators"),
        "operators/manifest.json",
        "operators were signed, and are not there",
    ),
    "unfinished": (lambda index, _: (index / "truth.partial").mkdir(), "truth.partial", "an unfinished"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_not_as_it_was_signed_is_told(run, index: Path, keys: tuple[Path, Path], kind: str) -> None:
    change, path, words = CHANGES[kind]
    assert run(f"index sign {index} --key {keys[0]}").code == 0
    change(index, keys)
    plain = run(f"index verify {index} --json")
    assert plain.code == 0, plain.out  # by itself it is whole
    found = run(f"index verify {index} --key {keys[1]} --json")
    assert problems(found) == [(path, "signature")]
    assert words in found.records[0]["message"] and "is not what was signed" in found.err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"statement": {"index": 1, "stages": []}}',
        bytes(1 << 17),
    ],
)
def test_a_signature_that_is_none(run, index: Path, keys: tuple[Path, Path], data: bytes) -> None:
    (index / SIGNATURE).write_bytes(data)
    assert problems(run(f"index verify {index} --json")) == [(SIGNATURE, "content")]
    found = problems(run(f"index verify {index} --json --key {keys[1]}"))
    assert found == [(SIGNATURE, "content"), (SIGNATURE, "signature")]
    assert run(f"index sign {index} --key {keys[0]}").code == 0  # in its place
    assert run(f"index verify {index} --key {keys[1]}").code == 0


def test_signature_json_is_a_plain_file(run, index: Path, keys: tuple[Path, Path]) -> None:
    elsewhere = index.parent / "thesis.txt"
    elsewhere.write_text("mine")
    for name in (SIGNATURE, f"{SIGNATURE}.new"):
        (index / name).symlink_to(elsewhere)
        refused = run(f"index sign {index} --key {keys[0]}")
        assert refused.code == 3 and elsewhere.read_text() == "mine"
        assert run(f"index verify {index}").code == 1
        (index / name).unlink()
    (index / SIGNATURE).mkdir()
    assert problems(run(f"index verify {index} --json")) == [(SIGNATURE, "extra")]
    (index / "operators" / SIGNATURE).write_text("{}")
    assert (f"operators/{SIGNATURE}", "extra") in problems(run(f"index verify {index} --json"))


def test_an_append_does_not_carry_the_signature_over(run, index: Path, keys: tuple[Path, Path]) -> None:
    assert run(f"index sign {index} --key {keys[0]}").code == 0
    build(index, ["more", "of it"], key="more", extend=True)
    assert not (index / SIGNATURE).exists() and (index / "operators").is_dir()
    assert problems(run(f"index verify {index} --key {keys[1]} --json")) == [(SIGNATURE, "signature")]


def test_a_damaged_index_is_not_signed(run, index: Path, keys: tuple[Path, Path]) -> None:
    tokens = index / "corpus/tokens/c/0"
    tokens.write_bytes(tokens.read_bytes()[::-1])
    refused = run(f"index sign {index} --key {keys[0]}")
    assert refused.code == 3 and "corpus/tokens/c/0" in refused.err and not (index / SIGNATURE).exists()


def test_other_keys_are_refused(run, index: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    other = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "rsa.pem").write_bytes(other.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "rsa-pub.pem").write_bytes(other.public_key().public_bytes(pem, spki))
    (tmp_path / "noise.pem").write_bytes(bytes(range(256)))
    new, half = "openssl genpkey -algorithm ed25519 -out key.pem", "openssl pkey -in key.pem -pubout"
    for command, key, words, fix in (
        ("sign", tmp_path / "rsa.pem", "of another kind, RSA", new),
        ("sign", public, "is a public key", new),
        ("sign", tmp_path / "noise.pem", "is no key", new),
        ("sign", tmp_path / "nothing.pem", "cannot be read: No such file", "--key"),
        ("sign", "/dev/zero", "is no key", new),
        ("verify", tmp_path / "rsa-pub.pem", "of another kind, RSA", half),
        ("verify", private, "is a private key", half),
        ("verify", tmp_path / "noise.pem", "is no key", half),
        ("verify", tmp_path, "cannot be read: Is a directory", "--key"),
    ):
        refused = run(f"index {command} {index} --key {key}")
        assert refused.code == 2 and refused.out == "" and words in refused.err, refused.err
        assert fix in refused.err.partition("fix:")[2]
    assert not (index / SIGNATURE).exists()


def test_in_a_zip_file_and_behind_a_url(run, index: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    import functools
    import http.server
    import threading

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    private, public = keys
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run.stride"
        assert problems(run(f"index verify {url} --key {public} --json")) == [(SIGNATURE, "signature")]
        assert run(f"index sign {index} --key {private}").code == 0
        packed = shutil.make_archive(str(tmp_path / "run.stride"), "zip", index)
        for place in (url, packed):
            assert run(f"index verify {place} --key {public}").code == 0
            plain = run(f"index verify {place}")
            assert plain.code == 0 and "unchecked" in plain.err
            assert run(f"index sign {place} --key {private}").code == 2
        add_stage(index, "truth")
        found = problems(run(f"index verify {url} --key {public} --json"))
        assert found == [("truth/manifest.json", "signature")]
        server.shutdown()


def test_without_the_package_the_extra_is_named(
    run, index: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for command, key in (("sign", keys[0]), ("verify", keys[1])):
        refused = run(f"index {command} {index} --key {key}")
        assert refused.code == 2 and "pip install 'stride-attribution[sign]'" in refused.err
    assert run(f"index verify {index}").code == 0
