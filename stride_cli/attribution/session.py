"""An index with its operators and its model, open for queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.answer import Answer, Refused
from stride_cli.attribution.asking import OF_A_PROMPT, Asked, Asking, Found
from stride_cli.attribution.options import QueryOptions, RecoveryOptions
from stride_cli.errors import QueryError, StrideError, UsageError
from stride_cli.output import progress
from stride_cli.startup import without_collection

if TYPE_CHECKING:
    from index_format.location import RemotePath
    from index_format.reader import Index
    from stride_cli.attribution.attributor import Attribution, Attributor
    from stride_cli.attribution.scale import Nats
    from stride_cli.attribution.verdict import NullAnswers, Verdict
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.designs import Designs
    from stride_cli.operators.steered_model import SteeredModel
    from stride_cli.operators.store import Operators
    from stride_cli.recovery.ranking import Hit

_SPOT_CHECK = 16
TOGETHER = 128  # prompts of a file whose chunks are read in one pass, at most


@dataclass
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
        model: AttributableModel | None = None,
        model_path: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        recalibrate: bool = False,
    ) -> Session:
        """Open an index for queries: a directory, or, fetched as it is needed, a zip file or a URL.

        Parameters
        ----------
        recalibrate : its calibration is to be replaced: one that is damaged is passed over, with a note

        Raises
        ------
        IndexNotFound, IndexDamaged, IndexVersionError, IndexUnreachable
        IndexMismatch     the model is not the index's, or a checkpoint that takes part has changed
        ModelError        a model cannot be loaded, or a checkpoint is gone
        StageMissing      the index has no operators yet
        """
        from stride_cli.attribution.calibration import readable_calibration, stored_calibration
        from stride_cli.attribution.defaults import recovery_defaults
        from stride_cli.data.workspace import Workspace
        from stride_cli.opening import open_index
        from stride_cli.operators.checkpoints import open_checkpoints, stored_designs
        from stride_cli.operators.store import Operators

        index = open_index(index_path)
        operators = Operators.from_index(index)
        attributes = index.group_attributes("operators")
        workspace = Workspace.open(index, model or model_path, device=device, dtype=dtype)
        opened = cls(
            workspace,
            operators,
            designs=stored_designs(index),
            chunk_document=index.array("corpus/chunk_document"),
            defaults=recovery_defaults(index, workspace.model, operators.fit, attributes.get("recipe")),
            checkpoints=open_checkpoints(index, workspace.model),
            calibration=(readable_calibration if recalibrate else stored_calibration)(index),
        )
        with index.understanding("operators"):
            opened._try_out()
        return opened

    def _try_out(self) -> None:
        """Take two tokens through every model and the spaces of its operators: what does not fit together
        raises."""
        import numpy as np

        from stride_cli.data.batches import pad_batch
        from stride_cli.operators.gradients import gate_gradients

        two = pad_batch(np.zeros(1, np.int64), [np.zeros(2, np.int64)], [np.array([0.0, 1.0])])
        for steered in self.steered:
            found, _ = gate_gradients(steered, two)
            for gradient, gates in zip(found, steered.operators.gates, strict=True):
                if gradient.shape[1] != gates.shape[1]:
                    raise ValueError(f"{gates.shape[1]} gates have {gradient.shape[1]} gradients")

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
        import numpy as np

        from index_format.shards import ranges

        seen, total = self.operators.seen, 0
        for start, stop in ranges(len(seen)):
            total += int(np.count_nonzero(seen[start:stop]))
        return total / self.index.n_chunks if self.index.n_chunks else 0.0

    @property
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> Answer:
        """Which training documents made the model continue ``prompt`` this way?

        Of a classifier: which training rows made it give an example its label?

        Parameters
        ----------
        prompt : str or Query
            A prompt; of a classifier, the number or id of a row of the index's file, held out or not (and
            ``response`` a class, or "predicted"; default: the row's label). Or a finished query, for example
            from `stride_cli.data.example_queries.file_queries`.
        options : QueryOptions
        response, span : see `build_query`
        instead : str, optional      why not this response? See `stride_cli.data.queries.compared`

        Returns
        -------
        Answer

        Raises
        ------
        QueryError, NumericalError
        """
        asked = {"prompt": prompt, "response": response, "span": span, "instead": instead}
        return next(self.query_all([asked], options, together=1, clock=clock))

    def query_pooled(
        self,
        prompts: Iterable[Mapping[str, Any]],
        options: QueryOptions | None = None,
        *,
        add: str | None = None,
    ) -> Answer:
        """Which documents made the model answer all of these prompts so?

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
        from stride_cli.attribution.pooling import as_one, each_alone
        from stride_cli.data.queries import pooled

        options = options or QueryOptions()
        queries = []
        for query in self.build(list(prompts), options):
            if isinstance(query, StrideError):
                raise query
            queries.append(query)
        if not queries:
            raise QueryError("there is no prompt to ask", fix="give one or more")
        one = pooled(queries)
        if add is None:
            add = "support" if all(query.comparison is not None for query in queries) else "all"
        if add == "all":
            return replace(self.query(one, options), added=add)
        if options.bottom:
            raise UsageError(
                "what opposes prompts is not looked at where what supports any of them is added up "
                f"(found --bottom {options.bottom})",
                fix='leave --bottom out; in Python, query_pooled(add="all")',
            )
        attributor = self.attributor(options)
        asking = Asking(attributor, options, self.build, self._spot_check, time.perf_counter)
        found = as_one(one, each_alone(asking, queries, _together(attributor)))
        return replace(self._answer(asking, found), added=add)

    def build(self, prompts: Sequence[Mapping[str, Any]], options: QueryOptions) -> list[Query | StrideError]:
        """Prompts with the model's responses where none are given, or the error of one that has none.

        Parameters
        ----------
        prompts : as of `query_all`
        options : their form, and the length of what the model writes
        """
        from stride_cli.data.queries import form_of
        from stride_cli.data.query_files import as_queries

        form = form_of(self.workspace, options.chat)
        return as_queries(self.model, prompts, max_new_tokens=options.max_new_tokens, form=form)

    def query_all(
        self,
        prompts: Iterable[Mapping[str, Any]],
        options: QueryOptions | None = None,
        *,
        together: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
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
        for outcome in self.outcomes(prompts, options, together=together, clock=clock, stop=True):
            if isinstance(outcome, Refused):
                raise outcome.error
            yield outcome

    def outcomes(
        self,
        prompts: Iterable[Mapping[str, Any] | StrideError],
        options: QueryOptions | None = None,
        *,
        together: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        stop: bool = False,
    ) -> Iterator[Answer | Refused]:
        """`query_all`, in which one bad prompt does not stop the others: one outcome for each, in order.

        Parameters
        ----------
        prompts : as of `query_all`; or the error of one that could not be read, which comes back in its place
        stop : end after the first that has no answer
        """
        options = options or QueryOptions()
        attributor = self.attributor(options)
        asking = Asking(attributor, options, self.build, self._spot_check, clock)
        together = _together(attributor, together)
        arriving, broken, ended = iter(prompts), None, False
        while not ended and broken is None:
            taken: list[Mapping[str, Any] | StrideError] = []
            try:
                for prompt in islice(arriving, together):
                    taken.append(prompt)
                    if stop and isinstance(prompt, StrideError):
                        break
            except StrideError as error:  # of who gives the prompts: there are no more
                broken = error
            if not taken:
                break
            with progress("asking the model"):
                asked = asking.measured(taken)
            if stop:
                bad = next((place for place, each in enumerate(asked) if isinstance(each, Refused)), None)
                if bad is not None:
                    asked, ended = asked[: bad + 1], True
            for outcome in self._answers(asking, asked):
                yield outcome
                if stop and isinstance(outcome, Refused):
                    return
        if broken is not None:
            raise broken

    def _answers(self, asking: Asking, asked: Sequence[Asked | Refused]) -> Iterator[Answer | Refused]:
        """The outcomes of prompts, of which those that are measured are answered together."""
        with progress("finding documents"):
            found = iter(asking.found([each for each in asked if isinstance(each, Asked)]))
        for each in asked:
            outcome: Found | Refused = next(found) if isinstance(each, Asked) else each
            if isinstance(outcome, Refused):
                yield outcome
                continue
            try:
                answer = self._answer(asking, outcome)
            except OF_A_PROMPT as error:
                yield Refused(error)
            else:
                yield answer

    def _answer(self, asking: Asking, outcome: Found) -> Answer:
        """Documents in order, their passages, and what may be concluded."""
        from stride_cli.attribution.hit_passages import row_labels
        from stride_cli.recovery.ranking import rank_documents, told_apart

        attributor, options, clock = asking.attributor, asking.options, asking.clock
        asked, found = outcome.asked, outcome.attribution
        query, measured, start = asked.query, asked.measured, clock()
        responses = measured.responses[0]
        supporters, opposers = rank_documents(
            found.influences,
            self.designs.columns,
            self.chunk_document,
            top=options.top,
            bottom=options.bottom,
            seen=self.operators.seen,
        )
        supporters, opposers = (
            told_apart(hits, found.read, estimated=found.estimated) for hits in (supporters, opposers)
        )
        shown = [*supporters, *opposers]
        asked_of = self.steered[0]
        document_ids = {hit.document: self.index.document_id(hit.document) for hit in shown}
        labels = row_labels(self.workspace, [hit.chunk for hit in shown])
        passages = {chunk: f"label {label}" for chunk, label in labels.items()}
        carrying = bool(attributor.reads) and not labels
        if not labels and options.passages != "none":
            if carrying and options.passages == "carrying":
                passages = self._carrying(asked_of, query, responses, shown, asked.batch)
            passages |= self.passages(query, [hit.chunk for hit in shown], known=passages)
        verdict, comparable = self._verdict(attributor, asked, found)
        ended = clock()
        return Answer(
            query=query,
            loss=float(measured.losses[0]),
            other_loss=self._other_loss(asked, asked_of),
            supporters=supporters,
            opposers=opposers,
            passages=passages,
            solution=found.solution,
            influences=found.influences,
            method=measured.method,
            agreement=measured.agreement,
            seconds={**asked.seconds, "rank": ended - start},
            document_ids=document_ids,
            coverage=self.coverage,
            models=len(self.steered),
            labels=labels,
            responses=responses,
            measured=attributor.explained(responses),
            read=attributor.reads,
            recall=found.recall,
            estimated=found.estimated,
            redundancy=attributor.redundancy,
            shrinkage=attributor.shrinkage,
            verdict=verdict,
            line=None if verdict is None or not comparable else verdict.line,
            scale=None if query.parts else self._scale(attributor),
            carried=not carrying or options.passages == "carrying",
        )

    def with_passages(self, answer: Answer) -> Answer:
        """An answer of this session with the passages that carry the influence of its hits, as it has them
        where `QueryOptions.passages` are "carrying"; itself where it has them already.

        Raises
        ------
        NumericalError
        """
        if answer.carried:
            return answer
        shown = [*answer.supporters, *answer.opposers]
        passages = self._carrying(self.steered[0], answer.query, answer.responses, shown)
        passages |= self.passages(answer.query, [hit.chunk for hit in shown], known=passages)
        return replace(answer, passages=passages, carried=True)

    def attributor(self, options: RecoveryOptions | None = None) -> Attributor:
        """The pipeline from queries to influences, asked in this way."""
        from stride_cli.attribution.attributor import Attributor

        steered = self.steered
        return Attributor(
            operators=[each.operators for each in steered],
            load=lambda number: steered[number].model,
            designs=self.designs,
            workspace=self.workspace,
            defaults=self.defaults,
            options=options or RecoveryOptions(),
        )

    def _other_loss(self, asked: Asked, asked_of: SteeredModel) -> float | None:
        """Nats of the token that the response is compared with; None where it is with nothing."""
        from stride_cli.operators.linear_response import gradients_with_loss

        if asked.query.comparison is None:
            return None
        return float(gradients_with_loss(asked_of, asked.batch)[1][1])  # remembered

    def _scale(self, attributor: Attributor) -> Nats | None:
        """What influences are in nats: if that is sure, and they are found as they were for it."""
        found = None if self.calibration is None else self.calibration.scale
        if found is None or not found.sure:
            return None
        as_measured = attributor.like_default and bool(attributor.reads) == bool(self.attributor().reads)
        return found if as_measured else None

    def _verdict(
        self, attributor: Attributor, asked: Asked, found: Attribution
    ) -> tuple[Verdict | None, bool]:
        """What may be concluded, and whether influences are what null prompts' were, so that its line is of
        these.

        An answer is held against null prompts' as they were asked by default: with chunks read where they
        were for it, else without.
        """
        query, measured = asked.query, asked.measured
        if self.calibration is None or query.parts:  # null prompts were asked one by one, and not compared
            return None, False
        loss, scored = float(measured.losses[0]), int(query.weights.sum())
        if attributor.like_default and attributor.looks_at_chunks and self.calibration.read is not None:
            strongest = found.strongest(self.chunk_document)
            return self.calibration.judge(loss, strongest, scored, read=True), True
        default = self.attributor(RecoveryOptions(read=0, estimate="subsets"))
        if attributor.like_default:
            (found,) = default.unread([found.solution])
        else:
            (found,) = default.influences(None, [], measured.responses)
        strongest = found.strongest(self.chunk_document)
        comparable = attributor.like_default and not attributor.looks_at_chunks
        return self.calibration.judge(loss, strongest, scored), comparable

    def _spot_check(self) -> Any:
        import numpy as np

        from stride_cli.randomness import stream

        order = stream(self.index.seed, "spot check").permutation(self.operators.n_subsets)
        return np.sort(order[:_SPOT_CHECK])

    def _carrying(
        self,
        steered: SteeredModel,
        query: Query,
        responses: Any,
        hits: Sequence[Hit],
        batch: Batch | None = None,
    ) -> dict[int, str]:
        from stride_cli.attribution.hit_passages import carrying_passages

        return carrying_passages(steered, self.workspace, query, responses, hits, batch)

    def passages(self, query: Query, chunks: Sequence[int], known: Collection[int] = ()) -> dict[int, str]:
        """Of each chunk, but for those `known`, the sentence most like the query."""
        from stride_cli.attribution.hit_passages import likest_passages

        return likest_passages(self.workspace, query, chunks, known)


def _together(attributor: Attributor, most: int | None = None) -> int:
    """How many prompts are asked in one pass: alone, where no chunks are read for them."""
    return min(most or TOGETHER, attributor.together) if attributor.reads else 1
