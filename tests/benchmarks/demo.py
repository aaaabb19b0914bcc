"""For how many of the embedded corpus's prompts is the document that states the fact on top?

Runs `stride demo --all` in a directory (`--out`), timing it when that is new, and counts: prompts
whose fact the model knows (its continuation holds the answer), prompts with the right document on top, and
both, for the ten listed prompts and for all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from stride_cli.api import demo_corpus
from stride_cli.output import emit


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("stride-demo"))
    out = parser.parse_args(arguments).out
    fresh = not out.exists()
    seconds = None
    if fresh:
        began = time.perf_counter()
        _demo(out)
        seconds = time.perf_counter() - began
    prompts = {prompt["prompt"]: prompt for prompt in demo_corpus()[1]}
    answers = [json.loads(line) for line in _demo(out, "--all").splitlines()]
    for name, chosen in (
        ("listed", [answer for answer in answers if prompts[answer["prompt"]]["listed"]]),
        ("all", answers),
    ):
        known = [prompts[answer["prompt"]]["answer"] in answer["response"] for answer in chosen]
        top = [answer["hits"][0]["document"] in answer["expected"] for answer in chosen]
        emit(
            {
                "benchmark": "demo",
                "prompts": name,
                "count": len(chosen),
                "model_knows": sum(known),
                "right_document_on_top": sum(top),
                "both": sum(a and b for a, b in zip(known, top, strict=True)),
                "seconds_of_a_first_run": seconds,
            }
        )


def _demo(out: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "stride_cli", "demo", "--out", str(out), "--json", *flags]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
