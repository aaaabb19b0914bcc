"""Fingerprints of models in memory: equal ones mean equal weights and equal tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def state_fingerprint(model: Any) -> str:
    """SHA-256, in hex, of name, dtype, shape and bytes of each tensor of a module's state dict, by name."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, of everything that decides how text becomes ids: the tokenizer's JSON with sorted
    keys, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # what a caller's last call asked for, not what the tokenizer is
        state["truncation"] = state["padding"] = None
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
    canonical = {
        "tokenizer": state,
        "special": special,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cuts_alike(one: Any, other: Any) -> bool:
    """True where two tokenizers cut every text alike. They may differ in tokens that no text is cut
    into: how they pad, or one that was added for it."""
    backends = [getattr(each, "backend_tokenizer", None) for each in (one, other)]
    if None in backends:
        return tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    first, second = (json.loads(each.to_str()) for each in backends)  # type: ignore[union-attr]
    return all(first[part] == second[part] for part in ("normalizer", "pre_tokenizer", "model"))
