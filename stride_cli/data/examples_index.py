"""The index of a classifier's training rows: one chunk of two tokens a row, and the design over them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from index_format.design import build_columns
from index_format.layout import FORMAT_VERSION
from index_format.reader import Index
from index_format.writer import IndexWriter
from stride_cli import output
from stride_cli.corpus.options import BuildOptions
from stride_cli.corpus.plan import choose_design
from stride_cli.errors import CorpusError
from stride_cli.models.classifier.directory import (
    classes_fingerprint,
    classifier_fingerprint,
    load_classifier,
    outline,
    training_columns,
    training_rows,
)
from stride_cli.models.classifier.examples import class_numbers, read_examples
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.permissions import name_code
from stride_cli.remembered import recorded_path, remember
from stride_cli.version import __version__

_BLOCK = 1 << 18  # chunks


def build_classifier_index(
    source: str | Path, *, model: GivenModel, out: str | Path, options: BuildOptions = BuildOptions()
) -> Index:
    """Index the rows that a classifier was trained on; of another file than its own, all rows.

    Of a classifier from elsewhere whose network is Python code nothing is run, unless the user trusts it, and
    then from now on: its files say what it is.

    Chunk i holds the tokens (i, label's number), of which the label is scored; document ids are the rows'
    numbers in the file, or their ids. Inputs stay in the file, whose content the index knows by its digest.

    Parameters
    ----------
    source : file of examples, of the columns that the model was trained on
    model : the classifier's directory; a `ModelSpec` says whether its code is trusted
    out, options : see `stride_cli.corpus.build.build_index`; of the options design, seed and overwrite

    Raises
    ------
    CorpusError       the file cannot be read, has other inputs or labels than the model, or too few rows
    ModelError        the directory is damaged
    IndexExists, IndexBusy, IndexIncomplete, StorageFull
    """
    spec, model_path = ModelSpec.of(model), place_of(model)
    found = outline(model_path, spec.permissions)
    if found.trusted:
        load_classifier(replace(spec, device="cpu"))  # its weights fit its network
        if found.code:
            name_code(found.code, model_path)
    columns = training_columns(model_path)
    examples = read_examples(source, columns)
    if examples.shape != found.shape:
        raise CorpusError(
            f"{source}: inputs have shape {examples.shape} (expected {found.shape}, as the model's)",
            fix="give the data that the model was trained on",
        )
    labels = class_numbers(examples, found.classes)
    known = training_rows(model_path, examples)
    if known is None:
        output.note(f"{source} is not the file that the model was trained on: all its rows are indexed")
    rows = np.arange(len(examples)) if known is None else known[0]
    n = len(rows)
    k, d = choose_design(n, options)
    fingerprints = {
        "corpus": examples.fingerprint(rows),
        "tokenizer": classes_fingerprint(model_path),
        "model": classifier_fingerprint(model_path),
    }
    settings = {
        "format_version": FORMAT_VERSION,
        "kind": "classifier",
        **fingerprints,
        "n_subsets": options.n_subsets,
        "degree": options.degree,
        "seed": options.seed,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    tokens = np.stack([np.arange(n), labels[rows]], axis=1)
    token_type = np.uint16 if max(n, len(found.classes)) <= 1 << 16 else np.uint32
    places = np.arange(n + 1, dtype=np.int64)
    with IndexWriter.create(out, build_key=key, overwrite=options.overwrite) as writer:
        if not writer.length("design/row_offsets"):
            writer.append("corpus/chunk_offsets", 2 * places)
            writer.append("corpus/document_offsets", places)
            writer.append("corpus/tokens", tokens.reshape(-1).astype(token_type))
            writer.append("corpus/chunk_document", places[:-1])
            writer.append("corpus/loss_start", np.ones(n, np.int32))
            writer.append_strings("corpus/document_id", [examples.ids[row] for row in rows.tolist()])
            for start in range(0, n, _BLOCK):
                stop = min(start + _BLOCK, n)
                drawn = build_columns(start, stop, n_subsets=k, degree=d, seed=options.seed)
                writer.append("design/columns", drawn)
            writer.append_row_offsets(k)
        writer.publish(
            {
                "seed": options.seed,
                "n_subsets": k,
                "degree": d,
                "design": "regular",
                "block_size": 2,
                "fingerprints": fingerprints,
                "model_path": recorded_path(model_path, out),
                "config": {
                    **settings,
                    "sources": [recorded_path(source, out)],
                    "columns": asdict(columns),
                    "rows": "all" if known is None else "training",
                    "classes": found.classes,
                },
                "counts": {
                    "documents": n,
                    "chunks": n,
                    "tokens": 2 * n,
                    "scored_tokens": n,
                    "unscored_documents": 0,
                    "skipped_records": 0,
                },
                "created_by": f"stride {__version__}",
            }
        )
    for name, place in (("model", model_path), ("corpus", source)):
        remember("places", fingerprints[name], str(Path(place).expanduser().absolute()))
    return Index.open(out)
