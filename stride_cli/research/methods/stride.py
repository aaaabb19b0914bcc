"""STRIDE itself under the protocol of all methods, and what its recovery approaches: the direct readout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.attribution.options import RecoveryOptions
from stride_cli.attribution.several import Several, in_passes, open_pipeline
from stride_cli.data.query_set import QUERY_BLOCK, QUERY_TOKENS
from stride_cli.data.workspace import Workspace
from stride_cli.errors import UsageError
from stride_cli.operators.options import FLAT, ClosedOptions, train_options
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.options import own
from stride_cli.output import progress
from stride_cli.recovery.problem import dense
from stride_cli.research.methods.gradients.passes import load_checkpoint, load_residuals_once
from stride_cli.research.methods.protocol import takes

if TYPE_CHECKING:
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.data.query_set import QuerySet
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.store import Operators

_DIRECT_BYTES = 4 << 30


class StrideMethod:
    """Operators of K random subsets, a measurement per subset, sparse recovery (paper, alg:stride).

    Parameters
    ----------
    given : options of `FitChoice`, `ClosedOptions`, `SgdOptions` (as `stride train` takes them) and
        `RecoveryOptions` (as `stride query`)
    subsets, degree : int, optional     a design of its own; default: the index's
    checkpoints : str, optional         paths of checkpoints joined by ``|``, each with subsets of its own, as
                                        `stride train` fits them; measured one after the other
    stored : bool                       use the operators in the index, of all its checkpoints, instead of
                                        fitting
    """

    @takes(*FLAT, RecoveryOptions, leave_out=("checkpoints", "seed", "base"))
    def __init__(
        self,
        *,
        subsets: int | None = None,
        degree: int | None = None,
        checkpoints: str | None = None,
        stored: bool = False,
        **given: Any,
    ) -> None:
        self.name = "stride"
        self.bytes_per_chunk = 0.0
        recovery = own(RecoveryOptions, given)
        fit = {name: value for name, value in given.items() if name not in recovery}
        self._options = train_options(
            **fit, choice="fit={}", called=lambda option, flag: f"{self.name}: {option}"
        )
        self._subsets, self._degree = subsets, degree
        self._recovery = RecoveryOptions(**recovery)
        self._checkpoints = checkpoints
        self._stored = stored
        # which model (see `_open`), and its operators
        self._fitted: list[tuple[str | int | None, Operators]] = []

    def fit(self, workspace: Workspace) -> None:
        """Fit the operators of every checkpoint.

        Raises
        ------
        UsageError      settings that do not fit the model, or ``stored`` together with a fit's options
        StageMissing    ``stored``, and the index has no operators
        """
        from stride_cli.attribution.defaults import recovery_defaults
        from stride_cli.operators.checkpoints import stored_checkpoints, stored_designs
        from stride_cli.operators.designs import Designs
        from stride_cli.operators.store import Operators

        self._task = workspace
        if self._stored:
            if self._subsets or self._degree or self._checkpoints:
                raise UsageError(
                    "stored operators have the index's design and models: no other options",
                    fix="leave out stored, or subsets, degree and checkpoints",
                )
            places = range(1 + len(stored_checkpoints(workspace.index)))
            self._fitted = [(place or None, Operators.from_index(workspace.index, place)) for place in places]
            self._designs = stored_designs(workspace.index)
            recipe = workspace.index.group_attributes("operators").get("recipe")
        else:
            paths = [None] if self._checkpoints is None else self._checkpoints.split("|")
            designs = [self._design_of(workspace, number) for number in range(len(paths))]
            self._fitted = self._fit_all(workspace, paths, designs)
            self._designs = Designs.stacked(designs)
            recipe = self._options.recipe
        operators = self._fitted[0][1]
        self._defaults = recovery_defaults(workspace.index, workspace.model, operators.fit, recipe)
        self._pipeline()  # settings that these operators cannot have are refused before anything is scored
        kept = sum(sum(gate.nbytes for gate in found.gates) for _, found in self._fitted)
        kept += sum(found.projections.nbytes for _, found in self._fitted if found.projections is not None)
        self.bytes_per_chunk = (kept + np.asarray(self._designs.columns).nbytes) / max(1, workspace.n_chunks)

    def _design_of(self, workspace: Workspace, number: int) -> Designs:
        """Draw the subsets of checkpoint 0, 1, …: the index's own for the first, unless others are wanted."""
        from stride_cli.operators.designs import Designs, design_seed

        seed = design_seed(workspace.index.seed, number) if number else None
        if self._subsets is None and self._degree is None:
            return Designs.of(workspace.index, seed)
        subsets = self._subsets or workspace.index.n_subsets
        degree = self._degree or min(workspace.index.degree, subsets)
        if not 1 <= degree <= subsets:
            raise UsageError(
                f"degree {degree} with {subsets} subsets (expected 1 ≤ degree ≤ subsets)",
                fix="give a smaller degree, or more subsets",
            )
        return Designs.drawn(
            workspace.n_chunks, subsets, degree, workspace.index.seed if seed is None else seed
        )

    def _fit_all(
        self, workspace: Workspace, paths: Sequence[str | None], designs: Sequence[Designs]
    ) -> list[tuple[str | int | None, Operators]]:
        """Fit the operators of every checkpoint; of several, one model is held at a time."""
        from stride_cli.operators.fitting import fit_operators
        from stride_cli.operators.options import like_own, resolve_settings

        fitted: list[tuple[str | int | None, Operators]] = []
        options = _options_for(like_own(self._options, workspace.model, workspace.index), self._checkpoints)
        for path, design in zip(paths, designs, strict=True):
            model = self._open(path)
            settings = resolve_settings(options, model, workspace.index)
            columns = np.asarray(design.columns)
            load_residuals_once(workspace, settings)
            operators = fit_operators(model, workspace.chunks, columns, design.n_subsets, settings)
            fitted.append((path, operators.packed()))
            del model, operators
        return fitted

    def _open(self, which: str | int | None) -> AttributableModel:
        """Open the workspace's model (None), a checkpoint in the index (its place), or one at a path."""
        if which is None:
            return self._task.model
        if isinstance(which, int):
            from stride_cli.operators.checkpoints import open_stored

            return open_stored(self._task.index, self._task.model, which)
        return load_checkpoint(self._task, Path(which))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        """See `Method.score`: relative influences; zero outside of the solution and of what was read."""
        for _, found in in_passes(self._pipeline(), queries):
            for first in range(0, len(found), QUERY_BLOCK):
                yield dense(found[first : first + QUERY_BLOCK], np.float32)

    def _pipeline(self) -> Pipeline | Several:
        """Make the pipeline, with one model loaded at a time."""

        def load(number: int) -> SteeredModel:
            which, operators = self._fitted[number]
            return SteeredModel.of(self._open(which), operators)

        operators = [operators for _, operators in self._fitted]
        return open_pipeline(operators, load, self._designs, self._task, self._defaults, self._recovery)


class DirectReadout:
    """Influence in gate space, ``g_i · F⁻¹ · g_x``: what recovery approaches as K grows.

    The gradient of every chunk is made anew in one pass over the corpus for each call of `score`.

    Parameters
    ----------
    space, layer, rank, damping, curvature, buckets : as `stride train --fit closed` takes them
    checkpoints : str, optional      as for `StrideMethod`; scores are added, each at unit spread
    shrink : bool                    as for `StrideMethod`
    """

    shares_a_pass = True

    @takes(ClosedOptions, leave_out=("checkpoints", "seed", "stability", "project", "base"))
    def __init__(self, *, checkpoints: str | None = None, shrink: bool = True, **given: Any) -> None:
        self.name = "direct"
        self.bytes_per_chunk = 0.0
        self._options = ClosedOptions(**given)
        self._checkpoints = checkpoints
        self._shrink = shrink

    def fit(self, workspace: Workspace) -> None:
        """Fit the bases (and, where these are not whitened, one operator per chunk).

        Raises
        ------
        UsageError      one operator per chunk, of a corpus whose gradients do not fit in memory
        """
        from stride_cli.operators.closed import fit_closed, fit_spaces, is_whitened
        from stride_cli.operators.options import like_own, resolve_settings
        from stride_cli.operators.steered_model import SteeredModel

        self._task = workspace
        self._parts: list[tuple[Any, SteeredModel]] = []  # settings, and the model, fitted or with bases only
        options = _options_for(like_own(self._options, workspace.model, workspace.index), self._checkpoints)
        for model in _models(workspace, self._checkpoints):
            settings = resolve_settings(options, model, workspace.index)
            load_residuals_once(workspace, settings)
            steered = fit_spaces(model, workspace.chunks, settings)
            if is_whitened(settings):
                self._parts.append((settings, steered))
                continue
            gate_size = sum(space.gate_size for space in steered.spaces)
            if gate_size * workspace.n_chunks * 4 > _DIRECT_BYTES:
                raise UsageError(
                    f"gradients of {workspace.n_chunks} chunks in {gate_size} gates do not fit in memory",
                    fix="use another space than residual, or a smaller rank",
                )
            alone = np.arange(workspace.n_chunks, dtype=np.uint32)[:, None]  # every chunk its own subset
            operators = fit_closed(model, workspace.chunks, alone, workspace.n_chunks, settings)
            self._parts.append((settings, SteeredModel.of(model, operators)))

    def score(self, queries: QuerySet) -> Iterator[np.ndarray]:
        """See `Method.score`; all queries share one pass over the corpus."""
        from stride_cli.attribution.defaults import recovery_defaults
        from stride_cli.recovery.shrinkage import shrink

        total = np.zeros((len(queries), self._task.n_chunks))
        for settings, steered in self._parts:
            if steered.fitted is not None:
                from stride_cli.operators.linear_response import measure_linear

                groups = queries.groups(steered.model, QUERY_TOKENS)
                scores = np.concatenate([measure_linear(steered, queries.batch(g)) for g in groups])
            else:
                scores = self._pass(settings, steered, queries)
            if len(self._parts) > 1:
                scores = scores / np.maximum(scores.std(axis=1, keepdims=True), np.finfo(float).tiny)
            total += scores
        shrinkage = recovery_defaults(self._task.index, self._task.model, "closed", None)["shrinkage"]
        if self._shrink and shrinkage is not None:
            total = shrink(total - total.mean(axis=1, keepdims=True), shrinkage)
        for start in range(0, len(total), QUERY_BLOCK):
            yield total[start : start + QUERY_BLOCK].astype(np.float32)

    def _pass(self, settings: Any, steered: SteeredModel, queries: QuerySet) -> np.ndarray:
        """Score (Q, n): dot products in every space, summed."""
        from stride_cli.attribution.direct import query_gradients
        from stride_cli.operators.gradients import gradient_products

        batches = [queries.batch(group) for group in queries.groups(steered.model, settings.batch_tokens)]
        asked = query_gradients(steered, batches)
        with progress("reading chunks", self._task.n_chunks, unit="chunks") as bar:
            scores = gradient_products(
                steered, asked, self._task.chunks, batch_tokens=settings.batch_tokens, advance=bar.advance
            )
        return scores.sum(axis=0)


def _options_for(options: Any, checkpoints: str | None) -> Any:
    """Options that know of the checkpoints which these methods are given apart: defaults depend on them."""
    return options if checkpoints is None else replace(options, checkpoints=tuple(checkpoints.split("|")))


def _models(workspace: Workspace, checkpoints: str | None) -> list[AttributableModel]:
    """Open the workspace's model, or those of the checkpoints."""
    if checkpoints is None:
        return [workspace.model]
    return [load_checkpoint(workspace, Path(path)) for path in checkpoints.split("|")]
