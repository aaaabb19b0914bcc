"""Agreement with the field's libraries, on what they can do: skipped where they are not installed."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from stride_cli.data.batches import ChunkReader
from stride_cli.data.query_set import QuerySet
from stride_cli.data.workspace import Workspace
from stride_cli.research.methods.gradients.ekfac import EKFAC
from stride_cli.research.methods.gradients.graddot import GradDot
from stride_cli.research.methods.gradients.trackstar import TrackStar
from stride_cli.research.methods.gradients.trak import TRAK
from tests.stride_cli.research.methods.gradients.scored import score_all

LENGTH = 8


def _equal_chunks(task):
    """The task with chunks of one length: the libraries treat padding in ways of their own."""
    random = np.random.default_rng(5)
    tokens = random.integers(0, task.model.vocab_size, (20, LENGTH))
    index = copy.copy(task.index)
    index.arrays = {
        "corpus/tokens": tokens.ravel().astype(np.uint16),
        "corpus/chunk_offsets": np.arange(21, dtype=np.int64) * LENGTH,
        "corpus/loss_start": np.ones(20, np.int32),
    }
    held = random.integers(0, task.model.vocab_size, (6, LENGTH))
    weights = [np.concatenate([[0], np.ones(LENGTH - 1)])] * 6
    return Workspace(index, task.model, ChunkReader(index), 0), QuerySet(list(held), weights, list("abcdef"))


class _Logits(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(input_ids=ids, use_cache=False).logits


@pytest.mark.slow
def test_ekfac_of_kronfluence(nanochat_task, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("kronfluence")
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments, ScoreArguments
        from kronfluence.task import Task as KronfluenceTask

    task, queries = _equal_chunks(nanochat_task)
    linear = [name for name, module in task.model.model.named_modules() if isinstance(module, nn.Linear)]
    mlp = [f"module.{name}" for name in linear if "mlp" in name]

    class Language(KronfluenceTask):
        def compute_train_loss(self, batch, model, sample=False):
            logits = model(batch[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model) / (LENGTH - 1)

        def get_influence_tracked_modules(self):
            return mlp

    corpus = torch.stack([torch.from_numpy(task.chunks.chunk(row)[0].astype(np.int64)) for row in range(20)])
    held = torch.stack([torch.from_numpy(row) for row in queries.ids])
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare_model(_Logits(copy.deepcopy(task.model.model)).requires_grad_(True), Language())
        analyzer = Analyzer("test", model, Language(), cpu=True, disable_tqdm=True)
        analyzer.fit_all_factors(
            "factors",
            corpus,
            per_device_batch_size=5,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=True),
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            held,
            corpus,
            per_device_query_batch_size=3,
            per_device_train_batch_size=5,
            score_args=ScoreArguments(damping_factor=None),
        )
        expected = analyzer.load_pairwise_scores("scores")["all_modules"].numpy()
    method = EKFAC(labels="true", damping=0.1)
    method.fit(task)
    found = score_all(method, queries)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=5e-3 * np.abs(expected).max())


def test_trak_of_traker(softmax, tmp_path):
    """Without a projection there, and with one that keeps everything here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trak = pytest.importorskip("trak")
        from trak.projectors import NoOpProjector

        head = copy.deepcopy(softmax.task.model.model["head"]).requires_grad_(True)
        tracer = trak.TRAKer(
            model=head,
            task="image_classification",
            train_set_size=softmax.n,
            save_dir=str(tmp_path),
            device="cpu",
            projector=NoOpProjector(15, 15, 0, "normal", torch.device("cpu")),
            proj_dim=15,
            lambda_reg=1e-5,
            use_half_precision=False,
            logging_level=50,
        )
        tracer.load_checkpoint(head.state_dict(), model_id=0)
        inputs, n = softmax.inputs.float(), softmax.n
        tracer.featurize(batch=(inputs[:n], softmax.labels[:n]), num_samples=n)
        tracer.finalize_features()
        tracer.start_scoring_checkpoint("held", head.state_dict(), 0, num_targets=len(softmax.queries))
        tracer.score(batch=(inputs[n:], softmax.labels[n:]), num_samples=len(softmax.queries))
        expected = np.array(tracer.finalize_scores("held")).T  # (Q, n)
    method = TRAK(dim=1024, damping=0)
    method.fit(softmax.task)
    found = score_all(method, softmax.queries)
    for a, b in zip(found, expected, strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.995  # its inverse is of float32 and needs a ridge


def _of_bergson(task, rows, path):
    """Gradients of the mean loss of each row by bergson, module → (n, parameters), and its processor with
    their second moments."""
    from bergson import CollectorComputer, GradientProcessor, IndexConfig, InMemoryCollector
    from datasets import Dataset

    model = copy.deepcopy(task.model.model).requires_grad_(True)
    path.mkdir()
    config = IndexConfig(run_path=str(path), loss_reduction="mean")
    config.partial_run_path.mkdir(exist_ok=True)
    processor = GradientProcessor(projection_dim=None)
    data = Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})
    linear = {name for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear)}
    collector = InMemoryCollector(
        model=model.base_model,
        cfg=config,
        processor=processor,
        data=data,
        target_modules=linear,
        skip_hessians=False,
    )
    CollectorComputer(model, data, collector=collector, cfg=config).run_with_collector_hooks()
    return collector.gradients, processor


def test_graddot_and_trackstar_of_bergson(nanochat_task, tmp_path):
    """Unit gradients of the whole space, whitened by second moments of the corpus, and of the queries too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bergson")
        from bergson.hessians.preconditioner import DensePreconditioner
        from bergson.utils.math import compute_lambda

        task, queries = _equal_chunks(nanochat_task)
        chunks = [task.chunks.chunk(row)[0].astype(np.int64) for row in range(20)]
        corpus, at_corpus = _of_bergson(task, chunks, tmp_path / "corpus")
        held, at_queries = _of_bergson(task, queries.ids, tmp_path / "queries")

    def scores(precondition=lambda gradients: gradients, *, unit=False):
        whole = [torch.cat(list(precondition(each).values()), dim=1) for each in (held, corpus)]
        a, b = (nn.functional.normalize(each, dim=1) if unit else each for each in whole)
        return (a @ b.T).numpy()

    def close(method, expected):
        method.fit(task)
        found = score_all(method, queries)
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())

    close(GradDot(layers="body", reduction="mean"), scores())
    whitened = DensePreconditioner.from_processor(at_corpus, power=-0.5).apply
    options = {"rank": 64, "moments": "none", "reduction": "mean", "layers": "body"}
    close(TrackStar(**options), scores(whitened, unit=True))
    width = sum(each.shape[1] for each in corpus.values())
    components = round(width * 1000 / 65_536)
    mix = compute_lambda(at_queries.hessians_eigen, at_corpus.hessians_eigen, components)
    assert 0.05 < mix < 0.95
    at_corpus.hessians = {
        name: mix * at_queries.hessians[name] + (1 - mix) * moment
        for name, moment in at_corpus.hessians.items()
    }
    whitened = DensePreconditioner.from_processor(at_corpus, power=-0.5).apply
    close(TrackStar(**options, mix="auto"), scores(whitened, unit=True))
