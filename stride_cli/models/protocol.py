"""The protocol of models whose training chunks can be attributed: language models, classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stride_cli.models.classifier.classifier_model import InputTable
    from stride_cli.models.kinds import Kind
    from stride_cli.models.length_kinds import LengthKinds
    from stride_cli.models.linear_layers import AdapterMatrices, LayerVisitor
    from stride_cli.models.spec import ModelSpec


class AttributableModel(Protocol):
    """A frozen network of blocks and a head, which reads sequences and predicts each next token.

    Sequences are (B, T) int64; of a classifier T is 2, an input's number and its label. `CausalLM` and
    `ClassifierModel` are the two; nobody but `stride_cli.models.loading` asks which.

    Attributes
    ----------
    kind : "language" or "classifier"      by which a stage finds what it has for this kind: a table's key
    model : nn.Module                      the network itself
    spec : ModelSpec                       where it was loaded from, and how; without a path: in memory
    path : str or None                     of that
    name : str                             its class
    table : InputTable or None             inputs by number; None where the tokens are the input
    classes : sequence of str              names of the labels; empty where the tokens are what is predicted
    pretrained : bool
        Whether it learned all that it knows from its chunks, as a language model in pre-training does: many
        chunks say the same then, and each weighs little.
    capture_layers : sequence of str
        Names of the layers whose gradients are taken unless told otherwise; the first that there are.
    all_layers : str                       the name of those that no method leaves out
    pools : sequence of str                positions over which its states can be averaged
    n_layers, d_model, vocab_size, n_parameters, context_length : int
    fingerprint, tokenizer_fingerprint : str      SHA-256 in hex
    tokenizer : Any                        ModelError where there is none
    end_tokens : frozenset of int          those that end a generation
    length_kinds : LengthKinds or None     which sequences may share a padded batch; None: all
    """

    @property
    def kind(self) -> Kind: ...
    @property
    def model(self) -> Any: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def path(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def table(self) -> InputTable | None: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def pretrained(self) -> bool: ...
    @property
    def capture_layers(self) -> Sequence[str]: ...
    @property
    def all_layers(self) -> str: ...
    @property
    def pools(self) -> Sequence[str]: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def n_parameters(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def end_tokens(self) -> frozenset[int]: ...
    @property
    def length_kinds(self) -> LengthKinds | None: ...
    @property
    def blocks(self) -> nn.ModuleList: ...
    @property
    def head(self) -> nn.Module: ...

    def default_space(self, fit: str) -> str:
        """The spaces of the operators that are fitted unless others are asked for: names joined by ``+``.

        Parameters
        ----------
        fit : "closed" or "sgd"
        """
        ...

    def share_inputs(self, other: Any) -> None:
        """Read the inputs that another model of the same index reads."""
        ...

    def hidden(self, ids: Tensor, layer: int) -> Tensor:
        """Activations (B, T, d_layer) after `layer` blocks; 0 is what the first block reads."""
        ...

    def continue_from(self, hidden: Tensor, layer: int) -> Tensor:
        """Continue activations after `layer` blocks to the head's input (B, T, d_model); differentiable."""
        ...

    def advance(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Activations after `stop` blocks from those after `start`; differentiable."""
        ...

    def prepare(self, length: int) -> Sequence[Any]:
        """Learn how the blocks are called on sequences of this length, for passes of several threads."""
        ...

    def linear_layers(self, which: str) -> list[nn.Module]:
        """Linear layers inside the blocks in the order in which they run, by a name in `LinearLayers`."""
        ...

    def adapter_matrices(self, which: str) -> list[AdapterMatrices] | None:
        """Low-rank change of each of `linear_layers`; None where any was trained in all its weights."""
        ...

    def check_padding(self, length: int) -> None:
        """Raise ModelError where a sequence padded to this length is read otherwise than alone, although
        `length_kinds` let it."""
        ...

    def remarks(self, spaces: Sequence[str]) -> list[str]:
        """Sentences about what operators in these spaces leave out of the model's weights."""
        ...

    def at_layers(self, which: str, length: int, visit: LayerVisitor) -> AbstractContextManager[None]:
        """While it lasts, `visit` is called when one of `linear_layers` has run; T is `length`."""
        ...

    def logits(self, final: Tensor) -> Tensor:
        """The head: (…, d_model) → (…, vocab_size), soft cap included."""
        ...

    def uncapped_logits(self, final: Tensor, tokens: Tensor | None = None) -> Tensor:
        """As `logits`, before the soft cap; of `tokens` (…, m) alone if given."""
        ...

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Cap logits softly as `logits` does."""
        ...

    def cap_slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the soft cap at capped logits; None where there is no cap."""
        ...

    def token_losses(self, final: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of targets (B, T) at (B, T, d_model): (B, T) float32 nats; differentiable once."""
        ...
