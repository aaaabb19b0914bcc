"""Options of recovery, queries, workers and calibration."""

from __future__ import annotations

from dataclasses import dataclass

from stride_cli.options import MORE, Options, chat_option, engine_option, option

PASSAGES = ("carrying", "like", "none")


@dataclass(frozen=True)
class RecoveryOptions(Options):
    """Options of measurement and recovery; None means "as the operators' fit asks for".

    Attributes
    ----------
    intercept, nonneg : of the Lasso
    shrink : in pre-training; False: weights of the Lasso as they are
    read : chunks that the recovery, projections and shared pairs of tokens make most likely
    estimate : "auto": where there are projections
    redundancy : see `operators.redundancy`
    batch_size : steered continuations at once (exact)
    """

    lambda_ratio: float | None = option(
        None,
        "λ as a share of λ_max. [0.003 where projections estimate every chunk; else 0.03 closed "
        "(fine-tuned, classifiers: 0.01), 0.2 sgd; 0.8 paper]",
        above=0,
        high=1,
        setting=True,
        example=0.1,
        panel=MORE,
    )
    measure: str = option(
        "auto",
        "auto, linear (one backward pass) or exact (K steered continuations).",
        flag="query.measure",
        choices=("auto", "linear", "exact"),
        setting=True,
    )
    nonneg: bool = option(False, "Recover supporting influences only.", flag="query.nonneg", setting=True)
    intercept: bool | None = option(
        None, "Fit a constant offset; the paper's form has none.", flag="query.intercept", setting=True
    )
    read: int | None = option(
        None,
        "Take exact gradients of so many selected chunks, a forward and a backward pass each. [as many as "
        "take a few seconds]",
        low=0,
        setting=True,
        example=100,
        panel=MORE,
    )
    estimate: str = option(
        "auto",
        "Estimate the other chunks by projections, shared pairs of tokens and subsets (auto), or by the "
        "recovery alone (subsets).",
        flag="query.estimate",
        choices=("auto", "subsets"),
        setting=True,
    )
    redundancy: float | None = option(
        None,
        "Let near-duplicates share credit, with a ridge of so many chunks; 0: they do not. [10 where chunks "
        "are estimated; classifiers: 0]",
        flag="query.redundancy",
        low=0,
        high=1e6,
        setting=True,
        example=10,
    )
    shrink: bool = option(
        True, "Make small influences smaller, where they are mostly noise.", flag="query.shrink", setting=True
    )
    batch_size: int = option(8, low=1)


@dataclass(frozen=True)
class QueryOptions(RecoveryOptions):
    """Options of a query; beside those of recovery:

    Attributes
    ----------
    chat : put prompts as the corpus's prompts with responses are; None: where most of it is such
    decisive : see `attribution.decisive`
    passages : "carrying", the sentence of each hit that carries its influence, where chunks are read, else
        the one most like the query; "like", the latter everywhere, which takes no pass through the model;
        "none". `Session.with_passages` finds the former afterwards
    """

    top: int = option(10, "Supporting documents to show. [10]", low=0, setting=True)
    bottom: int = option(0, "Opposing documents to show. [0]", low=0, setting=True, example=10)
    max_new_tokens: int = option(
        16, "Length of the model's continuation. [16]", flag="query.max_new_tokens", low=1, setting=True
    )
    chat: bool | None = chat_option()
    decisive: bool = option(
        True,
        "Tokens of a response count by how much the prompt decides them; or all alike.",
        flag="query.decisive",
        setting=True,
    )
    verbose: bool = option(
        False, "Explain the answer, and show its certificate and time.", short="-v", panel=MORE
    )
    passages: str = option("carrying", choices=PASSAGES)


@dataclass(frozen=True)
class QuestionOptions(Options):
    """Options of what is attributed after a prompt; see `Session.query`."""

    response: str | None = option(
        None, "Attribute this continuation, not the model's own. Of a classifier: a class, or predicted."
    )
    span: str | None = option(None, "Attribute only this part of the response.", panel=MORE)
    instead: str | None = option(
        None,
        "Ask why the response and not this: attribute the odds of the token where they part.",
        panel=MORE,
    )


@dataclass(frozen=True)
class SharingOptions(Options):
    """Options of workers (`attribution.sharing`); their answers are the same, but for rounding."""

    workers: int | None = option(
        None,
        "Share the prompts of FILE, or the items, out to N processes; default: this one answers all.",
        metavar="N",
        low=1,
        panel=MORE,
    )
    engine: str = engine_option()

    @property
    def shared(self) -> bool:
        """True where other processes are to answer."""
        return self.engine != "local" or (self.workers or 1) > 1


@dataclass(frozen=True)
class CalibrationOptions(Options):
    """Options of calibration, with prompts about which no corpus says anything."""

    nulls: int = option(
        100,
        "Prompts to ask that verdicts are held against: half unrelated, half near misses. [100]",
        low=40,
        high=10_000,
        setting=True,
        example=100,
    )
    retrain: int = option(
        0,
        "Also train so many pairs of models again, with all documents and without a tenth: from then on "
        "influences are forecasts in nats, with intervals. 3 do. [0]",
        low=0,
        high=5,
        example=3,
    )
