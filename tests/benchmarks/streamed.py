"""Models whose weights memory has no room for (`--stream`): what they hold, and what they take.

`--parts commands`: a Llama-shaped checkpoint of 1.1 billion random parameters in bf16, in several files, is
computed with in float32. `stride train`, then `stride query`, both with --stream, in processes of their own
that are ended where their anonymous memory passes `--limit`, which is less than the weights take.

`--parts passes`: a shallower model of the same width, whole and streamed in one process, in turn: gate
gradients of a batch (processor seconds, and how far apart they are), and tokens that are written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from stride_cli.output import emit, note
from tests.benchmarks._machine import interleave, machine, resident

PARTS = ("commands", "passes")
BLOCKS = {"commands": 22, "passes": 4}
_SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_SAMPLED = 0.01  # seconds between two looks at memory
_ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "STRIDE_NO_PROGRESS": "1"}
_DOCUMENTS, _SUBSETS = 12, 3
_FEW = {"STRIDE_QUERY_MAX_NEW_TOKENS": "4"}
_ROWS, _LENGTHS = 4, (8, 48)  # of batches whose gradients are taken


def make(path: Path, blocks: int) -> None:
    """A checkpoint of that shape with random weights, and a tokenizer of a few words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stride_cli.models.language.bpe import train_bpe

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config: Any = LlamaConfig(**_SHAPE, num_hidden_layers=blocks, dtype="bfloat16")
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="500MB")
    train_bpe(_texts(), vocab_size=300, context_length=2048).save_pretrained(path)


def _texts() -> list[str]:
    return [f"Ada number {number} lives in Oslo and likes to read." for number in range(_DOCUMENTS)]


def made(folder: Path, part: str) -> Path:
    """The part's checkpoint, made once, by a process of its own."""
    path = folder / f"{part}.model"
    if not (path / "tokenizer_config.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        code = "import sys, pathlib; from tests.benchmarks.streamed import make; "
        code += "make(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", code, str(path), str(BLOCKS[part])], check=True)
    return path


def commands(folder: Path, limit: int, spaces: str) -> Iterator[dict[str, Any]]:
    """One record a stage: seconds, and bytes that the process held at most."""
    model, out, corpus = made(folder, "commands"), folder / "commands.stride", folder / "corpus.jsonl"
    lines = (json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(_texts()))
    corpus.write_text("".join(line + "\n" for line in lines))
    shutil.rmtree(out, ignore_errors=True)
    place, streamed = ["--index", str(out)], ["--stream", "--json"]
    drawn = ["--subsets", str(_SUBSETS)]
    fit = ["train", *place, *streamed, "--no-calibration", *(["--space", spaces] if spaces else [])]
    stages = {
        "build": ["index", "build", str(corpus), "--model", str(model), "--out", str(out), *drawn, "--json"],
        "fit": fit,
        "query": [
            "query",
            "Ada number 7 lives in",
            *place,
            *streamed,
        ],
    }
    for stage, command in stages.items():
        note(stage)
        found, said = watched([sys.executable, "-m", "stride_cli", *command], limit)
        record = {
            "what": "command",
            "stage": stage,
            "spaces": spaces or "default",
            "limit_bytes": limit,
            **found,
        }
        if stage == "query":
            record["hits"] = len(json.loads(said)["hits"])
        yield record | {"weights": weights(model)}


def weights(model: Path) -> dict[str, int]:
    """How many numbers a checkpoint has, and bytes of them there and in float32."""
    from stride_cli.models.language.streaming import stored_numbers

    files = sorted(model.glob("*.safetensors"))
    count, _ = stored_numbers(files)
    return {
        "parameters": count,
        "files": len(files),
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "bytes_in_float32": 4 * count,
    }


def watched(command: list[str], limit: int) -> tuple[dict[str, Any], bytes]:
    """Processor seconds, seconds and the peak of anonymous memory of a command, and what it wrote to stdout.

    Raises
    ------
    SystemExit      it failed, or held more than `limit` bytes and was ended
    """
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(
        command, env=os.environ | _ALONE | _FEW, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, resident(process.pid).get("anonymous", 0))
        except (FileNotFoundError, ProcessLookupError):
            break
        if peak > limit:
            process.kill()
            process.communicate()
            raise SystemExit(f"{' '.join(command[3:])} held {peak:,} bytes, more than {limit:,}: ended")
        time.sleep(_SAMPLED)
    said, complaint = process.communicate()
    if process.returncode:
        raise SystemExit(complaint.decode())
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "processor_seconds": spent,
        "seconds": time.perf_counter() - began,
        "peak_anonymous_bytes": peak,
    }, said


def passes(folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Whole and streamed, in turn."""
    import numpy as np
    import torch

    from stride_cli.data.batches import pad_batch
    from stride_cli.models.linear_layers import layer_widths
    from stride_cli.models.loading import load_model
    from stride_cli.operators.gradients import gate_gradients
    from stride_cli.operators.layer_spaces import LayerMatrixSpace
    from stride_cli.operators.spaces import SPACES
    from stride_cli.operators.steered_model import SteeredModel

    path = made(folder, "passes")
    torch.set_num_threads(1)
    models: dict[str, Any] = {
        name: load_model(path, device="cpu", dtype="fp32", stream=name == "streamed")
        for name in ("whole", "streamed")
    }
    cls = SPACES["mlp-matrix"]
    assert issubclass(cls, LayerMatrixSpace)
    random = torch.Generator().manual_seed(0)
    widths = [layer_widths(layer) for layer in models["whole"].linear_layers("mlp")]
    V = [torch.randn(8, read, generator=random) / read**0.5 for read, _ in widths]
    U = [torch.randn(given, 8, generator=random) / given**0.5 for _, given in widths]
    space = cls.from_bases(V, U).requires_grad_(False)
    about = {"what": "passes", "blocks": BLOCKS["passes"], "weights": weights(path)}
    for length in _LENGTHS:
        ids = list(np.random.default_rng(0).integers(0, _SHAPE["vocab_size"], (_ROWS, length)))
        batch = pad_batch(np.arange(_ROWS), ids, list(np.ones((_ROWS, length))))
        tasks = {
            name: partial(gate_gradients, SteeredModel(model, [space], 0), batch)
            for name, model in models.items()
        }
        tasks["streamed"]()
        taken, found = interleave(tasks, repeats)
        (this, *_), (that, *_) = found["streamed"][0], found["whole"][0]
        apart = {"tokens": _ROWS * length, "relative_error": float((this - that).norm() / that.norm())}
        yield about | _compared("gradients", taken) | apart
    prompt = list(range(16))
    writing = {name: partial(model.generate, prompt, 4) for name, model in models.items()}
    written, said = interleave(writing, repeats)
    same = said["streamed"] == said["whole"]
    yield about | _compared("generation", written) | {"tokens": len(said["whole"]), "same": same}


def _compared(work: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    middle = {name: median(times) for name, times in taken.items()}
    return {
        "work": work,
        "processor_seconds": middle,
        "streamed_by_whole": middle["streamed"] / middle["whole"],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks streamed", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where models and indexes go")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=4.0, help="gigabytes of anonymous memory [4]")
    parser.add_argument("--spaces", default="", help="of stride train; default: its own")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    about = machine("torch", "transformers", "accelerate", "safetensors")
    if "passes" in given.parts:
        for record in passes(given.folder, given.repeats):
            emit({"benchmark": "streamed", **record, **about})
    if "commands" in given.parts:
        for record in commands(given.folder, int(given.limit * 1e9), given.spaces):
            emit({"benchmark": "streamed", **record, **about})
