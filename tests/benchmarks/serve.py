"""How long a warm query of `stride serve` takes, against the passes that it cannot do without; many clients.

A server is started (`stride serve INDEX`) and left alone until it has asked its own first query. Then:

- one after the other: queries over HTTP, each of another prompt, as the page asks them: the answer first
  ("query"), then the passages that carry the influence of its hits ("passages"). In turn with them, in this
  process, one forward and backward pass of the same query through the same model and operators
- at once: `--clients` clients, each with a connection of its own, ask `--requests` prompts in all, for
  answers first

Milliseconds of wall time, as whoever asks would measure them. One record a part.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli.output import emit
from tests.benchmarks._machine import machine

_PATIENCE = 120.0  # seconds to start


class Client:
    """One connection to a server, kept open."""

    def __init__(self, port: int, token: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, path: str = "/query", **body: Any) -> tuple[dict[str, Any], float]:
        """A query's record, and milliseconds."""
        began = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body).encode(), self._headers)
        answer = self._connection.getresponse()
        record = json.loads(answer.read())
        assert answer.status == 200, record
        return record, 1000 * (time.perf_counter() - began)

    def close(self) -> None:
        self._connection.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks serve", description=__doc__)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=40, help="one after the other")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=320, help="of all clients")
    parser.add_argument("--settle", type=float, default=5, help="seconds before the first query")
    parser.add_argument("--read", type=int, help="chunks that a query reads; default: the index's")
    parser.add_argument("--prompt", default="The French Revolution began in")
    for record in run(parser.parse_args(arguments)):
        emit(record)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sizes = f"--queries {given.queries} --clients {given.clients} --requests {given.requests}"
    about = {"command": f"python -m tests.benchmarks serve --index {given.index} {sizes}"}
    about |= machine("torch", "transformers", "numpy", "starlette", "uvicorn")
    with tempfile.TemporaryDirectory() as home, served(given.index, Path(home)) as (port, token):
        time.sleep(given.settle)
        yield one_after_another(given, port, token) | about
        yield at_once(given, port, token) | about


@contextmanager
def served(index: Path, home: Path) -> Iterator[tuple[int, str]]:
    """A running server: its port and its token. It is told in a state directory of its own."""
    token = "benchmark-token-0123456789"
    line = [sys.executable, "-m", "stride_cli", "serve", str(index), "--port", "0", "--token", token]
    environment = {**os.environ, "XDG_STATE_HOME": str(home)}
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        deadline = threading.Timer(_PATIENCE, process.kill)
        deadline.start()
        try:
            told = next((each for each in process.stderr if "serving at" in each), "")
            assert told, "the server did not start"
            deadline.cancel()
            yield int(told.split(":")[2].partition("/")[0]), token
        finally:
            deadline.cancel()
            process.terminate()


def one_after_another(given: argparse.Namespace, port: int, token: str) -> dict[str, Any]:
    """Warm queries, and bare passes of the same queries in turn with them."""
    from stride_cli import api
    from stride_cli.data.query_files import as_query
    from stride_cli.operators.gradients import gate_gradients

    session, client = api.Session.open(given.index), Client(port, token)
    steered = session.steered[0]
    read = {} if given.read is None else {"read": given.read}
    asked = {**read, "passages": "like"}
    client.ask(prompt=given.prompt, **read)
    gate_gradients(steered, as_query(session.model, given.prompt).batch())
    times: dict[str, list[float]] = {name: [] for name in ("query", "passages", "bare pass")}
    for number in range(given.queries):
        prompt = f"{given.prompt} {number}"
        record, spent = client.ask(prompt=prompt, **asked)
        times["query"].append(spent)
        times["passages"].append(client.ask("/passages", prompt=prompt, **read)[1])
        query = as_query(session.model, prompt)
        began = time.perf_counter()
        gate_gradients(steered, query.batch())
        times["bare pass"].append(1000 * (time.perf_counter() - began))
    client.close()
    return {
        "benchmark": "serve",
        "what": "one after another",
        "chunks": session.index.n_chunks,
        "read": record["read"],
        "milliseconds": {name: _quantiles(values) for name, values in times.items()},
        "times_a_bare_pass": float(np.median(times["query"]) / np.median(times["bare pass"])),
    }


def at_once(given: argparse.Namespace, port: int, token: str) -> dict[str, Any]:
    """Many clients, each of which asks as soon as it has its answer."""
    each = max(1, given.requests // given.clients)
    asked = {"passages": "like"} | ({} if given.read is None else {"read": given.read})

    def one(client_number: int) -> list[float]:
        client = Client(port, token)
        spent = [
            client.ask(prompt=f"{given.prompt} {client_number} {number}", **asked)[1]
            for number in range(each)
        ]
        client.close()
        return spent

    began = time.perf_counter()
    with ThreadPoolExecutor(given.clients) as pool:
        times = [spent for own in pool.map(one, range(given.clients)) for spent in own]
    seconds = time.perf_counter() - began
    return {
        "benchmark": "serve",
        "what": "at once",
        "clients": given.clients,
        "requests": len(times),
        "milliseconds": _quantiles(times),
        "queries_a_second": len(times) / seconds,
    }


def _quantiles(times: list[float]) -> dict[str, float]:
    return {name: float(np.quantile(times, at)) for name, at in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
