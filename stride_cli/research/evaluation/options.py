"""Options of the measures of `stride evaluate`; light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stride_cli.options import Options, chat_option, option
from stride_cli.training.options import RetrainOptions

RESPONSES = ("loss", "margin")
ROWS = ("corpus", "pool")
FEWEST_CHUNKS = 3  # that are left out one by one: of two, every correlation is ±1
_METHODS = (
    "Methods, separated by commas, each with options: tfidf:ngrams=1,top=100; any takes top=K (its K "
    "strongest scores) and shrink=true."
)
_SEEDS = "Trainings of every set of chunks."


@dataclass(frozen=True)
class BenchOptions(Options):
    """Methods that are measured, and the queries; None: those of the index's truth.

    `chat`: how prompts of the file are put to the model, see `data.queries.form_of`.
    """

    queries: Path | None = option(
        None, "File of queries (classifiers: or held-out); default: those of the truth."
    )
    methods: str = option("stride", _METHODS, short="--method")
    chat: bool | None = chat_option()


@dataclass(frozen=True)
class LdsOptions(Options):
    """Options of comparing methods with retrained models.

    Attributes
    ----------
    alpha : which subsets, by their share of the chunks; None: the most numerous
    response : "loss", or "margin" (of classifiers): what the retrained models are asked
    draws : bootstrap resamples of every interval
    """

    alpha: float | None = option(
        None,
        "Use the subsets of this share of the chunks; default: the most numerous.",
        low=0.001,
        high=0.999,
        example=0.3,
    )
    response: str = option(
        "loss", "loss, or margin (classifiers): what retrained models are asked.", choices=RESPONSES
    )
    draws: int = option(1000, "Bootstrap resamples of every interval.", low=100, high=10**6)


@dataclass(frozen=True)
class ImportOptions(Options):
    """A truth that others have measured; see `stride_cli.research.evaluation.truth_import`."""

    rows: str = option(
        "corpus",
        "With --import: the index is of the whole corpus (train_subset_global), or of the pool that the run "
        "drew its subsets from (train_subset).",
        choices=ROWS,
    )


@dataclass(frozen=True)
class CausesOptions(Options):
    """Options of judging methods by known causes.

    Attributes
    ----------
    methods : None: STRIDE, with the index's own operators where it has them, and what it is compared with
    at : the k of Recall@k; None: 1, 5, 10 and 50, as far as there are so many documents
    known : only queries count that the model answers rightly
    base : path of a model that must not answer them rightly
    chat : see `data.queries.form_of`
    fresh : what earlier runs have kept is not used
    """

    methods: str | None = option(
        None,
        f"{_METHODS} Default: STRIDE, with the index's operators where it has them "
        '(stride:stored=true), and every kind of other method. Where queries have "instead", what might '
        "have been said, any takes asked=token|odds.",
        short="--method",
    )
    at: str | None = option(
        None, "Numbers k of Recall@k, separated by commas; default: 1,5,10,50.", example="1,5,10"
    )
    draws: int = option(1000, "Bootstrap resamples of every interval.", low=100, high=10**6)
    known: bool = option(False, "Only queries count that the model answers rightly.")
    base: str | None = option(
        None, "The model before it was trained on this corpus: queries that it answers do not count."
    )
    chat: bool | None = chat_option()
    fresh: bool = option(False, "Score anew what earlier runs have kept (INDEX.causes).")


@dataclass(frozen=True)
class TailPatchOptions(Options):
    """Options of one training step on a query's top chunks."""

    top: str = option("10,20,50", "Numbers k of chunks of a step.")
    lr: float = option(1e-4, "Learning rate of the step.", above=0, high=1e6)  # app:metrics
    draws: int = option(8, "Random batches to compare with.", low=1, high=10_000)


@dataclass(frozen=True)
class RemovalOptions(RetrainOptions):
    """Options of retraining without queries' top chunks.

    Attributes
    ----------
    grouped : queries of one `group` (or of the same causes) are one, and documents are removed; `limit` is
        not looked at then
    """

    top: str = option(
        "10,50", "Numbers k of chunks to remove, or 1%; --grouped: of documents, or causes: all of a group's."
    )
    grouped: bool = option(
        False,
        'Remove the documents of highest score for all queries of one "group" (or of the same "causes") '
        "together; a method may take asked=response|token|odds and add=all|support.",
    )
    limit: int = option(10, "At most so many queries, drawn by lot: each needs its models.", low=1)
    seeds: int = option(3, _SEEDS, low=1, high=1_000)
    draws: int = option(5, "Random removals to compare with.", low=1, high=10_000)


@dataclass(frozen=True)
class LooOptions(RetrainOptions):
    """Options of retraining without single chunks."""

    chunks: int = option(40, "Chunks to leave out one by one, drawn by lot.", low=FEWEST_CHUNKS)
    seeds: int = option(3, _SEEDS, low=1, high=1_000)


@dataclass(frozen=True)
class RankingOptions(Options):
    """Options of the ranking that `stride baseline` shows."""

    top: int = option(10, "Documents to show for a query.", low=0)
