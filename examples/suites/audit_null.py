"""p-values of `stride audit` for items that are in the corpus, and that the model was never trained on.

    python examples/suites/audit_null.py suite/text gsm8k_train.jsonl.gz --model scratch > audit_null.jsonl

Takes a model of audit_matrix.sh and problems that are in none of its corpora: `--items` of them are put into
an index, as the corpus puts its documents, `--controls` stay outside. Their p-values, by the product's own
functions, should be uniform: against the controls, and against versions of the items. Prints of each the
share of p ≤ .01, .05, .1, .5, the distance of Kolmogorov and Smirnov, and how many are discoveries at
q < .05, all together and among every 50 of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from audit_matrix import SAME_WORDS, document
from planted import read_rows, write
from scipy.stats import kstest

from stride_cli import api
from stride_cli.audit.calibration import benjamini_hochberg
from stride_cli.audit.judge import _as_trained, controls_alike
from stride_cli.audit.options import AuditOptions
from stride_cli.audit.presence import ITEM, find_copies
from stride_cli.audit.ranking import among_controls, among_versions
from stride_cli.audit.samples import copy_sample, parts_of, read_documents_of, tokenize_samples
from stride_cli.corpus.readers import ReadOptions
from stride_cli.data.workspace import Workspace
from stride_cli.randomness import stream


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", type=Path, help="a folder of audit_matrix.py: text, pairs or chats")
    parser.add_argument("problems", type=Path, help="JSON Lines, also .gz")
    parser.add_argument("--model", default="scratch", help="its model")
    parser.add_argument("--form", help="of the items; default: as the corpus")
    parser.add_argument("--copy", default="verbatim", help="how the corpus sets them, as of audit_matrix.py")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--controls", type=int, default=200)
    parser.add_argument("--versions", type=int, default=6, help="--controls-per-item")
    parser.add_argument("--kinds", nargs="+", default=["absent", "made"], help="of controls")
    parser.add_argument("--longest", type=int, default=500, help="characters of a problem")
    chosen = parser.parse_args()

    files = [chosen.suite / "indexed.jsonl", chosen.suite.parent / "base.jsonl"]
    taken = {row["id"].split("/")[-2 if "/" in row["id"] else 0] for file in files for row in read_rows(file)}
    free = [
        row
        for row in read_rows(chosen.problems)
        if row["id"] not in taken and len(row["prompt"]) + len(row["response"]) <= chosen.longest
    ]
    order = stream(0, "audit null").permutation(len(free))[: chosen.items + chosen.controls]
    rows = [free[int(i)] for i in order]
    put, form = SAME_WORDS[chosen.copy], chosen.form or chosen.suite.name
    there = [document(f"there/{row['id']}/0", put(row), chosen.suite.name) for row in rows[: chosen.items]]
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        write(here / "indexed.jsonl", [*read_rows(files[0]), *there])
        write(here / "benchmark.jsonl", [document(row["id"], row, form) for row in rows])
        options = api.BuildOptions(n_subsets=60)
        model = str(chosen.suite / chosen.model)
        api.build_index(
            [str(here / "indexed.jsonl")], model=api.ModelSpec(model), out=here / "i.stride", options=options
        )
        measure(here, chosen)


def measure(here: Path, chosen: argparse.Namespace) -> None:
    workspace = Workspace.open(here / "i.stride")
    session: Any = SimpleNamespace(workspace=workspace, index=workspace.index, model=workspace.model)
    tokenizer, size = workspace.model.tokenizer, int(workspace.index.attributes["block_size"])
    form = _as_trained(session)
    tokenized = partial(tokenize_samples, tokenizer, block_size=size, form=form)
    items = tokenized(read_documents_of(str(here / "benchmark.jsonl"), ReadOptions()))
    options = replace(AuditOptions(), controls_per_item=chosen.versions)
    copies = find_copies(workspace.index, tokenizer, [parts_of(item.document) for item in items], options)
    exact = np.array([copy.found == ITEM for copy in copies])
    absent = [item for item, copy in zip(items, copies, strict=True) if not copy.found]
    present = [
        copy_sample(workspace, item.document, copy.document, copy.span)
        for item, copy, there in zip(items, copies, exact, strict=True)
        if there
    ]
    there = [copy for copy in copies if copy.found == ITEM]
    kinds, alike = controls_alike(workspace, tokenized, absent, present, there, form.name != "text")
    every = np.ones(len(present), bool)
    few = replace(options, controls_per_item=max(2, chosen.versions // 3))
    tests = {
        "absent": lambda: among_controls(session, "absent", present, kinds, alike, options),
        "made": lambda: among_versions(session, present, every, ~every, few),
    }
    for kind in chosen.kinds:
        found = tests[kind]()
        p = found.p[np.isfinite(found.p)]
        groups = [p[at : at + 50] for at in range(0, len(p) - 49, 50)]
        record = {
            "table": "null",
            "corpus": chosen.suite.name,
            "model": chosen.model,
            "controls": kind,
            "form": chosen.form or chosen.suite.name,
            "copy": chosen.copy,
            "like": sorted(set(found.kinds)),
            "versions": chosen.versions,
            "count": int(found.count[0]),
            "sources": found.sources,
            "items": len(p),
            "below": {str(level): float(np.mean(p <= level)) for level in (0.01, 0.05, 0.1, 0.5)},
            "distance": float(kstest(p, "uniform").statistic),
            "discoveries": int((benjamini_hochberg(p) < 0.05).sum()),
            "fifties": len(groups),
            "fifties_with_discoveries": sum(bool((benjamini_hochberg(each) < 0.05).any()) for each in groups),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
