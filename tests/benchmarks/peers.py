"""How much an index costs beside bergson's: the same pairs, model and threads, in processor time.

    python -m tests.benchmarks peers PAIRS.jsonl --model DIR --bergson PYTHON [--sizes 80 160]

PAIRS.jsonl holds {"id", "prompt", "response"}, DIR a model in transformers' format, PYTHON the interpreter of
an environment with bergson (``pip install bergson``). Each tool starts anew for each size, on the first
pairs: `stride index build` and `stride train`, in the spaces of a fine-tuned model and without null prompts,
and `bergson build` with projections of 16 × 16 numbers a layer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stride_cli.output import emit
from tests.benchmarks._machine import machine

SPACE = "linear-matrix+logit+token-logit+pair-logit"


def run(commands: list[list[str]], made: Path, threads: int) -> dict[str, float]:
    """Run commands: processor seconds of all processes, the largest peak of memory, and what is on disk."""
    kept = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    seconds, peak = 0.0, 0.0
    for command in commands:
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, env=kept, stdout=said, stderr=said)
            _, status, used = os.wait4(process.pid, 0)
            said.seek(0)
            if status:
                raise SystemExit(f"{' '.join(command)}\n{said.read()[-2000:]}")
        seconds += used.ru_utime + used.ru_stime
        peak = max(peak, used.ru_maxrss / 1024)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file()) / 1e6
    return {"processor_seconds": seconds, "peak_megabytes": peak, "megabytes": size}


def main(arguments: list[str]) -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peers", description=__doc__, formatter_class=about)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bergson", required=True, help="python of an environment that has it")
    parser.add_argument("--sizes", type=int, nargs="+", default=[80, 160], help="pairs")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    lines = given.pairs.read_text(encoding="utf-8").splitlines()
    stride, model = [sys.executable, "-m", "stride_cli"], ["--model", given.model]
    columns = ["--prompt_column", "prompt", "--completion_column", "response", "--projection_dim", "16"]
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as name:
            pairs, index, other = (Path(name) / each for each in ("pairs.jsonl", "run.stride", "run.bergson"))
            pairs.write_text("\n".join(lines[:size]) + "\n", encoding="utf-8")
            build = [*stride, "index", "build", str(pairs), *model, "--out", str(index)]
            train = [*stride, "train", "--index", str(index), "--space", SPACE, "--no-calibration"]
            theirs = [given.bergson, "-m", "bergson", "build", str(other), *model, "--dataset", str(pairs)]
            records = {
                "stride": run([build, train], index, given.threads),
                "bergson": run([[*theirs, *columns]], other, given.threads),
            }
            emit({"benchmark": "peers", "pairs": size, "threads": given.threads} | records | machine("torch"))
