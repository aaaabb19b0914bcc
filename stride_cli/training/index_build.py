"""Build an index for a model from a corpus, a classifier's examples, or a recorded training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stride_cli.corpus.options import BuildOptions
from stride_cli.errors import UsageError
from stride_cli.models.kinds import kind_of
from stride_cli.models.spec import GivenModel, ModelSpec, place_of
from stride_cli.output import note, progress

if TYPE_CHECKING:
    from index_format.reader import Index
    from stride_cli.corpus.forms import Form
    from stride_cli.corpus.readers import ReadOptions


@progress("building the index")
def build_index(
    sources: str | Path | Sequence[str | Path],
    *,
    model: GivenModel,
    out: str | Path,
    options: BuildOptions | None = None,
    reading: ReadOptions | None = None,
    form: Form | None = None,
) -> Index:
    """Index a corpus for a model: chunks, design matrix, fingerprints. For a classifier, its training rows.

    Parameters
    ----------
    sources : files, globs or ``-``; or one
    model : checkpoint directory, hub id or .gguf file; its tokenizer is loaded, its weights are hashed.
        Or a classifier's directory, with one file of examples as the source.
    options : BuildOptions
    reading : ReadOptions
    form : that a recorded training had

    Raises
    ------
    CorpusError, ModelError, UsageError, IndexExists, IndexBusy, IndexIncomplete, StorageFull
    """
    from stride_cli.corpus import build
    from stride_cli.corpus.readers import ReadOptions
    from stride_cli.models.configuration import context_length, vocabulary_size
    from stride_cli.models.language.fingerprints import settings_fingerprint, tokenizer_fingerprint
    from stride_cli.models.language.language_recipe import most_subsets
    from stride_cli.models.language.tokenizer import load_tokenizer
    from stride_cli.models.loading import model_fingerprint

    options, reading = BuildOptions.given(options), ReadOptions.given(reading)
    listed = list(map(str, [sources] if isinstance(sources, str | Path) else sources))
    spec, place = ModelSpec.of(model), place_of(model)
    if kind_of(place) == "classifier":
        from stride_cli.data.examples_index import build_classifier_index

        if len(listed) != 1:
            raise UsageError(
                f"a classifier's examples are in one file (found {len(listed)})", fix="join them into one"
            )
        _refuse_options_of_text(options, reading)
        return build_classifier_index(listed[0], model=spec, out=out, options=options)
    tokenizer, weights = load_tokenizer(spec), model_fingerprint(spec)
    local = Path(place).expanduser()
    indexed = build.IndexedModel(
        tokenizer,
        tokenizer_fingerprint(tokenizer),
        weights,
        # found again from another working directory
        path=str(local.absolute()) if local.exists() else place,
        context=context_length(spec),
        settings_fingerprint=settings_fingerprint(spec),
        most_subsets=most_subsets(spec),
        form=form,
        vocabulary=vocabulary_size(spec),
    )
    return build.build_index(listed, indexed, out, options, reading)


def build_index_of_run(
    run: str | Path,
    *,
    out: str | Path,
    options: BuildOptions | None = None,
    reading: ReadOptions | None = None,
) -> Index:
    """Index the corpus of a recorded training: by `StrideCallback` or `stride model train`.

    Parameters
    ----------
    run : the directory that it left; its model is the index's
    options, reading : as for `build_index`; chunks are as long as the training's by default

    Raises
    ------
    ModelError      nothing was recorded there, or the corpus is another one by now; and as `build_index`
    """
    from stride_cli.training.language_trainer import check_recipe
    from stride_cli.training.recording import find_run

    found, options = find_run(run), BuildOptions.given(options)
    block_size = options.block_size or found.recipe.block_size
    if options.form is not None:
        fix = f"leave it out, or give the corpus and --model {run}"
        raise UsageError("--form is what the training had, and --from-run reads it", fix=fix)
    options = replace(options, block_size=block_size)
    built = build_index(found.sources, model=run, out=out, options=options, reading=reading, form=found.form)
    # how many are scored depends on the chunks' length, too
    corpus = {name: value for name, value in found.recipe.corpus.items() if "tokens" not in name}
    check_recipe(replace(found.recipe, block_size=block_size, corpus=corpus), built)
    if found.form is not None and built.n_chunks > built.n_documents:
        chunk_at, first = (built.array(f"corpus/{of}_offsets")[:] for of in ("chunk", "document"))
        longest = int((chunk_at[first[1:]] - chunk_at[first[:-1]]).max())
        note(
            f"warning: rows of more than {block_size} tokens are cut, which training read whole: give "
            f"--block-size {longest}"
        )
    return built


def _refuse_options_of_text(options: BuildOptions, reading: ReadOptions) -> None:
    """Raise UsageError where a classifier's index is given options of a corpus of text."""
    from stride_cli.corpus.readers import Fields, ReadOptions
    from stride_cli.options import entries, refuse_foreign

    given = {
        name: getattr(options, name)
        for name in ("block_size", "form", "store_text", "range", "workers", "engine")
    }
    given |= {name: getattr(reading, name) for name in entries(ReadOptions)}
    given |= {name: getattr(reading.fields, name) for name in entries(Fields)}
    refuse_foreign(
        given,
        (),
        (BuildOptions, ReadOptions, Fields),
        because="of a corpus of text, and this model is a classifier",
        otherwise="give a language model with --model",
    )
