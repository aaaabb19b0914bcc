"""What `stride index plan` says beforehand, and what it then takes: disk, memory and time of every stage.

Cases, each of a size of its own: the demo's corpus and model; a model of about 5 million parameters with the
first documents of `--corpus`; SmolLM2-135M's shape with random weights and a few of them. Models other than
the demo's hardly know their corpus: what they answer does not matter here.

Predictions are made in a process of its own, which measures rates as the command does. Then `stride index
build`, `train --no-calibration`, `calibrate` and `query` run, one thread each. Time is processor time, of the
rates and of the commands, so that what else the machine does enters it little; memory is the peak of a
process's anonymous pages; disk is what files take.

`--parts half`: opening, and fitting with a few chunks, a checkpoint of about a billion random parameters in
half precision: whether its weights stay in their file, mapped, or are widened.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stride_cli.output import emit, note
from tests.benchmarks._machine import machine, resident, watched_memory

PARTS = ("predict", "run", "half")
CASES = ("demo", "five", "smollm2")
DOCUMENTS = {"five": 360, "smollm2": 40}
BLOCKS = {"five": 128, "smollm2": 64}
_ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
_SAMPLED = 0.01  # seconds between two looks at memory


def prepare(case: str, folder: Path, corpus: Path | None) -> tuple[Path, Path, int | None]:
    """The case's corpus, model and block size; made once."""
    from stride_cli import demo

    if case == "demo":
        home = Path(demo.__file__).parent
        return home / "corpus.jsonl", home / "model", None
    if corpus is None:
        raise SystemExit(f"case {case} needs --corpus, JSON Lines of texts")
    own, model = folder / f"{case}.jsonl", folder / f"{case}.model"
    if not own.exists():
        with corpus.open() as lines, own.open("w") as out:
            out.writelines(line for _, line in zip(range(DOCUMENTS[case]), lines, strict=False))
    if not model.exists():
        sizes = {"layers": 4, "width": 256, "vocab": 4096, "context": 128, "steps": 2}
        command = [sys.executable, "-m", "stride_cli", "model", "train", str(own), "--out", str(model)]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if case == "smollm2":
            _smollm2_shape(model)
    return own, model, BLOCKS[case]


def _smollm2_shape(place: Path) -> None:
    """SmolLM2-135M's shape with random weights, in the place of a model whose tokenizer stays."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(place)
    shutil.rmtree(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)


def predict(case: str, corpus: Path, model: Path, block: int | None) -> dict[str, Any]:
    """The plan, with rates in processor time."""
    from stride_cli.attribution.stage_plan import plan_stages
    from stride_cli.corpus.options import PlanOptions

    began = time.process_time()
    found = plan_stages(
        str(model), PlanOptions(block_size=block), sources=[str(corpus)], clock=time.process_time
    )
    return {"what": "predicted", "measured_for": time.process_time() - began} | asdict(found)


def run(case: str, corpus: Path, model: Path, block: int | None, out: Path) -> Iterator[dict[str, Any]]:
    """One record a stage: seconds, megabytes in memory, bytes on disk afterwards."""
    shutil.rmtree(out, ignore_errors=True)
    build = ["index", "build", str(corpus), "--model", str(model), "--out", str(out)]
    place = ["--index", str(out)]
    asked = ["query", "The capital of France is", *place, "--no-server", "--json"]
    commands = {
        "build": build if block is None else [*build, "--block-size", str(block)],
        "fit": ["train", *place, "--no-calibration"],
        "calibrate": ["calibrate", *place],
        "query": asked,
    }
    for stage, command in commands.items():
        note(f"{case}: {stage}")
        seconds, elapsed, peak, said = _watched([sys.executable, "-m", "stride_cli", *command])
        disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        record = {"what": "taken", "stage": stage, "seconds": seconds, "elapsed": elapsed}
        record |= {"memory_bytes": peak, "disk_bytes": disk}
        if stage == "query":
            record["stages"] = json.loads(said)["seconds"]
        if stage == "fit":
            record["gate_size"] = json.loads(said)["gate_size"]
        yield record


def _watched(command: list[str]) -> tuple[float, float, int, bytes]:
    """Processor seconds, seconds, the peak of anonymous memory, and what the command wrote to stdout."""
    environment = {**os.environ, **_ALONE, "STRIDE_NO_PROGRESS": "1"}
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, resident(process.pid).get("anonymous", 0))
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(_SAMPLED)
    said, complaint = process.communicate()
    if process.returncode:
        raise SystemExit(complaint.decode())
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, time.perf_counter() - began, peak, said


_HALF = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HALF_SPACES = "residual-matrix+logit+token-logit+pair-logit"  # without a decomposition in every block


def make_half(folder: Path) -> None:
    """A checkpoint of that shape, its tokenizer, and a corpus of a few documents."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stride_cli.models.language.bpe import train_bpe

    texts = [f"Ada number {number} lives in Oslo and likes to read." for number in range(9)]
    lines = [json.dumps({"id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (folder / "half.jsonl").write_text("".join(lines))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**_HALF, dtype="bfloat16"))
    model.save_pretrained(folder / "half.model", max_shard_size="1GB")
    train_bpe(texts, vocab_size=300, context_length=64).save_pretrained(folder / "half.model")


def half(folder: Path) -> Iterator[dict[str, Any]]:
    """What opening and fitting hold, of their own and mapped."""
    import multiprocessing

    import torch

    from stride_cli import api
    from stride_cli.models.loading import load_model

    model_path, out = folder / "half.model", folder / "half.stride"
    if not model_path.exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_half, args=(folder,))
        maker.start()
        maker.join()
    if not out.exists():
        api.build_index([str(folder / "half.jsonl")], model_path=str(model_path), out=out)

    with watched_memory() as held:
        model = load_model(model_path, device="cpu", dtype="bf16")
        model.hidden(torch.zeros((1, 4), dtype=torch.int64), model.n_layers)
    about = {
        "what": "half",
        "parameters": model.n_parameters,
        "weight_megabytes": 2e-6 * model.n_parameters,
    }
    yield about | {"stage": "open", **held, "mapped_megabytes": resident()["mapped"] / 1e6}
    with watched_memory() as held:
        options = api.ClosedOptions(space=_HALF_SPACES, project=512)
        record = api.train(out, options, model=model, overwrite=True)
    gates = 4e-6 * record["gate_size"] * record["subsets"]
    yield about | {"stage": "fit", **held, "gate_size": record["gate_size"], "sums_megabytes": gates}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks plan", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where models and indexes go")
    parser.add_argument("--corpus", type=Path, help="JSON Lines of texts")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["predict", "run"])
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    about = machine("torch", "transformers", "numpy")
    if "half" in given.parts:
        for record in half(given.folder):
            emit({"benchmark": "plan", "case": "half", **record, **about})
    for case in given.cases if {"predict", "run"} & set(given.parts) else ():
        corpus, model, block = prepare(case, given.folder, given.corpus)
        if "predict" in given.parts:
            emit({"benchmark": "plan", "case": case, **predict(case, corpus, model, block), **about})
        if "run" in given.parts:
            for record in run(case, corpus, model, block, given.folder / f"{case}.stride"):
                emit({"benchmark": "plan", "case": case, **record, **about})
