"""The interface of operator spaces: shifts, gate gradients, and how a basis is fitted to a model and corpus.

The paper's operator k adds ``B_ψ(h_x) a_k`` (§3.1) to what the frozen model says: a basis that all subsets
share, and gates of each subset's own. A space is one such basis. Here is the interface; the spaces themselves
are in `residual_spaces`, `layer_spaces`, `logit_spaces` and `pair_space`, and listed in `spaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.second_moments import Moments


@dataclass(frozen=True)
class BasisOptions:
    """Settings of bases, for all spaces of a sum.

    Attributes
    ----------
    layer : residual spaces act after this many blocks
    ranks : rank of each space by name; clipped to the widths that there are
    n_buckets : c of the spaces with buckets of the vocabulary; None for as many as keep c r within 2¹⁸
    seed : names every random stream
    batch_tokens : padded tokens in one forward pass
    damping : whiten the bases, after adding this share of the mean eigenvalue to every eigenvalue; None for
        orthonormal ones
    all_labels : of a classifier: the gradients inside the blocks are those of every label, weighted by its
        probability, instead of one drawn
    """

    layer: int
    ranks: dict[str, int]
    n_buckets: int | None = None
    seed: int = 0
    batch_tokens: int = 4096
    damping: float | None = None
    all_labels: bool = False


@dataclass(frozen=True)
class Signals:
    """Activations of a batch, and gradients of its loss, at the sites where operators act.

    Attributes
    ----------
    hidden : (B, T, d)            residual stream at the layer
    final : (B, T, d)             normed state before the head
    pull : (B, T, d) float32 or None
        ``−∂loss/∂hidden``; None where no space acts on the residual stream
    logit : list of (B, p) float32
        ``−∂loss/∂a`` of each logit space, in order.
    loss : (B,) float64           mean nats per scored token
    inputs : (B, T, d) or None    input of the first block, where a space reads it
    inner : list of (B, T, in)    what each of the linear layers reads at which a space acts
    given : list of (B, T, out)   ``−∂loss/∂`` what it gives
    prediction : (V,) float64 or None
        Sum over the scored positions of the model's distribution of the next token; where asked for.
    """

    hidden: torch.Tensor
    final: torch.Tensor
    pull: torch.Tensor | None
    logit: list[torch.Tensor]
    loss: torch.Tensor
    inputs: torch.Tensor | None = None
    inner: list[torch.Tensor] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    prediction: torch.Tensor | None = None


@dataclass(frozen=True)
class Observation:
    """A batch of the sample, after its pass through the model.

    Attributes
    ----------
    drawn : Signals           activations; gradients of the loss of labels drawn from the model
    used : (B, T) bool        whether position t makes a prediction that is scored: whether token t + 1 counts
    scored : (B,) float32     scored tokens of each chunk; times a gradient of the chunk's mean loss: that of
                              the sum over its tokens, so that every token weighs the same
    """

    drawn: Signals
    used: torch.Tensor
    scored: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """The sample that a space fits its basis to.

    Attributes
    ----------
    model : AttributableModel
    chunks : ChunkReader           the corpus, of which batches were observed
    moments : Moments              what this space's `observe` collected
    prediction : (V,) float64      sum over scored positions of the model's distribution of the next token
    each_label : () → Iterator     of a classifier with `BasisOptions.all_labels`: the sample again, as the
                                   signals of every label and its probability (B, 1)
    """

    model: AttributableModel
    chunks: ChunkReader
    moments: Moments
    prediction: torch.Tensor
    each_label: Callable[[], Iterator[tuple[Signals, torch.Tensor]]]

    @property
    def tokens(self) -> float:
        """Scored predictions of the sample: their probabilities add up to one each."""
        return max(1.0, float(self.prediction.sum()))


def layer_norm(hidden: torch.Tensor) -> torch.Tensor:
    """Apply LayerNorm without parameters over the last axis, in float32 (paper, Table operator_arch)."""
    return F.layer_norm(hidden.float(), (hidden.shape[-1],))


class OperatorSpace(torch.nn.Module):
    """A family of steering operators that share one basis and differ in their gates.

    To add a space: a class with a name, a site, `forward` and `gate_gradient` (linear in the gates, one the
    adjoint of the other) and `fit`, listed in `spaces.SPACES`. What else it is, the attributes say; nothing
    outside asks for a name.

    Attributes
    ----------
    name : str
    site : str          ``"residual"`` (shift added to h at the layer), ``"layers"`` (to what linear layers
                        inside the blocks give) or ``"logit"`` (to the logits, before a soft cap)
    source : str        what a space at the logits reads: the ``"final"`` state, the ``"input"`` of the first
                        block, or the current ``"tokens"`` themselves
    gate_size : int     p, the length of one gate vector
    default_rank : int
    classifier_rank : int or None     where it is another for classifiers
    whitens : bool              with a damping, the basis holds the Fisher matrix's inverse root (K-FAC), so
                                that F is the identity in the gates; else F is estimated as a whole
    of_weights : bool           gates are a change of a network's own weights, so that its training time holds
                                in them
    has_buckets : bool          tokens share buckets, as many as memory allows
    diagonal_fisher : bool      of F with every label counted, `mean_squares` gives the diagonal, which is
                                enough in this basis; else F is p × p
    mean_eigenvalue : float     of the Fisher matrix per token, to which a whitened basis is scaled: how much
                                the space counts in a sum
    """

    name: ClassVar[str]
    site: ClassVar[str]
    source: ClassVar[str] = "final"
    gate_size: int
    default_rank: ClassVar[int] = 128
    classifier_rank: ClassVar[int | None] = None
    whitens: ClassVar[bool] = False
    of_weights: ClassVar[bool] = False
    has_buckets: ClassVar[bool] = False
    diagonal_fisher: ClassVar[bool] = False
    mean_eigenvalue: ClassVar[float] = 1.0

    # The operator itself

    def forward(self, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Compute the shift that each row's gates cause.

        Parameters
        ----------
        hidden : (B, T, d)     residual stream at the layer, or for spaces at the logits what it `reads`
        gates : (B, p)         one gate vector per row

        Returns
        -------
        Tensor (B, T, d) or, for spaces at the logits, (B, T, V); float32
        """
        raise NotImplementedError

    def gate_gradient(self, hidden: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """Differentiate in the gates, per row, ``Σ_t ⟨cotangent_t, shift_t⟩``: the adjoint of `forward`.

        Parameters
        ----------
        hidden : (B, T, d)
        cotangent : (B, T, d) or (B, T, V)     zero at positions that are not scored

        Returns
        -------
        Tensor (B, p) float32
        """
        raise NotImplementedError

    def gradient_from(self, found: Signals) -> torch.Tensor:
        """Contract a batch's signals to the gate gradient (B, p) float32, for a space inside the network."""
        assert found.pull is not None
        return self.gate_gradient(found.hidden, found.pull)

    def reads(self, final: torch.Tensor, inputs: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """Choose what a space at the logits reads; `inputs` may be missing where no `source` is the input."""
        if self.source == "final":
            return final
        if self.source == "tokens":
            return ids
        assert inputs is not None
        return inputs

    # How its basis is made

    @classmethod
    def probe(cls) -> OperatorSpace | None:
        """Make a space at the same site with gates of no meaning, so that a pass over the sample keeps what
        `observe` wants of that site; None where states and predictions do."""
        return None

    @classmethod
    def observe(cls, seen: Observation, moments: Moments, options: BasisOptions) -> None:
        """Collect what the basis is made of from one batch of a sample of the corpus."""

    @classmethod
    def fit(cls, sample: Sample, options: BasisOptions) -> Self:
        """Fit the basis to this model and corpus, after the whole sample was observed."""
        raise NotImplementedError

    # Its size, for a model

    @classmethod
    def check_model(cls, model: AttributableModel) -> None:
        """Raise UsageError where a model cannot be steered in this space."""

    @classmethod
    def choose_rank(cls, model: AttributableModel, n_subsets: int, asked: int | None) -> int:
        """Choose the rank of the basis for K subsets, where one was asked for or not."""
        own = cls.classifier_rank if model.classes else None
        return asked or own or cls.default_rank

    @classmethod
    def reserved_gates(cls, model: AttributableModel, rank: int) -> int:
        """Count gates at that rank that leave less room for buckets; 0 where they are few, or apart."""
        return 0

    # Its parts, and how it is stored

    def is_on(self, device: torch.device) -> bool:
        """Tell whether all that it holds is on a device."""
        held = (*self._parameters.values(), *self._buffers.values())
        return not self._modules and all(each is None or each.device == device for each in held)

    def parts(self) -> list[slice]:
        """List the gates that have directions of their own, in order: those of each layer, or all of them."""
        return [slice(0, self.gate_size)]

    def scale(self, part: int, factor: float) -> None:
        """Multiply the shift that the gates of one of the `parts` cause, in place."""
        raise NotImplementedError

    def mean_squares(self, seen: Signals, probability: torch.Tensor) -> torch.Tensor:
        """Sum Σ_i p_i g_i² of a classifier's gate gradients, (p,), for probabilities p (B, 1); where
        `diagonal_fisher`."""
        raise NotImplementedError

    def arrays(self) -> dict[str, np.ndarray]:
        """Give the basis as arrays to store, float32 (integers for index arrays)."""
        return {name: value.detach().cpu().numpy() for name, value in self.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        """Give what rebuilds the space around its arrays."""
        return {"name": self.name, "gate_size": self.gate_size}
