"""Ask queries that show the same as one group."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stride_cli.data.query_set import QuerySet
from stride_cli.errors import CorpusError, QueryError, StrideError, UsageError, located

if TYPE_CHECKING:
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.evaluation.cause_queries import CauseQuery

ASKED = ("response", "token", "odds")
ADD = ("all", "support")


@dataclass(frozen=True)
class QueryGroup:
    """Queries that show the same.

    Attributes
    ----------
    name : str
    rows : (q,) int64        which of the queries
    causes : (R,) int64      numbers of the documents that taught it; none where that is not known
    """

    name: str
    rows: np.ndarray
    causes: np.ndarray


@dataclass(frozen=True)
class GroupRule:
    """Rule by which a method answers a group of queries: options ``asked=`` and ``add=`` of its spec.

    Attributes
    ----------
    method : the spec without these
    asked : of each query, "response": all its tokens; "token": the first in which it differs from what might
        have been said; "odds": the score of that token less the score of the other
    add : over the queries, "all" scores, or "support": those above zero
    """

    method: str
    asked: str = "response"
    add: str = "all"

    @classmethod
    def of(cls, spec: str) -> GroupRule:
        """UsageError where an option is neither of its values."""
        name, _, rest = spec.partition(":")
        given: dict[str, str] = {}
        kept = []
        for part in rest.split(",") if rest else []:
            option, _, value = (piece.strip() for piece in part.partition("="))
            choices = {"asked": ASKED, "add": ADD}.get(option)
            if choices is None:
                kept.append(part)
            elif value not in choices:
                raise UsageError(
                    f"{name}: {option} is '{value}' (expected {', '.join(choices)})",
                    fix=f"write {option}={choices[0]}",
                )
            else:
                given[option] = value
        return cls(name + (":" + ",".join(kept) if kept else ""), **given)

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets of `build_asked` that are scored."""
        return {"response": ("response",), "token": ("token",), "odds": ("token", "instead")}[self.asked]

    def scores(self, found: Mapping[str, np.ndarray], groups: Sequence[QueryGroup]) -> np.ndarray:
        """Score every document for every group, (G, D) float64, from (Q, D) of each of the `sets`."""
        each = self.counted(self.each(found))
        return np.stack([each[group.rows].sum(axis=0) for group in groups])

    def each(self, found: Mapping[str, np.ndarray]) -> np.ndarray:
        """Score every document for every query, (Q, D) float64, from (Q, D) of each of the `sets`."""
        first = found[self.sets[0]]
        return first - found["instead"] if self.asked == "odds" else first

    def counted(self, scores: np.ndarray) -> np.ndarray:
        """Keep the part of the scores that is added up."""
        return np.maximum(scores, 0.0) if self.add == "support" else scores


def check_rules(rules: Iterable[GroupRule], sets: Container[str]) -> None:
    """UsageError where a rule needs what the queries do not have."""
    for rule in rules:
        if missing := [name for name in rule.sets if name not in sets]:
            raise UsageError(
                f"{rule.method}: asked={rule.asked} compares, and the queries have no '{missing[-1]}'",
                fix='give them "instead", what might have been said; or asked=response',
            )


def find_groups(asked: Sequence[CauseQuery]) -> list[QueryGroup]:
    """Group queries by their `group`, or else by their causes, in the order in which groups begin.

    Raises
    ------
    CorpusError      some name a group and some do not
    QueryError       two queries of one group have different causes
    """
    named = _have(asked, "group")
    members: dict[Any, list[int]] = {}
    for row, query in enumerate(asked):
        members.setdefault(query.group if named else query.causes.tobytes(), []).append(row)
    found = []
    for key, rows in members.items():
        first = asked[rows[0]]
        for row in rows:
            if not np.array_equal(asked[row].causes, first.causes):
                raise QueryError(
                    f"{asked[row].where}: query '{asked[row].id}' has other causes than '{first.id}' of its "
                    f"group '{key}'",
                    fix="give queries of one group the same causes",
                )
        found.append(QueryGroup(key if named else first.id, np.array(rows, np.int64), first.causes))
    return found


def build_asked(
    workspace: Workspace,
    asked: Sequence[CauseQuery],
    rules: Iterable[GroupRule] | None = None,
    *,
    chat: bool | None = None,
) -> dict[str, QuerySet]:
    """Build the queries as `stride query` asks them, once for each thing that is asked of them.

    Parameters
    ----------
    rules : what will be asked, by default all that can be
    chat : see `queries.form_of`

    Returns
    -------
    dict      "response": scored whole; where the queries say what might have been said instead, also "token":
              the first token in which the two differ, and "instead": the other one in its place

    Raises
    ------
    CorpusError      some say what might have been said, and some do not
    UsageError       a rule compares, and none does
    QueryError       with file and line: a query that does not fit the model, or does not differ
    """
    from stride_cli.data.queries import build_queries, form_of

    rules = None if rules is None else list(rules)
    wanted = rules is None or any(rule.asked != "response" for rule in rules)
    compared = wanted and _have(asked, "instead")
    language: Any = workspace.model
    form = form_of(workspace, chat)

    def built(instead: bool) -> list[Any]:
        texts: list[dict[str, Any]] = [{"prompt": each.prompt, "response": each.response} for each in asked]
        if instead:
            texts = [text | {"instead": each.instead} for text, each in zip(texts, asked, strict=True)]
        found = build_queries(language, texts, form=form)
        for query, each in zip(asked, found, strict=True):
            if isinstance(each, StrideError):
                raise located(each, query.where) from None
        return found

    names = [query.id for query in asked]
    sets = {"response": QuerySet.from_queries(built(False), names)}
    if compared:
        found = built(True)
        texts = {
            "token": [query.prompt + query.response for query in found],
            "instead": [query.prompt + query.comparison.response for query in found],
        }
        for part, name in enumerate(("token", "instead")):
            own = [query.parts[part] for query in found]
            ids, weights = [each.ids for each in own], [each.weights for each in own]
            sets[name] = QuerySet(ids, weights, names, texts[name])
    check_rules(rules or (), sets)
    return sets


def _have(asked: Sequence[CauseQuery], name: str) -> bool:
    """Tell whether queries have this field; CorpusError where only some do."""
    there = [getattr(query, name) is not None for query in asked]
    if any(there) and not all(there):
        query = asked[there.index(False)]
        raise CorpusError(
            f"{query.where}: query '{query.id}' has no '{name}', and others do",
            fix=f'give every query "{name}", or none',
        )
    return all(there)


def all_of(sets: Mapping[str, QuerySet]) -> QuerySet:
    """Join the sets one after the other."""
    parts = list(sets.values())
    return QuerySet(
        [ids for part in parts for ids in part.ids],
        [weights for part in parts for weights in part.weights],
        [name for part in parts for name in part.names],
        [text for part in parts for text in part.texts or ()],
    )
