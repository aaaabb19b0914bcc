"""AirRep's encoder: BERT, mean over tokens, a linear projection (Sun et al. 2025)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stride_cli.errors import ModelError, first_line
from stride_cli.models.configuration import quiet_transformers
from stride_cli.randomness import torch_seed

_PREFIX = "bert."
_FIX = "give an AirRep checkpoint (airrep:model=PATH), for example sunweiwei/AirRep-Flan-Small, or train one"


class AirRepEncoder(nn.Module):
    """Texts to vectors whose inner product is the influence of one on another.

    Parameters
    ----------
    bert : BertModel             without its pooler
    projector : nn.Linear        (width, width)
    tokenizer : PreTrainedTokenizerBase
    max_length : int             tokens that are read
    """

    def __init__(self, bert: Any, projector: nn.Linear, tokenizer: Any, *, max_length: int = 512) -> None:
        super().__init__()
        self.bert = bert
        self.projector = projector
        self.tokenizer = tokenizer
        self.max_length = min(max_length, int(bert.config.max_position_embeddings))
        self.eval()  # no dropout in training either, as the authors do

    @property
    def width(self) -> int:
        return int(self.projector.out_features)

    @property
    def device(self) -> torch.device:
        return self.projector.weight.device

    def pooled(self, texts: Sequence[str]) -> Tensor:
        """Average BERT's last states over tokens, (texts, width) float32."""
        batch = self.tokenizer(
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=self.max_length
        ).to(self.device)
        states = self.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        share = batch["attention_mask"][..., None].float()
        return (states.last_hidden_state.float() * share).sum(1) / share.sum(1).clamp_min(1)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Encode texts, (texts, width) float32."""
        return self.projector(self.pooled(texts))

    @torch.no_grad()
    def embed(self, texts: Sequence[str], *, batch_size: int = 64, projected: bool = True) -> Tensor:
        """Encode any number of texts without a graph; similar lengths go together.

        Parameters
        ----------
        projected : bool      False stops before the projection

        Returns
        -------
        Tensor (texts, width) float32, on the encoder's device
        """
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = torch.empty(len(texts), self.width, device=self.device)
        for start in range(0, len(texts), batch_size):
            rows = order[start : start + batch_size]
            part = [texts[row] for row in rows]
            vectors[torch.from_numpy(rows).to(self.device)] = self(part) if projected else self.pooled(part)
        return vectors

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint in the form of the released ones."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {f"{_PREFIX}{name}": value for name, value in self.bert.state_dict().items()}
        state |= {f"projector.{name}": value for name, value in self.projector.state_dict().items()}
        save_file(
            {name: value.cpu().contiguous() for name, value in state.items()}, folder / "model.safetensors"
        )
        settings = {
            **self.bert.config.to_dict(),
            "model_type": "airrep",
            "architectures": ["AirRepModel"],
            "dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        self.tokenizer.save_pretrained(folder)


def load_airrep(path: str, *, device: torch.device | str, max_length: int = 512) -> AirRepEncoder:
    """Load a trained encoder from a directory or hub id.

    Raises
    ------
    ModelError      it cannot be read, or is not AirRep's
    """
    from transformers import BertConfig, BertModel
    from transformers.utils import cached_file

    settings = _settings(path)
    if settings.get("model_type") != "airrep":
        raise ModelError(
            f"'{path}' is a checkpoint of type '{settings.get('model_type')}', expected 'airrep'", fix=_FIX
        )
    try:
        from safetensors.torch import load_file

        state = load_file(str(cached_file(path, "model.safetensors")))
        config = BertConfig.from_dict({**settings, "model_type": "bert"})
        with quiet_transformers():
            bert = BertModel(config, add_pooling_layer=False)
        projector = nn.Linear(config.hidden_size, config.hidden_size)
        inside = {
            name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)
        }
        missing = bert.load_state_dict(inside, strict=False).missing_keys
        if missing:
            raise ModelError(f"'{path}' lacks the weights {', '.join(missing[:3])}", fix=_FIX)
        projector.load_state_dict({name: state[f"projector.{name}"] for name in ("weight", "bias")})
        tokenizer = _tokenizer(path)
    except (OSError, KeyError, RuntimeError) as error:
        raise ModelError(f"'{path}' does not load: {first_line(error)}", fix=_FIX) from error
    return AirRepEncoder(bert, projector, tokenizer, max_length=max_length).float().to(device)


def new_airrep(base: str, *, device: torch.device | str, seed: int, max_length: int = 512) -> AirRepEncoder:
    """Make an encoder to be trained: a pretrained BERT and a random projection, as the authors do.

    Raises
    ------
    ModelError      the base cannot be read, or is no BERT
    """
    from transformers import BertModel

    settings = _settings(base)
    if settings.get("model_type") != "bert":
        raise ModelError(
            f"'{base}' is a checkpoint of type '{settings.get('model_type')}', expected 'bert'",
            fix="give a BERT encoder such as thenlper/gte-small with airrep:base=PATH",
        )
    try:
        with quiet_transformers():
            bert = BertModel.from_pretrained(base, add_pooling_layer=False)
        tokenizer = _tokenizer(base)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"'{base}' does not load: {first_line(error)}",
            fix="give a directory that transformers loads as an encoder",
        ) from error
    projector = nn.Linear(bert.config.hidden_size, bert.config.hidden_size)
    generator = torch.Generator().manual_seed(torch_seed(seed, "airrep projection"))
    with torch.no_grad():
        projector.weight.normal_(0, bert.config.initializer_range, generator=generator)
        projector.bias.zero_()
    return AirRepEncoder(bert, projector, tokenizer, max_length=max_length).float().to(device)


def _settings(path: str) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        with quiet_transformers():
            settings, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is no checkpoint: {first_line(error)}", fix=_FIX) from error
    return dict(settings)


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (KeyError, ValueError):  # transformers has no model of type "airrep" to name a tokenizer for
            return PreTrainedTokenizerFast.from_pretrained(path)
