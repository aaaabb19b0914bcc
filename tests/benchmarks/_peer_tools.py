"""One step of another library, in an environment that has it and needs nothing of STRIDE: see `peers`.

    python _peer_tools.py TOOL fit|ask MODEL TOKENS FOLDER [SCORES.npy]

TOKENS has {"input_ids", "labels"} a line, the tokens and the mask that training saw. `fit` makes of a corpus
in FOLDER all that queries share; `ask` writes scores of its examples, (queries, examples) float32. Losses are
sums over tokens, as training adds them up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

SIDE = 16  # of a layer's projected gradient, for those that project: bergson's default
Rows = list[dict[str, torch.Tensor]]


def read(path: Path) -> Rows:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{key: torch.tensor(value) for key, value in json.loads(line).items()} for line in lines]


def padded(rows: Rows) -> dict[str, torch.Tensor]:
    """A batch: ids, labels and attention mask, (B, T)."""
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    fill, pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}, torch.nn.utils.rnn.pad_sequence
    return {key: pad([row[key] for row in rows], True, value) for key, value in fill.items()}


def summed(model: torch.nn.Module, batch: dict[str, torch.Tensor], sample: bool = False) -> torch.Tensor:
    """Nats of all scored tokens, or of labels that the model draws at their places."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
    logits, labels = logits[labels != -100], labels[labels != -100]
    if sample:
        labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def bergson(step: str, model: str, tokens: Path, folder: Path, moments: bool = False) -> np.ndarray | None:
    """Cosines of every layer's gradients, projected to 16 × 16 numbers; with second moments, TrackStar."""
    command = [sys.executable, "-m", "bergson"]
    usual = ["--model", model, "--dataset", str(tokens), "--projection_dim", str(SIDE)]
    usual += ["--loss_reduction", "sum"]
    made = folder / ("index" if step == "fit" else "queries")
    subprocess.run([*command, "build", str(made), *usual, "--overwrite", "true"], check=True)
    hessian = folder / "hessian" if moments else None
    if step == "fit":
        if hessian:
            method = ["--method", "autocorrelation", "--overwrite", "true"]
            subprocess.run([*command, "hessian", str(hessian), *usual, *method], check=True)
        return None
    from bergson.query.attributor import Attributor

    names = {name: each.clone() for name, each in Attributor(made).grads.items()}  # `search` divides them
    found = Attributor(folder / "index", hessian_path=hessian, unit_norm=True)
    scores, order = found.search(names, None)
    return np.take_along_axis(scores.numpy(), order.argsort(dim=1).numpy(), 1)


def dattri_llm(step: str, model: str, tokens: Path, folder: Path) -> np.ndarray | None:
    """EK-FAC of gradients projected to 16 on both sides (LoGRA); one example at once, as nothing pads."""
    import dattri_llm as library

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    each = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    arguments = library.AttributionArguments(output_dir=str(folder), use_cpu=True, max_grad_norm=None, **each)
    found = library.EKFACAttributor(arguments, task=library.AttributionTask(summed, loaded))
    projection = {"style": "logra", "proj_dim": SIDE, "proj_max_batch_size": 8, "proj_type": "normal"}
    config = library.HookManagerConfig(linear_io=[r"layers\."], projection_kwargs={"__default__": projection})
    # equal examples would be one row: each has a number
    numbered = [{**row, "number": torch.tensor(at)} for at, row in enumerate(read(tokens))]
    take = found.generate_train_rep if step == "fit" else found.generate_test_rep
    place = str(folder / step)
    found.collect_gradients(take(numbered, hook_config=config), library.GradientStorageManager(place))
    if step == "fit":
        found.fit(place, str(folder / "fisher"))
        return None
    given = {"fisher_dir": str(folder / "fisher"), "damping": 0.1, "relative_damping": True}
    return found.attribute_from_cache(str(folder / "fit"), place, **given).scores.T.numpy()


def kronfluence(step: str, model: str, tokens: Path, folder: Path) -> np.ndarray | None:
    """EK-FAC of whole gradients; its factors are kept, and no gradients: each query goes over the corpus."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import ScoreArguments
    from kronfluence.task import Task
    from kronfluence.utils.dataset import DataLoaderKwargs

    class Language(Task):
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> torch.Tensor:
            return summed(model, batch, sample)

        def compute_measurement(self, batch: Any, model: torch.nn.Module) -> torch.Tensor:
            return summed(model, batch)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> torch.Tensor:
            return batch["attention_mask"]

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    linear = (name for name, module in loaded.named_modules() if isinstance(module, torch.nn.Linear))
    names = [name for name in linear if "layers." in name]
    prepared = prepare_model(loaded, Language())
    how = Analyzer("corpus", prepared, Language(), cpu=True, disable_tqdm=True, output_dir=str(folder))
    how.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=padded))
    if step == "fit":
        (folder / "tokens").write_bytes(tokens.read_bytes())
        torch.manual_seed(0)
        how.fit_all_factors("factors", read(tokens), per_device_batch_size=8)
        return None
    given: dict[str, Any] = {"per_device_query_batch_size": 16, "per_device_train_batch_size": 8}
    # a tenth of the mean eigenvalue; the default is 1e-8
    given |= {"score_args": ScoreArguments(damping_factor=None), "overwrite_output_dir": True}
    how.compute_pairwise_scores("scores", "factors", read(tokens), read(folder / "tokens"), **given)
    return how.load_pairwise_scores("scores")["all_modules"].numpy()


TOOLS: dict[str, Callable[[str, str, Path, Path], np.ndarray | None]] = {
    "bergson": bergson,
    "bergson-moments": partial(bergson, moments=True),
    "dattri-llm": dattri_llm,
    "kronfluence": kronfluence,
}


if __name__ == "__main__":
    tool, step, model, tokens, folder = sys.argv[1:6]
    scores = TOOLS[tool](step, model, Path(tokens), Path(folder))
    if scores is not None:
        np.save(sys.argv[6], scores.astype(np.float32))
