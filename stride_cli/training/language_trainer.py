"""Retrain a language model by its recipe on subsets of its index's chunks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from index_format.durable import make_directory, replace_file
from stride_cli.corpus.chunking import Chunk
from stride_cli.data.batches import token_losses
from stride_cli.errors import ModelError
from stride_cli.models.language.causal_lm import CausalLM
from stride_cli.models.language.language_recipe import FILE_NAME, RECORDED, Recipe, read_recipe
from stride_cli.models.protocol import AttributableModel
from stride_cli.operators.device_memory import DIFFERENTIATED
from stride_cli.output import note
from stride_cli.permissions import Permissions
from stride_cli.training.initial_model import initial_model
from stride_cli.training.jobs import Job, Outcome, job_key
from stride_cli.training.language_loop import planned_steps, train

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace

_TOKENS = 4096  # of queries evaluated together
# of a small model a GPU waits for kernels to be launched: processes that share it launch theirs side by side.
# SmolLM2-135M took 147 ms a step by itself, and of 14 on an H200 there was one every 34
_WAITS, _ON_ONE_GPU = 500_000_000, 12
_TIMED, _SHORT = 4, 12  # steps, of which the first takes longer; digits of a fingerprint in messages


@dataclass
class LanguageTrainer:
    """Trains by a recipe, as `stride_cli.training.language_loop.train` does; see `jobs.Trainer`.

    Attributes
    ----------
    recipe : Recipe
    chunks : list of Chunk       all n, of the index
    queries : QuerySet
    device : str                 "cpu", "cuda", "cuda:1" …
    keep : Path or None          retrained weights, one safetensors file a job
    peak_bytes : int             about what training takes; 0 = not known
    on_one_gpu : int             most that are trained side by side on a GPU by default, each in a process
    permissions : Permissions    to download a fine-tuning's base model
    """

    recipe: Recipe
    chunks: list[Chunk]
    queries: QuerySet
    device: str = "cpu"
    keep: Path | None = None
    peak_bytes: int = 0
    on_one_gpu: int = 1
    at_once: int = 1
    permissions: Permissions = field(default_factory=Permissions)
    digest: str = field(init=False)
    weights_digest: str = field(init=False)

    def __post_init__(self) -> None:
        # what names files and versions does not decide a retrained model, the seed is the job's
        kept = replace(self.recipe, seed=0, corpus={}, versions={}, base=None).to_record()
        text = json.dumps([kept, self.recipe.corpus["fingerprint"], len(self.chunks)], sort_keys=True)
        self.weights_digest = hashlib.sha256(text.encode()).hexdigest()
        both = self.weights_digest + self.queries.fingerprint()
        self.digest = hashlib.sha256(both.encode()).hexdigest()

    @property
    def n_chunks(self) -> int:
        return len(self.chunks)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Train one model per job; see `jobs.Trainer`."""
        return [Outcome(query_losses(CausalLM(model), self.queries)) for model in self.models(jobs)]

    def models(self, jobs: Sequence[Job]) -> Iterator[Any]:
        """Yield the retrained models in order: PreTrainedModel, in eval mode, on the trainer's device."""
        for job in jobs:
            model = self._kept(job)
            if model is None:
                recipe = self.recipe.with_seed(job.seed)
                model = initial_model(recipe, self.permissions).to(self.device)
                train(model, self.chunks, recipe, subset=job.mask)
                self._save(job, model)
            yield model

    def seconds(self) -> float:
        """Time a few steps, and count how many a model takes."""
        steps, plan = planned_steps(self.chunks, self.recipe)
        few, ended = np.concatenate([batch for batch, *_ in islice(plan, _TIMED)]), list[float]()
        short = replace(self.recipe, epochs=1.0, steps=_TIMED)
        model = initial_model(short, self.permissions).to(self.device)
        train(model, self.chunks, short, subset=few, after_step=lambda _: ended.append(time.perf_counter()))
        return steps * (ended[-1] - ended[0]) / max(1, len(ended) - 1)

    def _file(self, job: Job) -> Path | None:
        return None if self.keep is None else self.keep / f"{job_key(self.weights_digest, job)}.safetensors"

    def _save(self, job: Job, model: Any) -> None:
        from safetensors.torch import save

        path = self._file(job)
        if path is None:
            return
        trained = {name: value.detach().cpu().contiguous() for name, value in _trained(model)}
        make_directory(path.parent)
        # another worker may be writing weights beside these, never these
        replace_file(path, save(trained, metadata={"sha256": _content(trained)}))

    def _kept(self, job: Job) -> Any:
        """Load a job's model from kept weights; None where there are none, or damaged ones."""
        from safetensors import SafetensorError, safe_open

        path = self._file(job)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                stored = (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError):
            weights, stored = {}, None
        model = initial_model(self.recipe.with_seed(job.seed), self.permissions)
        wanted = dict(_trained(model))
        if weights.keys() != wanted.keys() or stored != _content(weights):
            note(f"{path} is damaged: that model is trained again")
            return None
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(weights[name])
        return model.to(self.device)


def open_language_trainer(
    workspace: Workspace,
    queries: QuerySet,
    *,
    recipe: Recipe | str | Path | None = None,
    keep: Path | None = None,
) -> LanguageTrainer:
    """Make the trainer of a workspace's language model; see `retraining.open_trainer`.

    Raises
    ------
    ModelError      no recipe, or one of another corpus, block size or tokenizer than the index
    """
    recipe, model = own_recipe(workspace, recipe), workspace.model
    return LanguageTrainer(
        recipe,
        index_chunks(workspace),
        queries,
        str(model.device),
        keep,
        peak_bytes=training_bytes(model, recipe.batch_tokens),
        on_one_gpu=_ON_ONE_GPU if model.n_parameters < _WAITS else 1,
        permissions=model.spec.permissions,
    )


def own_recipe(workspace: Workspace, recipe: Recipe | str | Path | None = None) -> Recipe:
    """Find the recipe of a workspace's language model: the given one, or the model's own.

    Raises
    ------
    ModelError      no recipe, or one of another corpus, block size or tokenizer than the index
    """
    model, path = workspace.model, workspace.model.path
    if isinstance(recipe, str | Path):
        recipe = _read(Path(recipe))
    if recipe is None and path is not None:
        recipe = read_recipe(path)
    if recipe is None:
        raise ModelError(
            f"the model '{path or model.name}' has no recipe ({FILE_NAME}), so it cannot be "
            "trained again on subsets",
            fix="make it with `stride model train` or `stride model finetune`, or give --recipe FILE or "
            "--command 'python train.py --mask {mask} --out {out}'",
        )
    if recipe.kind == RECORDED:
        raise ModelError(
            f"the model '{path or model.name}' was trained by transformers' "
            "Trainer, as StrideCallback recorded it, and that loop is not repeated here on subsets",
            fix="give that training: in Python verify_hit(…, retrain=function), else as --command 'python "
            "train.py --mask {mask} --out {out}', whose mask is over the index's chunks",
        )
    check_recipe(recipe, workspace.index)
    return recipe


def training_bytes(model: AttributableModel, batch_tokens: int) -> int:
    """Estimate the bytes that training takes in fp32: weights, gradients, two moments, and the
    activations of one batch (every block's, and the logits three times).

    SmolLM2-135M with batches of 2,048 tokens: 6.8 GB, measured 7.0 to 8.5.
    """
    states = 16 * model.n_parameters
    per_token = 4 * (DIFFERENTIATED * model.n_layers * model.d_model + 3 * model.vocab_size)
    return states + batch_tokens * per_token


def check_recipe(recipe: Recipe, index: Index) -> None:
    """Check that the index's chunks are what the model was trained on: same corpus, chunks and tokens.

    Raises
    ------
    ModelError      names both
    """
    prints, counts = index.attributes["fingerprints"], index.attributes.get("counts") or {}
    corpus = recipe.corpus
    pairs = [
        ("corpus", corpus.get("fingerprint"), prints["corpus"]),
        ("tokenizer", recipe.tokenizer_fingerprint, prints["tokenizer"]),
        ("block size", recipe.block_size, index.attributes["block_size"]),
    ]
    # no recipe says in which form documents were: another gives other tokens, or other ones are scored
    known = [name for name in ("tokens", "scored_tokens") if name in corpus and name in counts]
    pairs += [(name.replace("_", " "), corpus[name], counts[name]) for name in known]
    said = "; ".join(
        f"{name} {str(trained)[:_SHORT]} in the recipe, {str(indexed)[:_SHORT]} in the index"
        for name, trained, indexed in pairs
        if trained != indexed
    )
    if not said:
        return
    sources = " ".join(str(source) for source in recipe.corpus.get("sources", ["CORPUS"]))
    raise ModelError(
        f"index {index.path} does not hold the chunks that its model was trained on: {said}",
        fix=f"index the training corpus: stride index build {sources} --block-size {recipe.block_size} …, "
        "without --form",
    )


def index_chunks(workspace: Workspace) -> list[Chunk]:
    """Read the chunks of a workspace's index, as training takes them."""
    reader = workspace.chunks
    chunks = []
    for row in range(reader.n_chunks):
        tokens, weights = reader.chunk(row)
        mask = None if reader.loss_mask is None else weights.astype(np.uint8)
        chunks.append(Chunk(tokens.astype(np.int32), max(1, int(reader.loss_start[row])), mask))
    return chunks


@torch.no_grad()
def query_losses(model: AttributableModel, queries: QuerySet) -> np.ndarray:
    """Compute the loss of every query under a model.

    Parameters
    ----------
    model : AttributableModel          or a classifier with the same interface
    queries : QuerySet

    Returns
    -------
    ndarray (Q,) float64      mean nats per scored token; logits and their log-sum in fp32, the mean in fp64
    """
    losses = np.zeros(len(queries))
    for batch in map(queries.batch, queries.groups(model, _TOKENS)):
        rows, _, each = (found.cpu().numpy() for found in token_losses(model, batch))
        count = len(batch.ids)
        losses[batch.rows] = np.bincount(rows, each, count) / np.bincount(rows, minlength=count)
    return losses


def _trained(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def _content(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> Recipe:
    try:
        return Recipe.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path} is not a recipe: {error}", fix=f"give the path of a {FILE_NAME} of `stride model train`"
        ) from error
