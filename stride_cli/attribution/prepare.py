"""All that a query of a corpus needs, made where it is missing, and extended where the corpus has grown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from stride_cli.attribution.session import Session
from stride_cli.data.workspace import WorkspacePath, open_model
from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of, refuse_classifier
from stride_cli.training.index_build import build_index
from stride_cli.training.index_fit import fit_index

if TYPE_CHECKING:
    from index_format.location import Given
    from index_format.reader import Index
    from stride_cli.attribution.options import CalibrationOptions
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.protocol import AttributableModel
    from stride_cli.operators.options import TrainOptions


def prepare(
    sources: str | Sequence[str],
    where: WorkspacePath | Given,
    *,
    reading: ReadOptions | None = None,
    training: TrainOptions | None = None,
    calibration: CalibrationOptions | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Session:
    """All that a query of a corpus needs: index, operators, calibration. What is there is used again.

    Stopped, the same call goes on where it was. A corpus that has grown since is appended to its index, and
    the operators are fitted anew.

    Parameters
    ----------
    sources : files and globs of one corpus, of text
    where : where its index is, or will be; a WorkspacePath names the model, needed where there is no index
    reading : ReadOptions
    training, calibration : see `stride_cli.api.train` and `calibrate`
    say : called with a line of text before each stage

    Raises
    ------
    UsageError         there is no index and no model is given; the corpus has changed other than by growing;
                       it has grown, and its index was made in ways of its own; the model is a classifier
    IndexMismatch      the model is not the index's
    what `build_index`, `stride_cli.api.train` and `Session.open` raise
    """
    from index_format.location import local_directory, locate
    from index_format.reader import Index
    from stride_cli.corpus.build import append_to_index
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.language.language_recipe import read_recipe

    where = where if isinstance(where, WorkspacePath) else WorkspacePath(locate(where))
    reading, index_path = ReadOptions.given(reading), local_directory(where.index)
    sources = [sources] if isinstance(sources, str) else sources
    model_path = where.model.place
    if not index_path.exists():
        if model_path is None:
            raise UsageError(
                f"there is no index '{index_path}' yet, and no model is given to make it for",
                fix="name the model that was trained on this corpus (--model), or train one on it",
            )
        if kind_of(model_path) == "classifier":
            raise UsageError(
                f"model '{model_path}' is a classifier (expected a language model)",
                fix=f"stride index build FILE --model {model_path}; then stride train, stride query ROW",
            )
        say("indexing the corpus")
        build_index(sources, model=where.model, out=index_path, reading=reading)
        added = 0
    else:
        added = _count_new(Index.open(index_path), sources, reading)
    index = Index.open(index_path)
    model = open_model(index, where.model)
    fitted = index.has("operators")
    if fitted and (added or index.fitted_share < 1):
        _refuse_own_way(index, model, training)
    if added:
        trained = model.path is not None and read_recipe(model.path) is not None
        without = "; the model was trained without them" if trained else ""
        say(f"adding {added:,} new documents to the index{without}")
        del index
        index = append_to_index(
            index_path,
            sources,
            tokenizer=model.tokenizer,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            vocabulary=model.vocab_size,
            reading=reading,
            grown=True,
        )
    if not fitted or index.fitted_share < 1:
        say(
            f"fitting one operator for each of {index.n_subsets:,} subsets of {index.n_chunks:,} chunks, "
            "once only; Ctrl-C keeps what is done"
        )
        fit_index(index_path, training, model=model, overwrite=fitted)
    session = Session.open(index_path, model=model)
    if session.calibration is None:
        say("asking unrelated prompts, which verdicts are held against")
        session.calibrate(calibration)
    return session


def _count_new(index: Index, sources: Sequence[str], reading: ReadOptions) -> int:
    """Count the documents that a corpus has beyond its index's; see `prepare` for what is refused."""
    from stride_cli.corpus.build import compare_corpus, difference

    refuse_classifier(index, "stride ask asks of texts", fix="stride query 0")
    what, count = compare_corpus(index, sources, reading)
    if what == "other":
        quoted = shlex.quote(str(index.path))
        raise UsageError(
            f"index '{index.path}' is of another corpus than {', '.join(sources)} is now: expected its "
            f"{index.n_documents:,} documents unchanged at the beginning, found of {count:,}: "
            f"{difference(index, sources, reading)}",
            fix=f"keep both: --index OTHER.stride; or move {quoted} away, and it is built anew",
        )
    return count - index.n_documents


def _refuse_own_way(index: Index, model: AttributableModel, training: TrainOptions | None) -> None:
    """Refuse to fit anew, with these options, operators that were fitted with others."""
    from stride_cli.operators.options import ClosedOptions, resolve_settings

    options, stored = training or ClosedOptions(), index.group_attributes("operators")
    given = {name: getattr(options, name, None) for name in ("base", "recipe", "checkpoints")}
    asked = json.loads(json.dumps(given | asdict(resolve_settings(options, model, index)), default=str))
    found, judged = stored | stored["settings"], asked.keys() - {"batch_tokens"}
    judged -= {"project"} if index.fitted_share < 1 else set()  # its default is of fewer chunks
    if own := sorted(name for name in judged if (asked[name] or None) != (found.get(name) or None)):
        quoted = shlex.quote(str(index.path))
        raise UsageError(
            f"the corpus has more documents than the operators of index '{index.path}' have seen, and these "
            f"were fitted with settings of their own ({', '.join(own)}): they are not replaced unasked",
            fix=f"stride index append NEW.jsonl --index {quoted}, then stride train --overwrite as before",
        )
