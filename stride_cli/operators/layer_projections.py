"""Random projections of linear layers' gradients from both sides: what is kept of a training's examples.

The gradient of a loss in the weights of a linear layer is ``G = Σ_t δ_t a_tᵀ``, with a_t what the layer reads
at token t and δ_t the gradient in what it gives. Kept is ``Qᵀ G P = Σ_t (Qᵀ δ_t) (Pᵀ a_t)ᵀ``, with P and Q of
k random orthonormal columns each, times √(width / k): k² numbers, whose inner products are those of the G up
to noise (as LoGRA projects; Choe et al. 2024, arXiv:2405.13954).

P and Q are drawn before anything is known of the model, and whiten nothing. A query does it for both: with
U_j and V_j the operators' bases of layer j, and M_j the query's gate gradient there,

    g_i · g_q  =  Σ_j ⟨U_jᵀ G_ij V_jᵀ, M_j⟩  =  Σ_j ⟨G_ij, U_j M_j V_j⟩  ≈  Σ_j ⟨Qᵀ G_ij P, Qᵀ U_j M_j V_j P⟩
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from index_format.durable import make_directory, replacing
from stride_cli.corpus.gate_budget import MOST_PROJECTED
from stride_cli.errors import ModelError, UsageError
from stride_cli.operators.projections import (
    FORM,
    AskedProjections,
    Folding,
    Projections,
    bit_planes,
    encode,
)
from stride_cli.randomness import stream

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.operators.steered_model import SteeredModel


@dataclass(frozen=True)
class ProjectedLayers:
    """Which layers are projected, and how.

    Attributes
    ----------
    names : of the layers, as modules of the model
    widths : of each, how many numbers it reads, and gives
    rank : k
    seed : int      names the random columns
    """

    names: tuple[str, ...]
    widths: tuple[tuple[int, int], ...]
    rank: int
    seed: int

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Of each layer the columns of P and of Q: k, or what there are."""
        return [(min(self.rank, read), min(self.rank, given)) for read, given in self.widths]

    @property
    def size(self) -> int:
        """Numbers of one example."""
        return sum(r * s for r, s in self.ranks)

    @property
    def spans(self) -> list[slice]:
        """Where each layer's are among them: (columns of Q, columns of P), row by row."""
        ends = np.cumsum([0, *(r * s for r, s in self.ranks)]).tolist()
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def sides(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """P (in, k) and Q (out, k) of a layer; float32."""
        P, Q = (
            _columns(width, count, stream(self.seed, "layer projections", layer, side))
            for side, (width, count) in enumerate(zip(self.widths[layer], self.ranks[layer], strict=True))
        )
        return P, Q

    def record(self) -> dict[str, Any]:
        """As JSON values, for `read`."""
        return {
            "names": list(self.names),
            "widths": [list(pair) for pair in self.widths],
            "rank": self.rank,
            "seed": self.seed,
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ProjectedLayers:
        """The inverse of `record`; KeyError, TypeError or ValueError where it is none."""
        names = tuple(str(name) for name in record["names"])
        widths = tuple((int(read), int(given)) for read, given in record["widths"])
        if len(names) != len(widths):
            raise ValueError("layers and widths are not of the same number")
        return cls(names, widths, int(record["rank"]), int(record["seed"]))


def _columns(size: int, count: int, random: np.random.Generator) -> torch.Tensor:
    columns, _ = np.linalg.qr(random.standard_normal((size, count), dtype=np.float32))
    return torch.from_numpy(np.ascontiguousarray(columns) * np.float32((size / count) ** 0.5))


# in a run's directory; beside its weights it would be taken for some
GATHERED = "projections/gathered.safetensors"


GROUP = "run"  # in an index
_RANKS = 4, 64
_ROWS = 4096  # examples that are folded together


def check_bytes(size: int) -> None:
    """UsageError for bytes an example that projections cannot have."""
    if not 0 <= size <= MOST_PROJECTED or size % 8:
        raise UsageError(
            f"projections is {size:,} (expected a multiple of 8, 0 to {MOST_PROJECTED:,})",
            fix="try projections=2048",
        )


def rank_for(size: int, layers: int) -> int:
    """k with which so many layers give as many numbers as there are signs in `size` bytes, about: at
    least 4, at most 64."""
    return int(np.clip(round((8 * size / max(1, layers)) ** 0.5), _RANKS[0], _RANKS[1]))


@dataclass(frozen=True)
class GatheredProjections(Projections):
    """Signs of what a training did to its examples' layers, in the place of signs of gate gradients.

    Estimates are of Σ_steps lr g_i · g_q, as far as the operators' own layers are among those that were
    projected. Their errors are not those of folding alone, so that nothing is said of them.

    Attributes
    ----------
    layers : ProjectedLayers
    scale : (layers,) float32       root mean square of each layer's numbers, by which they are divided before
                                    they are folded, and those of a query multiplied
    """

    layers: ProjectedLayers
    scale: np.ndarray
    errors_known: ClassVar[bool] = False

    @classmethod
    def of(cls, layers: ProjectedLayers, sums: np.ndarray, size: int, seed: int) -> GatheredProjections:
        """Of sums (n, numbers) float32 of Σ_steps lr Qᵀ G P, signs in `size` bytes each."""
        spans = layers.spans
        scale = np.array([_root_mean_square(sums[:, span]) for span in spans], np.float32)
        folding = Folding(layers.size, 8 * size, seed)
        codes, step = np.zeros((len(sums), size), np.uint8), np.zeros(len(sums), np.float32)
        factors = _each(1.0 / scale, spans)
        for start in range(0, len(sums), _ROWS):
            part = torch.from_numpy(sums[start : start + _ROWS] * factors)
            codes[start : start + _ROWS], step[start : start + _ROWS] = encode(folding([part]))
        return cls(codes, step, seed, layers, scale)

    def asked(
        self, gradients: Sequence[torch.Tensor], steered: SteeredModel | None = None
    ) -> AskedProjections:
        assert steered is not None
        numbers = layer_numbers(self.layers, gradients, steered) * _each(self.scale, self.layers.spans)
        folding = Folding(self.layers.size, 8 * self.size, self.seed)
        return AskedProjections(self, *bit_planes(folding([torch.from_numpy(numbers)])))

    def arrays(self) -> dict[str, Any]:
        return {**super().arrays(), "projection_scale": self.scale}

    def record(self) -> dict[str, Any]:
        """What `read` needs beside the arrays."""
        return {
            "project": self.size,
            "project_seed": self.seed,
            "project_form": FORM,
            "layers": self.layers.record(),
        }

    @classmethod
    def read(cls, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> Self:
        """The inverse of `arrays` and `record`; KeyError, TypeError or ValueError where they are none."""
        codes, step, scale = (arrays[f"projection_{name}"] for name in ("codes", "step", "scale"))
        if record.get("project_form") != FORM:
            raise ValueError("projections of another form, by another stride")
        layers, size = ProjectedLayers.read(record["layers"]), int(record["project"])
        wanted = [((len(step), size), np.uint8), ((len(step),), np.float32)]
        wanted.append(((len(layers.names),), np.float32))
        if [(each.shape, each.dtype) for each in (codes, step, scale)] != wanted or size % 8 or not size:
            raise ValueError("projections of other shapes than they say")
        scale = np.asarray(scale)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("a scale is not above 0")
        return cls(codes, step, int(record["project_seed"]), layers, scale)

    def save(self, file: Path, **told: Any) -> None:
        """Write them into a run, whole or not at all, with what else is to be told."""
        from safetensors.numpy import save_file

        make_directory(file.parent)
        with replacing(file) as fresh:
            save_file(self.arrays(), fresh, metadata={"stride": json.dumps({**self.record(), **told})})

    @classmethod
    def load(cls, file: Path) -> Self:
        """Of a run; ModelError where the file is none."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="numpy") as opened:
                record = json.loads((opened.metadata() or {})["stride"])
                names = list(opened.keys())
                return cls.read({name: opened.get_tensor(name) for name in names}, record)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{file} holds no projections that StrideCallback wrote: {error}",
                fix="remove it: stride train makes projections of the model",
            ) from error

    @classmethod
    def from_index(cls, index: Index) -> Self | None:
        """Those that a training gathered, where the index is of such a one."""
        if not index.has(GROUP):
            return None
        names = index.names(GROUP)
        arrays = {name.partition("/")[2]: index.array(name) for name in names}
        with index.understanding(GROUP):
            found = cls.read(arrays, index.group_attributes(GROUP))
            if len(found) > index.n_chunks:
                raise ValueError(f"there are {len(found):,} projections of {index.n_chunks:,} chunks")
        return found


def take_in(index: Index, run: Path) -> Index:
    """Give the index of a run the projections that its training gathered: each chunk its document's.

    Returns
    -------
    Index      with them; the given one where the training gathered none

    Raises
    ------
    ModelError      they are not of as many examples as the index has documents
    """
    from index_format.reader import Index
    from index_format.writer import GroupWriter

    file = run / GATHERED
    if not file.is_file():
        return index
    found = GatheredProjections.load(file)
    if len(found) != index.n_documents:
        raise ModelError(
            f"{file} has projections of {len(found):,} examples (expected {index.n_documents:,}, the "
            "documents of the index)",
            fix="build the index of the run's own corpus, or remove the file",
        )
    document = np.asarray(index.array("corpus/chunk_document"))
    key = hashlib.sha256(file.read_bytes()).hexdigest()
    with GroupWriter(index.path, "run", key, overwrite=True) as writer:
        for name, values in found.arrays().items():
            of_chunks = values if name == "projection_scale" else values[document]
            writer.append(f"{GROUP}/{name}", of_chunks)
        writer.publish(found.record())
    return Index.open(index.path)


def _each(values: np.ndarray, spans: Sequence[slice]) -> np.ndarray:
    """A number of each layer at every number of its own."""
    return np.repeat(values, [span.stop - span.start for span in spans]).astype(np.float32)


def _root_mean_square(values: np.ndarray) -> float:
    """Above 0: that of nothing is 1."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean())) or 1.0


def layer_numbers(
    layers: ProjectedLayers, gradients: Sequence[torch.Tensor], steered: SteeredModel
) -> np.ndarray:
    """Qᵀ (U_j M_j V_j) P of queries' gate gradients M_j, one (Q, p) a space: (Q, numbers) float32."""
    space, model = steered.layer_space, steered.model
    assert space is not None
    own = gradients[list(steered.spaces).index(space)].cpu()
    names = {module: name for name, module in model.model.named_modules()}
    numbers = {names[layer]: number for number, layer in enumerate(model.linear_layers(space.which))}
    found = np.zeros((len(own), layers.size), np.float32)
    parts = space.parts()
    for layer, (name, span) in enumerate(zip(layers.names, layers.spans, strict=True)):
        if name in numbers:
            P, Q = layers.sides(layer)
            for number in space.matrices(numbers[name]):
                V, U = (basis.detach().cpu() for basis in space.bases(number))
                gates = own[:, parts[number]].unflatten(1, (U.shape[1], V.shape[0]))
                found[:, span] += ((Q.T @ U) @ gates @ (V @ P)).flatten(1).numpy()
    return found
