"""Several checkpoints of a run in one index: fitted one after the other, measured together, or refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from index_format.errors import IndexIncomplete, IndexMismatch
from index_format.reader import Index
from stride_cli import api
from stride_cli.attribution.pipeline import additive_measurement
from stride_cli.corpus.build import append_to_index
from stride_cli.data.batches import ChunkReader
from stride_cli.data.example_queries import register
from stride_cli.errors import ModelError
from stride_cli.models.language.fingerprints import tokenizer_fingerprint
from stride_cli.models.language.tokenizer import load_tokenizer
from stride_cli.models.loading import Opener
from stride_cli.operators import fitting, saving
from stride_cli.operators.designs import Designs, design_seed
from stride_cli.operators.linear_response import measure_linear
from stride_cli.operators.options import FitRunOptions, resolve_settings
from stride_cli.operators.steered_model import SteeredModel
from stride_cli.operators.store import Operators
from tests.prepared import Prepared
from tests.same_fit import assert_same_fit

DEMO = Path(__file__).parents[3] / "stride_cli" / "demo" / "corpus.jsonl"
SIZES = {"layers": 2, "width": 32, "heads": 2, "vocab": 512, "context": 64}
QUICK = {"space": "residual-matrix+logit", "rank": 8}
PROMPT = "The French Revolution"


def built(folder: Path, model: Path, name: str) -> Path:
    """An index of the folder's corpus for a model, without operators."""
    api.build_index(
        [str(folder / "corpus.jsonl")],
        out=folder / name,
        options=api.BuildOptions(n_subsets=40),
        model=str(model),
    )
    return folder / name


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus.jsonl (40 documents), model/ with three checkpoints, bare.stride, and run.stride with operators
    of two of the checkpoints beside the model's own."""
    from stride_cli.training.pretraining import TrainOptions, train_model

    folder = tmp_path_factory.mktemp("checkpoints")
    documents = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:40]]
    rows = [{"id": document["id"], "text": document["text"][:160]} for document in documents]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = TrainOptions(**SIZES, epochs=2, batch_tokens=256, device="cpu", dtype="fp32", checkpoints=3)
    train_model([str(folder / "corpus.jsonl")], folder / "model", options)
    built(folder, folder / "model", "bare.stride")
    shutil.copytree(folder / "bare.stride", folder / "run.stride")
    api.fit_index(folder / "run.stride", api.ClosedOptions(**QUICK, checkpoints=kept(folder)[:2]))
    return folder


def kept(folder: Path) -> list[Path]:
    """The checkpoints that the training kept."""
    found = sorted((folder / "model" / "checkpoints").iterdir())
    assert len(found) == 3
    return found


@pytest.fixture
def bare(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder / "bare.stride", tmp_path / "bare.stride"))


def test_each_measures_subsets_of_its_own_and_their_recoveries_are_averaged(run_folder: Path) -> None:
    """By hand: every model fitted on the design of its place and measured alone, at the spread of the first;
    the mean of scikit-learn's Lasso on each."""
    from sklearn.linear_model import Lasso

    together = api.Session.open(run_folder / "run.stride")
    index, n_chunks = together.index, together.index.n_chunks
    query = api.as_query(together.model, PROMPT, max_new_tokens=4)
    answer = together.query(query, api.QueryOptions(read=0, estimate="subsets", shrink=False))
    parts, rows = [], []
    for number, path in enumerate([run_folder / "model", *kept(run_folder)[:2]]):
        design = Designs.of(index, design_seed(index.seed, number) if number else None)
        model = Opener.like(together.model).load(str(path))
        settings = resolve_settings(
            api.ClosedOptions(**QUICK, residuals="final", normalize=0.0), model, index
        )
        alone = fitting.fit_operators(model, ChunkReader(index), np.asarray(design.columns), 40, settings)
        stored = Operators.from_index(index, number)
        for ours, theirs in zip(stored.gates, alone.gates, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        matrix = np.zeros((40, n_chunks))
        matrix[np.asarray(design.columns).T.astype(int), np.arange(n_chunks)] = 1
        np.testing.assert_array_equal(matrix.sum(1), design.row_sizes)
        rows.append(matrix)
        y = additive_measurement(
            measure_linear(SteeredModel.of(model, alone), query.batch())[0], matrix.sum(1)
        )
        parts.append(y * (parts[0].std() / y.std() if parts else 1))
    expected = np.concatenate(parts)
    assert len({matrix.tobytes() for matrix in rows}) == 3
    np.testing.assert_allclose(answer.measured, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    mean = np.zeros(n_chunks)
    for matrix, y in zip(rows, parts, strict=True):
        largest = np.abs((matrix - matrix.mean(0)).T @ (y - y.mean())).max()
        alpha = answer.solution.lambda_ratio * largest / 40
        mean += Lasso(alpha=alpha, tol=1e-10, max_iter=1_000_000).fit(matrix, y).coef_ / 3
    found = np.zeros(n_chunks)  # against the average chunk
    found[answer.solution.indices] = answer.solution.values - answer.solution.average
    np.testing.assert_allclose(found, mean, atol=5e-3 * np.abs(mean).max())
    assert answer.to_record()["measurement"]["models"] == 3
    assert answer.loss == pytest.approx(together.query(query, api.QueryOptions(measure="exact")).loss)


def test_every_way_to_ask_uses_all_of_them(run_folder: Path) -> None:
    """The method of the evaluation, the audit, and a fit of the method's own agree with a query."""
    from stride_cli.audit.effect import _measure
    from stride_cli.audit.samples import tokenize_samples
    from stride_cli.corpus.documents import Document
    from stride_cli.data.queries import Query
    from stride_cli.data.query_set import QuerySet
    from stride_cli.data.workspace import Workspace
    from stride_cli.research.methods.registry import open_method
    from tests.stride_cli.research.methods.gradients.scored import score_all

    session = api.Session.open(run_folder / "run.stride")
    query = api.as_query(session.model, PROMPT, max_new_tokens=4)
    answer = session.query(query)
    expected = np.zeros(session.index.n_chunks)
    expected += answer.solution.average
    expected[answer.solution.indices] = answer.solution.values
    task = Workspace.open(session.index, session.model)
    listed = "|".join(map(str, [run_folder / "model", *kept(run_folder)[:2]]))
    for spec in ("stride:stored=true", f"stride:space=residual-matrix+logit,rank=8,checkpoints={listed}"):
        method = open_method(spec)
        method.fit(task)
        scores = score_all(method, QuerySet.from_queries([query]))[0]
        np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())

    document = Document(id="q", text=PROMPT + " began in 1789.", source="benchmark", line=1)
    (sample,) = tokenize_samples(session.model.tokenizer, [document], block_size=64)
    measured = _measure(session.pipeline(), [sample])
    asked = session.query(Query(PROMPT, "", sample.ids[0], sample.weights[0], False))
    np.testing.assert_allclose(measured.responses[0], asked.responses, rtol=1e-5, atol=1e-9)
    assert measured.losses[0] == pytest.approx(asked.loss)


def test_an_interrupted_fit_does_not_go_on_after_documents_were_appended(
    run_folder: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append keeps what is unfinished, and the chunks that the pass has seen are numbered as before."""

    def save(state: dict, path: Path) -> None:
        before(state, path)
        raise KeyboardInterrupt

    before = saving.save_atomically
    options = api.ClosedOptions(**QUICK, batch_tokens=256)
    with monkeypatch.context() as patched:
        patched.setattr(saving, "save_atomically", save)
        with pytest.raises(KeyboardInterrupt):
            api.fit_index(bare, options, run=FitRunOptions(save_seconds=0))
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"id": "later", "text": "The Directory followed the Convention. " * 40}))
    tokenizer = load_tokenizer(run_folder / "model")
    fingerprint = tokenizer_fingerprint(tokenizer)
    append_to_index(bare, [str(more)], tokenizer=tokenizer, tokenizer_fingerprint=fingerprint)
    with pytest.raises(IndexIncomplete, match="other input"):
        api.fit_index(bare, options)
    api.fit_index(bare, options, overwrite=True)
    assert len(Operators.from_index(Index.open(bare)).seen) == Index.open(bare).n_chunks


@pytest.mark.slow
def test_killed_between_checkpoints_it_ends_with_the_same_bits(
    run_folder: Path, bare: Path, prepared: Prepared
) -> None:
    # beside the one it is compared with: the way to the checkpoints is recorded
    bare = bare.rename(run_folder / "killed.stride")
    command = ["stride", "train", "--index", str(bare), "--device", "cpu", "--no-calibration"]
    command += ["--space", QUICK["space"], "--rank", "8", "--checkpoints", *map(str, kept(run_folder)[:2])]
    journal = bare / "operators.partial" / "journal.jsonl"
    process = prepared.start(command)
    while process.poll() is None and not (journal.exists() and '"fitted"' in journal.read_text()):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (bare / "operators").exists()
    prepared.run(command, check=True)
    assert_same_fit(bare / "operators", run_folder / "run.stride" / "operators")


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_a_checkpoint_that_is_not_as_it_was_is_refused(
    run_folder: Path, bare: Path, tmp_path: Path, what: str
) -> None:
    place = Path(shutil.copytree(kept(run_folder)[0], tmp_path / "kept"))
    api.fit_index(bare, api.ClosedOptions(**QUICK, checkpoints=[place]))
    stored = Index.open(bare).group_attributes("operators")["checkpoints"][0]["model_fingerprint"]
    shutil.rmtree(place)
    if what == "changed":
        shutil.copytree(kept(run_folder)[1], place)
    with pytest.raises(IndexMismatch if what == "changed" else ModelError) as refused:
        api.Session.open(bare)
    assert str(place) in str(refused.value) and stored in str(refused.value)
    assert "stride train" in refused.value.fix and "--overwrite" in refused.value.fix
    if what == "changed":
        found = hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
        assert found in str(refused.value)
    api.fit_index(bare, api.ClosedOptions(**QUICK), overwrite=True)
    assert api.Session.open(bare).checkpoints == []


def test_another_tokenizer_is_refused_before_anything_is_fitted(
    run_folder: Path, bare: Path, tmp_path: Path
) -> None:
    from stride_cli.models.language.fingerprints import tokenizer_fingerprint
    from stride_cli.training.pretraining import TrainOptions, train_model

    other = tmp_path / "other"
    options = TrainOptions(
        **{**SIZES, "vocab": 300}, epochs=0.1, batch_tokens=256, device="cpu", dtype="fp32"
    )
    train_model([str(run_folder / "corpus.jsonl")], other, options)
    with pytest.raises(IndexMismatch, match="another tokenizer") as refused:
        api.fit_index(bare, api.ClosedOptions(checkpoints=[kept(run_folder)[0], other]))
    for path in (run_folder / "model", other):
        assert tokenizer_fingerprint(load_tokenizer(path)) in str(refused.value)
    assert not (bare / "operators.partial").exists()
    with pytest.raises(ModelError, match="there is no model"):
        api.fit_index(bare, api.ClosedOptions(checkpoints=[tmp_path / "nothing"]))


def test_checkpoints_of_a_classifier(tmp_path: Path) -> None:
    """Two trainings from other seeds; they share the rows, and a query's own inputs."""
    from stride_cli.training.classifiers import ClassifierOptions, train_classifier

    random = np.random.default_rng(0)
    labels = np.arange(120) % 3
    images = random.integers(0, 9, (120, 8, 8)) + 3 * labels[:, None, None]
    np.savez(tmp_path / "digits.npz", images=images.astype(np.uint8), labels=labels)
    for seed, name in enumerate(("first", "second")):
        options = ClassifierOptions(width=8, rows=100, holdout=10, epochs=3, seed=seed)
        train_classifier(tmp_path / "digits.npz", tmp_path / name, options)
    index = tmp_path / "run.stride"
    api.build_index([str(tmp_path / "digits.npz")], out=index, model=str(tmp_path / "first"))
    record = api.fit_index(index, api.ClosedOptions(checkpoints=[tmp_path / "second"]))
    assert [entry["path"] for entry in record["checkpoints"]] == [str(tmp_path / "second")]
    session = api.Session.open(index)
    (held_out,) = session.model.held_out[:1]
    answer = session.query(str(held_out))
    assert np.isfinite(answer.responses).all() and len(session.steered) == 2
    fresh = register(session.model, images[:1], labels[:1])  # an input that only this process has
    rows = [steered.model.predict(fresh.batch([0]).ids) for steered in session.steered]
    assert rows[0].shape == rows[1].shape and not np.allclose(rows[0].cpu(), rows[1].cpu())
