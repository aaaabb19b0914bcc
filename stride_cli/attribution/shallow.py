"""A model's shape without its weights: shallow models like it, with random ones, and what follows for all of
it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stride_cli.attribution.stage_rates import (
    Clock,
    Rates,
    affordable_tokens,
    measure_rates,
)
from stride_cli.errors import ModelError, first_line
from stride_cli.free_memory import available_bytes

if TYPE_CHECKING:
    import torch

    from stride_cli.corpus.plan import CorpusCounts
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.operators.closed import ClosedSettings

_WHOLE = 20_000_000  # parameters: a smaller model is made as deep as it is
_SCALE = 0.02  # of random weights
_SYNTHETIC_TOKENS = 1 << 16
_COPIED = 1 << 24  # numbers, by which it is measured how fast weights come
_READ = 5e8  # bytes a second of weights from a disk, where memory does not keep the file


@dataclass(frozen=True)
class SpaceSize:
    """What an operator space takes.

    Attributes
    ----------
    name : str
    gates : p
    basis_bytes : of what it is stored with beside gates
    """

    name: str
    gates: int
    basis_bytes: int


@dataclass(frozen=True)
class Shape:
    """What follows from a model's configuration.

    Attributes
    ----------
    deep : with `n_layers`, `n_parameters`, `linear_layers` and whatever else of the whole model
    settings : ClosedSettings      by default
    rates : Rates                  of the whole model
    spaces : of every space what it takes
    d_model, vocabulary : widths
    weight_bytes, moment_bytes : of weights; of second moments while bases are made
    checkpoint_bytes : of weights where they are stored
    mapped : whether weights stay in their file, mapped, as they are in the precision that is computed in
    token_bytes : of a token on its way through a pass with gradients
    has_base : whether a model before training takes part
    device : "cpu" or "cuda"
    layers : how many blocks
    block_bytes : of the weights of one, as it computes
    fetch : seconds in which all of them come from where they are stored, once
    streamed : whether they come while their block runs (`models.language.streaming`)
    """

    deep: Any
    settings: ClosedSettings
    rates: Rates
    spaces: list[SpaceSize]
    d_model: int
    vocabulary: int
    weight_bytes: int
    moment_bytes: int
    mapped: bool
    token_bytes: int
    has_base: bool
    device: str
    checkpoint_bytes: int = 0
    layers: int = 1
    block_bytes: int = 0
    fetch: float = 0.0
    streamed: bool = False

    @property
    def streamed_bytes(self) -> int:
        """Of the weights that are where the model computes if they are streamed: two blocks, and what is
        around them."""
        return self.weight_bytes - max(0, self.layers - 2) * self.block_bytes

    @property
    def placed_bytes(self) -> int:
        """Of the weights that are where the model computes."""
        return self.streamed_bytes if self.streamed else self.weight_bytes

    @property
    def held_bytes(self) -> int:
        """Of weights in memory, beside mapped files."""
        return 0 if self.mapped else self.placed_bytes

    @property
    def gates(self) -> int:
        """p of all spaces."""
        return sum(space.gates for space in self.spaces)

    def with_gates(self, count: int) -> Shape:
        """With so many gates in all, each space with its share."""
        whole = self.gates
        sizes = [replace(space, gates=round(count * space.gates / whole)) for space in self.spaces]
        left = count - sum(space.gates for space in sizes)
        return replace(self, spaces=[*sizes[:-1], replace(sizes[-1], gates=sizes[-1].gates + left)])


class AsDeep:
    """A shallow model that says of itself what a deeper one of its shape would.

    Parameters
    ----------
    model : CausalLM
    layers : blocks of the whole model
    a_block : parameters of a block
    """

    def __init__(self, model: CausalLM, layers: int, a_block: int) -> None:
        self._model = model
        self.n_layers = layers
        self.n_parameters = model.n_parameters + (layers - model.n_layers) * a_block

    def linear_layers(self, which: str) -> list[Any]:
        return self._of_all_blocks(self._model.linear_layers(which))

    def adapter_matrices(self, which: str) -> list[Any] | None:
        from stride_cli.models.linear_layers import layer_widths

        found = self._model.adapter_matrices(which)
        if found is None:
            return None
        # of random weights B cannot be told: it is as large as that of the model itself
        widths = [layer_widths(layer)[1] for layer in self._model.linear_layers(which)]
        sized = [
            each._replace(B=each.A.new_zeros(wide, len(each.A)))
            for each, wide in zip(found, widths, strict=True)
        ]
        return self._of_all_blocks(sized)

    def _of_all_blocks(self, found: list[Any]) -> list[Any]:
        each = len(found) // self._model.n_layers
        return found[: each or None] * self.n_layers if each else []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def shallow_model(path: str, blocks: int | None, *, device: str, dtype: Any) -> tuple[CausalLM, int]:
    """A model of that configuration with random weights and so many blocks (None: all), and how many blocks
    the whole has.

    Raises
    ------
    ModelError      transformers has no such model, or its parts cannot be told
    """
    import torch
    from transformers import AutoModelForCausalLM, NanoChatConfig

    from stride_cli.corpus.context import read_configuration
    from stride_cli.models.language.causal_lm import CausalLM

    config = copy.deepcopy(read_configuration(path))
    if isinstance(config, SimpleNamespace):  # of an own model, as it stands in its file
        config = NanoChatConfig(**vars(config))
    layers = int(config.num_hidden_layers)
    count = layers if blocks is None else min(blocks, layers)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers and name not in ("architectures",):
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=_SCALE)
    except (ValueError, TypeError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(
            f"no model of the shape of '{path}' can be made: {first_line(error)}",
            fix="plan with --chunks alone, which needs no model",
        ) from error
    return CausalLM(model.to(device), path=path), layers


def shape_of(
    path: str,
    chunks: ChunkReader,
    counts: CorpusCounts,
    n_subsets: int,
    project: int | None,
    clock: Clock,
) -> Shape:
    """The shape of a checkpoint, and the rates of its work on chunks like these.

    Parameters
    ----------
    path : as `load_model` takes it; only its configuration is read
    chunks : some of the corpus's, or like them
    counts : of the corpus
    n_subsets : K
    project : bytes that are kept of a chunk; None: by default
    """
    import torch

    from stride_cli.models.language.streaming import larger_than_memory
    from stride_cli.models.stream_choice import chosen_stream
    from stride_cli.operators.beginnings import has_beginning
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one, layers = shallow_model(path, 1, device=device, dtype=dtype)
    two = shallow_model(path, 2, device=device, dtype=dtype)[0] if layers > 1 else one
    a_block = two.n_parameters - one.n_parameters
    deep = AsDeep(one, layers, a_block)
    index: Any = SimpleNamespace(
        attributes={}, n_subsets=n_subsets, n_chunks=counts.chunks, seed=0, path=None
    )
    settings = resolve_settings(ClosedOptions(project=project), cast("Any", deep), index)
    measured = [(1, one), (2, two)]
    if deep.n_parameters <= _WHOLE or layers <= 2:
        measured = [(layers, shallow_model(path, None, device=device, dtype=dtype)[0])]
    found = [_rates(model, chunks, settings, n_subsets, clock) for _, model in measured]
    rates = found[0]
    if len(found) > 1:
        rates = rates.at_depth(found[1], layers - 1)
    spaces, moments = space_sizes(deep, settings, counts, chunks)
    kept = max((space.kept_numbers for space in _classes(settings)), default=0)
    from stride_cli.operators.budget import DIFFERENTIATED

    blocks = layers if kept else max(0, layers - settings.layer)
    a_number = one.model.get_input_embeddings().weight.element_size()
    a_token = a_number * one.d_model
    said = _stored_as(path)
    mapped = device == "cpu" and said == dtype  # transformers leaves them in their file
    stored = said or torch.float32
    weight_bytes = deep.n_parameters * a_number
    wanted = chosen_stream()
    larger = not mapped and larger_than_memory(weight_bytes, one.device)
    streamed = larger if wanted is None else wanted
    return Shape(
        deep=deep,
        settings=settings,
        rates=rates,
        spaces=spaces,
        d_model=one.d_model,
        vocabulary=one.vocab_size,
        weight_bytes=weight_bytes,
        moment_bytes=moments,
        mapped=mapped,
        token_bytes=a_token * (DIFFERENTIATED * blocks + kept * layers),
        has_base=has_beginning(cast("Any", one), settings),
        device=device,
        checkpoint_bytes=deep.n_parameters * stored.itemsize,
        layers=layers,
        block_bytes=a_block * a_number,
        fetch=0.0 if mapped else _fetched(stored, a_block, layers, one, clock),
        streamed=streamed and layers > 1,
    )


def _fetched(kept: torch.dtype, numbers: int, layers: int, model: CausalLM, clock: Clock) -> float:
    """Seconds in which all blocks' weights, so many numbers each, come once from where they are stored."""
    import torch

    stored = torch.zeros(max(1, min(numbers, _COPIED)), dtype=kept)
    taken = []
    for _ in range(3):
        begun = clock()
        torch.empty_like(stored, dtype=model.dtype, device=model.device).copy_(stored)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - begun)
    seconds = min(taken[1:]) * numbers / len(stored)
    bytes_of_one, free = numbers * stored.element_size(), available_bytes()
    beyond = free is not None and layers * bytes_of_one > free
    return layers * (seconds + (bytes_of_one / _READ if beyond else 0.0))


def _stored_as(path: str) -> torch.dtype | None:
    """The precision that a checkpoint of transformers says that its weights have; None of others."""
    import torch

    from stride_cli.corpus.context import read_configuration

    config = read_configuration(path)
    said = None if isinstance(config, SimpleNamespace) else getattr(config, "dtype", None)
    return getattr(torch, said) if isinstance(said, str) else said


def _rates(
    model: CausalLM, chunks: ChunkReader, settings: ClosedSettings, n_subsets: int, clock: Clock
) -> Rates:
    """On chunks as they are, or on their beginnings where one of them would take long."""
    # residual spaces act below all blocks of a shallow model: as if every block were differentiated
    settings = replace(settings, layer=0 if settings.layer > model.n_layers else settings.layer)
    tokens = affordable_tokens(model.n_parameters)
    if tokens >= chunks.mean_length:
        return measure_rates(model, chunks, settings, n_subsets, clock=clock)
    short = beginnings(chunks, tokens)
    factor = chunks.mean_length / short.mean_length
    return measure_rates(model, short, settings, n_subsets, clock=clock).lengthened(factor)


def _classes(settings: ClosedSettings) -> list[Any]:
    from stride_cli.operators.spaces import space_classes

    return list(space_classes(settings.spaces))


def space_sizes(
    deep: Any, settings: ClosedSettings, counts: CorpusCounts, chunks: ChunkReader
) -> tuple[list[SpaceSize], int]:
    """Of every space what it takes, and the bytes of second moments while bases are made."""
    from stride_cli.models.linear_layers import layer_widths
    from stride_cli.operators.layer_spaces import LayerMatrixSpace, read_units
    from stride_cli.operators.pair_space import PairLogitSpace

    found: list[SpaceSize] = []
    moments, largest = 0, 0
    width, vocabulary = deep.d_model, deep.vocab_size
    for cls in _classes(settings):
        rank = settings.ranks[cls.name]
        if issubclass(cls, LayerMatrixSpace):
            basis = 0
            ranks = cls.layer_ranks(deep, rank)
            for layer, matrices in zip(deep.linear_layers(cls.which), ranks, strict=True):
                widths = layer_widths(layer)
                for kept in matrices:
                    basis += 4 * sum(wide * each for wide, each in zip(widths, kept, strict=True)) + 32
                units = [len(read_units(each, 0)) for each in widths]
                moments += 8 * sum(each**2 for each in units)
                largest = max(largest, *units)
            found.append(SpaceSize(cls.name, cls.reserved_gates(deep, rank), basis))
        elif cls is PairLogitSpace:
            pairs = _pairs(chunks, counts, vocabulary, rank)
            found.append(SpaceSize(cls.name, pairs, 8 * (vocabulary + 1) + 12 * pairs))
        elif cls.has_buckets:
            buckets, rank = min(settings.n_buckets or vocabulary, vocabulary), min(rank, width)
            found.append(SpaceSize(cls.name, buckets * rank, 4 * rank * width + 12 * vocabulary))
            moments += 8 * width**2
            largest = max(largest, width)
        else:
            rank = min(rank, width)
            found.append(SpaceSize(cls.name, rank * rank, 8 * rank * width))
            moments += 16 * width**2
    return found, moments + 3 * 8 * largest**2  # of the largest its eigenvectors, and room to find them


def _pairs(chunks: ChunkReader, counts: CorpusCounts, vocabulary: int, most: int) -> int:
    """Pairs of tokens that a corpus has, of the sample's; as a vocabulary grows, with the root of its
    length."""
    from stride_cli.operators.pair_space import token_pairs

    found = len(token_pairs(chunks, vocabulary)[0])
    grown = (counts.tokens / max(1, int(chunks.offsets[-1]))) ** 0.6
    return min(most, round(found * max(1.0, grown)))


def beginnings(chunks: ChunkReader, tokens: int) -> ChunkReader:
    """Chunks cut to their first tokens, scored but for the first."""
    return chunks_of([chunks.chunk(row)[0][:tokens] for row in range(min(64, chunks.n_chunks))])


def synthetic_chunks(block: int, count: int, model_path: str) -> ChunkReader:
    """Whole blocks of random tokens, of which some are frequent."""
    from stride_cli.corpus.context import vocabulary_size

    vocabulary = vocabulary_size(model_path) or 1 << 15
    random = np.random.default_rng(0)
    count = max(1, min(count, _SYNTHETIC_TOKENS // block))
    ids = (vocabulary * random.random((count, block)) ** 3).astype(np.int64)
    return chunks_of(list(np.minimum(ids, vocabulary - 1)))


def chunks_of(rows: list[np.ndarray]) -> ChunkReader:
    from stride_cli.data.batches import ChunkReader

    arrays = {
        "corpus/tokens": np.concatenate(rows),
        "corpus/chunk_offsets": np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        "corpus/loss_start": np.ones(len(rows), np.int32),
    }
    index: Any = SimpleNamespace(array=arrays.__getitem__, has=arrays.__contains__)
    return ChunkReader(index)
