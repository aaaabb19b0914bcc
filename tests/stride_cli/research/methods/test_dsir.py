"""DSIR against data-selection run as it is meant to be, on files."""

from __future__ import annotations

import json

import numpy as np

from stride_cli.research.methods.dsir import DSIR
from tests.stride_cli.research.methods.gradients.scored import score_all


def test_scores_are_data_selections_log_importance_weights(
    task, make_queries, sentences, tmp_path, capfd
) -> None:
    from data_selection import HashedNgramDSIR

    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    method = DSIR()
    method.fit(task)
    found = score_all(method, make_queries(sentences[:2]))
    for number, text in enumerate(sentences[:2]):
        target = tmp_path / f"target{number}.jsonl"
        target.write_text(json.dumps({"text": text}) + "\n")
        library = HashedNgramDSIR([str(raw)], [str(target)], str(tmp_path / f"cache{number}"), num_proc=1)
        library.fit_importance_estimator(num_tokens_to_fit="all")
        expected = [library.importance_estimator(library.featurizer(other)) for other in sentences]
        np.testing.assert_allclose(found[number], expected, rtol=1e-5)
