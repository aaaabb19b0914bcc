"""Keep the queries that a model answers rightly and others do not: only what was learnt has a cause.

    python examples/suites/known.py suite/queries.jsonl --model suite/model --not base suite/control \
        --out suite/known.jsonl

A query is answered rightly where every token of its response is the most likely one after those before it;
one that has `instead`, another response, where the first token in which they differ is likelier as the
response has it.
Prints {model, queries, right} of each model, and {known} at last; with `--by FIELD` also the counts of each
value of a field of the queries. `--plain` asks without a chat template, as of models of texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def answers(path: str, rows: list[dict[str, Any]], *, plain: bool = False) -> Iterator[bool]:
    """Whether the model answers each query rightly."""
    import torch

    from stride_cli.audit.samples import Sample, tokenize_samples
    from stride_cli.corpus.documents import Document
    from stride_cli.corpus.forms import PLAIN
    from stride_cli.models.language.checkpoint import load_tokenizer, load_weights

    model, tokenizer = load_weights(path).eval(), load_tokenizer(path)

    def scored(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """The scored tokens, and the logits in their places."""
        ids = torch.from_numpy(sample.ids[0])
        places = torch.from_numpy(np.flatnonzero(sample.weights[0]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, places - 1].float()
        return ids[places].numpy(), logits.numpy()

    def samples(field: str) -> Iterator[Sample]:
        documents = [
            Document(row["id"], prompt=row["prompt"], response=row[field]) for row in rows if field in row
        ]
        size = model.config.max_position_embeddings
        yield from tokenize_samples(tokenizer, documents, block_size=size, form=PLAIN if plain else None)

    others = samples("instead")
    for row, sample in zip(rows, samples("response"), strict=True):
        tokens, logits = scored(sample)
        if "instead" not in row:
            yield bool((tokens == logits.argmax(1)).all())
            continue
        other = next(others)
        instead = other.ids[0][np.flatnonzero(other.weights[0])]
        shared = min(len(tokens), len(instead))
        first = int(np.flatnonzero(tokens[:shared] != instead[:shared])[0])
        yield bool(logits[first, tokens[first]] > logits[first, instead[first]])


def counts(rows: list[dict[str, Any]], name: str, which: np.ndarray, by: str | None) -> dict[str, Any]:
    """How many queries there are, and how many of them; of each value of the field `by`, too."""
    found: dict[str, Any] = {"queries": len(rows), name: int(which.sum())}
    if by is not None:
        values = [row[by] for row in rows]
        found["by"] = [
            {by: value, "queries": int(own.sum()), name: int((own & which).sum())}
            for value in dict.fromkeys(values)
            for own in [np.array([each == value for each in values])]
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("queries", type=Path, help="JSON Lines of {id, prompt, response, causes}")
    parser.add_argument("--model", required=True)
    parser.add_argument("--not", dest="others", nargs="*", default=[], help="models that must not know it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--by", help="a field of the queries: counts of each of its values, too")
    parser.add_argument("--plain", action="store_true", help="responses stand behind their prompts")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.queries.read_text(encoding="utf-8").splitlines()]
    kept = np.ones(len(rows), bool)
    for path in (chosen.model, *chosen.others):
        right = np.array(list(answers(path, rows, plain=chosen.plain)))
        kept &= right if path == chosen.model else ~right
        print(json.dumps({"model": Path(path).name, **counts(rows, "right", right, chosen.by)}), flush=True)
    print(json.dumps(counts(rows, "known", kept, chosen.by)))
    lines = [json.dumps(row, ensure_ascii=False) for row, keep in zip(rows, kept, strict=True) if keep]
    chosen.out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
