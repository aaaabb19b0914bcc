"""What an index and its answers cost beside other libraries: same tokens, model and threads, processor time.

    python -m tests.benchmarks peers PAIRS.jsonl --model DIR --python PYTHON [--sizes 80 160] [--truth FILE]

PAIRS.jsonl holds {"id", "prompt", "response"}, DIR a model in transformers' format that was fine-tuned on
the like, with STRIDE's recipe beside it, PYTHON the interpreter of an environment with the libraries (``pip
install bergson kronfluence dattri-llm dattri``). For each size every tool starts anew on the first pairs,
fits, and scores all pairs for one query and for a hundred (the last of the file, or --queries). `stride
train` makes no null prompts; of the others see `_peer_tools`. With losses of models retrained on halves
(--truth) the LDS of the scores is added.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from stride_cli.data.workspace import Workspace
from stride_cli.output import emit
from stride_cli.research.evaluation.metrics import lds
from tests.benchmarks._machine import machine

PEERS = ("bergson", "bergson-moments", "dattri-llm", "kronfluence")
STRIDE = [sys.executable, "-m", "stride_cli"]


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


def write_tokens(pairs: Path, index: Path, model: str) -> Path:
    """Write the tokens of an index, and as labels those that are scored."""
    if not index.exists():
        build = [*STRIDE, "index", "build", str(pairs), "--model", model, "--out", str(index)]
        subprocess.run(build, check=True, stdout=sys.stderr)
    chunks, lines = Workspace.open(index, model).chunks, []
    for row in range(chunks.n_chunks):
        ids, weights = chunks.chunk(row)
        labels = np.where(weights > 0, ids.astype(np.int64), -100)
        lines.append(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")
    tokens = index.with_suffix(".tokens.jsonl")
    tokens.write_text("".join(lines), encoding="utf-8")
    return tokens


def lds_of(scores: np.ndarray, truth: Path) -> dict[str, float]:
    """Mean over queries of LDS on imported losses, and its standard error."""
    halves = [json.loads(line) for line in truth.read_text(encoding="utf-8").splitlines()]
    halves = [each for each in halves if "train_subset" in each]
    masks = np.array([np.isin(np.arange(scores.shape[1]), each["train_subset"]) for each in halves])
    losses = np.array([[each["test_loss"]] for each in halves])  # (R, 1, Q)
    found = lds(scores, masks, losses).spearman
    return {"lds": float(found.mean()), "lds_se": float(found.std(ddof=1) / np.sqrt(len(found)))}


def measured(tool: str, python: str, files: dict[str, Path], model: str, threads: int) -> dict[str, float]:
    """Fit, and score one query and many, each in a process of its own; scores are left in the folder."""
    folder, index = files["folder"], files["index"]
    if tool == "stride":
        made, named = index, ["--model", model]
        build = [*STRIDE, "index", "build", str(files["corpus"]), *named, "--out", str(index)]
        train = [*STRIDE, "train", "--index", str(index), *named, "--no-calibration"]
        found = run([build, train], made, threads)
        asked = [*STRIDE, "baseline", "stride:stored=true", "--index", str(index), *named]
        asks = {each: [*asked, "--queries", str(files[each]), "--scores"] for each in ("one", "many")}
    else:
        (made := folder / tool).mkdir()
        step = [python, str(Path(__file__).with_name("_peer_tools.py")), tool]
        found = run([[*step, "fit", model, str(files["corpus tokens"]), str(made)]], made, threads)
        tokens = {each: str(files[f"{each} tokens"]) for each in ("one", "many")}
        asks = {each: [*step, "ask", model, tokens[each], str(made)] for each in tokens}
    for each, ask in asks.items():
        used = run([[*ask, str(folder / f"{tool}.npy")]], made, threads)
        found |= {f"{each}_seconds": used["processor_seconds"], f"{each}_peak": used["peak_megabytes"]}
    return found


def main(arguments: list[str]) -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peers", description=__doc__, formatter_class=about)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", required=True, help="of an environment with the libraries")
    parser.add_argument("--tools", nargs="+", default=["stride", *PEERS])
    parser.add_argument("--sizes", type=int, nargs="+", default=[80, 160], help="pairs")
    parser.add_argument("--queries", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    lines = given.pairs.read_text(encoding="utf-8").splitlines()
    queries = given.queries.read_text(encoding="utf-8").splitlines() if given.queries else lines[-100:]
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files = {"folder": folder, "index": folder / "run.stride"}
            for part, some in {"corpus": lines[:size], "one": queries[:1], "many": queries}.items():
                files[part] = folder / f"{part}.jsonl"
                files[part].write_text("\n".join(some) + "\n", encoding="utf-8")
                if set(given.tools) - {"stride"}:
                    index = folder / f"{part}.stride"
                    files[f"{part} tokens"] = write_tokens(files[part], index, given.model)
            records = {}
            for tool in given.tools:
                records[tool] = measured(tool, given.python, files, given.model, given.threads)
                if given.truth:
                    records[tool] |= lds_of(np.load(folder / f"{tool}.npy"), given.truth)
                print(tool, records[tool], file=sys.stderr)
            record = {"benchmark": "peers", "pairs": size, "queries": len(queries), "threads": given.threads}
            emit(record | records | machine("torch"))
