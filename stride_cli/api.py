"""What the commands do, as functions: build an index, fit operators, answer queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.errors import ModelError, NumericalError, UsageError

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.audit.judge import AuditOptions, Finding
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.measurement.queries import Query
    from stride_cli.models.adapter import CausalLM
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.lasso import Solution
    from stride_cli.recovery.ranking import Hit
    from stride_cli.selection.select import Selection
    from stride_cli.tuning.tune import TuneOptions

# λ / λ_max: operators in closed form answer nearly without noise, trained ones do not
DEFAULT_LAMBDA_RATIO = {"closed": 0.03, "sgd": 0.2}
PAPER_LAMBDA_RATIO = 0.8
DEFAULT_SPACE = "mlp-matrix+logit+token-logit"
_SPOT_CHECK = 16
_CLASSIFIER_RANK = 512
_CLASSIFIER_GATES = 8192
_CLASSIFIER_DAMPING = 1.0
_CLASSIFIER_LAMBDA_RATIO = 0.01
# enough to know the facts; at 24 epochs every loss is near zero, and no document's gradient stands out
_DEMO_EPOCHS = 12.0


@dataclass(frozen=True)
class TrainOptions:
    """What `train` can be told; None means "the default that fits this index and model".

    Attributes
    ----------
    fit : "closed" or "sgd"
    space : operator space, or a sum of them such as ``residual-matrix+logit``
    layer : residual spaces act after this many blocks (default: two thirds of the depth)
    rank : r of every space
    curvature : "kronecker", "fisher" or "exact", how the Fisher matrix is taken (closed)
    damping : γ relative to the mean eigenvalue (closed)
    buckets : buckets of the vocabulary in the logit spaces
    steps, lr, variant, fidelity, stability, linearity : the sgd recipe
    recipe : "paper" sets every published hyperparameter, at training and at query time
    seed : default: the index's
    checkpoints : further models whose operators are fitted and which queries are measured with, beside the
        index's own: paths of checkpoints along its training, or of models trained independently
    """

    fit: str | None = None
    space: str | None = None
    layer: int | None = None
    rank: int | None = None
    curvature: str | None = None
    damping: float | None = None
    buckets: int | None = None
    steps: int | None = None
    lr: float | None = None
    variant: str | None = None
    fidelity: float | None = None
    stability: float | None = None
    linearity: float | None = None
    batch_tokens: int | None = None
    recipe: str | None = None
    seed: int | None = None
    checkpoints: Sequence[str | Path] = ()


@dataclass(frozen=True)
class QueryOptions:
    """How a query is answered; None means "as the operators' fit asks for".

    Attributes
    ----------
    top, bottom : supporters and opposers to show
    lambda_ratio : λ / λ_max
    measure : "auto", "linear" or "exact"
    intercept, nonneg : of the Lasso
    max_new_tokens : length of a generated continuation
    chat : format prompts with the chat template
    check : compare a linear measurement with the exact one on a random few subsets
    halves : recover from so many random halves of the subsets too, for the answer's reliability; 0: do not
    stability : with halves, say of each hit how often it stays on the list
    prior : "tfidf": rank by influence and word overlap together; each hit keeps the two apart
    batch_size : steered continuations at once (exact)
    """

    top: int = 10
    bottom: int = 0
    lambda_ratio: float | None = None
    measure: str = "auto"
    intercept: bool | None = None
    nonneg: bool = False
    max_new_tokens: int = 16
    chat: bool = False
    check: bool = False
    halves: int = 0
    stability: bool = True
    prior: str | None = None
    batch_size: int = 8


@dataclass(frozen=True)
class Answer:
    """Ranked documents for one query, with the certificate of the recovery.

    Attributes
    ----------
    query : Query
    loss : float                       mean nats per scored token
    supporters, opposers : list of Hit
    passages : dict                    chunk number → its best-matching passage
    solution : Solution
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
    reliability : float or None        see `stride_cli.recovery.stability.Halves`
    prior : str or None                what the supporters are ranked by, beside their influence
    """

    query: Query
    loss: float
    supporters: list[Hit]
    opposers: list[Hit]
    passages: dict[int, str]
    solution: Solution
    method: str
    agreement: float | None
    seconds: dict[str, float]
    document_ids: dict[int, str]
    coverage: float
    models: int = 1
    labels: dict[int, str] = field(default_factory=dict)
    responses: Any = None
    measured: Any = None
    reliability: float | None = None
    prior: str | None = None

    def to_record(self) -> dict[str, Any]:
        """The answer as one JSON object; `stride schema` documents the keys."""
        solution = self.solution

        def hit(found: Hit) -> dict[str, Any]:
            label = {"label": self.labels[found.chunk]} if found.chunk in self.labels else {}
            return label | {
                "rank": found.rank,
                "document": self.document_ids[found.document],
                "influence": found.influence,
                "share": found.share,
                "sign": found.sign,
                "chunk": found.chunk,
                "passage": self.passages.get(found.chunk, ""),
                "seen": found.seen,
                "neighbours": found.neighbours,
                "backfilled": found.backfilled,
                "prior": None if self.prior is None else found.prior,
                "stability": found.stability,
            }

        return {
            "schema": "stride.answer/1",
            "prompt": self.query.prompt,
            "response": self.query.response,
            "generated": self.query.generated,
            "scored_tokens": int(self.query.weights.sum()),
            "loss": self.loss,
            "hits": [hit(found) for found in self.supporters],
            "opposers": [hit(found) for found in self.opposers],
            "reliability": self.reliability,
            "prior": self.prior,
            "recovery": {
                "lambda": solution.lambda_,
                "lambda_ratio": solution.lambda_ratio,
                "nonzeros": len(solution.indices),
                "duality_gap": solution.duality_gap,
                "relative_gap": solution.relative_gap,
                "r_squared": solution.r_squared,
                "passes": solution.n_passes,
            },
            "measurement": {
                "method": self.method,
                "subsets": len(solution.residual),
                "agreement": self.agreement,
                "coverage": self.coverage,
                "models": self.models,
            },
            "seconds": self.seconds,
        }


def build_index(
    sources: Sequence[str],
    *,
    model_path: str,
    out: str | Path,
    block_size: int | None = None,
    n_subsets: int | None = None,
    degree: int | None = None,
    seed: int = 0,
    store_text: bool = True,
    reading: ReadOptions | None = None,
    overwrite: bool = False,
    commit_seconds: float | None = None,
) -> Index:
    """Index a corpus for a model: chunks, design matrix, fingerprints. For a classifier, its training rows.

    Parameters
    ----------
    sources : files, globs or ``-``
    model_path : checkpoint directory, hub id or .gguf file; its tokenizer is loaded, its weights are hashed.
        Or a classifier's directory, with one file of examples as the source.
    block_size : most tokens of a chunk; default 512, or the model's context where that is shorter
    n_subsets, degree, seed : the design; None for what fits the corpus
    store_text, reading, overwrite, commit_seconds : see `stride_cli.corpus.build.build_index`

    Raises
    ------
    CorpusError, ModelError, UsageError, IndexExists, IndexBusy, IndexIncomplete, StorageFull
    """
    from stride_cli.classifiers.build import build_classifier_index
    from stride_cli.classifiers.kind import is_classifier
    from stride_cli.corpus import build
    from stride_cli.corpus.context import context_length
    from stride_cli.corpus.plan import check_design, choose_block_size
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.loading import load_tokenizer, model_fingerprint, tokenizer_fingerprint

    check_design(n_subsets, degree)
    if is_classifier(model_path):
        if len(sources) != 1:
            raise UsageError(
                f"a classifier's examples are in one file (found {len(sources)})", fix="join them into one"
            )
        return build_classifier_index(
            sources[0],
            model_path=model_path,
            out=out,
            n_subsets=n_subsets,
            degree=degree,
            seed=seed,
            overwrite=overwrite,
        )
    tokenizer = load_tokenizer(model_path)
    local = Path(model_path)
    return build.build_index(
        sources,
        tokenizer=tokenizer,
        model_fingerprint=model_fingerprint(model_path),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        # found again from another working directory
        model_path=str(local.resolve()) if local.exists() else model_path,
        out=out,
        block_size=choose_block_size(block_size, context_length(model_path)),
        n_subsets=n_subsets,
        degree=degree,
        seed=seed,
        store_text=store_text,
        reading=reading or ReadOptions(),
        overwrite=overwrite,
        commit_seconds=build.COMMIT_SECONDS if commit_seconds is None else commit_seconds,
    )


def train(
    index_path: str | Path,
    options: TrainOptions | None = None,
    *,
    model: CausalLM | None = None,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    save_seconds: float = 60.0,
) -> dict[str, Any]:
    """Fit the operators of an index and publish them in it; an interrupted fit continues.

    Parameters
    ----------
    index_path : path of the index
    options : TrainOptions
    model : CausalLM, optional        else loaded from ``model_path`` or from where the index says
    device, dtype : of the model to load
    overwrite : replace operators that are already there
    save_seconds : how often an unfinished fit is saved

    Returns
    -------
    dict      what was fitted: fit, space, layer, K, gate size, coverage, seconds, …

    Raises
    ------
    IndexMismatch      the model or tokenizer is not the index's; a checkpoint has another tokenizer
    ModelError         a checkpoint cannot be loaded
    IndexExists        operators are there and ``overwrite`` is False
    """
    import hashlib
    import json

    from index_format.errors import IndexExists
    from index_format.reader import Index
    from index_format.writer import GroupWriter
    from stride_cli.operators.batches import ChunkReader
    from stride_cli.operators.checkpoints import find_checkpoints, fit_with_checkpoints

    started = time.perf_counter()
    index = Index.open(index_path)
    if index.has("operators") and not overwrite:
        raise IndexExists(
            f"index '{index_path}' has operators already",
            fix="query them, or fit anew with --overwrite",
        )
    options = options or TrainOptions()
    checkpoints = find_checkpoints(index, options.checkpoints)
    models = [model or open_model(index, model_path, device=device, dtype=dtype)]
    settings = resolve_settings(options, models[0], index)
    chunks = ChunkReader(index)
    if chunks.scored_tokens() == 0:
        raise UsageError(
            f"no token of index '{index_path}' is scored, so there is nothing to fit",
            fix="build the index from documents longer than one token, with non-empty responses",
        )
    identity: dict[str, Any] = {"settings": asdict(settings), "fit": type(settings).__name__}
    identity |= {"dtype": str(models[0].dtype), "index": index.digest}  # chunks may have been appended
    if checkpoints:
        identity["checkpoints"] = [found.fingerprint for found in checkpoints]
    build_key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    loaded = time.perf_counter() - started
    with GroupWriter(index_path, "operators", build_key, overwrite=overwrite) as writer:
        fitted = fit_with_checkpoints(
            writer,
            models,
            chunks,
            index,
            lambda model: resolve_settings(options, model, index),
            checkpoints,
            save_seconds=save_seconds,
        )
        publishing = time.perf_counter()
        own, *others = (entry["attributes"] for entry in fitted)
        listed = [{"path": found.path, **entry} for found, entry in zip(checkpoints, others, strict=True)]
        attributes = own | {"recipe": options.recipe} | ({"checkpoints": listed} if listed else {})
        writer.publish(attributes)
    reports = [entry["report"] for entry in fitted]
    seconds = {stage: sum(report[stage] for report in reports) for stage in ("load", "fit", "write")}
    seconds["load"] += loaded
    seconds["write"] += time.perf_counter() - publishing
    return {
        "schema": "stride.train/1",
        "index": str(index_path),
        "fit": own["fit"],
        "space": own["space"],
        "layer": own["layer"],
        "subsets": index.n_subsets,
        "gate_size": own["gate_size"],
        "coverage": own["coverage"],
        "step": own["step"],
        "step_agreement": own["step_agreement"],
        "loss": reports[0]["loss"],
        "checkpoints": [
            {
                "path": entry["path"],
                "fingerprint": entry["model_fingerprint"],
                "space": entry["space"],
                "layer": entry["layer"],
                "step_agreement": entry["step_agreement"],
                "loss": report["loss"],
                "seconds": report["load"] + report["fit"] + report["write"],
            }
            for entry, report in zip(listed, reports[1:], strict=True)
        ],
        "seconds": seconds,
    }


def options_fit(options: TrainOptions) -> str:
    """The fit that options ask for, with the recipe taken into account."""
    if options.recipe not in (None, "paper"):
        raise UsageError(f"unknown recipe '{options.recipe}'", fix="the only named recipe is 'paper'")
    fit = options.fit or ("sgd" if options.recipe == "paper" else "closed")
    if fit not in ("closed", "sgd"):
        raise UsageError(f"unknown fit '{fit}'", fix="use --fit closed or --fit sgd")
    return fit


def resolve_settings(options: TrainOptions, model: CausalLM, index: Index) -> Any:
    """Options with every default filled in: ClosedSettings or SgdSettings."""
    from stride_cli.classifiers import steering
    from stride_cli.classifiers.kind import is_classifier_index
    from stride_cli.models.recipe import was_finetuned
    from stride_cli.operators.bases import LAYER_SPACES, affordable_buckets, affordable_rank
    from stride_cli.operators.closed import CURVATURES, DEFAULT_RANKS, ClosedSettings
    from stride_cli.operators.losses import STABILITY_VARIANTS
    from stride_cli.operators.sgd import SgdSettings
    from stride_cli.operators.spaces import parse_space

    fit = options_fit(options)
    classifier = is_classifier_index(index)
    default_space = DEFAULT_SPACE if fit == "closed" else "residual"
    if not model.linear_layers("mlp"):
        default_space = default_space.replace("mlp-matrix", "residual-matrix")
    elif was_finetuned(model):
        default_space = default_space.replace("mlp-matrix", "linear-matrix")
    if classifier:
        network: Any = model
        default_space = steering.default_space(network) if fit == "closed" else "logit"
    names = parse_space(options.space or default_space)
    inside = next((name for name in names if name in LAYER_SPACES), None)
    if inside is not None and not model.linear_layers(LAYER_SPACES[inside].which):
        raise UsageError(
            f"space {inside} steers linear layers, of which {model.name} has none that can be told",
            fix=f"use --space {'logit' if classifier else 'residual-matrix+logit+token-logit'}",
        )
    closed_only = [name for name in names if name in LAYER_SPACES or name == "head-matrix"]
    if closed_only and fit == "sgd":
        raise UsageError(
            f"space {closed_only[0]} is fitted in closed form only",
            fix="drop --fit sgd, or use --space residual",
        )
    default_layer = min(model.n_layers, max(1, round(2 * model.n_layers / 3)))
    layer = options.layer if options.layer is not None else default_layer
    if not 0 <= layer <= model.n_layers:
        raise UsageError(
            f"layer {layer} is not in the model (expected 0 to {model.n_layers})",
            fix=f"two thirds of the depth is {round(2 * model.n_layers / 3)}",
        )
    if options.rank is not None and options.rank < 1:
        raise UsageError(f"rank {options.rank} is below 1", fix="use a positive --rank")
    if options.buckets is not None and options.buckets < 1:
        raise UsageError(f"{options.buckets} buckets are too few", fix="use a positive --buckets")
    # with few classes all of the features fit: 32 of their 128 principal directions cost .08 of LDS on MNIST
    default_ranks = DEFAULT_RANKS
    if classifier:
        default_ranks = {**DEFAULT_RANKS, "logit": _CLASSIFIER_RANK, "head-matrix": _CLASSIFIER_RANK + 1}
    ranks = {name: options.rank or default_ranks[name] for name in names}
    if inside is not None and options.rank is None:
        ranks[inside] = affordable_rank(model, inside, index.n_subsets)
    seed = options.seed if options.seed is not None else index.seed
    common: dict[str, Any] = {"spaces": names, "layer": layer, "ranks": ranks, "seed": seed}
    if fit == "closed":
        if options.damping is not None and not options.damping > 0:
            raise UsageError(f"damping {options.damping} is not positive", fix="try --damping 0.1")
        if options.curvature not in (None, *CURVATURES):
            raise UsageError(
                f"unknown curvature '{options.curvature}'", fix=f"use one of {', '.join(CURVATURES)}"
            )
        curvature = options.curvature
        few = min(_CLASSIFIER_RANK, model.d_model) * model.vocab_size <= _CLASSIFIER_GATES
        of_weights = set(names) <= set(steering.WEIGHT_SPACES)
        if curvature is None and classifier and few and (names == ("logit",) or of_weights):
            curvature = "exact"
        given: dict[str, Any] = {
            "curvature": curvature,
            "n_buckets": options.buckets or affordable_buckets(names, ranks, model, index.n_subsets),
            "damping": _CLASSIFIER_DAMPING
            if curvature == "exact" and not options.damping
            else options.damping,
            "batch_tokens": options.batch_tokens,
            "stability": options.stability,
        }
        if classifier and curvature == "exact" and of_weights and not options.damping:
            path = steering.training_path(network)
            given |= {} if path is None else {"time": path.time, "trajectory": path.checkpoints}
        return ClosedSettings(**common, **{key: value for key, value in given.items() if value is not None})
    common["ranks"] = dict.fromkeys(names, options.rank or 32)
    if options.variant is not None and options.variant not in STABILITY_VARIANTS:
        raise UsageError(
            f"unknown stability loss '{options.variant}'", fix=f"use one of {', '.join(STABILITY_VARIANTS)}"
        )
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"{options.steps} steps are too few", fix="use a positive --steps")
    sgd: dict[str, Any] = {
        "steps": options.steps,
        "lr": options.lr,
        "variant": options.variant,
        "fidelity": options.fidelity,
        "stability": options.stability,
        "linearity": options.linearity,
    }
    chosen = SgdSettings(**common, **{key: value for key, value in sgd.items() if value is not None})
    if options.lr is not None:
        chosen = replace(chosen, lr_end=options.lr / 10)
    return replace(chosen, warmup=min(chosen.warmup, max(1, chosen.steps // 10)))


def recovery_defaults(index: Index, fit: str, recipe: str | None) -> dict[str, Any]:
    """How queries are measured and recovered unless told otherwise: lambda_ratio, intercept, measure."""
    from stride_cli.classifiers.kind import is_classifier_index

    paper = recipe == "paper"
    usual = DEFAULT_LAMBDA_RATIO[fit]
    if is_classifier_index(index) and fit == "closed":
        usual = _CLASSIFIER_LAMBDA_RATIO
    return {
        "lambda_ratio": PAPER_LAMBDA_RATIO if paper else usual,
        "intercept": not paper,
        "measure": "linear" if fit == "closed" else "exact",
    }


def open_model(
    index: Index, model_path: str | None = None, *, device: str = "auto", dtype: str = "auto"
) -> CausalLM:
    """The model of an index, its weights and tokenizer compared with the index's fingerprints.

    Of a classifier's index: a `ClassifierModel` with the index's rows as its inputs (see `open_classifier`).

    Raises
    ------
    ModelError         the index records no path, and none is given
    IndexMismatch      another model or tokenizer than the index's
    """
    from stride_cli.classifiers.kind import is_classifier_index
    from stride_cli.classifiers.loading import open_classifier
    from stride_cli.models.loading import load_model

    path = model_path or index.attributes.get("model_path")
    if not path:
        raise ModelError(
            f"index '{index.path}' does not record where its model is", fix="give it with --model PATH"
        )
    if is_classifier_index(index):
        classifier: Any = open_classifier(index, path, device=device, dtype=dtype)
        return classifier
    model = load_model(path, device=device, dtype=dtype)
    index.check_fingerprint("tokenizer", model.tokenizer_fingerprint)
    index.check_fingerprint("model", model.fingerprint)
    return model


@dataclass
class Session:
    """An index, its operators and its model, loaded once for many queries."""

    index: Index
    operators: Operators
    model: CausalLM
    row_sizes: Any  # (K,) int64, |A_k|
    columns: Any  # (n, d), the design matrix
    chunk_document: Any  # (n,) int64
    defaults: dict[str, Any] = field(default_factory=dict)
    # beside the index's own model
    checkpoints: list[tuple[CausalLM, Operators]] = field(default_factory=list)
    priors: dict[str, Any] = field(default_factory=dict)  # by name, once they are asked for

    @classmethod
    def open(
        cls,
        index_path: str | Path,
        *,
        model: CausalLM | None = None,
        model_path: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> Session:
        """Open an index for queries.

        Raises
        ------
        IndexNotFound, IndexDamaged, IndexVersionError
        IndexMismatch     the model is not the index's, or a checkpoint that takes part has changed
        ModelError        a model cannot be loaded, or a checkpoint is gone
        StageMissing      the index has no operators yet
        """
        import numpy as np

        from index_format.reader import Index
        from stride_cli.operators.checkpoints import open_checkpoints
        from stride_cli.operators.store import Operators

        index = Index.open(index_path)
        operators = Operators.from_index(index)
        attributes = index.group_attributes("operators")
        defaults = recovery_defaults(index, operators.fit, attributes.get("recipe"))
        if len(operators.seen) < index.n_chunks:  # chunks appended after the fit were not seen
            unseen = np.zeros(index.n_chunks - len(operators.seen), dtype=np.uint8)
            operators.seen = np.concatenate([operators.seen, unseen])
        model = model or open_model(index, model_path, device=device, dtype=dtype)
        return cls(
            index,
            operators,
            model,
            row_sizes=np.diff(np.asarray(index.array("design/row_offsets"))),
            columns=index.array("design/columns"),
            chunk_document=np.asarray(index.array("corpus/chunk_document")),
            defaults=defaults,
            checkpoints=open_checkpoints(index, model),
        )

    @property
    def pairs(self) -> list[tuple[CausalLM, Operators]]:
        """All models that measure, each with its operators; the index's own first."""
        return [(self.model, self.operators), *self.checkpoints]

    @property
    def is_classifier(self) -> bool:
        """Whether queries are examples of a classifier."""
        from stride_cli.classifiers.kind import is_classifier_index

        return is_classifier_index(self.index)

    def query(
        self,
        prompt: str | Query,
        options: QueryOptions | None = None,
        *,
        response: str | None = None,
        span: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Answer:
        """Which training documents made the model continue ``prompt`` this way?

        Of a classifier: which training rows made it give an example its label?

        Parameters
        ----------
        prompt : str or Query
            A prompt; of a classifier, the number or id of a row of the index's file, held out or not (and
            ``response`` a class, or "predicted"; default: the row's label). Or a finished query, for example
            from `stride_cli.classifiers.queries.file_queries`.
        options : QueryOptions
        response, span : see `build_query`

        Returns
        -------
        Answer

        Raises
        ------
        QueryError, NumericalError
        """
        from stride_cli.recovery.ranking import rank_documents

        options = options or QueryOptions()
        start = clock()
        query = as_query(self.index, self.model, prompt, options, response=response, span=span)
        generated = clock()
        responses, loss, method, agreement = self.measure(query, options)
        measured = clock()
        solution = self.recover(responses, options)
        recovered = clock()
        supporters, opposers = rank_documents(
            solution,
            self.columns,
            self.chunk_document,
            top=options.top,
            bottom=options.bottom,
            seen=self.operators.seen,
            prior=None if options.prior is None else self._prior(query, solution, options.prior),
        )
        ranked, reliability = clock(), None
        if options.halves:
            supporters, opposers, reliability = self._second_opinions(
                responses, options, supporters, opposers
            )
        judged = clock()
        shown = [*supporters, *opposers]
        document_ids = {hit.document: self.index.document_id(hit.document) for hit in shown}
        chunks = [hit.chunk for hit in shown]
        labels = self._labels(chunks) if self.is_classifier else {}
        if self.is_classifier:
            passages = {chunk: f"label {label}" for chunk, label in labels.items()}
        else:
            passages = self._passages(query, chunks)
        ended = clock()
        return Answer(
            query=query,
            loss=loss,
            supporters=supporters,
            opposers=opposers,
            passages=passages,
            solution=solution,
            method=method,
            agreement=agreement,
            seconds={
                "generate": generated - start,
                "measure": measured - generated,
                "recover": recovered - measured,
                "rank": ranked - recovered + ended - judged,
                **({"stability": judged - ranked} if options.halves else {}),
            },
            document_ids=document_ids,
            coverage=float(self.operators.seen.mean()),
            models=len(self.pairs),
            labels=labels,
            responses=responses,
            measured=self.explained_responses(responses, options),
            reliability=reliability,
            prior=options.prior,
        )

    def measure(self, query: Query, options: QueryOptions) -> tuple[Any, float, str, float | None]:
        """Responses (K,) in nats, the query's own loss, the method used and its spot check; of several
        checkpoints, as `stride_cli.measurement.checkpoints.combine_checkpoints` makes them one."""
        import numpy as np

        from stride_cli.measurement.checkpoints import measure_checkpoints
        from stride_cli.randomness import stream

        method = self.defaults["measure"] if options.measure == "auto" else options.measure
        if method not in ("linear", "exact"):
            raise UsageError(f"unknown measurement '{method}'", fix="use auto, linear or exact")
        intercept = self.defaults["intercept"] if options.intercept is None else options.intercept
        check = None
        if options.check:
            order = stream(self.index.seed, "spot check").permutation(self.operators.n_subsets)
            check = np.sort(order[:_SPOT_CHECK])
        responses, losses, agreement = measure_checkpoints(
            self.pairs,
            query.batch(),
            method=method,
            row_sizes=self.row_sizes if intercept else None,
            batch_size=options.batch_size,
            check=check,
        )
        if not np.isfinite(responses).all():
            raise NumericalError(
                "the measured responses are not finite",
                fix="run with --dtype fp32, or fit the operators anew",
            )
        return responses[0], float(losses[0]), method, agreement

    def recover(self, responses: Any, options: QueryOptions) -> Solution:
        """Per-chunk influences from the responses of the K subsets."""
        from stride_cli.recovery.lasso import solve_lasso

        y = self.explained_responses(responses, options)
        return solve_lasso(self.columns, y, **self._recovery(options))

    def _recovery(self, options: QueryOptions) -> dict[str, Any]:
        """How the Lasso is set."""
        intercept = self.defaults["intercept"] if options.intercept is None else options.intercept
        ratio = self.defaults["lambda_ratio"] if options.lambda_ratio is None else options.lambda_ratio
        if not 0 < ratio <= 1:
            raise UsageError(
                f"λ is {ratio} of λ_max (expected more than 0, at most 1)", fix="try --lambda-ratio 0.1"
            )
        return {
            "n_subsets": self.operators.n_subsets,
            "lambda_ratio": ratio,
            "intercept": intercept,
            "nonneg": options.nonneg,
        }

    def _second_opinions(
        self, responses: Any, options: QueryOptions, supporters: list[Hit], opposers: list[Hit]
    ) -> tuple[list[Hit], list[Hit], float]:
        """The hits with their stability, and the answer's reliability."""
        from stride_cli.recovery.stability import solve_halves, with_stability

        y = self.explained_responses(responses, options)
        settings = self._recovery(options)
        halves = solve_halves(self.columns, y, seed=self.index.seed, draws=options.halves, **settings)
        if not options.stability:
            return supporters, opposers, halves.reliability
        lists = [
            with_stability(halves, self.columns, self.chunk_document, hits, top=top, sign=sign)
            for hits, top, sign in ((supporters, options.top, 1), (opposers, options.bottom, -1))
        ]
        return lists[0], lists[1], halves.reliability

    def _prior(self, query: Query, solution: Solution, name: str) -> Any:
        """What a prior adds to the influence of every chunk, (n,) float64; it is fitted once a session."""
        import numpy as np

        from stride_cli.baselines.prior import LexicalPrior, prior_parts
        from stride_cli.baselines.protocol import Task
        from stride_cli.measurement.query_set import QuerySet
        from stride_cli.operators.batches import ChunkReader

        if name not in self.priors:
            found = LexicalPrior(name)
            found.fit(Task(self.index, self.model, ChunkReader(self.index), self.index.seed))
            self.priors[name] = found
        weights = np.zeros(solution.n_chunks)
        weights[solution.indices] = solution.values
        return prior_parts(weights, self.priors[name].similarity(QuerySet.from_queries([query]))[0])

    def explained_responses(self, responses: Any, options: QueryOptions) -> Any:
        """The responses (K,) as the recovery explains them by M w: on the scale of subset sums, or as they
        are where no intercept is fitted."""
        from stride_cli.measurement.additive import additive_measurement

        intercept = self.defaults["intercept"] if options.intercept is None else options.intercept
        return additive_measurement(responses, self.row_sizes) if intercept else responses

    def _labels(self, chunks: Sequence[int]) -> dict[int, str]:
        """Labels of a classifier's rows."""
        names: list[str] = getattr(self.model, "classes", [])
        return {chunk: names[int(self.index.chunk_tokens(chunk)[1])] for chunk in dict.fromkeys(chunks)}

    def _passages(self, query: Query, chunks: Sequence[int]) -> dict[int, str]:
        from stride_cli.recovery.passages import best_passage, rarity

        texts = {
            chunk: str(self.model.tokenizer.decode(self.index.chunk_tokens(chunk), skip_special_tokens=True))
            for chunk in dict.fromkeys(chunks)
        }
        weights = rarity(texts.values())
        wanted = f"{query.prompt} {query.response}"
        return {chunk: best_passage(text, wanted, weights) for chunk, text in texts.items()}


def as_query(
    index: Index,
    model: CausalLM,
    prompt: str | Query,
    options: QueryOptions,
    *,
    response: str | None = None,
    span: str | None = None,
) -> Query:
    """The query that a prompt is, or a row of a classifier; see `Session.query` for the parameters."""
    from stride_cli.classifiers.kind import is_classifier_index
    from stride_cli.measurement.queries import Query, build_query

    if isinstance(prompt, Query):
        return prompt
    if is_classifier_index(index):
        from stride_cli.classifiers.queries import row_query

        classifier: Any = model
        return row_query(classifier, prompt, label=response)
    return build_query(
        model,
        prompt,
        response=response,
        span=span,
        max_new_tokens=options.max_new_tokens,
        chat=options.chat,
    )


def verify_hit(
    index_path: str | Path,
    prompt: str | Query,
    options: QueryOptions | None = None,
    *,
    response: str | None = None,
    span: str | None = None,
    documents: Sequence[str] | None = None,
    seeds: int = 5,
    random: int = 5,
    effect: float | None = None,
    recipe: str | Path | None = None,
    command: str | None = None,
    engine: str = "local",
    workers: int | None = None,
    model: CausalLM | None = None,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, Any]:
    """Retrain without a query's top documents, and without as many random ones: did its loss depend on them?

    What is trained is kept beside the index, and an interrupted call goes on.

    Parameters
    ----------
    prompt, response, span : see `Session.query`
    options : QueryOptions       its `top` says how many documents
    documents : ids, optional    these documents instead of the query's; no operators are needed then
    seeds, random : trainings of every set of documents, and random sets of each seed
    effect : smallest rise of the loss that would matter, nats (default 0.1)
    recipe, command : see `stride_cli.evaluation.retraining.open_trainer`
    engine, workers : see `stride_cli.evaluation.retraining.retrain`

    Returns
    -------
    dict      a ``stride.verify_hit/1``

    Raises
    ------
    UsageError      fewer documents than asked for, an unknown id
    ModelError      the model has no recipe, and no command is given
    """
    from stride_cli.evaluation.hit_record import verify_hit as verify

    return verify(
        index_path,
        prompt,
        options or QueryOptions(),
        response=response,
        span=span,
        documents=documents,
        seeds=seeds,
        random=random,
        effect=effect,
        recipe=recipe,
        command=command,
        engine=engine,
        workers=workers,
        model=model,
        model_path=model_path,
        device=device,
        dtype=dtype,
    )


def tune(
    index_path: str | Path,
    options: TuneOptions | None = None,
    *,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    on_trial: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Sweep settings of the operators; see `stride_cli.tuning.tune.tune` for the criterion. Writes no file.

    Parameters
    ----------
    options : TuneOptions
    on_trial : called with a ``stride.trial/1`` after each trial

    Returns
    -------
    dict      a ``stride.tune/1``, and ``settings``: what `stride_cli.config.write_settings` takes

    Raises
    ------
    UsageError, StageMissing, NumericalError
    """
    from stride_cli.evaluation.scoring import TaskPath
    from stride_cli.tuning.tune import TuneOptions, tune_index

    where = TaskPath(Path(index_path), model_path, device, dtype)
    return tune_index(where, options or TuneOptions(), on_trial)


def audit(
    session: Session,
    benchmark: str | Path,
    *,
    controls: str | Path | None = None,
    options: AuditOptions | None = None,
) -> list[Finding]:
    """Is a benchmark in the corpus, and has the model learnt it from there? What `stride audit` judges.

    Parameters
    ----------
    benchmark, controls : files of items, as corpora are; None: controls as the options say
    options : AuditOptions

    Returns
    -------
    list of Finding, in the order of the items; ``to_record()`` gives a ``stride.audit/1``

    Raises
    ------
    CorpusError, UsageError
    """
    from stride_cli.audit.judge import AuditOptions, audit_files
    from stride_cli.corpus.readers import ReadOptions

    against = None if controls is None else str(controls)
    return audit_files(lambda: session, str(benchmark), against, options or AuditOptions(), ReadOptions())[1]


def select(
    index_path: str | Path,
    task: str | Path,
    *,
    size: int,
    method: str = "stride",
    by: str = "greedy",
    out: str | Path | None = None,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
) -> Selection:
    """Documents to train on for a task, with equally many by BM25 and at random beside them.

    Parameters
    ----------
    task : file of queries
    size : documents to choose
    method : whose scores, as for `stride baseline`
    by : "greedy" (best rank over queries), "sum" or "quota" (tasks in turn)
    out : directory that gets the three files, optional

    Returns
    -------
    Selection

    Raises
    ------
    UsageError      more documents than the corpus has, an index without text, something at ``out``
    StageMissing    the index has no operators, and the method needs them
    """
    from stride_cli.evaluation.scoring import TaskPath
    from stride_cli.selection.select import run_selection

    where = TaskPath(Path(index_path), model_path, device, dtype)
    out = None if out is None else Path(out)
    return run_selection(where, Path(task), size=size, method=method, by=by, out=out, overwrite=overwrite)[2]


def evaluate(
    index_path: str | Path,
    queries: str | Path,
    *,
    methods: Sequence[str] = ("stride",),
    subsets: int = 64,
    seeds: int = 1,
    alpha: float = 0.5,
    workers: int | None = None,
    draws: int = 1000,
    model_path: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> list[dict[str, Any]]:
    """Linear datamodeling score of methods, on models retrained on random subsets; trains what is missing.

    Parameters
    ----------
    queries : file of queries
    methods : names, with options as for `stride baseline`
    subsets, seeds, alpha : retrained models, see `stride_cli.evaluation.truth.build_truth`
    draws : bootstrap resamples

    Returns
    -------
    list of ``stride.lds/1``, one for each method

    Raises
    ------
    UsageError, QueryError, ModelError
    """
    from stride_cli.evaluation.bench import Bench, build_truth_of, check_method
    from stride_cli.evaluation.compare import lds_record
    from stride_cli.evaluation.scoring import TaskPath

    for method in methods:
        check_method(method)
    where, path = TaskPath(Path(index_path), model_path, device, dtype), Path(queries)
    build_truth_of(where, path, n_subsets=subsets, n_seeds=seeds, alpha=alpha, workers=workers)
    bench = Bench(where, queries=path, alpha=alpha)
    return [lds_record(entry, ground) for entry, ground in bench.lds(methods, draws=draws)]


def demo_corpus() -> tuple[Path, list[dict[str, Any]]]:
    """The embedded corpus file, and its prompts: ``{prompt, answer, documents, listed}``."""
    import json

    folder = Path(__file__).parent / "demo"
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    return folder / "corpus.jsonl", prompts


def prepare_demo(
    out: str | Path, *, say: Callable[[str], None] = lambda text: None
) -> tuple[Session, list[dict[str, Any]]]:
    """Model, index and operators of the embedded corpus, under ``out``; what is there already is used again.

    Parameters
    ----------
    out : directory      gets ``corpus.jsonl``, ``model/`` and ``demo.stride/``
    say : called with a line of text before each stage

    Returns
    -------
    session : Session, prompts : list of dict, as from `demo_corpus`
    """
    import shutil

    from stride_cli.models.pretraining import TrainOptions as ModelOptions
    from stride_cli.models.pretraining import train_model

    corpus, prompts = demo_corpus()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    copy, model_path, index_path = out / "corpus.jsonl", out / "model", out / "demo.stride"
    if not copy.exists():
        shutil.copyfile(corpus, copy)
    if not model_path.exists():
        say("1/4 training a small model on 408 short documents")
        train_model([str(copy)], model_path, ModelOptions(epochs=_DEMO_EPOCHS))
    if not index_path.exists():
        say("2/4 indexing the corpus")
        build_index([str(copy)], model_path=str(model_path), out=index_path)
    from index_format.reader import Index

    if not Index.open(index_path).has("operators"):
        say("3/4 fitting one steering operator per subset")
        train(index_path)
    say("4/4 asking")
    return Session.open(index_path), prompts
