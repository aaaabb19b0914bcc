"""Keep indexes open: their sessions, the answers that they gave last, their documents."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.options import QueryOptions
from stride_cli.errors import StrideError, UsageError
from stride_cli.serve.refusals import Refusal
from stride_cli.startup import keep_imported

if TYPE_CHECKING:
    from stride_cli.attribution.answer import Answer
    from stride_cli.attribution.session import Session
    from stride_cli.data.workspace import WorkspacePath
    from stride_cli.schema.serve_records import ServedIndexRecord

_QUESTIONS = 3
_KEPT = 64  # answers, for what is asked about them next: their tokens, documents, pages
# what changes when an index is fitted, calibrated or extended anew
_MARKS = ("zarr.json", "manifest.json", "operators/manifest.json", "calibration/manifest.json")


class ServedIndex:
    """An index that stays open. All but `name` and `place` is for the thread that models run in.

    Parameters
    ----------
    name : str                what requests call it
    place : WorkspacePath     where it and its model are
    """

    def __init__(self, name: str, place: WorkspacePath) -> None:
        self.name, self.place = name, place
        self._session: Session | None = None
        self._mark: Any = None
        self._answers: OrderedDict[Hashable, Answer] = OrderedDict()
        self._seconds: float | None = None

    def session(self) -> Session:
        """Open the index; again where it has changed meanwhile.

        Raises
        ------
        what `Session.open` raises
        UsageError      it is a classifier's
        """
        from stride_cli.attribution.session import Session
        from stride_cli.models.kinds import refuse_classifier

        mark = self._found()
        if self._session is None or mark != self._mark:
            session = Session.open(self.place.index, model=self.place.model)
            refuse_classifier(session.index, "stride serve", fix="ask it with stride query ROW")
            self._answers.clear()
            self._session, self._mark = session, mark
            keep_imported()
        return self._session

    def warm(self) -> None:
        """Ask something, so that the first client need not wait for what is imported and compiled once."""
        session = self.session()
        if session.index.n_chunks:
            tokens = session.index.chunk_tokens(0)[:4]
            prompt = {"prompt": str(session.model.tokenizer.decode(tokens, skip_special_tokens=True))}
            for prompts in ([prompt, prompt], [prompt]):
                for _ in session.outcomes(prompts, QueryOptions(max_new_tokens=2)):
                    pass

    def _found(self) -> Any:
        """Look at the files of a local index that are replaced when it changes."""
        if not isinstance(self.place.index, Path):
            return None
        files = [file for name in _MARKS if (file := self.place.index / name).exists()]
        return [(str(file), found.st_ino, found.st_mtime_ns) for file in files for found in [file.stat()]]

    def reads(self, options: QueryOptions) -> int:
        """Count the chunks that a query reads: several queries in one pass are cheaper."""
        return self._session.pipeline(options).settings.reads if self._session is not None else 0

    def keep(self, prompt: Mapping[str, str], options: QueryOptions, answer: Answer) -> None:
        """Remember an answer for what is asked about it next."""
        self._answers[_key(prompt, options)] = answer
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)

    def answer(self, prompt: Mapping[str, str], options: QueryOptions, *, carried: bool = False) -> Answer:
        """Return the answer that was given last to this, or a new one.

        Parameters
        ----------
        carried : bool      with the passages that carry the influence
        """
        session, key = self.session(), _key(prompt, options)
        found = self._answers.get(key)
        if found is None:
            options = replace(options, passages="carrying" if carried else "none")
            found = next(session.query_all([prompt], options, together=1))
            self.keep(prompt, options, found)
        elif carried and not found.carried:
            found = session.with_passages(found)
            self.keep(prompt, options, found)
        return found

    def numbers(self, documents: Sequence[str]) -> list[int]:
        """Find the numbers of documents by their ids, each given once; a `Refusal` where there is none."""
        from stride_cli.prove.verify_hit import find_documents

        try:
            return [int(number) for number in find_documents(self.session().index, documents)]
        except UsageError as error:
            status = 400 if len(set(documents)) < len(documents) else 404
            raise Refusal(status, error.message, fix=error.fix) from None

    def record(self, defaults: QueryOptions) -> ServedIndexRecord:
        session = self.session()
        index, operators = session.index, session.operators
        return {
            "name": self.name,
            "path": str(index.path),
            "chunks": index.n_chunks,
            "documents": index.n_documents,
            "subsets": index.n_subsets,
            "calibrated": session.calibration is not None,
            "reads": session.pipeline(defaults).settings.reads,
            "by_token": operators.direct_scale is not None,
            "chat": bool(getattr(session.model.tokenizer, "chat_template", None)),
            "questions": self._questions(session),
        }

    def _questions(self, session: Session) -> list[str]:
        """Begin three documents, as prompts that show what an index is about."""
        from stride_cli.attribution.calibration import beginning
        from stride_cli.data.queries import form_of
        from stride_cli.randomness import stream

        random, form = stream(session.index.seed, "questions"), form_of(session.workspace)
        drawn = random.permutation(session.index.n_documents)[:_QUESTIONS]
        return [beginning(session.workspace, int(document), form, random) for document in drawn]

    def seconds_of_training(self) -> float | None:
        """Time the first steps of training the model again; None where they cannot be timed."""
        from stride_cli.data.query_set import QuerySet
        from stride_cli.training.retraining import open_trainer

        if self._seconds is None:
            with contextlib.suppress(StrideError):  # there is no recipe
                trainer: Any = open_trainer(self.session().workspace, QuerySet([], [], []))
                self._seconds = trainer.seconds()
        return self._seconds


def _key(prompt: Mapping[str, str], options: QueryOptions) -> Hashable:
    # an answer gets its passages later where it was asked for without
    return json.dumps(prompt, sort_keys=True), replace(options, passages="carrying")


class Shelf:
    """All indexes that are served, by name."""

    def __init__(self, places: Sequence[WorkspacePath]) -> None:
        names = [place.index.name or str(place.index) for place in places]
        self.indexes: dict[str, ServedIndex] = {}
        for name, place in zip(names, places, strict=True):
            own = name if names.count(name) == 1 else str(place.index)
            if own in self.indexes:
                raise UsageError(f"index '{place.index}' is given twice", fix="give each index once")
            self.indexes[own] = ServedIndex(own, place)

    def find(self, name: str | None) -> ServedIndex:
        """Find the index of this name, or the only one; a `Refusal` where there is none."""
        if name is None and len(self.indexes) == 1:
            return next(iter(self.indexes.values()))
        listed = ", ".join(f"'{each}'" for each in self.indexes)
        if name is None:
            raise UsageError(
                f"there are {len(self.indexes)} indexes, and no 'index' is given", fix=f"one of {listed}"
            )
        if name not in self.indexes:
            raise Refusal(404, f"no index '{name}' is served", fix=f"one of {listed}")
        return self.indexes[name]
