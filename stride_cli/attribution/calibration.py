"""Calibration: what answers to null prompts look like, kept in the index's ``calibration/`` group.

The corpus says nothing on a null prompt, and the right answer is "no source". Half are unrelated to it:
tokens drawn from all over the corpus, whole words, or words that do not exist. Half are near misses:
beginnings of the corpus's own documents, or prompts of its pairs, whose rarest words are exchanged for
words that do not exist, for some of several documents, or for those of one other; no document has all words
of one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stride_cli.attribution.decisive import CorpusWords, folded, measured, put
from stride_cli.attribution.nats import scale_of
from stride_cli.attribution.verdict import NullAnswers, strongest
from stride_cli.characters import WORD
from stride_cli.corpus.forms import Form
from stride_cli.data.queries import Query, build_queries, form_of, prompt_tokens
from stride_cli.output import note, progress
from stride_cli.randomness import stream
from stride_cli.schema.derivation import to_record

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.attribution.nats import Nats
    from stride_cli.attribution.pipeline import Pipeline
    from stride_cli.attribution.several import Several
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.language.causal_lm import CausalLM
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.options import TrainOptions
    from stride_cli.schema.train_records import TrainEstimateRecord

FORM = 3  # of influences and nulls: before 2, zero was the average chunk; before 3, all tokens counted alike
_ARRAYS = {"losses": np.float64, "shares": np.float64, "held": np.uint8, "near": np.uint8}
SCORED_TOKENS = 16  # of a null prompt's response
_PROMPT_TOKENS = (6, 9, 12)  # of an unrelated prompt
_WORDS = (4, 10)  # of a chunk as a prompt, at least and below
_WORD = 6  # letters of a word that does not exist
_TIMED = 8  # prompts, whose time is that of all
_TRIES = 50  # to exchange words so that no document has them all, for each near miss


def calibrate(pipeline: Pipeline | Several, nulls: int, scale: Nats | None = None) -> NullAnswers:
    """Ask null prompts, and publish the index's ``calibration/`` group.

    Parameters
    ----------
    pipeline : as by default, of a language model; the calibration is of its operators and chunks
    nulls : how many prompts
    scale : what influences are in nats, where that was measured

    Raises
    ------
    NumericalError      see `Pipeline`
    """
    from index_format.writer import GroupWriter

    index, corpus = pipeline.workspace.index, CorpusWords.of(pipeline.workspace)
    queries, near = null_queries(corpus, nulls)
    answers = replace(ask(pipeline, corpus, queries, near), scale=scale)
    about = _about(index) | {"nulls": [{"prompt": q.prompt, "response": q.response} for q in queries]}
    about["scale"] = to_record(scale)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    # all that is in it is made at once: an unfinished write is not worth keeping
    with GroupWriter(index.directory, "calibration", key, overwrite=True) as writer:
        for name, kind in _ARRAYS.items():
            writer.append(f"calibration/null_{name}", getattr(answers, name).astype(kind))
        writer.publish(about)
    return answers


def estimate_train(
    index: Index, model: AttributableModel, options: TrainOptions | None, nulls: int
) -> TrainEstimateRecord:
    """Estimate what a fit takes (`estimate_fit`) and, by a few of them, the null prompts after it."""
    from stride_cli.attribution.defaults import default_reads
    from stride_cli.attribution.pipeline import queries_together
    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.workspace import Workspace
    from stride_cli.operators.device_memory import resident_bytes
    from stride_cli.training.dry_run import SUBSETS, estimate_fit

    found, held = estimate_fit(index, model, options), index.n_subsets
    if nulls and not model.classes:
        workspace = Workspace(index, model, ChunkReader(index, model), index.seed)
        corpus, begun = CorpusWords.of(workspace), time.perf_counter()
        queries, _ = null_queries(corpus, _TIMED)
        asking = nulls * (time.perf_counter() - begun) / _TIMED
        # their gradients, and those of chunks that are read for them, take what the corpus's do
        tokens = nulls * float(np.mean([len(query.ids) for query in queries] or [0]))
        tokens += index.n_tokens if default_reads(workspace) else 0
        found["seconds"]["calibration"] = asking + tokens * found["seconds"]["corpus"] / index.n_tokens
        held = max(held, min(nulls, queries_together(index.n_chunks, found["gate_size"], model.device)))
    if found["memory"]:  # beside what is held still: sums of all subsets, or gradients of null prompts
        own = (resident_bytes() or 0) + max(0, held - SUBSETS) * 4 * found["gate_size"]
        found["memory"] = max(found["memory"], own)
    return found


def stored_calibration(index: Index, *, replaced: bool = False) -> NullAnswers | None:
    """The calibration of an index; None where there is none, or it is of other operators or chunks.

    Parameters
    ----------
    replaced : it is about to be: of one that is damaged it is only told, and None comes back

    Raises
    ------
    IndexDamaged
    """
    from index_format.errors import IndexDamaged

    if not index.has("calibration"):
        return None
    try:
        attributes = index.group_attributes("calibration")
        if any(attributes.get(name) != value for name, value in _about(index).items()):
            return None
        with index.understanding("calibration"):
            scale = attributes.get("scale")
            losses, *others = (np.asarray(index.array(f"calibration/null_{name}")) for name in _ARRAYS)
            if losses.ndim != 2 or any(each.shape != losses.shape[:1] for each in others):
                raise ValueError(f"losses are {losses.shape}, the others {[each.shape for each in others]}")
            shares, held, near = others
            known = None if scale is None else scale_of(scale)
            return NullAnswers(losses, shares, held.astype(bool), near.astype(bool), known)
    except IndexDamaged as error:
        if not replaced:
            raise
        note(f"{error.message}: it is made anew, without what it said of nats (--retrain measures that)")
        return None


def ask(
    pipeline: Pipeline | Several, corpus: CorpusWords, queries: list[Query], near: np.ndarray
) -> NullAnswers:
    """Measure answers to null prompts as those to a user's are measured.

    Parameters
    ----------
    queries : from `null_queries`, weighed
    near : (m,) bool      near misses
    """
    from stride_cli.attribution.several import in_passes
    from stride_cli.data.query_set import QuerySet

    chunk_document = pipeline.workspace.index.array("corpus/chunk_document")
    losses = np.full((len(queries), SCORED_TOKENS), np.nan)
    shares, held = np.zeros(len(queries)), np.zeros(len(queries), bool)
    with progress("measuring null prompts", len(queries), unit="responses") as bar:
        for rows, found in in_passes(pipeline, QuerySet.from_queries(queries)):
            for number, solution in zip(rows.tolist(), found, strict=True):
                own = queries[number].losses
                assert own is not None
                losses[number, : len(own)] = own
                documents, shares[number] = strongest(solution, chunk_document)
                held[number] = corpus.held_by(documents, queries[number].prompt)
            bar.advance(len(rows))
    return NullAnswers(losses, shares, held, near)


def _about(index: Index) -> dict[str, Any]:
    """Name the operators, chunks and kind of influences that a calibration holds for."""
    return {"operators": index.group_digest("operators"), "index": index.digest, "influences": FORM}


# ---- null prompts ----


def null_queries(corpus: CorpusWords, wanted: int) -> tuple[list[Query], np.ndarray]:
    """Null prompts with the model's greedy continuations, put to the model as other prompts are (`form_of`).

    Of an index and model always the same ones.

    Parameters
    ----------
    wanted : how many; those after which the model ends at once are left out

    Returns
    -------
    Queries, weighed; (m,) bool, near misses
    """
    workspace, model = corpus.workspace, cast("CausalLM", corpus.workspace.model)
    form = form_of(workspace)
    unrelated = list(islice(_unrelated(workspace), wanted - wanted // 2))
    prompts = [*unrelated, *islice(_near_misses(corpus, form), wanted // 2)]
    queries, near = [], []
    with progress("asking null prompts", len(prompts), unit="prompts") as bar:
        asked = [{"prompt": prompt} for prompt in prompts]
        written = build_queries(model, asked, max_new_tokens=SCORED_TOKENS, form=form)
        for number, query in enumerate(written):
            if isinstance(query, Query):
                queries.append(measured(model, corpus, query, weigh=True))
                near.append(number >= len(unrelated))
            bar.advance(1)
    return queries, np.array(near, bool)


def _unrelated(workspace: Workspace) -> Iterator[str]:
    """The three kinds in turn, each in all lengths."""
    chunks, model = workspace.chunks, cast("CausalLM", workspace.model)
    random, longest = stream(workspace.seed, "null prompts"), max(_PROMPT_TOKENS)

    def decoded(ids: Any) -> str:
        return str(model.tokenizer.decode(ids, skip_special_tokens=True))

    def word() -> str:
        words = decoded(chunks.chunk(int(random.integers(chunks.n_chunks)))[0]).split()
        return words[int(random.integers(len(words)))] if words else ""

    def of_kind(kind: int) -> str:
        if kind == 0:
            places = random.integers(len(chunks.tokens), size=2 * longest)
            return decoded(np.array([chunks.tokens[int(place)] for place in places], np.int64))
        if kind == 1:
            return " ".join(word() for _ in range(longest))
        letters = [letter for letter in "".join(word() for _ in range(2 * longest)) if letter.isalpha()]
        random.shuffle(letters)
        return " ".join("".join(letters[start : start + _WORD]) for start in range(0, len(letters), _WORD))

    for number in count():
        length = _PROMPT_TOKENS[number // 3 % len(_PROMPT_TOKENS)]
        if text := decoded(prompt_tokens(model, of_kind(number % 3) or "?")[:length]).strip():
            yield text


def _near_misses(corpus: CorpusWords, form: Form) -> Iterator[str]:
    """The three kinds in turn; fewer where words can hardly be exchanged so that no document has them all."""
    workspace = corpus.workspace
    random = stream(workspace.seed, "near misses")
    letters = [letter for word in sorted(corpus.counts) for letter in word if letter.isalpha()] or ["x"]
    made = tries = 0
    while tries < _TRIES * (made + 20):
        tries += 1
        drawn = (int(random.integers(workspace.index.n_documents)) for _ in range(2))
        own, other = (beginning(workspace, document, form, random) for document in drawn)
        places, others = corpus.rare_places(own), [match[0] for match in corpus.rare_places(other)]
        if not places or not others:
            continue
        # what it is about: its rarest word, and those that are hardly less rare
        counts = [corpus.counts[match[0].casefold()] for match in places]
        places = [match for match, held in zip(places, counts, strict=True) if held <= 2 * min(counts) + 1]
        new = [others[at % len(others)] for at in range(len(places))]
        if made % 3 < 2:
            new = [corpus.random_word(random) for _ in places]
        if made % 3 == 0:
            new = ["".join(random.choice(letters, size=_WORD)) for _ in places]
        prompt = put(own, places, new).strip()
        words = set(folded(prompt))
        if prompt and not any(words <= document for document in corpus.documents):
            made += 1
            yield prompt


def beginning(workspace: Workspace, document: int, form: Form, random: np.random.Generator) -> str:
    """The prompt of a document that has one, else some words of its beginning."""
    return cut_in_two(workspace, int(workspace.index.document_chunks(document)[0]), form, random)[0]


def cut_in_two(
    workspace: Workspace, row: int, form: Form, random: np.random.Generator, *, within: bool = False
) -> tuple[str, str]:
    """Cut a chunk into a prompt and what follows it: those of a pair; else some words, of its beginning or
    from any place `within` it, and as many more."""
    model = cast("CausalLM", workspace.model)
    ids, weights = workspace.chunks.chunk(row)

    def said(some: np.ndarray) -> str:
        return str(model.tokenizer.decode(some, skip_special_tokens=True)).strip()

    scored = int(np.argmax(weights > 0))
    if form.name != "text" and scored > 1:
        one, seven = prompt_tokens(model, "a", form), prompt_tokens(model, "7", form)
        same = min(len(one), len(seven))
        before = next((at for at in range(same) if one[at] != seven[at]), same)
        behind = next((at for at in range(same - before) if one[-1 - at] != seven[-1 - at]), 0)
        return said(ids[before : scored - behind]), said(ids[scored:])
    text = said(ids)
    ends = [match.end() for match in WORD.finditer(text)]
    last = min(int(random.integers(*_WORDS)), len(ends) - 1)
    if last <= 0:
        return text, ""
    first = int(random.integers(len(ends) - last)) if within else 0
    begin, middle, end = ([0, *ends][min(first + at * last, len(ends))] for at in range(3))
    return text[begin:middle].strip(), text[middle:end]
