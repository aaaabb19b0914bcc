"""Leave out each part of an answer in turn: how much of the linear datamodeling score each one is worth.

    python examples/suites/ablation.py RUN.stride [--before SCORES.npy] [--tuned EVERY] > ablation.jsonl

RUN.stride has operators and a truth (`stride evaluate truth`). One JSON object a part: LDS without it, and
the paired difference to the default, means over queries with standard errors. SCORES.npy are an earlier
default's, (queries, chunks). Every EVERYth query was looked at when settings were chosen, and is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from index_format.reader import Index
from stride_cli.attribution.estimates import Estimate
from stride_cli.data.workspace import Workspace, open_model
from stride_cli.research.evaluation.metrics import lds
from stride_cli.research.methods.registry import open_method
from stride_cli.research.training.truth import Truth

# what is left out → options of the method; pairs have no option
PARTS = {
    "nothing": "",
    "projections, pairs": ",estimate=subsets",
    "projections, pairs, exact gradients": ",estimate=subsets,read=0",
    "subsets": ",lambda_ratio=1",
    "exact gradients": ",read=0",
    "shared credit": ",redundancy=0",
    "shrinkage": ",shrink=false",
    "pairs": "",
}


@contextmanager
def without_pairs(wanted: bool) -> Iterator[None]:
    """Within: estimates know nothing of shared pairs."""
    of = Estimate.of
    if wanted:
        Estimate.of = lambda *asked: [replace(each, pairs=None) for each in of(*asked)]  # type: ignore
    try:
        yield
    finally:
        Estimate.of = of  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--tuned", type=int)
    chosen = parser.parse_args()
    index = Index.open(chosen.index)
    truth = Truth.from_index(index)
    rows = np.arange(len(truth.queries))
    if chosen.tuned:
        rows = rows[rows % chosen.tuned != 0]
    task = Workspace.open(index, open_model(index))
    queries = truth.queries.take(rows)

    def scores(spec: str) -> np.ndarray:
        method = open_method(spec)
        method.fit(task)
        return np.concatenate(list(method.score(queries)))

    def agreement(found: np.ndarray) -> np.ndarray:
        return lds(found, truth.masks, truth.losses[:, :, rows]).spearman

    def mean(values: np.ndarray) -> dict[str, float]:
        return {"mean": float(values.mean()), "se": float(values.std(ddof=1) / np.sqrt(len(values)))}

    whole = None
    for part, options in PARTS.items():
        with without_pairs(part == "pairs"):
            own = agreement(scores(f"stride:stored=true{options}"))
        whole = own if whole is None else whole
        record = {
            "index": chosen.index.parent.name,
            "chunks": index.n_chunks,
            "queries": len(rows),
            "subsets": len(truth.masks),
            "without": part,
            "lds": mean(own),
            "difference": mean(own - whole),
        }
        if part == "nothing" and chosen.before:
            record["to_the_default_before"] = mean(own - agreement(np.load(chosen.before)[rows]))
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
