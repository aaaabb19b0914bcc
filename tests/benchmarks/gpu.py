"""For a machine with a GPU, in less than nine minutes: does it agree with the CPU, and how fast is it?

    python -m tests.benchmarks gpu --out tests/benchmarks/results/gpu.jsonl

(a) Every path of the fit, the query and the reading, compared with the CPU (`tests.gpu.device_paths`).
(b) For models of 135 M, .5 B and 1.5 B random weights in bf16, 64 subsets, chunks of 128 tokens and about 10⁶
gates: tokens a second of the fit (whole, and of the pass over the corpus alone), of reading, of
exact and linear measurement, each against a bare forward and backward pass into every parameter, in the
batches that are fastest for it; the most memory that each took; the bare pass's share of the card's bf16
peak, as its maker states it and as a product of two 8,192² matrices reaches it. How many chunks there are,
the bare pass decides: a few seconds of it.

Left out: fine-tuning on halves of a corpus and comparing methods by it: `examples/suites/finetuning.sh` with
BASE, SEEDS and WORKERS (100 halves × 2 seeds of 1,000 pairs take nine minutes by themselves). `--device cpu
--tiny` and `--device pretend --tiny` run the same at no size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from index_format.design import build_columns
from stride_cli.attribution.direct import query_gradients
from stride_cli.corpus.gate_budget import FEWEST_SUBSETS
from stride_cli.data.batches import Batch, ChunkReader
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.operators import closed
from stride_cli.operators.closed import ClosedSettings, fit_closed
from stride_cli.operators.device_memory import ShrinkingBatches
from stride_cli.operators.gradients import gradient_products
from stride_cli.operators.layer_spaces import MlpMatrixSpace
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.options import ClosedOptions, resolve_settings
from stride_cli.operators.pair_space import token_pairs
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.output import emit
from stride_cli.research.paper.exact_response import measure_exact
from tests.benchmarks._machine import machine

# of SmolLM2-135M, Qwen2.5-0.5B and -1.5B
SIZES: dict[str, dict[str, int]] = {
    "135M": {"d": 576, "inner": 1536, "layers": 30, "heads": 9, "groups": 3, "vocabulary": 49_152},
    "0.5B": {"d": 896, "inner": 4864, "layers": 24, "heads": 14, "groups": 2, "vocabulary": 151_936},
    "1.5B": {"d": 1536, "inner": 8960, "layers": 28, "heads": 12, "groups": 2, "vocabulary": 151_936},
}
_TINY = {"d": 32, "inner": 64, "layers": 3, "heads": 2, "groups": 1, "vocabulary": 300}
# dense bf16, 10¹² operations a second, as the makers state them; the first name that a card's own holds
_PEAKS = {
    **{"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "A10": 125, "L40S": 362},
    **{"L4": 121, "RTX 4090": 165, "RTX 3090": 71},
}
_CHUNK, _DEGREE = 128, 10
_BARE_SECONDS = 4.0  # of the bare pass: it says how many chunks there are
_BARE_TOKENS = (4096, 16_384, 32_768)  # at once: whatever is fastest; halved where memory is short
_QUERIES = 32


class RandomCorpus:
    """The arrays of an index of random chunks that `ChunkReader` reads: tokens as frequent as words are."""

    def __init__(self, n_chunks: int, length: int, vocabulary: int) -> None:
        random = np.random.default_rng(0)
        frequency = 1.0 / np.arange(1, vocabulary + 1)
        tokens = random.choice(vocabulary, n_chunks * length, p=frequency / frequency.sum())
        self.arrays = {
            "corpus/tokens": tokens.astype(np.uint32),
            "corpus/chunk_offsets": np.arange(n_chunks + 1, dtype=np.int64) * length,
            "corpus/loss_start": np.ones(n_chunks, np.int32),
        }

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def has(self, name: str) -> bool:
        return name in self.arrays


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    about = {"benchmark": "gpu", **machine("torch", "transformers", "numpy"), **_card(given.device)}
    yield from ({"what": "device path", **record, **about} for record in _agreement(given.device, given.path))
    for name, size in ({"tiny": _TINY} if given.tiny else SIZES).items():
        spent = time.monotonic() - began
        if spent > 0.7 * given.seconds:
            yield {"what": "rates", "model": name, "left_out": f"{spent:.0f} s are over"} | about
            continue
        yield {"what": "rates", "model": name, **rates(given, size), **about}
    yield {
        "what": "whole",
        "seconds": time.monotonic() - began,
        "left_out": "fine-tuning on halves, and a comparison of all methods: examples/suites/finetuning.sh",
    } | about


def _agreement(device: str, chosen: str) -> Iterator[dict[str, Any]]:
    from tests.gpu.device_paths import compare

    # on the CPU there is nothing to compare it with
    return iter(()) if device == "cpu" or chosen == "none" else compare(device, chosen)


def rates(given: argparse.Namespace, size: dict[str, int]) -> dict[str, Any]:
    """Tokens a second of everything, of a model of these sizes."""
    clock = _Clock(given.device)
    model = random_model(size, given.device)
    n_subsets, length = (40, 16) if given.tiny else (FEWEST_SUBSETS, _CHUNK)
    few = 64 if given.tiny else 512
    # 1. A bare pass says how many chunks there are to be
    probe = _reader(few, length, size)
    settings = _settings(model, probe, n_subsets, 10_000 if given.tiny else 1_000_000)
    bare(model, probe, _BARE_TOKENS[0])  # warm
    least, bare_tokens = min(
        (clock.time(lambda some=some: bare(model, probe, some)).seconds, some) for some in _BARE_TOKENS
    )
    count = int(np.clip(few * _BARE_SECONDS / least, few, 16 * few)) // 32 * 32
    count = few if given.tiny else count
    chunks = _reader(count, length, size)
    columns = build_columns(0, count, n_subsets=n_subsets, degree=min(_DEGREE, n_subsets // 2), seed=0)
    # 2. The fit, warm: of few chunks first
    apart = _apart(*(fit_closed(model, probe, columns[:few], n_subsets, settings).gates for _ in range(2)))
    spaces = clock.wrapped(closed.fit_spaces)
    with mock.patch.object(closed, "fit_spaces", spaces):
        fit = clock.time(lambda: fit_closed(model, chunks, columns, n_subsets, settings))
    found = {"bare": clock.time(lambda: bare(model, chunks, bare_tokens)), "fit": fit}
    operators = replace(fit.result, step=0.01)
    steered = SteeredModel.of(model, operators)
    # 3. Reading, linear and exact measurement
    asked = query_gradients(steered, [chunks.batch(np.arange(1))])
    query, queries = chunks.batch(np.arange(1)), chunks.batch(np.arange(min(_QUERIES, count)))
    measure_linear(steered, queries)
    found["read"] = clock.time(lambda: gradient_products(steered, asked, chunks))
    found["linear"] = clock.time(lambda: measure_linear(steered, queries))
    found["exact"] = clock.time(lambda: measure_exact(steered, query, batch_size=_QUERIES))
    tokens = dict.fromkeys(("bare", "fit", "read"), count * length)
    # exact: two continuations a subset, towards it and away
    tokens |= {"linear": queries.ids.numel(), "exact": 2 * n_subsets * query.ids.numel()}
    per_second = {name: tokens[name] / each.seconds for name, each in found.items()}
    per_second["pass"] = tokens["fit"] / max(1e-9, fit.seconds - clock.inner)
    flops = 6 * model.n_parameters + 6 * model.n_layers * length * model.d_model  # a token; causal attention
    return {
        "parameters": model.n_parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "subsets": n_subsets,
        "gates": operators.gate_size,
        "project": settings.project,
        "chunks": count,
        "chunk_tokens": length,
        "batch_tokens": settings.batch_tokens,
        "bare_batch_tokens": bare_tokens,
        "two_fits_apart": apart,
        "seconds": {name: each.seconds for name, each in found.items()} | {"bases": clock.inner},
        "tokens_per_second": per_second,
        "share_of_bare_rate": {
            name: rate / per_second["bare"] for name, rate in per_second.items() if name != "bare"
        },
        "peak_gigabytes": {name: each.bytes / 1e9 for name, each in found.items()},
        "bare_teraflops": flops * per_second["bare"] / 1e12,
        **_shares(flops * per_second["bare"], given.device),
    }


def random_model(size: dict[str, int], device: str) -> CausalLM:
    """A Llama of these sizes with random weights, bf16 on CUDA."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    named = {"hidden_size": "d", "intermediate_size": "inner", "num_hidden_layers": "layers"}
    named |= {"num_attention_heads": "heads", "num_key_value_heads": "groups", "vocab_size": "vocabulary"}
    sizes = {name: size[own] for name, own in named.items()}
    config = LlamaConfig(**sizes, max_position_embeddings=2048, tie_word_embeddings=True)
    torch.manual_seed(0)
    on_card = device == "cuda"
    with torch.device(device if on_card else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_card else torch.float32)
    return CausalLM(model.to(device))


def bare(model: Any, chunks: ChunkReader, batch_tokens: int) -> None:
    """Forward, loss and backward into every parameter, batch by batch."""

    def step(batch: Batch) -> bool:
        ids, weights = batch.ids.to(model.device), batch.weights[:, 1:].to(model.device)
        logits = model.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        (losses * weights.flatten()).sum().backward()
        model.model.zero_grad(set_to_none=True)
        return True

    model.model.requires_grad_(True)
    try:
        for _ in ShrinkingBatches().each(chunks.batches(batch_tokens), step):
            pass
    finally:
        model.model.requires_grad_(False)


def _apart(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """How far the gates of two fits are apart, relative; 0 where they are the same, bit for bit."""
    return max(
        float(np.linalg.norm(one - other) / np.linalg.norm(one))
        for one, other in zip(first, second, strict=True)
    )


def _reader(n_chunks: int, length: int, size: dict[str, int]) -> ChunkReader:
    corpus: Any = RandomCorpus(n_chunks, length, size["vocabulary"])
    return ChunkReader(corpus)


def _settings(model: CausalLM, chunks: ChunkReader, n_subsets: int, gates: int) -> ClosedSettings:
    """The default ones, with as many buckets as make the gates that many, about; projections included."""
    index: Any = SimpleNamespace(
        attributes={}, n_subsets=n_subsets, n_chunks=chunks.n_chunks, seed=0, path=None
    )
    chosen = resolve_settings(ClosedOptions(), model, index)
    ranks = chosen.ranks
    inside = MlpMatrixSpace.reserved_gates(model, ranks["mlp-matrix"])
    pairs = min(ranks["pair-logit"], len(token_pairs(chunks, model.vocab_size)[0]))
    buckets = max(8, (gates - inside - pairs) // (2 * min(ranks["logit"], model.d_model)))
    found: ClosedSettings = replace(chosen, n_buckets=buckets)
    return found


class _Timed(SimpleNamespace):
    seconds: float
    bytes: int
    result: Any


class _Clock:
    """Time and memory of what runs on a device; `inner` is the time of what was `wrapped`."""

    def __init__(self, device: str) -> None:
        self.on_card, self.inner = device == "cuda", 0.0

    def time(self, action: Callable[[], Any]) -> _Timed:
        if self.on_card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = action()
        if self.on_card:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if self.on_card else 0
        return _Timed(seconds=seconds, bytes=peak, result=result)

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            found = self.time(lambda: function(*given, **named))
            self.inner = found.seconds
            return found.result

        return timed


def _card(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"gpu": None, "device": device}
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "device": device,
        "gpu_gigabytes": about.total_memory / 1e9,
        "cuda": torch.version.cuda,
    }


def _shares(reached: float, device: str) -> dict[str, Any]:
    """The bare pass's operations a second by the card's, as stated and as one large product reaches them."""
    if device != "cuda":
        return {"share_of_stated_peak": None, "share_of_product": None}
    name = torch.cuda.get_device_properties(0).name
    stated = next((peak for card, peak in _PEAKS.items() if card in name), None)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    clock = _Clock(device)
    clock.time(lambda: a @ a)
    product = 20 * 2 * 8192**3 / clock.time(lambda: [a @ a for _ in range(20)]).seconds
    return {
        "share_of_stated_peak": None if stated is None else reached / (1e12 * stated),
        "share_of_product": reached / product,
    }


def _missing(device: str) -> str | None:
    """Why there is nothing to measure on; None where there is."""
    if device != "cuda" or torch.cuda.is_available():
        return None
    build = "is built without CUDA" if torch.version.cuda is None else "finds no device that it can use"
    return (
        f"error: no GPU is here: torch {torch.__version__} {build} (expected a CUDA device)\n"
        "fix: run it on a machine with an NVIDIA card and a CUDA build of torch; `--device cpu --tiny` tries "
        "the command out, and measures nothing"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu", "pretend"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to try the command out")
    parser.add_argument("--path", default="", help="compare only this device path; none: none")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no model after .7 of them")
    parser.add_argument("--out", type=Path, help="write the records there too")
    given = parser.parse_args(arguments)
    if (missing := _missing(given.device)) is not None:
        print(missing, file=sys.stderr)
        return 2
    if given.device == "pretend":
        import tests.gpu.pretend_device  # noqa: F401
    records, failed = [], False
    for record in run(given):
        emit(record)
        failed |= record.get("ok") is False
        records.append(json.dumps(record) + "\n")
        if given.out is not None:  # what there is, should it be cut off
            given.out.write_text("".join(records))
    return 1 if failed else 0
