"""The records that `stride evaluate` and `stride baseline` write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from stride_cli.schema.verify_records import Interval

Number = float | None
MethodSpec = Annotated[str, "the method with its options, as given"]
QueryId = Annotated[str, "the query's id"]
Queries = Annotated[int, "queries"]
Failure = Annotated[str, "why the method failed"]
Seeds = Annotated[int, "trainings of every set"]


class SpreadRecord(TypedDict):
    """Uncertainty of a mean."""

    se: Annotated[Number, "bootstrap standard error"]
    low: Annotated[Number, "2.5 % of the bootstrap"]
    high: Annotated[Number, "97.5 % of the bootstrap"]


class EstimateRecord(SpreadRecord):
    """A mean with its uncertainty."""

    mean: Annotated[Number, ""]


def estimate_record(found: Interval | None) -> EstimateRecord:
    """Convert an interval; all null without one."""
    if found is None:
        return {"mean": None, "se": None, "low": None, "high": None}
    return {"mean": found.mean, "se": found.se, "low": found.low, "high": found.high}


def _mean(what: str) -> dict[str, str]:
    return {"mean": f"{what}; null where the method failed"}


def _over(what: str) -> dict[str, str]:
    return {
        "se": f"bootstrap standard error, over {what} only",
        "low": f"2.5 % of the bootstrap, over {what} only",
        "high": f"97.5 % of the bootstrap, over {what} only",
    }


# -------------------------------------------------------------------------------- agreement with retraining


class MethodSeconds(TypedDict):
    fit: Annotated[Number, "seconds before the first query"]
    query: Annotated[Number, "seconds a query"]


class ScoredRecord(TypedDict):
    method: MethodSpec
    error: NotRequired[Failure]
    response: Annotated[str, '"loss" or "margin": what the retrained models were asked']
    alpha: Annotated[float, "share of the chunks in a subset"]
    subsets: Annotated[int, "retrained subsets it is judged on: not those that it was fitted on"]
    seeds: Annotated[int, "trainings of each subset"]
    own_seed: Annotated[bool, "from the model's own initial weights and order, instead of others"]
    queries: Queries
    spearman: Annotated[
        EstimateRecord,
        _mean("LDS: rank correlation over subsets, mean over queries, −1 … 1; both are resampled"),
    ]
    pearson: Annotated[EstimateRecord, _mean("the same with Pearson's correlation")]
    kendall: Annotated[EstimateRecord, _mean("the same with Kendall's τ_a")]
    over_queries: Annotated[SpreadRecord, _over("queries")]
    over_subsets: Annotated[SpreadRecord, _over("subsets")]
    constant_queries: Annotated[
        Number, "queries whose scores predict the same for every subset; they count as 0"
    ]
    ceiling: Annotated[Number, "the highest LDS that the noise between seeds allows; null with one seed"]
    seconds: MethodSeconds
    bytes_per_chunk: Annotated[Number, "what the method keeps for later queries, bytes a chunk"]


class LdsRecord(ScoredRecord):
    schema: Literal["stride.lds/1"]


class GroupMean(TypedDict):
    queries: Queries
    mean: Annotated[Number, "mean over them"]
    se: Annotated[Number, "standard error over queries"]


class GroupRecord(GroupMean):
    group: Annotated[str, "what the ids of these queries begin with, up to the first /"]


class PartialRecord(GroupMean):
    given: Annotated[str | None, "the method whose part is taken out of both; null without --given"]
    groups: list[GroupRecord]


class SlopeRecord(TypedDict):
    value: Annotated[
        Number,
        "measured on predicted responses of subsets, each query's mean taken off, all queries together: 1 "
        "where scores are changes of the response in its own unit",
    ]
    se: Annotated[Number, "its standard error, by leaving out one query at a time"]
    correlation: Annotated[Number, "of the two, likewise"]


class ComparisonRecord(ScoredRecord):
    schema: Literal["stride.comparison/1"]
    reference: Annotated[str, "the first method, which differences are taken to"]
    difference: Annotated[
        EstimateRecord, _mean("LDS minus the reference's, on the same resamples; null for the reference")
    ]
    slope: SlopeRecord
    groups: list[GroupRecord]
    partial: PartialRecord
    peak_memory: Annotated[Number, "growth of resident memory over fit and queries, bytes, at its peak"]
    peak_device_memory: Annotated[Number, "the same on the GPU; null without one"]


class CurvePoint(TypedDict):
    share: Annotated[float, "this share of the chunks, highest |score| first"]
    mass: Annotated[float, "holds this part of Σ|score|, mean over queries"]


class DistributionRecord(TypedDict):
    schema: Literal["stride.distribution/1"]
    method: MethodSpec
    error: NotRequired[Failure]
    chunks: Annotated[int, "n"]
    queries: Queries
    sparsity: Annotated[
        Number, "share of scores that are exactly zero, mean over queries; null where the method failed"
    ]
    gini: Annotated[Number, "Gini coefficient of |scores|, mean over queries that have any"]
    top10_coverage: Annotated[Number, "part of Σ|score| that the top 10 % of the chunks hold, mean"]
    active_mean: Annotated[Number, "scores that are not zero, mean over queries"]
    active_p50: Annotated[Number, "their median"]
    active_p90: Annotated[Number, "their 90th percentile"]
    empty_queries: Annotated[Number, "queries whose scores are all zero"]
    curve: list[CurvePoint]


class LooRecord(TypedDict):
    schema: Literal["stride.loo/1"]
    method: MethodSpec
    spearman: Annotated[
        EstimateRecord, _mean("rank correlation over left-out chunks, mean over queries; both are resampled")
    ]
    pearson: Annotated[EstimateRecord, _mean("the same with Pearson's correlation")]
    kendall: Annotated[EstimateRecord, _mean("the same with Kendall's τ_a")]
    chunks: Annotated[int, "chunks left out one by one"]
    seeds: Annotated[int, "trainings without each"]
    queries: Queries
    constant_queries: Annotated[int, "queries whose sampled scores are all the same; they count as 0"]
    ceiling: Annotated[Number, "the highest correlation that the noise between seeds allows; null with one"]


# ------------------------------------------------------------------------------------------- interventions


class TailPatchRecord(TypedDict):
    schema: Literal["stride.tail_patch/1"]
    method: MethodSpec
    k: Annotated[int, "chunks of a step"]
    lift: Annotated[
        EstimateRecord, _mean("attributed − random, nats per scored token; > 0: attributed chunks help more")
    ]
    attributed: Annotated[EstimateRecord, _mean("Δ log p of a query by one step on its top k")]
    random: Annotated[EstimateRecord, _mean("Δ log p by one step on k random chunks")]
    helped: Annotated[float, "share of the queries with a lift above zero"]
    queries: Queries
    draws: Annotated[int, "random batches"]
    lr: Annotated[float, "learning rate of the step"]


class RemovalRecord(TypedDict):
    schema: Literal["stride.removal/1"]
    method: MethodSpec
    k: Annotated[int, "chunks removed"]
    attributed: Annotated[
        EstimateRecord,
        _mean("rise of a query's loss without its top k, nats per scored token; > 0: it suffers"),
    ]
    random: Annotated[EstimateRecord, _mean("rise without k random chunks")]
    advantage: Annotated[EstimateRecord, _mean("attributed − random: bergson's QLD, of 1 %")]
    advantage_seeds: Annotated[EstimateRecord, {"mean": "advantage", "se": "over seeds; null with one"}]
    probability_attributed: Annotated[
        EstimateRecord, _mean("fall of the probability (label's; exp(−loss) for text) without the top k")
    ]
    probability_random: Annotated[EstimateRecord, _mean("fall without k random chunks")]
    queries: Queries
    seeds: Seeds
    draws: Annotated[int, "random removals"]


class SeededRecord(TypedDict):
    """A mean over groups and seeds, with both kinds of uncertainty."""

    mean: Annotated[Number, ""]
    se: Annotated[Number, "standard error over groups; null with one"]
    low: Annotated[Number, "Student's t over groups, 95 %"]
    high: Annotated[Number, "Student's t over groups, 95 %"]
    seed_se: Annotated[Number, "standard error over seeds of the mean over groups; null with one"]


def _all(what: str) -> dict[str, str]:
    return {"mean": f"{what}; mean over groups and seeds"}


class RemovedGroup(TypedDict):
    group: Annotated[str, "the group's name"]
    queries: Annotated[int, "its queries"]
    k: Annotated[int, "documents removed"]
    causes_removed: Annotated[int | None, "how many of them are causes; null of random ones"]
    causes_score: Annotated[
        Number, "the causes' scores for the group, added up; units differ by method; null without one"
    ]
    odds_before: Annotated[Number, "mean log-odds with all documents, nats; null without instead"]
    odds: Annotated[Number, "their fall"]
    loss_before: Annotated[Number, "mean loss with all documents, nats a token"]
    loss: Annotated[Number, "its rise"]
    shown_before: Annotated[
        Number, "share of the queries whose response's token is the likelier; null without instead"
    ]
    shown: Annotated[Number, "that share after the removal"]


class GroupRemovalRecord(TypedDict):
    schema: Literal["stride.group_removal/1"]
    method: Annotated[str, "the method with its options, as given; causes: what is known; random: by lot"]
    k: Annotated[int | None, "documents removed of each group; null: of each as many as it has causes"]
    odds: Annotated[
        SeededRecord,
        _all(
            "fall of log p(response's token) − log p(the other), where a response and instead part, nats; "
            "> 0: the group shows less of it; null without instead"
        ),
    ]
    odds_beyond_random: Annotated[SeededRecord, _all("less the fall without random documents")]
    loss: Annotated[SeededRecord, _all("rise of the response's loss, nats a token")]
    loss_beyond_random: Annotated[SeededRecord, _all("less the rise without random documents")]
    shown: Annotated[
        SeededRecord,
        _all("share of the queries whose response's token is still the likelier; null without instead"),
    ]
    best_other: Annotated[str | None, "of the other methods the one of the largest fall (without odds: rise)"]
    difference: Annotated[
        SeededRecord, _all("this method's fall (or rise) minus that one's; null without another")
    ]
    groups: list[RemovedGroup]
    documents: Annotated[int, "of the corpus"]
    queries: Queries
    seeds: Seeds
    draws: Annotated[int, "random removals"]


# -------------------------------------------------------------------------------------------- known causes


class CauseRank(TypedDict):
    document: Annotated[str, "the document's id"]
    rank: Annotated[float, "position, 1 = highest; ties share their mid-rank"]


class RecallValue(TypedDict):
    k: Annotated[int, "first documents of the ranking"]
    value: Annotated[float, "share of the causes among them; expected over the orders of tied documents"]


class FoundCauses(TypedDict):
    recall: list[RecallValue]
    reciprocal_rank: Annotated[float, "1 / rank of the first cause; expected, as recall is"]
    average_precision: Annotated[float, "area under precision over recall; expected, as recall is"]


class CauseRanksRecord(FoundCauses):
    schema: Literal["stride.cause_ranks/1"]
    query: QueryId
    method: MethodSpec
    causes: list[CauseRank]
    documents: Annotated[int, "documents that are ranked"]
    seconds: Annotated[Number, "of this query, the fit left out; null: read from a file of scores"]


class CauseMeasureRecord(SpreadRecord):
    mean: Annotated[Number, "mean over the queries that count; null where the method failed"]
    best_other: Annotated[str | None, "of the other methods the one with the highest mean"]
    difference: Annotated[
        EstimateRecord, _mean("this method's minus the best other's, query by query; null without another")
    ]


class RecallRecord(CauseMeasureRecord):
    k: Annotated[int, "first documents of the ranking"]


class PooledRecord(FoundCauses):
    groups: Annotated[int, "sets of causes, each shared by queries whose scores are added up"]


class CausesRecord(TypedDict):
    schema: Literal["stride.causes/1"]
    method: MethodSpec
    error: NotRequired[Failure]
    queries: Annotated[int, "queries of the file; of a set of DATE-LM: those with a cause"]
    counted: Annotated[int, "queries that count: with --known, those that the model answers rightly"]
    documents: Annotated[int, "documents that are ranked"]
    recall: list[RecallRecord]
    mrr: Annotated[CauseMeasureRecord, _mean("mean of 1 / rank of the first cause")]
    auprc: Annotated[CauseMeasureRecord, _mean("mean area under precision over recall")]
    pooled: NotRequired[
        Annotated[
            PooledRecord,
            "of the scores of queries that have the same causes added up, mean over such groups; where every "
            "query shares its causes with another",
        ]
    ]
    seconds: MethodSeconds


class KnownRecord(TypedDict):
    schema: Literal["stride.known/1"]
    query: QueryId
    answer: Annotated[str, "the model's greedy continuation of the prompt"]
    right: Annotated[bool, "whether it is the response, or begins with it; case and white space aside"]
    base_answer: Annotated[str | None, "the base model's; null without --base"]
    base_right: Annotated[bool | None, "whether that one is right; null without --base"]
    counts: Annotated[bool, "whether the query counts: the model is right, and the base model is not"]


# ------------------------------------------------------------------------------------------------ baselines


class MethodRecord(TypedDict):
    schema: Literal["stride.method/1"]
    method: Annotated[str, "the method's name"]
    needs: Annotated[str, '"text", "model", or "truth" (models retrained on subsets)']
    description: Annotated[str, "one line"]


class RankedDocument(TypedDict):
    rank: Annotated[float, "position, 1 = highest; ties share their mid-rank"]
    document: Annotated[str, "the document's id"]
    score: Annotated[float, "summed over its chunks; > 0 supports; units differ by method"]


class RankingRecord(TypedDict):
    schema: Literal["stride.ranking/1"]
    query: QueryId
    method: MethodSpec
    hits: list[RankedDocument]
