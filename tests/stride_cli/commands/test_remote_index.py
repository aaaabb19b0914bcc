"""Commands on an index behind a URL and in a zip file: what reads it answers as ever, what writes refuses."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, without its log."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(workspace: Path) -> Iterator[str]:
    """The URL of the workspace, on a web server."""
    handler = functools.partial(Quiet, directory=str(workspace))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module", params=["url", "zip"])
def remote(request: pytest.FixtureRequest, served: str, workspace: Path, tmp_path_factory) -> str:
    if request.param == "url":
        return f"{served}/run.stride"
    base = tmp_path_factory.mktemp("zip") / "run.stride"
    return shutil.make_archive(str(base), "zip", workspace / "run.stride")


def without(record: dict, *names: str) -> dict:
    return {name: value for name, value in record.items() if name not in names}


def test_what_is_in_it(run, workspace, remote):
    for command in ("index info {} --json", "index verify {} --json"):
        here, there = run(command.format(workspace / "run.stride")), run(command.format(remote))
        assert there.code == here.code == 0, there.err
        assert there.records[0]["index"] == remote
        # on disk there are manifests as well, which do not list themselves
        assert without(there.records[0], "index", "bytes") == without(here.records[0], "index", "bytes")


def test_damage_is_exit_code_1(run, workspace, served, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where the whole one has not been fetched
    damaged = workspace / "damaged.stride"
    shutil.copytree(workspace / "run.stride", damaged)
    tokens = damaged / "corpus/tokens/c/0"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\xff")
    try:
        for index in (f"{served}/damaged.stride", shutil.make_archive(str(tmp_path / "a"), "zip", damaged)):
            found = run(f"index verify {index} --json")
            assert found.code == 1 and "corpus/tokens/c/0" in found.records[0]["message"]
            found = run(f"index info {index}")
            assert found.code == 3 and f"{index}/corpus/tokens/c/0" in found.err
    finally:
        shutil.rmtree(damaged)


@pytest.mark.slow
def test_a_query_has_the_same_answer(run, workspace, remote, monkeypatch):
    command = 'query "The French Revolution began in" --json --index {}'
    here, there = run(command.format(workspace / "run.stride")), run(command.format(remote))
    assert there.code == 0, there.err
    assert there.records[0]["hits"] and there.records[0]["hits"] == here.records[0]["hits"]
    assert without(there.records[0], "seconds", "index") == without(here.records[0], "seconds", "index")
    monkeypatch.setenv("STRIDE_GENERAL_INDEX", remote)
    assert run(command.removesuffix(" --index {}")).records[0]["hits"] == here.records[0]["hits"]


WRITERS = [
    "train --index {}",
    "train --index {} --overwrite",
    "tune --index {} --dry-run",
    "index append {corpus} --index {}",
    "evaluate truth --index {} --queries {corpus} --subsets 2",
    "evaluate removal --index {} --queries {corpus}",
    "evaluate loo --index {} --queries {corpus}",
    'verify-hit "The French Revolution began in" --index {}',
]


@pytest.mark.parametrize("command", WRITERS)
def test_what_writes_refuses(run, workspace, remote, command):
    before = {file: file.stat().st_mtime_ns for file in workspace.rglob("*")}
    found = run(command.replace("{corpus}", str(workspace / "corpus.jsonl")).format(remote))
    assert found.code == 2 and found.out == ""
    assert found.err.startswith(f"error: index {remote} ") and "cannot be written" in found.err
    assert "\n  fix: " in found.err and found.err.count("\n") == 2
    assert {file: file.stat().st_mtime_ns for file in workspace.rglob("*")} == before
