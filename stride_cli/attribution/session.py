"""An index with its operators and its model, open for queries.

Prompts go through the pipeline together, where nothing hinders it. One bad prompt does not stop the others:
what cannot be done of all together is done of each alone, and one that has no answer has its error in its
place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from stride_cli.attribution.answer import Answer, MeasurementRecord
from stride_cli.attribution.options import QueryOptions, RecoveryOptions
from stride_cli.attribution.pipeline import Measurement
from stride_cli.errors import NumericalError, QueryError, StrideError, UsageError
from stride_cli.output import progress
from stride_cli.schema.answer_records import AnswerSeconds
from stride_cli.schema.derivation import to_record
from stride_cli.startup import without_collection

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from index_format.reader import Index
    from stride_cli.attribution.decisive import CorpusWords
    from stride_cli.attribution.nats import CalibrationRecord
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.attribution.verdict import NullAnswers, Verdict
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.models.spec import GivenModel
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.problem import Solution
    from stride_cli.recovery.ranking import Hit

TOGETHER = 128  # prompts of a file whose chunks are read in one pass, at most
_READ_OF_A_TOKEN, _JUDGED_BY = 20, 10  # chunks, where the model is torn; documents on either side
_Item = TypeVar("_Item")
_Outcome = TypeVar("_Outcome")
OF_A_PROMPT = (QueryError, NumericalError)  # errors that say nothing of the prompts beside it


@dataclass(frozen=True)
class _Asked:
    """A prompt on its way: its query, as a batch that remembers its gradient, what was found of it so far,
    and the seconds that each stage took. Of hits, supporters and opposers."""

    query: Query
    batch: Batch
    measurement: Measurement
    seconds: dict[str, float]
    solution: Solution | None = None
    hits: tuple[list[Hit], list[Hit]] = ([], [])
    verdict: Verdict | None = None


@dataclass(repr=False)
class Session:
    """An index, its operators and its model, loaded once for many queries."""

    workspace: Workspace
    operators: Operators
    designs: Designs  # of all models that measure
    chunk_document: Any  # (n,) int64, mapped
    defaults: dict[str, Any] = field(default_factory=dict)
    # beside the index's own model
    checkpoints: list[SteeredModel] = field(default_factory=list)
    calibration: NullAnswers | None = None

    @classmethod
    @without_collection()  # most of it is importing
    @progress("opening the index and its model")
    def open(
        cls,
        index_path: str | Path | RemotePath,
        *,
        model: AttributableModel | GivenModel | None = None,
        recalibrate: bool = False,
    ) -> Session:
        """Open an index for queries: a directory, or, fetched as it is needed, a zip file or a URL.

        Parameters
        ----------
        model : see `Workspace.open`
        recalibrate : its calibration is to be replaced: one that is damaged is passed over, with a note

        Raises
        ------
        IndexNotFound, IndexDamaged, IndexVersionError, IndexUnreachable
        IndexMismatch     the model is not the index's, or a checkpoint that takes part has changed
        ModelError        a model cannot be loaded, or a checkpoint is gone
        StageMissing      the index has no operators yet
        """
        from stride_cli.attribution.calibration import stored_calibration
        from stride_cli.attribution.defaults import recovery_defaults
        from stride_cli.data.workspace import Workspace, open_index
        from stride_cli.operators.checkpoints import open_checkpoints, stored_designs
        from stride_cli.operators.store import Operators

        index = open_index(index_path)
        operators = Operators.from_index(index)
        attributes = index.group_attributes("operators")
        workspace = Workspace.open(index, model)
        opened = cls(
            workspace,
            operators,
            designs=stored_designs(index),
            chunk_document=index.array("corpus/chunk_document"),
            defaults=recovery_defaults(index, workspace.model, operators.fit, attributes.get("recipe")),
            checkpoints=open_checkpoints(index, workspace.model),
            calibration=stored_calibration(index, replaced=recalibrate),
        )
        with index.understanding("operators"):
            opened._try_out()
        return opened

    def __repr__(self) -> str:
        return f"Session({self.index!r}, model {self.model.name!r})"

    @cached_property
    def never_trained(self) -> frozenset[int] | None:
        """Numbers of the documents that the model was not trained on: see `untrained_documents`."""
        from stride_cli.training.index_changes import untrained_documents

        return None if self.model.table is not None else untrained_documents(self.index, self.model.path)

    def _try_out(self) -> None:
        """Take two tokens through every model and its operators' spaces: what does not fit raises."""
        from stride_cli.data.batches import pad_batch
        from stride_cli.operators.gradients import gate_gradients

        two = pad_batch(np.zeros(1, np.int64), [np.zeros(2, np.int64)], [np.array([0.0, 1.0])])
        for steered in self.steered:
            found, _ = gate_gradients(steered, two)
            for gradient, gates in zip(found, steered.operators.gates, strict=True):
                if gradient.shape[1] != gates.shape[1]:
                    raise ValueError(f"{gates.shape[1]} gates have {gradient.shape[1]} gradients")

    @cached_property
    def words(self) -> CorpusWords:
        from stride_cli.attribution.decisive import CorpusWords

        return CorpusWords.of(self.workspace)

    @property
    def index(self) -> Index:
        return self.workspace.index

    @property
    def model(self) -> AttributableModel:
        """The index's own."""
        return self.workspace.model

    @cached_property
    def coverage(self) -> float:
        """Share of all chunks that the operators have seen: not those that were appended after the fit."""
        return float(np.count_nonzero(np.asarray(self.operators.seen))) / max(1, self.index.n_chunks)

    @cached_property
    def steered(self) -> list[SteeredModel]:
        """All models that measure, each with its operators; the index's own first."""
        from stride_cli.operators.steered_model import SteeredModel

        return [SteeredModel.of(self.model, self.operators), *self.checkpoints]

    def query(
        self,
        prompt: str | Query,
        options: QueryOptions | None = None,
        *,
        response: str | None = None,
        span: str | None = None,
        instead: str | None = None,
    ) -> Answer:
        """Find the training documents that made the model continue ``prompt`` this way.

        Of a classifier: the training rows that made it give an example its label.

        Parameters
        ----------
        prompt : str or Query
            A prompt; of a classifier, the number or id of a row of the index's file, held out or not (and
            ``response`` a class, or "predicted"; default: the row's label). Or a finished query, for example
            from `stride_cli.data.example_queries.asked_examples`.
        options : QueryOptions
        response, span : see `build_queries`
        instead : str, optional      why not this response? See `stride_cli.data.queries.compared`

        Returns
        -------
        Answer

        Raises
        ------
        QueryError, NumericalError
        """
        asked = {"prompt": prompt, "response": response, "span": span, "instead": instead}
        return next(self.query_all([asked], options, together=1))

    def query_pooled(
        self,
        prompts: Iterable[Mapping[str, Any]],
        options: QueryOptions | None = None,
        *,
        add: str | None = None,
    ) -> Answer:
        """Find the documents that made the model answer all of these prompts so.

        Parameters
        ----------
        prompts : as of `query_all`, one or more
        add : "support" or "all"
            A document's influence is the mean over prompts of what is above zero of its influence on each; or
            its influence on the prompts' mean loss. Default: "support" where all prompts are comparisons

        Raises
        ------
        QueryError, NumericalError      of the first prompt that has no answer; or there is none
        UsageError                      "support", and opposers are asked for
        """
        from stride_cli.data.queries import pooled

        options = QueryOptions.given(options)
        queries = [_raised(query) for query in self.build(list(prompts), options)]
        if not queries:
            raise QueryError("there is no prompt to ask", fix="give one or more")
        one = pooled(queries, self.model.length_kinds)
        if add is None:
            add = "support" if all(query.comparison is not None for query in queries) else "all"
        if add == "all":
            return replace(self.query(one, options), added=add)
        if options.bottom:
            raise UsageError(
                f"opposers are not asked for where support is added up (found --bottom {options.bottom})",
                fix='leave --bottom out; in Python, query_pooled(add="all")',
            )
        pipeline = self.pipeline(options)
        found: list[_Asked] = []
        step = _together(pipeline)
        for start in range(0, len(queries), step):
            some = [{"prompt": query} for query in queries[start : start + step]]
            with progress("asking the model"):
                asked = [_raised(each) for each in self._measured(pipeline, some, options)]
            found += [_raised(each) for each in self._found(pipeline, asked)]
        (whole,) = self._judged(options, pipeline, [_as_one(pipeline, one, found, self.chunk_document)])
        return replace(self._answer(pipeline, options, _raised(whole)), added=add)

    def build(self, prompts: Sequence[Mapping[str, Any]], options: QueryOptions) -> list[Query | StrideError]:
        """Prompts with the model's responses where none are given, or the error of one that has none.

        Parameters
        ----------
        prompts : as of `query_all`
        options : their form, and the length of what the model writes
        """
        from stride_cli.attribution.decisive import measured
        from stride_cli.data.queries import Query, form_of
        from stride_cli.data.query_files import as_queries

        form = form_of(self.workspace, options.chat)
        found = as_queries(self.model, prompts, max_new_tokens=options.max_new_tokens, form=form)
        if self.model.table is not None:
            return found
        # what is asked about in words of the user's own counts as it stands, and other turns are no prompt's
        plain = [
            each.get("span") is None
            and each.get("prompt") is not query
            and not (isinstance(turns := each.get("messages"), list) and len(turns) > 1)
            for each, query in zip(prompts, found, strict=True)
        ]
        own: Any = self.model
        return [
            measured(own, self.words, query, weigh=options.decisive and weigh)
            if isinstance(query, Query) and not query.parts and query.losses is None
            else query
            for query, weigh in zip(found, plain, strict=True)
        ]

    def query_all(
        self,
        prompts: Iterable[Mapping[str, Any]],
        options: QueryOptions | None = None,
        *,
        together: int | None = None,
    ) -> Iterator[Answer]:
        """`query` of one prompt after the other; chunks are read for several of them in one pass.

        Parameters
        ----------
        prompts : of "prompt" and, where there are, "response", "span" and "instead"
        together : prompts whose answers come together; 1: each as soon as it can. Default: 128 at most, where
            chunks are read

        Raises
        ------
        QueryError, NumericalError      once all that came before has been answered
        """
        for outcome in self.outcomes(prompts, options, together=together):
            yield _raised(outcome)

    def outcomes(
        self,
        prompts: Iterable[Mapping[str, Any] | StrideError],
        options: QueryOptions | None = None,
        *,
        together: int | None = None,
    ) -> Iterator[Answer | StrideError]:
        """`query_all`, in which one bad prompt does not stop the others: one outcome for each, in order.

        Parameters
        ----------
        prompts : as of `query_all`; or the error of one that could not be read, which comes back in its place
        """
        options = QueryOptions.given(options)
        pipeline = self.pipeline(options)
        together = _together(pipeline, together)
        broken: list[StrideError] = []
        arriving = until_broken(prompts, broken)
        while taken := list(islice(arriving, together)):
            with progress("asking the model"):
                asked = self._measured(pipeline, taken, options)
            yield from self._answers(pipeline, asked, options)
        if broken:
            raise broken[0]

    # ---- 1. prompts are built and measured ----

    def _measured(
        self,
        pipeline: Pipeline | Several,
        prompts: Sequence[Mapping[str, Any] | StrideError],
        options: QueryOptions,
    ) -> list[_Asked | StrideError]:
        """Prompts' responses, and how the subsets answer them: of all together, where nothing hinders it."""
        # 1. What the model answers, where no response is given; errors keep their places
        start = time.perf_counter()
        queries = _of_good(prompts, lambda good: self.build(good, options))
        # 2. How the subsets answer those that have a query
        generated = time.perf_counter()
        found = _of_good(queries, lambda good: self._measured_queries(pipeline, good))
        # 3. Each prompt has an equal part of the time: they were asked together
        asked, good = (sum(not isinstance(each, StrideError) for each in some) for some in (prompts, queries))
        seconds = {
            "generate": (generated - start) / max(1, asked),
            "measure": (time.perf_counter() - generated) / max(1, good),
        }
        return _of_good(found, lambda good: [replace(each, seconds=dict(seconds)) for each in good])

    def _measured_queries(
        self, pipeline: Pipeline | Several, queries: Sequence[Query]
    ) -> list[_Asked | StrideError]:
        """Queries of about one length are measured in one pass over the gates."""
        from stride_cli.data.batches import little_padding

        plain = [place for place, query in enumerate(queries) if not query.parts]
        groups = little_padding([len(queries[place].ids) for place in plain], self.model.length_kinds)
        together = [[plain[at] for at in group] for group in groups]
        together += [[place] for place, query in enumerate(queries) if query.parts]
        found: dict[int, _Asked | StrideError] = {}
        for group in together:
            outcomes = self._measured_batch(pipeline, [queries[place] for place in group])
            found.update(zip(group, outcomes, strict=True))
        return [found[place] for place in range(len(queries))]

    def _measured_batch(
        self, pipeline: Pipeline | Several, queries: Sequence[Query]
    ) -> list[_Asked | StrideError]:
        """Measure a batch of queries; fall back to one at a time if a query fails."""
        from stride_cli.data.batches import RememberingBatch
        from stride_cli.data.query_set import QuerySet
        from stride_cli.operators.linear_response import each_remembering

        single = len(queries) == 1
        try:
            rows = range(len(queries))
            batch = queries[0].batch() if single else QuerySet.from_queries(queries).batch(rows)
            whole = RememberingBatch.of(batch)
            measured = pipeline.measure([whole])
        except OF_A_PROMPT as error:
            if single:
                return [error]
            return [found for query in queries for found in self._measured_batch(pipeline, [query])]
        batches = [whole] if single else each_remembering(whole, [query.batch() for query in queries])
        return [
            _Asked(query, own, measured.of_query(row), {})
            for row, (query, own) in enumerate(zip(queries, batches, strict=True))
        ]

    # ---- 2. influences are found ----

    def _found(self, pipeline: Pipeline | Several, asked: Sequence[_Asked]) -> list[_Asked | StrideError]:
        """Find influences on measured prompts together; fall back to one at a time if one fails."""
        from stride_cli.data.query_set import QuerySet

        if not asked:
            return []
        start = time.perf_counter()
        reached: dict[str, float] = {}
        try:
            solutions = pipeline.influences(
                QuerySet.from_queries([each.query for each in asked]),
                [each.batch for each in asked],
                Measurement.stacked([each.measurement for each in asked]),
                reached=lambda stage: reached.__setitem__(stage, time.perf_counter()),
            )
        except OF_A_PROMPT as error:
            if len(asked) == 1:
                return [error]
            return [found for each in asked for found in self._found(pipeline, [each])]
        spent = {"recover": reached["recover"] - start}
        if pipeline.settings.looks_at_chunks:
            spent["read"] = reached["read"] - reached["recover"]
        # of what is done together each prompt has its part of the time
        shared = {stage: each / len(asked) for stage, each in spent.items()}
        return [
            replace(each, solution=solution, seconds=each.seconds | shared)
            for each, solution in zip(asked, solutions, strict=True)
        ]

    # ---- 3. answers are put together ----

    def _answers(
        self, pipeline: Pipeline | Several, asked: Sequence[_Asked | StrideError], options: QueryOptions
    ) -> Iterator[Answer | StrideError]:
        """The outcomes of prompts, of which those that are measured are answered together."""
        with progress("finding documents"):
            found = _of_good(asked, partial(self._found, pipeline))
            found = _of_good(found, partial(self._judged, options, pipeline))
        for each in found:
            try:
                outcome = each if isinstance(each, StrideError) else self._answer(pipeline, options, each)
            except OF_A_PROMPT as error:
                outcome = error
            yield outcome

    def _answer(self, pipeline: Pipeline | Several, options: QueryOptions, asked: _Asked) -> Answer:
        """Documents in order, their passages, and what may be concluded."""
        from stride_cli.attribution.nats import TENTH
        from stride_cli.attribution.passages import row_labels, word_weights
        from stride_cli.operators.linear_response import gradients_with_loss

        query, measured, solution, start = asked.query, asked.measurement, asked.solution, time.perf_counter()
        assert solution is not None
        settings, verdict = pipeline.settings, asked.verdict
        supporters, opposers = asked.hits[0][: options.top], asked.hits[1][: options.bottom]
        shown = [*supporters, *opposers]
        labels = row_labels(self.workspace, [hit.chunk for hit in shown])
        passages = {chunk: f"label {label}" for chunk, label in labels.items()}
        carrying = bool(settings.reads) and not labels
        if not labels and options.passages != "none":
            carried = measured.responses[0] if carrying and options.passages == "carrying" else None
            passages = self._passages(query, shown, carried, asked.batch)
        line, scale = None, None
        if self.calibration is not None and not query.parts:
            default = self.pipeline().settings
            like = settings.like(default) and bool(settings.reads) == bool(default.reads)
            weighed = not query.alike or int((query.weights > 0).sum()) == 1
            if verdict is not None and verdict.line is not None and like and weighed:
                line = verdict.line * solution.total
            # nats hold for influences found as they were when these were measured (`scale.responses_of`)
            same = weighed if self.model.pretrained else query.alike
            if like and same and (found := self.calibration.scale) is not None and found.sure:
                scale = found
        numbers, most = {hit.document for hit in shown}, TENTH * self.index.n_chunks
        other_loss = None
        if query.comparison is not None:  # of the token that the response is compared with; remembered
            other_loss = float(gradients_with_loss(self.steered[0], asked.batch)[1][1])
        ended = time.perf_counter()
        return Answer(
            query=query,
            loss=float(measured.losses[0] if query.alike or query.losses is None else query.losses.mean()),
            other_loss=other_loss,
            supporters=supporters,
            opposers=opposers,
            passages=passages,
            solution=solution,
            measurement=MeasurementRecord(
                settings.method, self.index.n_subsets, self.coverage, settings.models
            ),
            seconds=cast("AnswerSeconds", {**asked.seconds, "rank": ended - start}),
            document_ids={each: self.index.document_id(each) for each in numbers},
            titles={each: self.index.document_title(each) for each in numbers},
            labels=labels,
            responses=measured.responses[0],
            measured=measured.y[0],
            asked=options.top,
            read=settings.reads,
            recall=solution.recall,
            estimated=settings.estimated,
            redundancy=settings.redundancy,
            shrinkage=settings.shrinkage,
            verdict=verdict,
            line=line,
            missing=self._missing(query, asked.hits[0], line),
            pieces=() if labels else word_weights(self.model.tokenizer, query),
            scale=scale,
            large=frozenset(each for each in numbers if len(self.index.document_chunks(each)) > most),
            never_trained=self.never_trained,
            carried=not carrying or options.passages == "carrying",
        )

    def _judged(
        self, options: QueryOptions, pipeline: Pipeline | Several, asked: Sequence[_Asked]
    ) -> list[_Asked | StrideError]:
        """Rank documents and judge answers; about tokens that the model is torn at it is asked together."""
        from stride_cli.attribution.decisive import torn
        from stride_cli.attribution.verdict import strongest

        judged: list[_Asked] = []
        tokens: dict[int, Query] = {}
        top, bottom = (max(count, _JUDGED_BY) for count in (options.top, options.bottom))
        for place, each in enumerate(asked):
            query, solution, verdict = each.query, cast("Solution", each.solution), None
            hits = self._ranked(pipeline, solution, top=top, bottom=bottom)
            # null prompts were asked one by one, and not compared
            if self.calibration is not None and not query.parts:
                assert query.losses is not None
                documents, share = strongest(solution, self.chunk_document)
                held = self.words.held_by(documents, query.prompt)
                verdict = self.calibration.judge(query.losses, share, held)
                others = [hit.document for side in hits for hit in side[:_JUDGED_BY]][1:]
                if verdict is not None and held and (at := torn(self.words, query, others)):
                    tokens[place] = at
            judged.append(replace(each, hits=hits, verdict=verdict))
        found: list[_Asked | StrideError] = [*judged]
        if not tokens:
            return found
        reads = min(pipeline.settings.reads, _READ_OF_A_TOKEN)  # only who is first on either side counts
        few = self.pipeline(replace(options, read=reads)) if pipeline.settings.estimated else pipeline
        measured = self._measured_queries(few, list(tokens.values()))
        for place, token in zip(tokens, _of_good(measured, partial(self._found, few)), strict=True):
            against = None if isinstance(token, StrideError) else self._against(few, token)
            if against and (verdict := judged[place].verdict):
                name = self.index.document_id(against.document)
                verdict = replace(verdict, word="contested", against=name)
                found[place] = replace(judged[place], verdict=verdict)
        return found

    def _ranked(
        self, pipeline: Pipeline | Several, solution: Solution, *, top: int, bottom: int
    ) -> tuple[list[Hit], list[Hit]]:
        """Rank documents by the influence of their chunks: supporters and opposers, strongest first."""
        from stride_cli.recovery.ranking import rank_documents, told_apart

        columns, documents, seen = self.designs.columns, self.chunk_document, self.operators.seen
        both = rank_documents(solution, columns, documents, top=top, bottom=bottom, seen=seen)
        estimated = pipeline.settings.estimated
        first, last = (told_apart(hits, solution.exact, estimated=estimated) for hits in both)
        return first, last

    def _against(self, pipeline: Pipeline | Several, token: _Asked) -> Hit | None:
        """Find the document that says another thing at the token that the model is torn at."""
        from stride_cli.attribution.decisive import CONTESTED

        hits = self._ranked(pipeline, cast("Solution", token.solution), top=1, bottom=1)
        both = [hit for each in hits for hit in each]
        as_strong = len(both) == 2 and both[1].share >= CONTESTED * both[0].share
        held = as_strong and all(self.words.held_by([hit.document], token.query.prompt) for hit in both)
        return both[1] if held else None

    def _missing(self, query: Query, hits: Sequence[Hit], line: float | None) -> tuple[str, ...]:
        """List the prompt's rarest words that stand in no document above the line."""
        from stride_cli.attribution.decisive import words_of

        if line is None:
            return ()
        above = [words_of(self.workspace, hit.document) for hit in hits if hit.influence > line]
        return tuple(word for word in self.words.named(query.prompt) if not any(word in own for own in above))

    def with_passages(self, answer: Answer) -> Answer:
        """Return an answer of this session with the passages that carry the influence of its hits, as it has
        them where `QueryOptions.passages` are "carrying"; itself where it has them. Raises NumericalError."""
        if answer.carried:
            return answer
        shown = [*answer.supporters, *answer.opposers]
        return replace(answer, passages=self._passages(answer.query, shown, answer.responses), carried=True)

    def pipeline(self, options: RecoveryOptions | None = None) -> Pipeline | Several:
        """The pipeline from queries to influences, asked in this way."""
        from stride_cli.attribution.several import open_pipeline

        steered = self.steered
        return open_pipeline(
            [each.operators for each in steered],
            lambda number: steered[number],
            self.designs,
            self.workspace,
            self.defaults,
            options or RecoveryOptions(),
        )

    @progress("calibrating")
    def calibrate(self, options: CalibrationOptions | None = None) -> CalibrationRecord:
        """Ask prompts about which no corpus says anything; from then on answers have verdicts.

        What was there is replaced, but for what influences are in nats, which is measured where options ask
        for it (`retrain`).

        Raises
        ------
        UsageError         the index is of a classifier
        IndexReadOnly      it is a URL or a zip file
        """
        from index_format.location import local_directory
        from stride_cli.attribution.calibration import calibrate
        from stride_cli.attribution.options import CalibrationOptions
        from stride_cli.models.kinds import refuse_classifier

        # refused before anything is asked or trained
        fix = "compare rows of known cause instead (stride evaluate --help)"
        refuse_classifier(self.index, "there are no null prompts of one", fix=fix)
        local_directory(self.index.path)
        begun = time.perf_counter()
        options, pipeline = CalibrationOptions.given(options), self.pipeline()
        scale = self.calibration.scale if self.calibration else None
        if options.retrain:
            from stride_cli.attribution.scale import measure_scale

            scale = measure_scale(pipeline, options.retrain)
        self.calibration = calibrate(pipeline, options.nulls, scale)
        return {
            "schema": "stride.calibration/1",
            "index": str(self.index.path),
            "nulls": len(self.calibration.losses),
            "median_loss": self.calibration.median_loss,
            "scale": to_record(scale),
            "sure": scale is not None and scale.sure,
            "seconds": time.perf_counter() - begun,
        }

    def _passages(
        self, query: Query, hits: Sequence[Hit], responses: Any = None, batch: Batch | None = None
    ) -> dict[int, str]:
        """Find the sentence of each hit that carries its influence, if responses are given; else, or where
        none carries it, the one most like the query."""
        from stride_cli.attribution.passages import carried_parts, likest_passages

        found: dict[int, str] = {}
        if responses is not None:
            chunks = {hit.chunk: hit.sign == "supports" for hit in hits}
            parts = carried_parts(self.steered[0], self.workspace, query, responses, chunks, batch)
            found = {chunk: part.passage for chunk, part in parts.items() if part.passage}
        return found | likest_passages(self.workspace, query, [hit.chunk for hit in hits], found)


def _together(pipeline: Pipeline | Several, most: int | None = None) -> int:
    """Count the prompts of one pass: one where no chunks are looked at for them."""
    return min(most or TOGETHER, pipeline.together) if pipeline.settings.looks_at_chunks else 1


def until_broken(prompts: Iterable[_Outcome], broken: list[StrideError]) -> Iterator[_Outcome]:
    """Yield prompts as they come; keep their giver's error for the end, when all before are answered."""
    try:
        yield from prompts
    except StrideError as error:
        broken.append(error)


def _of_good(
    items: Sequence[_Item | StrideError], compute: Callable[[list[_Item]], Sequence[_Outcome | StrideError]]
) -> list[_Outcome | StrideError]:
    """Compute outcomes of all items together; errors among these keep their places."""
    found = iter(compute([each for each in items if not isinstance(each, StrideError)]))
    return [each if isinstance(each, StrideError) else next(found) for each in items]


def _raised(outcome: _Outcome | StrideError) -> _Outcome:
    """The outcome, or its error raised."""
    if isinstance(outcome, StrideError):
        raise outcome
    return outcome


def _as_one(
    pipeline: Pipeline | Several, one: Query, found: Sequence[_Asked], documents: np.ndarray
) -> _Asked:
    """Join several prompts, each asked alone: what supports any of them is added up.

    Measurements are means, without those of tokens that responses are compared with. The certificate is that
    of the prompt whose own is weakest; of several recoveries no recall is told, and no residual, so that no
    document is backfilled by it.

    Parameters
    ----------
    pipeline : by which they were found
    one : Query      of `stride_cli.data.queries.pooled`
    found : of each of its prompts
    documents : (n,) int64      of each chunk
    """
    from stride_cli.recovery.problem import dense

    measured = [each.measurement for each in found]
    responses = np.mean([each.responses for each in measured], axis=0)
    y, average = pipeline.explained(responses)
    losses = np.mean([each.losses for each in measured], axis=0)
    together = replace(measured[0], responses=responses, y=y, average=average, losses=losses)
    seconds = {stage: sum(each.seconds[stage] for each in found) for stage in found[0].seconds}
    solutions = [each.solution for each in found if each.solution is not None]
    weakest = max(solutions, key=lambda each: each.relative_gap)
    # the mean over prompts of what is above zero of every document's influence
    mean = np.zeros(weakest.n_chunks)
    for own in (dense([each])[0] for each in solutions):
        mean += own * (np.bincount(documents, own) > 0)[documents] / len(solutions)
    solution = replace(
        weakest,
        indices=np.flatnonzero(mean),
        values=mean[mean != 0],
        average=0.0,
        residual=np.zeros_like(weakest.residual),
        exact=np.unique(np.concatenate([each.exact for each in solutions])),
        recall=None,
    )
    return _Asked(one, one.batch(), together, seconds, solution)
