"""Loading a language model's checkpoint, whole or not at all."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from stride_cli.errors import ModelError, first_line
from stride_cli.models.configuration import quiet_transformers
from stride_cli.models.devices import resolve_device, resolve_dtype
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.files import Source, code_refused, find_checkpoint, weight_files
from stride_cli.models.language.nanochat import load_own
from stride_cli.models.language.quantised import (
    make_differentiable,
    missing_package,
    quantisation,
    refuse_training,
)
from stride_cli.models.language.streaming import (
    is_streamed,
    outgrows,
    placement,
    stream_from_disk,
    stream_from_memory,
)
from stride_cli.models.language.structure import is_quantised
from stride_cli.models.language.tokenizer import check_gguf, tokenizer_of
from stride_cli.models.language.tokenizer import load_tokenizer as load_tokenizer
from stride_cli.models.spec import GivenModel, ModelSpec
from stride_cli.startup import keep_imported, without_collection


@cache  # once, when all has been imported that is before the first model is there
def _keep_torch() -> None:
    keep_imported()


def load_language_model(given: GivenModel) -> CausalLM:
    """See `stride_cli.models.loading.load_model`."""
    spec = ModelSpec.of(given)
    source = find_checkpoint(spec)
    where = resolve_device(spec.device)
    kind = resolve_dtype(spec.dtype, where)
    tokenizer = tokenizer_of(source)
    _keep_torch()
    model = load_own(source, kind)
    if model is None and is_streamed(source, kind, where, spec.stream):
        model = _load_streamed(source, kind, where)
    else:
        model = _load_weights(source, kind, where) if model is None else model
        if not is_quantised(model):  # which is where it belongs, and some cannot be moved
            _place(model, where, spec.stream)
    return CausalLM(model, tokenizer, spec=spec)


def load_weights(model: GivenModel, *, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model itself, on the CPU, to be trained or saved; refused as by `load_model`, and
    where its weights are quantised."""
    source = find_checkpoint(model)
    for each in (source, source.base):
        if each is not None and each.gguf is None:
            refuse_training(each.directory, each.given)
    model = _load_weights(source, dtype)
    if added := getattr(model, "added_biases", None):
        raise ModelError(
            f"adapter '{source.given}' adds biases (lora_bias) to layers without, such as {min(added)}: what "
            "is trained on from it cannot be saved",
            fix="train on from an adapter without lora_bias; as it is, this one can be indexed and asked",
        )
    return model


def _place(model: Any, where: torch.device, wanted: bool | None) -> None:
    """Move a model in memory to where it computes: whole, or where that is asked for or has no room for it,
    block by block."""
    if wanted or (wanted is None and where.type != "cpu" and outgrows(model, where)):
        stream_from_memory(model, where)
        return
    try:
        model.to(where)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"there is no room for the model's weights on {where}: {first_line(error)}",
            fix="give --stream: weights of blocks are there while their block runs",
        ) from error


def _load_streamed(source: Source, dtype: torch.dtype, where: torch.device) -> Any:
    """The model with the weights of its blocks on disk, and all else where it computes."""
    with tempfile.TemporaryDirectory(prefix="stride-", ignore_cleanup_errors=True) as folder:
        model = _load_weights(source, dtype, placed=placement(source, dtype, folder))
        stream_from_disk(model, where)
    return model


@without_collection()
def _load_weights(
    source: Source,
    dtype: torch.dtype,
    where: torch.device | None = None,
    placed: Mapping[str, Any] | None = None,
) -> Any:
    if source.base is not None:
        from stride_cli.models.language.peft_adapter import with_adapter

        base = _load_weights(source.base, dtype, where)
        with quiet_transformers():
            return with_adapter(base, source)
    if "transformers.modeling_utils" not in sys.modules:  # nearly all that a model's class imports
        # in a thread: torch.fx leaves cycles with the frames that import it, whose locals would be kept too
        with ThreadPoolExecutor(1) as apart:
            apart.submit(importlib.import_module, "transformers.modeling_utils").result()
        keep_imported()
    import transformers

    weight_files(source.directory / source.gguf if source.gguf else source.directory)
    check_gguf(source)
    method = None if source.gguf is not None else quantisation(source.directory)
    if source.gguf is not None and hasattr(transformers, "GgufConfig"):  # an older one always dequantises
        # plain weights also where transformers can compute on GGUF's blocks: they are differentiated
        placed = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if method is not None:
        placed = {"device_map": {"": where or torch.device("cpu")}}
    try:
        with quiet_transformers():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source.directory, dtype=dtype, output_loading_info=True, **source.options, **(placed or {})
            )
    except Exception as error:
        if method is not None and isinstance(error, ImportError):
            raise missing_package(error, method) from error
        if "trust_remote_code" in str(error):
            raise code_refused(source.given, source.directory / "config.json", None) from error
        raise ModelError(
            f"the model '{source.given}' cannot be loaded: {first_line(error)}",
            fix="its weights are truncated or damaged, or belong to another config.json: copy them again",
        ) from error
    _refuse_partial(source, model, report)
    if source.gguf is not None and (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)  # its weights are plain tensors, to train and to save
    if is_quantised(model):
        make_differentiable(model)
    return model


def _refuse_partial(source: Source, model: Any, report: dict[str, Any]) -> None:
    """ModelError where a tensor would be random, or a layer of the file dropped."""
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report.get("mismatched_keys") or ()]
    # old GPT-2 and GPT-NeoX checkpoints carry attention-mask buffers that nobody reads
    surplus = [key for key in report.get("unexpected_keys") or () if re.search(r"\.\d+\..*\.weight$", key)]
    for what, keys in (
        ("lack", report.get("missing_keys") or ()),
        ("have another shape for", mismatched),
        ("hold, but its config does not,", surplus),
    ):
        if keys:
            shown = ", ".join(sorted(map(str, keys))[:3]) + (" …" if len(keys) > 3 else "")
            raise ModelError(
                f"the weights in '{source.given}' {what} {len(keys)} tensors of its {type(model).__name__}: "
                f"{shown}",
                fix="weights and config.json do not belong together: copy both from one checkpoint",
            )
