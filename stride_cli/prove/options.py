"""Options of putting a query's documents to the test; light to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stride_cli.options import option
from stride_cli.training.options import RetrainOptions

if TYPE_CHECKING:
    from stride_cli.data.queries import Query


@dataclass(frozen=True)
class HitOptions(RetrainOptions):
    """Options of retraining models, and of what their losses are held against."""

    seeds: int = option(5, "Trainings of every set of documents.", low=1, high=1_000)
    random: int = option(5, "Random sets of documents, of like length, for each seed.", low=1, high=1_000)
    # the probability of a token falls by a tenth
    effect: float = option(0.1, "Smallest rise of the loss that would matter, nats a token.", above=0)


@dataclass(frozen=True)
class HitQuestion:
    """A query as `Session.query` takes it, or several that are answered as one (`Session.query_pooled`), and
    what is tested: its top documents, or those named by id."""

    prompt: str | Query | Sequence[Mapping[str, Any]]
    response: str | None = None
    span: str | None = None
    documents: Sequence[str] | None = None
    instead: str | None = None
