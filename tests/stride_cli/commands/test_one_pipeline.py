"""`stride query`, the evaluation's method and `stride audit` find the same influences for the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stride_cli import api
from stride_cli.attribution.options import RecoveryOptions
from stride_cli.audit.effect import _measure, measure_effects
from stride_cli.audit.samples import Sample, tokenize_samples
from stride_cli.corpus.documents import Document
from stride_cli.data.queries import Query
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.recovery.lasso import solve_lasso
from stride_cli.recovery.problem import LassoSettings
from stride_cli.recovery.problem import dense as solutions_dense
from stride_cli.research.methods.registry import open_method
from tests.stride_cli.research.methods.gradients.scored import score_all

pytestmark = pytest.mark.slow
TEXTS = [
    "The French Revolution began in 1789.",
    "The Berlin Wall fell in 1989, and the Cold War was over.",
    "Nobody in this corpus has written about lawn mowers.",
]


ALONE = "read=0,estimate=subsets"  # the recovery, by itself


@pytest.fixture(scope="module")
def session(workspace: Path) -> api.Session:
    return api.Session.open(workspace / "run.stride")


@pytest.fixture(scope="module")
def samples(session: api.Session) -> list[Sample]:
    documents = [
        Document(id=f"t{n}", text=text, source="benchmark", line=n + 1) for n, text in enumerate(TEXTS)
    ]
    block = session.index.attributes["block_size"]
    return tokenize_samples(session.model.tokenizer, documents, block_size=block)


def query_of(sample: Sample) -> Query:
    assert len(sample.ids) == 1
    return Query(sample.document.text, "", sample.ids[0], sample.weights[0], False)


def dense(answer: api.Answer) -> np.ndarray:
    return solutions_dense([answer.solution])[0]


@pytest.mark.parametrize("number", range(len(TEXTS)))
@pytest.mark.parametrize(
    "settings", ["", ALONE, "read=0", "shrink=false", "lambda_ratio=0.2,nonneg=true", "read=5"]
)
def test_to_the_last_bit(session: api.Session, samples: list[Sample], number: int, settings: str) -> None:
    sample = samples[number]
    chosen = dict(part.split("=") for part in settings.split(",") if part)
    read = {"true": True, "false": False}
    options: dict[str, Any] = {
        key: value if key == "estimate" else read[value] if value in read else float(value)
        for key, value in chosen.items()
    }
    if "read" in options:
        options["read"] = int(options["read"])
    answer = session.query(query_of(sample), api.QueryOptions(**options))
    expected = dense(answer)
    assert expected.any() and (answer.shrinkage is None) == ("shrink" in options)

    method = open_method(f"stride:stored=true{',' if settings else ''}{settings}")
    method.fit(Workspace.open(session.index, session.model))
    scores = score_all(method, QuerySet.from_queries([query_of(sample)]))[0]
    np.testing.assert_array_equal(scores, expected.astype(np.float32))

    measured = _measure(session.pipeline(RecoveryOptions(**options)), [sample])
    np.testing.assert_array_equal(measured.responses[0], answer.responses)
    assert measured.losses[0] == answer.loss
    if settings != ALONE:  # as the audit asks
        return
    (effect,) = measure_effects(session, [sample], [np.arange(session.index.n_chunks)])
    assert effect.candidate_influence == pytest.approx(expected.sum(), rel=1e-9)
    assert effect.strongest_share == expected.max() / answer.solution.total
    assert effect.strongest_chunk == expected.argmax()


def test_together_as_alone(session: api.Session, samples: list[Sample]) -> None:
    """In one batch the last bits of a product of matrices may differ, and nothing else."""
    queries = [query_of(sample) for sample in samples]
    answers = [session.query(query) for query in queries]
    alone = np.stack([dense(answer) for answer in answers])
    method = open_method("stride:stored=true")
    method.fit(Workspace.open(session.index, session.model))
    together = score_all(method, QuerySet.from_queries(queries))
    largest = np.abs(alone).max(axis=1, keepdims=True)
    np.testing.assert_allclose(together / largest, alone / largest, atol=1e-4)
    responses = _measure(session.pipeline(), samples).responses
    asked = np.stack([answer.responses for answer in answers])
    np.testing.assert_allclose(responses, asked, rtol=1e-4, atol=1e-6 * np.abs(asked).max())


def test_with_nothing_known_of_chunks_it_is_the_papers_lasso(
    session: api.Session, samples: list[Sample]
) -> None:
    """To the bit, with the settings of `--recipe paper`."""
    options = api.QueryOptions(lambda_ratio=0.8, intercept=False, read=0, estimate="subsets", shrink=False)
    answer = session.query(query_of(samples[0]), options)
    columns, n_subsets = np.asarray(session.designs.columns), len(answer.responses)
    settings = LassoSettings(0.8, intercept=False)
    lasso = solve_lasso(columns, answer.responses, settings, n_subsets=n_subsets)
    assert answer.solution.average == 0.0 and len(lasso.indices)
    for name in ("indices", "values", "residual", "duality_gap", "lambda_"):
        np.testing.assert_array_equal(getattr(answer.solution, name), getattr(lasso, name))


@pytest.mark.parametrize("read", [0, 5])
def test_penalty_sign_and_design_act_on_every_answer(
    session: api.Session, samples: list[Sample], read: int
) -> None:
    query = QuerySet.from_queries([query_of(samples[0])])

    def influences(settings: str) -> np.ndarray:
        method = open_method(f"stride:read={read},project=256,shrink=false{settings}")
        method.fit(Workspace.open(session.index, session.model))
        return score_all(method, query)[0]

    usual = influences("")
    assert (usual < 0).any() and (influences(",nonneg=true") >= 0).all()
    for other in (",lambda_ratio=0.3", ",subsets=20", ",degree=2"):
        assert np.abs(influences(other) - usual).max() > 1e-3 * np.abs(usual).max()
