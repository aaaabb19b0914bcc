"""What a command costs before it does anything, in `python -c pass`; where the time of a cold query goes.

Commands run in turn as processes of their own; processor seconds (user and system) and wall seconds, minima
and ratios. `--index` has operators. The stages of a cold query are timed in a process of its own: imports,
loading, kernels, the first query and the second. One prompt is also asked of transformers' own model, which a
query of a plain checkpoint does without, and held against importing torch alone; and of a running server, to
the last digit as without one. Kernels: the first query
of a process with an empty cache directory, which compiles, and with the one that this filled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from stride_cli.output import emit
from tests.benchmarks._machine import machine

STAGES = """
import json, sys, time
times = {}
last = time.process_time()
times["interpreter"] = last
def stage(name):
    global last
    now = time.process_time()
    times[name], last = now - last, now
import stride_cli.commands.app, stride_cli.commands.query
stage("command line")
import numpy
from index_format.reader import Index
index = Index.open(sys.argv[1])
stage("numpy, index")
from stride_cli.api import Session, open_model
from stride_cli.startup import own_process, without_collection
own_process()
with without_collection():  # as Session.open does all of this
    import torch
    stage("torch")
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.remembered import find_recorded
    load_tokenizer(find_recorded(index.attributes["model_path"], index.path))
    stage("tokenizer")
    model = open_model(index)
    stage("model, fingerprints")
    session = Session.open(sys.argv[1], model=model)
    stage("operators")
import stride_cli.recovery.lasso, stride_cli.recovery.ranking
stage("numba")
session.query(sys.argv[2])
stage("first query, kernels loaded")
session.query(sys.argv[2] + " of")
stage("second query")
print(json.dumps(times))
"""

# a query whose model and tokenizer are transformers' own
THEIRS = """
import sys
from stride_cli.models.language import nanochat, tokenizer
tokenizer.own_config = nanochat.own_config = lambda directory: None
from stride_cli.__main__ import main
sys.argv[0] = "stride"
main()
"""


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    about = machine("torch", "transformers", "numba", "typer")
    about["threads"] = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    stride = [sys.executable, "-m", "stride_cli"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "stride --help": [*stride, "--help"],
        "stride index info": [*stride, "index", "info", given.index],
    }
    yield _compare(commands, given.repeats) | about
    prompts = "\n".join(f"{given.prompt} {number}" for number in range(given.prompts))
    here = ["--index", given.index, "--json"]
    asked = ["query", given.prompt, *here]
    queries = {
        "python -c pass": commands["python -c pass"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "one prompt": [*stride, *asked],
        "one prompt by recovery alone": [*stride, *asked, "--read", "0"],
        "one prompt by transformers": [sys.executable, "-c", THEIRS, *asked],
        f"{given.prompts} prompts in one process": [*stride, "query", "-", *here],
    }
    record = _compare(queries, given.query_repeats, prompts)
    torch, one, _, theirs, many, *_ = list(record["processor_seconds"].values())[1:]
    passed = record["wall_seconds"]
    yield (
        record
        | {
            "processor_seconds_of_a_further_prompt": (many - one) / (given.prompts - 1),
            "one_prompt_in_imports_of_torch": one / torch,
            "further_prompt_in_imports_of_torch": (many - one) / (given.prompts - 1) / torch,
            "one_prompt_of_that_by_transformers": one / theirs,
            "imports_of_torch": {name: value / torch for name, value in record["processor_seconds"].items()},
            "wall_in_imports_of_torch": {
                name: value / passed["python -c 'import torch'"] for name, value in passed.items()
            },
        }
        | about
    )
    found: list[dict[str, float]] = [
        _child(["-c", STAGES, given.index, given.prompt]) for _ in range(given.query_repeats)
    ]
    best = min(found, key=lambda stages: sum(stages.values()))
    yield {
        "benchmark": "startup",
        "what": "stages of a cold query",
        "processor_seconds": best,
        "total": sum(best.values()),
    } | about
    with tempfile.TemporaryDirectory() as folder:
        cached = {"NUMBA_CACHE_DIR": folder}
        first, second = (_child(["-c", STAGES, given.index, given.prompt], cached) for _ in range(2))
        yield {
            "benchmark": "startup",
            "what": "kernels",
            "processor_seconds_of_first_query": {
                "compiling": first["first query, kernels loaded"],
                "cached": second["first query, kernels loaded"],
                "same process": second["second query"],
            },
            "cache_files": sum(len(names) for _, _, names in os.walk(folder)),
        } | about


def _compare(commands: dict[str, list[str]], repeats: int, text: str = "") -> dict[str, Any]:
    spent: dict[str, list[float]] = {name: [] for name in commands}
    wall: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            before, began = _children(), time.perf_counter()
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                input=text,
                text=True,
                env=_environment(None),
            )
            wall[name].append(time.perf_counter() - began)
            spent[name].append(_children() - before)
    least = {name: min(values) for name, values in spent.items()}
    unit = least["python -c pass"]
    return {
        "benchmark": "startup",
        "what": "commands",
        "processor_seconds": least,
        "wall_seconds": {name: min(values) for name, values in wall.items()},
        "python_starts": {name: value / unit for name, value in least.items()},
        "repeats": repeats,
    }


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    """In which modules are compiled once and no more, as where `stride` is installed."""
    return {**os.environ, **(more or {}), "PYTHONDONTWRITEBYTECODE": ""}


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _child(arguments: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    output = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(environment),
    ).stdout
    return json.loads(output.splitlines()[-1])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks startup", description=__doc__)
    parser.add_argument("--index", required=True)
    parser.add_argument("--prompt", default="The French Revolution began in")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--query-repeats", type=int, default=2)
    for record in run(parser.parse_args(arguments)):
        emit(record)
