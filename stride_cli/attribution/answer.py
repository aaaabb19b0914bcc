"""The answer to a query: ranked documents, the measurement, the certificate, the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pandas import DataFrame

    from stride_cli.attribution.nats import Nats
    from stride_cli.attribution.verdict import Verdict
    from stride_cli.data.queries import Query
    from stride_cli.recovery.lasso import Solution
    from stride_cli.recovery.ranking import Hit
    from stride_cli.recovery.recall import Recall
    from stride_cli.recovery.shrinkage import Shrinkage
    from stride_cli.schema.answer_records import AnswerRecord, AnswerSeconds, HitRecord, RecallRecord


@dataclass(frozen=True)
class Answer:
    """Ranked documents for one query, with the certificate of the recovery.

    Attributes
    ----------
    query : Query
    loss : float                       mean nats per scored token
    other_loss : float or None         nats of the token that the response is compared with, where it is
    added : str or None                of several prompts as one: what of their influences is added up, see
                                       `Session.query_pooled`
    supporters, opposers : list of Hit
    passages : dict                    chunk number → the sentence of it that carries its influence, where
                                       chunks are read; else the one most like the query
    carried : bool                     False: passages that carry the influence were not asked for, and
                                       `Session.with_passages` finds them
    solution : Solution                what the Lasso recovered
    influences : Solution              the same with the weights that documents are ranked by: read, shrunk
    method : "linear" or "exact"
    agreement : float or None          Pearson correlation with exact measurement on a spot check
    seconds : dict                     stage → seconds
    document_ids : dict                document number → id
    coverage : float
    models : int                       that measured the subsets: the index's own and further checkpoints
    labels : dict                      chunk number → label, of a classifier's rows
    responses : (K,) float64 or None   what the subsets answered, nats
    measured : (K,) float64 or None    y, the responses on the scale that the recovery explains; what it
                                       recovers of them is ``measured - solution.residual``
    read : int                         chunks whose influence was read from their own gradients
    estimated : bool                   others count with what their projections say, too
    redundancy : float                 ridge with which chunks share what they say alike; 0: they do not
    shrinkage : Shrinkage or None      how small influences were made smaller
    verdict : Verdict or None          what may be concluded; None where the index is not calibrated
    line : float or None               the verdict's, where influences are what null prompts' were
    scale : Nats or None               what influences are in nats, where they are what it was measured for;
                                       the record has them so, this object never
    """

    query: Query
    loss: float
    supporters: list[Hit]
    opposers: list[Hit]
    passages: dict[int, str]
    solution: Solution
    influences: Solution
    method: str
    agreement: float | None
    seconds: dict[str, float]
    document_ids: dict[int, str]
    coverage: float
    models: int = 1
    labels: dict[int, str] = field(default_factory=dict)
    responses: Any = None
    measured: Any = None
    read: int = 0
    estimated: bool = False
    redundancy: float = 0.0
    recall: Recall | None = None
    shrinkage: Shrinkage | None = None
    verdict: Verdict | None = None
    line: float | None = None
    scale: Nats | None = None
    carried: bool = True
    other_loss: float | None = None
    added: str | None = None

    def in_unit(self, influence: float) -> float:
        """An influence as the record has it: of documents together, the forecast for all of them."""
        if self.scale is None:
            return influence
        total = float(abs(self.influences.values).sum())
        return float(self.scale.rise(influence, total, self.loss))

    def to_record(self) -> AnswerRecord:
        """The answer as one JSON object; `stride schema` documents the keys."""
        solution, verdict = self.solution, self.verdict
        line = None if self.line is None else self.in_unit(self.line)

        def hit(found: Hit) -> HitRecord:
            record: HitRecord = {
                "rank": found.rank,
                "document": self.document_ids[found.document],
                "influence": self.in_unit(found.influence),
                "share": found.share,
                "above_line": None if self.line is None else found.influence > self.line,
                "sign": found.sign,
                "chunk": found.chunk,
                "passage": self.passages.get(found.chunk, ""),
                "seen": found.seen,
                "neighbours": found.neighbours,
                "backfilled": found.backfilled,
                "read": found.read if self.read or self.estimated else None,
            }
            if found.chunk in self.labels:
                record["label"] = self.labels[found.chunk]
            return record

        asked: dict[str, Any] = {}
        if (comparison := self.query.comparison) is not None and self.other_loss is not None:
            asked["instead"] = comparison.response
            asked["comparison"] = {
                "token": comparison.token,
                "other_token": comparison.other,
                "probability": math.exp(-self.loss),
                "other_probability": math.exp(-self.other_loss),
            }
        if self.query.count > 1:
            asked["pooled"] = self.query.count
            asked["added"] = self.added or "all"
        record: AnswerRecord = {
            "schema": "stride.answer/1",
            "verdict": None if verdict is None else verdict.word,
            "judged": None if verdict is None else {**verdict.to_record(), "line": line},
            "prompt": self.query.prompt,
            "response": self.query.response,
            "template": None if self.labels else self.query.form,
            "generated": self.query.generated,
            "scored_tokens": int(self.query.weights.sum()),
            "loss": self.loss,
            "unit": "relative" if self.scale is None else "nats",
            "scale": None if self.scale is None else self.scale.to_record(),
            "read": self.read,
            "estimated": self.estimated,
            "redundancy": self.redundancy,
            "recall": None if self.recall is None else cast("RecallRecord", asdict(self.recall)),
            "hits": [hit(found) for found in self.supporters],
            "opposers": [hit(found) for found in self.opposers],
            "recovery": {
                "lambda": solution.lambda_,
                "lambda_ratio": solution.lambda_ratio,
                "nonzeros": len(solution.indices),
                "duality_gap": solution.duality_gap,
                "relative_gap": solution.relative_gap,
                "r_squared": solution.r_squared,
                "passes": solution.n_passes,
                "shrink_exponent": 1.0 if self.shrinkage is None else self.shrinkage.exponent,
                "shrink_opposing": 1.0 if self.shrinkage is None else self.shrinkage.opposing,
            },
            "measurement": {
                "method": self.method,
                "subsets": len(solution.residual),
                "agreement": self.agreement,
                "coverage": self.coverage,
                "models": self.models,
            },
            "seconds": cast("AnswerSeconds", self.seconds),
            **asked,  # type: ignore[typeddict-item]
        }
        return record

    def to_frame(self) -> DataFrame:
        """The documents as a pandas DataFrame: one row a hit, opposers last.

        Columns as of ``stride query --format csv``; ``stride schema stride.hit_row/1`` says what they
        mean, and ``list`` which of the answer's lists a document is on.

        Raises
        ------
        MissingExtraError       pandas is not installed (extra "frames")
        """
        from stride_cli.attribution.frames import frame

        return frame(self.to_record())

    def _repr_html_(self) -> str:
        """Render the answer for a notebook: the verdict, the response and its documents."""
        from stride_cli.attribution.frames import html_table

        return html_table(self.to_record())
