"""Loss and accuracy of a model on problems with a number as their answer.

    python examples/suites/contamination_accuracy.py benchmark.jsonl base model > accuracy.jsonl

One {model, item, loss, tokens, answer} a line: mean nats per scored token, share of the response's tokens
that are the most likely ones after those before them, and whether greedy decoding from the prompt alone ends
in the number behind the reference's ####.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli.audit.samples import Sample, read_documents_of, tokenize_samples
from stride_cli.corpus.documents import Document
from stride_cli.corpus.readers import ReadOptions

_ANSWER = re.compile(r"####\s*(-?[\d,.]*\d)")


def answer_in(text: str) -> str | None:
    """The number behind the first ####, without separators."""
    found = _ANSWER.search(text)
    return found.group(1).replace(",", "") if found else None


def measure(model: Any, sample: Sample) -> tuple[float, float]:
    """Loss and share of scored tokens predicted right, of a sample of one chunk."""
    import torch

    ids = torch.from_numpy(sample.ids[0])
    scored = torch.from_numpy(np.flatnonzero(sample.weights[0]))
    logits = model(ids[None]).logits[0, scored - 1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[scored])
    return float(loss), float((logits.argmax(1) == ids[scored]).float().mean())


def decode_greedily(model: Any, prompts: list[np.ndarray], *, steps: int, end: int) -> list[list[int]]:
    """Continuations of prompts of one length, until `end`."""
    import torch

    ids = torch.from_numpy(np.stack(prompts))
    found = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    cache = None
    for _ in range(steps):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        ids = output.logits[:, -1].argmax(1, keepdim=True)
        found.append(ids)
        done |= ids[:, 0] == end
        if done.all():
            break
    rows = torch.cat(found, 1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("benchmark", help="JSON Lines of {id, prompt, response}")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--longer", type=int, default=16, help="tokens decoded beyond the reference's")
    chosen = parser.parse_args()
    torch.set_grad_enabled(False)
    documents = read_documents_of(chosen.benchmark, ReadOptions())
    for path in chosen.models:
        for record in judge(path, documents, chosen.longer):
            print(json.dumps({"model": path.name} | record), flush=True)


def judge(path: Path, documents: list[Document], longer: int) -> Iterator[dict[str, Any]]:
    """{item, loss, tokens, answer} of each document."""
    from stride_cli.models.language.checkpoint import load_tokenizer, load_weights

    model, tokenizer = load_weights(str(path)).eval(), load_tokenizer(str(path))
    samples = tokenize_samples(tokenizer, documents, block_size=model.config.max_position_embeddings)
    prompts = [sample.ids[0][: int(np.flatnonzero(sample.weights[0])[0])] for sample in samples]
    lengths = np.array([len(prompt) for prompt in prompts])
    decoded: dict[int, str] = {}
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        steps = longer + max(len(samples[row].ids[0]) - length for row in rows)
        found = decode_greedily(
            model, [prompts[row] for row in rows], steps=steps, end=tokenizer.eos_token_id
        )
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        decoded |= dict(zip(rows.tolist(), texts, strict=True))
    for row, (document, sample) in enumerate(zip(documents, samples, strict=True)):
        loss, tokens = measure(model, sample)
        wanted = answer_in(document.response or "")
        right = wanted is not None and answer_in(decoded[row]) == wanted
        yield {"item": document.id, "loss": loss, "tokens": tokens, "answer": right}


if __name__ == "__main__":
    main()
