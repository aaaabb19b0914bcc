"""For how many of the embedded corpus's prompts is the document that states the fact on top?

Runs `stride demo --all` in a directory (`--out`), timing it when that is new, and counts: prompts
whose fact the model knows (its continuation holds the answer), prompts with the right document on top, and
both, for the ten listed prompts and for all of them; and how many answers are clear, weak and guesses, of
these and of a hundred prompts that have nothing to do with the corpus (tests/unrelated_prompts.txt).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
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
                **_verdicts(chosen),
                "seconds_of_a_first_run": seconds,
            }
        )
    prompts_file = Path(__file__).parents[1] / "unrelated_prompts.txt"
    index = out / "demo.stride"
    asked = _stride("query", "--file", str(prompts_file), "--index", str(index), "--json", "--top", "1")
    unrelated = [json.loads(line) for line in asked.splitlines()]
    emit({"benchmark": "demo", "prompts": "unrelated", "count": len(unrelated), **_verdicts(unrelated)})


def _verdicts(answers: list[dict]) -> dict[str, int]:
    """How many answers have each verdict."""
    found = Counter(answer["verdict"] for answer in answers)
    return {word: found[word] for word in ("clear", "weak", "guessing")}


def _demo(out: Path, *flags: str) -> str:
    return _stride("demo", "--out", str(out), "--json", *flags)


def _stride(*arguments: str) -> str:
    command = [sys.executable, "-m", "stride_cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
