"""Judge a selection: fine-tune a base model on each file by one recipe, and ask held-out queries."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from index_format.durable import make_directory, replace_file
from stride_cli.corpus.documents import Document
from stride_cli.errors import UsageError
from stride_cli.research.evaluation.metrics import unigram_f1
from stride_cli.research.selection.options import JudgingOptions
from stride_cli.research.selection.select import SETS

if TYPE_CHECKING:
    from stride_cli.data.query_set import QuerySet
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.research.selection.records import SeedSpread, SelectionScoreRecord, TaskScore
    from stride_cli.training.finetuning import FinetuneOptions

_QUERY_TOKENS = 4096  # padded, of queries at once


@dataclass(frozen=True)
class Score:
    """One fine-tuned model on the held-out queries.

    Attributes
    ----------
    losses : (Q,) float64      mean nats per scored token
    f1 : (Q,) float64          unigram F1 of the greedy answer (app:selection_metrics); NaN for a text, which
                               has no answer
    """

    losses: np.ndarray
    f1: np.ndarray


def check_directory(directory: Path) -> None:
    """Raise UsageError where a file of the selection is missing."""
    for name in SETS:
        if not (directory / f"{name}.jsonl").is_file():
            raise UsageError(
                f"'{directory}' has no {name}.jsonl", fix=f"stride select TASK.jsonl --out {directory}"
            )


def evaluate_selection(
    directory: Path,
    base: str,
    queries: Path,
    judging: JudgingOptions,
    options: FinetuneOptions,
    *,
    block_size: int = 512,
) -> Iterator[tuple[str, list[Score]]]:
    """Judge the base model as it is, then fine-tuned on each file from every seed.

    Scores are kept under ``DIRECTORY/evaluation``, one file a model, so that an interrupted evaluation goes
    on; the models are not kept.

    Yields
    ------
    ("base" | "chosen" | "random" | "bm25", scores by seed): one score of the base model

    Raises
    ------
    UsageError       no such selection
    CorpusError, QueryError, ModelError
    """
    from stride_cli.corpus.readers import ReadOptions, open_documents
    from stride_cli.models.language.checkpoint import load_language_model
    from stride_cli.models.loading import model_fingerprint
    from stride_cli.models.spec import ModelSpec
    from stride_cli.training.finetuning import finetune_model

    check_directory(directory)
    if not queries.is_file():
        raise UsageError(f"there is no file '{queries}'", fix="give a file of held-out queries")
    stream, _ = open_documents([str(queries)], ReadOptions())
    references = list(stream)
    kept = directory / "evaluation"
    make_directory(kept)
    common = {
        "base": model_fingerprint(base),
        "queries": hashlib.sha256(queries.read_bytes()).hexdigest(),
        "max_new_tokens": judging.max_new_tokens,
        "block_size": block_size,
    }

    def measured(model_path: str) -> Score:
        model = load_language_model(ModelSpec(model_path, device=options.device, dtype="fp32"))
        return measure(
            model, queries, references, max_new_tokens=judging.max_new_tokens, block_size=block_size
        )

    yield "base", [_remembered(kept, {**common, "set": "base"}, lambda: measured(base))]
    for name in SETS:
        source = directory / f"{name}.jsonl"
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        scores = []
        for seed in range(judging.seeds):
            chosen = replace(options, seed=seed)

            def trained(source: Path = source, chosen: FinetuneOptions = chosen, name: str = name) -> Score:
                out = kept / f"{name}-seed{chosen.seed}"
                finetune_model([str(source)], base, out, chosen, overwrite=True)
                try:
                    return measured(str(out))
                finally:
                    shutil.rmtree(out)

            key = {**common, "corpus": digest, "options": asdict(chosen)}
            scores.append(_remembered(kept, key, trained))
        yield name, scores


def _remembered(kept: Path, key: dict[str, Any], make: Any) -> Score:
    """Read a score from its file, or make and write it."""
    path = kept / (hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Score(np.array(record["losses"], float), np.array(record["f1"], float))
    except (OSError, ValueError, KeyError):
        pass
    score: Score = make()
    # NaN is written as null, and read as NaN
    f1 = [None if np.isnan(value) else float(value) for value in score.f1]
    text = json.dumps({"of": key, "losses": score.losses.tolist(), "f1": f1})
    replace_file(path, text.encode())
    return score


def measure(
    model: CausalLM, path: Path, references: Sequence[Document], *, max_new_tokens: int, block_size: int
) -> Score:
    """Measure loss and unigram F1 of a model on the queries of a file; `references` are its documents."""
    import torch

    from stride_cli.data.batches import row_losses
    from stride_cli.data.query_files import read_texts

    queries = read_texts(model, path, block_size=min(block_size, model.context_length))
    losses, f1 = [], []
    with torch.no_grad():
        for batch in map(queries.batch, queries.groups(model, _QUERY_TOKENS)):
            losses.append((row_losses(model, batch).cpu() / batch.scored.double()).numpy())
        for row, reference in enumerate(references):
            f1.append(_answer_f1(model, queries, row, reference, max_new_tokens))
    return Score(np.concatenate(losses), np.array(f1))


def _answer_f1(
    model: CausalLM, queries: QuerySet, row: int, reference: Document, max_new_tokens: int
) -> float:
    if reference.response is None:
        return float("nan")
    # as the answer stands in training: everything before the first scored token is the prompt
    prompt = queries.ids[row][: int(queries.weights[row].argmax())].tolist()
    answer = model.generate(prompt, max(1, min(max_new_tokens, model.context_length - len(prompt))))
    return unigram_f1(str(model.tokenizer.decode(answer, skip_special_tokens=True)), reference.response)


def spread(values: Sequence[float]) -> SeedSpread:
    """Compute mean and sample standard deviation; NaN for the latter of a single value."""
    found = np.asarray(values, float)
    deviation = float(found.std(ddof=1)) if len(found) > 1 else float("nan")
    return {"mean": float(found.mean()), "sd": deviation}


def read_tasks(path: Path) -> list[str]:
    """Read the "task" of every query of a JSON Lines file; [] where one has none, or of another format."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        found = [json.loads(line).get("task") for line in lines if line.strip()]
    except ValueError:
        return []
    return found if all(isinstance(task, str) and task for task in found) else []


def score_record(name: str, scores: Sequence[Score], tasks: Sequence[str]) -> SelectionScoreRecord:
    """Make one set's record: means over queries, spread over seeds, and over tasks where there are some."""
    losses = np.stack([score.losses for score in scores])  # (S, Q)
    f1 = np.stack([score.f1 for score in scores])
    answered = ~np.isnan(f1[0])

    def mean_f1(rows: np.ndarray) -> list[float]:
        rows = rows & answered
        return [float(row[rows].mean()) for row in f1] if rows.any() else [float("nan")] * len(f1)

    groups: list[TaskScore] = []
    for task in dict.fromkeys(tasks):
        rows = np.array([each == task for each in tasks])
        groups.append(
            {
                "task": task,
                "queries": int(rows.sum()),
                "loss": float(losses[:, rows].mean()),
                "f1": float(np.mean(mean_f1(rows))),
            }
        )
    return {
        "schema": "stride.selection_score/1",
        "set": name,
        "queries": int(losses.shape[1]),
        "seeds": len(scores),
        "loss": spread(losses.mean(axis=1).tolist()),
        "f1": spread(mean_f1(np.ones(len(answered), bool))),
        "f1_over_tasks": spread([group["f1"] for group in groups] or [float("nan")]),
        "tasks": groups,
    }
