"""The answer to a query: ranked documents, the measurement, the certificate, the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from stride_cli.attribution.frames import frame, html_table, share_text
from stride_cli.attribution.nats import Nats
from stride_cli.attribution.verdict import Verdict
from stride_cli.characters import one_line, shortened
from stride_cli.recovery.ranking import Hit
from stride_cli.recovery.recall import Recall
from stride_cli.schema.answer_records import (
    GENERATED,
    LOSS,
    PROMPT,
    RESPONSE,
    SCORED_TOKENS,
    TEMPLATE,
    AnswerOfHit,
    AnswerSeconds,
)
from stride_cli.schema.derivation import key, to_record, told

if TYPE_CHECKING:
    from pandas import DataFrame

    from stride_cli.data.queries import Query
    from stride_cli.recovery.lasso import Solution
    from stride_cli.recovery.shrinkage import Shrinkage


@dataclass(frozen=True)
class Recovery:
    """The convex problem whose minimiser the influences are (`stride_cli.recovery.lasso`)."""

    lambda_: float = key(
        "penalty of the chunk that is known least, in the unit of measurements", name="lambda"
    )
    lambda_ratio: float = key("λ / λ_max; from λ_max on, influences are what was expected of the chunks")
    nonzeros: int = key("chunks whose influence is not what was expected of them: non-zeros of the Lasso")
    influences: int = key(
        "chunks with an influence of their own; all others have the average chunk's", optional=True
    )
    duality_gap: float = key("upper bound on how far the objective is from its minimum")
    relative_gap: float = key("the gap / ½‖y − M μ − mean‖²")
    r_squared: float = key("share of the responses' variance that influences explain, before they are shrunk")
    passes: int = key("passes over the design matrix")
    shrink_exponent: float = key(
        "small differences d from the average chunk were made smaller at the end: times (|d| / largest "
        "|d|)^(this − 1); 1: they were not",
        optional=True,
    )
    shrink_opposing: float = key(
        "what negative differences were multiplied by, too; 1: they were not", optional=True
    )


@dataclass(frozen=True)
class MeasurementRecord:
    method: str = key('"linear" or "exact"')
    subsets: int = key("K, responses measured")
    coverage: float = key("share of all chunks that the operators have seen")
    models: int = key("that measured: the index's own and its further checkpoints", optional=True)


@dataclass(frozen=True)
class ComparisonRecord:
    """With ``--instead``: influences are on the log-odds of the token where the two responses part."""

    token: str = key("the first token of the response that is another there")
    other_token: str = key("what stands there instead")
    probability: float = key("of `token`, by the model, 0 … 1")
    other_probability: float = key("of `other_token`, by the model, 0 … 1")


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """Ranked documents for one query, with the certificate of the recovery.

    Attributes
    ----------
    query : Query
    other_loss : float or None         nats of the token that the response is compared with, where it is
    added : str or None                of several prompts as one: what of their influences is added up
    supporters, opposers : list of Hit
    passages : dict                    chunk number → its sentence that carries its influence
    carried : bool                     False: `Session.with_passages` finds passages that carry the influence
    solution : Solution                the influences of all chunks, and their certificate
    document_ids, titles : dict        document number → id, and title, "" where it has none
    labels : dict                      chunk number → label, of a classifier's rows
    responses : (K,) float64 or None   what the subsets answered, nats
    measured : (K,) float64 or None    y, of which the recovery explains all but ``solution.residual``
    shrinkage : Shrinkage or None      how small differences were made smaller
    verdict : Verdict or None          what may be concluded; None where the index is not calibrated
    line : float or None               the verdict's, where influences are what null prompts' were
    missing : of str                   rarest words of the prompt that stand in no document above the line
    pieces : of (str, float)           the response cut at its words, and how much each counts, 0 … 1
    large : set of int                 documents with over a tenth of all chunks: they have no interval
    never_trained : set of int or None documents that the model was not trained on; see `untrained_documents`
    """

    schema: ClassVar[str] = "stride.answer/1"

    query: Query
    other_loss: float | None = None
    added: str | None = None
    supporters: list[Hit]
    opposers: list[Hit]
    passages: dict[int, str]
    carried: bool = True
    solution: Solution
    document_ids: dict[int, str]
    titles: dict[int, str] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    responses: Any = None
    measured: Any = None
    shrinkage: Shrinkage | None = None
    verdict: Verdict | None = None
    line: float | None = None
    missing: tuple[str, ...] = ()
    pieces: tuple[tuple[str, float], ...] = ()
    large: frozenset[int] = frozenset()
    never_trained: frozenset[int] | None = None

    id: str | None = key("the query's id, where its file gave one", default=None, lacking=True)

    @told(
        '"clear": the model is sure of this response, and the strongest documents have what the prompt is '
        'about; "contested": the model is torn between two documents that have it; "weak": it is sure, and '
        'not all of them have it; "guessing": it is no surer than after unrelated prompts; '
        "null: the index is not calibrated, or the answer is of another kind than unrelated prompts' were: a "
        "comparison, or pooled",
        name="verdict",
        optional=True,
    )
    def word(self) -> str | None:
        return None if self.verdict is None else self.verdict.word

    @told("what the verdict goes by", optional=True)
    def judged(self) -> Verdict | None:
        line = None if self.line is None else self.in_unit(self.line)
        return None if self.verdict is None else replace(self.verdict, line=line)

    @told(name="missing", optional=True)
    def lacked(self) -> list[Annotated[str, "a rare word of the prompt, in no document above the line"]]:
        return list(self.missing)

    @told(name="tokens", optional=True)
    def token_weights(self) -> list[Annotated[float, "how much a scored token counts, 1 at most"]]:
        return [round(float(weight), 4) for weight in self.query.weights if weight > 0]

    @told(
        "documents of the index that the model was not trained on, by its own record; null: none, or nothing "
        "is recorded; 0: it was another corpus, and which documents differ is not known",
        optional=True,
    )
    def untrained(self) -> int | None:
        return None if self.never_trained is None else len(self.never_trained)

    @told(PROMPT)
    def prompt(self) -> str:
        return self.query.prompt

    @told(RESPONSE)
    def response(self) -> str:
        return self.query.response

    @told("with --instead: what the response is compared with", lacking=True)
    def instead(self) -> str | None:
        compared = self.query.comparison
        return None if compared is None or self.other_loss is None else compared.response

    @told(lacking=True)
    def comparison(self) -> ComparisonRecord | None:
        compared = self.query.comparison
        if compared is None or self.other_loss is None:
            return None
        probabilities = math.exp(-self.loss), math.exp(-self.other_loss)
        return ComparisonRecord(compared.token, compared.other, *probabilities)

    @told("with --pool: prompts that are answered as one", lacking=True)
    def pooled(self) -> int | None:
        return self.query.count if self.query.count > 1 else None

    @told(
        'with --pool: "support": an influence is the mean over the prompts of what is above zero of the '
        "influence on each, and the recovery is that of the prompt whose certificate is weakest; "
        '"all": it is the influence on their mean loss, and the recovery is of that',
        name="added",
        lacking=True,
    )
    def added_up(self) -> str | None:
        return self.added or "all" if self.query.count > 1 else None

    @told(TEMPLATE, optional=True)
    def template(self) -> str | None:
        return None if self.labels else self.query.form.label

    @told(GENERATED)
    def generated(self) -> bool:
        return self.query.generated

    @told("the model's own response ends at --max-new-tokens, in the middle of a sentence", optional=True)
    def cut(self) -> bool:
        return self.query.cut

    @told(SCORED_TOKENS)
    def scored_tokens(self) -> int:
        return int((self.query.weights > 0).sum())

    loss: float = key(LOSS)

    @told(
        'of influences: "nats": forecast of the rise of the loss, per scored token, when the model is '
        'trained without this document alone; "relative": comparable within this answer, and no number '
        "of nats",
        optional=True,
    )
    def unit(self) -> str:
        return "relative" if self.scale is None else "nats"

    scale: Nats | None = key(
        "how nats were found; null: influences are relative", default=None, optional=True
    )
    read: int = key(
        "chunks whose influence was read from their own gradients; others' are recovered from subsets",
        default=0,
        optional=True,
    )
    estimated: bool = key(
        "chunks that were not read count with what projections, shared pairs of tokens and subsets say "
        "of them together",
        default=False,
        optional=True,
    )
    redundancy: float = key(
        "ridge with which chunks share what they say alike, read or not; 0: each counts as if alone",
        default=0.0,
        optional=True,
    )

    recall: Recall | None = key(
        "how many of the strongest chunks were read; null: none were, or the index has no projections",
        default=None,
        optional=True,
    )

    @told("chunks of the index", optional=True)
    def chunks(self) -> int:
        return self.solution.n_chunks

    asked: int = key("supporting documents that were asked for (--top)", default=0, optional=True)

    @told()
    def hits(self) -> list[Hit]:
        return [self._hit(found) for found in self.supporters]

    @told(name="opposers")
    def opposing(self) -> list[Hit]:
        return [self._hit(found) for found in self.opposers]

    @told()
    def recovery(self) -> Recovery:
        found, shrunk = self.solution, self.shrinkage
        sparse = found.lambda_, found.lambda_ratio, found.moved, len(found.indices)
        certificate = found.duality_gap, found.relative_gap, found.r_squared, found.n_passes
        smaller = (1.0, 1.0) if shrunk is None else (shrunk.exponent, shrunk.opposing)
        return Recovery(*sparse, *certificate, *smaller)

    measurement: MeasurementRecord = key()
    explanation: str | None = key(
        "what to conclude, how far to trust it and what it cannot say, with --verbose",
        default=None,
        lacking=True,
    )
    seconds: AnswerSeconds = key()
    expected: list[Annotated[str, "stride demo: a document that states the fact"]] | None = key(
        default=None, lacking=True
    )
    found: bool | None = key("stride demo: whether such a document is on top", default=None, lacking=True)

    def in_unit(self, influence: float) -> float:
        """An influence as the record has it: of documents together, the forecast for all of them."""
        if self.scale is None:
            return influence
        return float(self.scale.rise(influence, self.solution.total, self.loss))

    def _hit(self, found: Hit) -> Hit:
        influence, name = self.in_unit(found.influence), self.document_ids[found.document]
        scale = None if found.document in self.large else self.scale
        low, high = (None, None) if scale is None else scale.interval(influence)
        # what the model is torn by stands beside the strongest, however weak it is over the whole response
        torn = self.verdict is not None and name == self.verdict.against
        return replace(
            found,
            name=name,
            title=self.titles.get(found.document) or None,
            influence=influence,
            low=low,
            high=high,
            above_line=None if self.line is None else torn or abs(found.influence) > self.line,
            passage=self.passages.get(found.chunk, ""),
            label=self.labels.get(found.chunk),
            trained=False if found.document in (self.never_trained or ()) else None,
            read=found.read if self.read or self.estimated else None,
        )

    def to_record(self) -> dict[str, Any]:
        """The answer as one JSON object; `stride schema` documents the keys."""
        record: dict[str, Any] = to_record(self)
        return record

    def to_frame(self) -> DataFrame:
        """The documents as a pandas DataFrame: one row a hit, opposers last.

        Columns as of ``stride query --format csv``, whose meaning ``stride schema stride.hit_row/1`` says;
        prompt, response and verdict, which are of all rows, are in the frame's ``attrs``.

        Raises
        ------
        MissingExtraError       pandas is not installed (extra "frames")
        """
        return frame(self.to_record())

    def __repr__(self) -> str:
        said = one_line(shortened(f"{self.query.prompt}{self.query.response}", 200))
        strongest = ", ".join(f"{hit.title or hit.name} {share_text(hit.share)}" for hit in self.hits[:3])
        return f"{said}\nverdict: {self.word}\ndocuments: {strongest or 'none'}"

    def _repr_html_(self) -> str:
        """Render the answer for a notebook: the verdict, the response and its documents."""
        return html_table(self.to_record())


class HitRow(Hit, AnswerOfHit):
    """One row of ``stride query --format csv`` and `Answer.to_frame`: all keys but "schema" are columns."""

    schema: ClassVar[str] = "stride.hit_row/1"
