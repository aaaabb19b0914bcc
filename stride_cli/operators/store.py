"""Fitted operators in memory, and as the arrays of an index's ``operators/`` group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from index_format.errors import IndexDamaged
from stride_cli.corpus.gate_budget import LARGE_BASIS, PACKED_BYTES, gate_bits
from stride_cli.operators.gates import Gates, PackedGates, gate_rows
from stride_cli.operators.operator_space import OperatorSpace
from stride_cli.operators.projections import Projections, about, read_projections
from stride_cli.operators.redundancy import FORM as COMMON_FORM
from stride_cli.operators.redundancy import Redundancy, read_redundancy
from stride_cli.operators.spaces import space_from_arrays

if TYPE_CHECKING:
    from index_format.reader import Index
    from index_format.shards import ShardedArray

_CHECKPOINT = "checkpoint_"
_EIGHT_BITS = torch.float8_e4m3fn
_SOME = 16  # subsets whose gates say how long usual ones are


def array_name(name: str, checkpoint: int = 0) -> str:
    """Name an array of `Operators.to_arrays` within an index; of its own model, or of checkpoint 1, 2, …"""
    return f"operators/{_CHECKPOINT}{checkpoint}.{name}" if checkpoint else f"operators/{name}"


def _rounded(name: str, basis: np.ndarray) -> dict[str, np.ndarray]:
    """Keep a large float32 basis in eight bits a number, three of them digits: directions turn by 2 %;
    under a name that a version misses which cannot read it."""
    if basis.dtype != np.float32 or basis.nbytes < LARGE_BASIS:
        return {name: basis}
    values = torch.from_numpy(basis)
    scale = values.abs().max().clamp_min(1e-30) / torch.finfo(_EIGHT_BITS).max
    codes = (values / scale).to(_EIGHT_BITS).view(torch.uint8)
    return {f"{name}_codes": codes.numpy(), f"{name}_scale": scale.reshape(1).numpy()}


def _whole(name: str, arrays: Mapping[str, Any]) -> np.ndarray:
    """Read what `_rounded` kept, or versions before it: the upper half of each float32."""
    if (codes := arrays.get(f"{name}_codes")) is not None:
        numbers = torch.from_numpy(np.array(codes)).view(_EIGHT_BITS).float()
        return numbers.mul_(float(arrays[f"{name}_scale"][0])).numpy()
    kept = np.asarray(arrays[name])
    return (kept.astype(np.uint32) << 16).view(np.float32) if kept.dtype == np.uint16 else kept


@dataclass
class Operators:
    """K steering operators: shared bases and one gate vector per subset and space.

    Attributes
    ----------
    spaces : list of OperatorSpace
    gates : list of (K, p) float32 or PackedGates      one per space; nats per unit response (see
                                                        `linear_response`)
    layer : int                         residual spaces act after this many blocks
    fit : "closed" or "sgd"
    seen : (n,) uint8                   1 where the fit has seen the chunk
    direct_scale : float or None        of closed forms with whitened gates: times g_i · g_x, the response to
                                        chunk i alone; None where gates are not sums over chunks' gradients
    averaged : bool                     of chunks' tokens as on average over training, not as at its end
    normalized : float                  chunks' gradients are divided by their lengths to this power
    projections : Projections or None   a few bytes of every chunk's own gradient
    step : float                        the share of the gates at which `exact` measures (1 for sgd)
    shared : Redundancy or None         what the projected chunks have in common, where it is known already
    log : curves of the fit, name → (steps,) float64
    """

    spaces: list[OperatorSpace]
    gates: list[Gates]
    layer: int
    fit: str
    seen: np.ndarray | ShardedArray
    step: float = 1.0
    direct_scale: float | None = None
    averaged: bool = False
    normalized: float = 0.0
    projections: Projections | None = None
    shared: Redundancy | None = None
    log: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def n_subsets(self) -> int:
        return len(self.gates[0])

    @property
    def gate_size(self) -> int:
        """p summed over the spaces."""
        return sum(gate.shape[1] for gate in self.gates)

    @cached_property
    def redundancy(self) -> Redundancy:
        """Directions that the projected chunks share."""
        assert self.projections is not None
        return Redundancy.of(self.projections) if self.shared is None else self.shared

    @cached_property
    def usual_length(self) -> float:
        """Root mean square length of subsets' gates, all spaces together, of the first few subsets."""
        count = min(_SOME, self.n_subsets)
        rows = (gate_rows(gate, slice(k, k + 1)) for gate in self.gates for k in range(count))
        return float(np.sqrt(sum(float(np.square(each).sum(dtype=np.float64)) for each in rows) / count))

    @property
    def coverage(self) -> float:
        """Share of the chunks that the fit has seen."""
        return float(np.asarray(self.seen).mean()) if len(self.seen) else 0.0

    @property
    def space_name(self) -> str:
        return "+".join(space.name for space in self.spaces)

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give arrays (name within the group → values) and attributes that `from_index` reads back."""
        arrays: dict[str, Any] = {}
        stored = []
        for space, gate in zip(self.spaces, self.packed().gates, strict=True):
            prefix = space.name.replace("-", "_")
            for key, value in space.arrays().items():
                arrays |= _rounded(f"{prefix}_{key}", value)
            if isinstance(gate, PackedGates):
                arrays[f"{prefix}_gates"] = gate.codes
                arrays[f"{prefix}_gate_step"] = gate.step
            else:
                arrays[f"{prefix}_gates"] = gate
            stored.append({**space.settings(), "arrays": sorted(space.arrays())})
        arrays["seen"] = self.seen
        if self.projections is not None:
            arrays |= self.projections.arrays() | self.redundancy.arrays()
        for name, values in self.log.items():
            arrays[f"training_log_{name}"] = np.asarray(values, dtype=np.float64)
        attributes = {
            "spaces": stored,
            "space": self.space_name,
            "layer": self.layer,
            "fit": self.fit,
            "step": self.step,
            "direct_scale": self.direct_scale,
            "averaged": self.averaged,
            "normalized": self.normalized,
            "coverage": self.coverage,
            "gate_size": self.gate_size,
            **about(self.projections),
            "common_form": None if self.projections is None else COMMON_FORM,
        }
        return arrays, attributes

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], attributes: Mapping[str, Any]) -> Operators:
        """Rebuild operators from what `to_arrays` gave; arrays may lie in several files."""
        spaces: list[OperatorSpace] = []
        gates: list[Gates] = []
        for stored in attributes["spaces"]:
            prefix = stored["name"].replace("-", "_")
            basis = {key: _whole(f"{prefix}_{key}", arrays) for key in stored["arrays"]}
            gate = np.asarray(arrays[f"{prefix}_gates"])
            try:
                space = space_from_arrays(stored["name"], basis)
            except (KeyError, TypeError):
                space = None
            if space is None or gate.dtype not in (np.uint8, np.float32):
                raise IndexDamaged(
                    f"the operators of space '{stored['name']}' were stored by another version of stride",
                    fix="fit them again: stride train --overwrite",
                )
            spaces.append(space.requires_grad_(False))
            if gate.dtype == np.uint8:
                gates.append(PackedGates(gate, np.asarray(arrays[f"{prefix}_gate_step"]), space.gate_size))
            else:
                gates.append(gate)
        prefix = "training_log_"
        log = {key[len(prefix) :]: np.asarray(arrays[key]) for key in arrays if key.startswith(prefix)}
        return cls(
            spaces=spaces,
            gates=gates,
            layer=int(attributes["layer"]),
            fit=str(attributes["fit"]),
            seen=arrays["seen"],  # mapped: of many chunks it is in several files
            step=float(attributes["step"]),
            direct_scale=attributes.get("direct_scale"),
            averaged=bool(attributes.get("averaged", False)),
            normalized=float(attributes.get("normalized", 0.0)),
            projections=(projections := read_projections(arrays, attributes)),
            shared=None if projections is None else read_redundancy(arrays, attributes, len(projections)),
            log=log,
        )

    @classmethod
    def from_index(cls, index: Index, checkpoint: int = 0) -> Operators:
        """Read the operators of an index's own model, or of a further checkpoint (1, 2, …).

        Raises
        ------
        StageMissing      ``stride train`` has not been run on it
        """
        attributes = index.group_attributes("operators")
        with index.understanding("operators"):
            if checkpoint:
                attributes = attributes["checkpoints"][checkpoint - 1]
            prefix = array_name("", checkpoint)
            names = [
                name.removeprefix(prefix) for name in index.names("operators") if name.startswith(prefix)
            ]
            if not checkpoint:
                names = [name for name in names if not name.startswith(_CHECKPOINT)]
            found = cls.from_arrays({name: index.array(f"{prefix}{name}") for name in names}, attributes)
            found.check(index.n_subsets, index.n_chunks)
        return found

    def check(self, n_subsets: int, n_chunks: int) -> None:
        """Raise ValueError where these are no operators of so many subsets and at most so many chunks."""
        if self.projections is not None and len(self.projections) > n_chunks:
            raise ValueError(f"there are {len(self.projections):,} projections of {n_chunks:,} chunks")
        if self.seen.ndim != 1 or len(self.seen) > n_chunks:
            raise ValueError(f"seen should have at most {n_chunks} entries, has shape {self.seen.shape}")
        if self.fit not in ("closed", "sgd") or not self.spaces or not math.isfinite(self.step):
            raise ValueError(f"no such fit: {self.fit!r} of {len(self.spaces)} spaces, step {self.step}")
        for space, gate in zip(self.spaces, self.gates, strict=True):
            scales = [gate.step] if isinstance(gate, PackedGates) else []
            if not all(np.isfinite(values).all() for values in (*space.arrays().values(), *scales)):
                raise ValueError(f"bases of {space.name} are not finite")
            if gate.shape != (n_subsets, space.gate_size):
                expected = (n_subsets, space.gate_size)
                raise ValueError(f"gates of {space.name} should have shape {expected}, have {gate.shape}")

    def packed(self) -> Operators:
        """Pack large gates in a few bits, as they are after they were stored."""
        if 4 * self.n_subsets * self.gate_size <= PACKED_BYTES:
            return self
        bits = gate_bits(self.gate_size, whitened=self.direct_scale is not None)
        kept = (gate if isinstance(gate, PackedGates) else PackedGates.of(gate, bits) for gate in self.gates)
        return replace(self, gates=[*kept])
