"""From prompts to influences: built, measured, recovered, read and judged together, where nothing hinders it.

One bad prompt does not stop the others: what cannot be done of all together is done of each alone, and one
that has no outcome has an error in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stride_cli.attribution.answer import Refused
from stride_cli.errors import NumericalError, QueryError, StrideError

if TYPE_CHECKING:
    from stride_cli.attribution.attributor import Attribution, Attributor, Measured
    from stride_cli.attribution.options import QueryOptions
    from stride_cli.data.batches import Batch
    from stride_cli.data.queries import Query

OF_A_PROMPT = (QueryError, NumericalError)  # errors that say nothing of the prompts beside it


@dataclass(frozen=True)
class Asked:
    """A prompt with its response, what the subsets say of it, and the seconds of each stage."""

    query: Query
    batch: Batch
    measured: Measured
    seconds: dict[str, float]


@dataclass(frozen=True)
class Found:
    """A prompt's influences."""

    asked: Asked
    attribution: Attribution


@dataclass(frozen=True)
class Asking:
    """How prompts are asked.

    Attributes
    ----------
    attributor : Attributor
    options : QueryOptions
    build : prompts, options → each one's query, or its error; see `Session.build`
    spot_check : → (S,) int64      subsets on which a linear measurement is compared with the exact one
    clock : → seconds
    """

    attributor: Attributor
    options: QueryOptions
    build: Callable[[Sequence[Mapping[str, Any]], QueryOptions], list[Query | StrideError]]
    spot_check: Callable[[], Any]
    clock: Callable[[], float]

    def measured(self, prompts: Sequence[Mapping[str, Any] | StrideError]) -> list[Asked | Refused]:
        """Prompts' responses, and what the subsets say of them: of all together, where nothing hinders it.

        Parameters
        ----------
        prompts : as of `Session.outcomes`
        """
        clock = self.clock
        start = clock()
        built = self.build(
            [prompt for prompt in prompts if not isinstance(prompt, StrideError)], self.options
        )
        generated = clock()
        queries = [query for query in built if not isinstance(query, StrideError)]
        measured = iter(self._measured(queries))
        outcomes = iter(
            [next(measured) if not isinstance(each, StrideError) else Refused(each) for each in built]
        )
        seconds = {
            "generate": (generated - start) / max(1, len(built)),
            "measure": (clock() - generated) / max(1, len(queries)),
        }
        found: list[Asked | Refused] = []
        for prompt in prompts:
            each = Refused(prompt) if isinstance(prompt, StrideError) else next(outcomes)
            found.append(each if isinstance(each, Refused) else Asked(*each, seconds))
        return found

    def _measured(self, queries: Sequence[Query]) -> list[tuple[Query, Batch, Measured] | Refused]:
        """What the subsets say of queries, and each as a batch that remembers its gradient.

        Queries of about one length are measured in one pass over the gates.
        """
        from stride_cli.data.batches import little_padding

        found: dict[int, tuple[Query, Batch, Measured] | Refused] = {}
        # a spot check and an exact measurement's agreement are of one query
        apart = self.options.check or self.attributor.method != "linear"
        single = [place for place, query in enumerate(queries) if apart or query.parts]
        plain = [place for place, query in enumerate(queries) if not (apart or query.parts)]
        groups = little_padding([len(queries[place].ids) for place in plain])
        for group in [*([place] for place in single), *([plain[at] for at in each] for each in groups)]:
            outcomes = self._measured_together([queries[place] for place in group])
            found.update(zip(group, outcomes, strict=True))
        return [found[place] for place in range(len(queries))]

    def _measured_together(self, queries: Sequence[Query]) -> list[tuple[Query, Batch, Measured] | Refused]:
        """Of queries in one batch; where they cannot be measured together, of each alone."""
        from stride_cli.data.batches import RememberingBatch
        from stride_cli.data.query_set import QuerySet
        from stride_cli.operators.linear_response import each_remembering

        check = self.spot_check() if self.options.check else None
        single = len(queries) == 1
        try:
            rows = range(len(queries))
            batch = queries[0].batch() if single else QuerySet.from_queries(queries).batch(rows)
            whole = RememberingBatch.of(batch)
            measured = self.attributor.measure([whole], check=check)
        except OF_A_PROMPT as error:
            if single:
                return [Refused(error)]
            parts = [self._measured_together([query]) for query in queries]
            return [found for part in parts for found in part]
        batches = [whole] if single else each_remembering(whole, [query.batch() for query in queries])
        return [
            (
                query,
                own,
                replace(
                    measured,
                    responses=measured.responses[row : row + 1],
                    losses=measured.losses[row : row + 1],
                ),
            )
            for row, (query, own) in enumerate(zip(queries, batches, strict=True))
        ]

    def found(self, asked: Sequence[Asked]) -> list[Found | Refused]:
        """Influences on prompts that were measured; of each alone where they cannot be found together."""
        if not asked:
            return []
        try:
            return list(self._together(asked))
        except OF_A_PROMPT as error:
            if len(asked) == 1:
                return [Refused(error)]
        return [found for each in asked for found in self.found([each])]

    def _together(self, asked: Sequence[Asked]) -> Iterator[Found]:
        """Influences on prompts that are measured; of what is done together each has its part of the time."""
        import numpy as np

        from stride_cli.data.query_set import QuerySet

        clock, attributor = self.clock, self.attributor
        queries = [each.query for each in asked]
        start = clock()
        reached: dict[str, float] = {}
        attributions = attributor.influences(
            QuerySet.from_queries(queries),
            [each.batch for each in asked],
            np.concatenate([each.measured.responses for each in asked]),
            reached=lambda stage: reached.__setitem__(stage, clock()),
        )
        shared = {"recover": reached["recover"] - start}
        if attributor.looks_at_chunks:
            shared["read"] = reached["read"] - reached["recover"]
        for each, found in zip(asked, attributions, strict=True):
            seconds = each.seconds | {stage: spent / len(asked) for stage, spent in shared.items()}
            yield Found(replace(each, seconds=seconds), found)
