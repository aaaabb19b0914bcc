"""RDS and FeatSim against one sequence at a time through transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stride_cli.data.example_queries import queries_of_rows
from stride_cli.models.classifier.classifier_model import Standardisation
from stride_cli.research.methods import representations
from stride_cli.research.methods.representations import RDS, FeatSim
from tests.stride_cli.research.methods.gradients.scored import score_all


def states_of(model, text: str, layer: int) -> np.ndarray:
    ids = torch.tensor([model.tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        return model.model(input_ids=ids, output_hidden_states=True).hidden_states[layer][0].numpy()


def cosines(left: list[np.ndarray], right: list[np.ndarray]) -> np.ndarray:
    first, second = np.stack(left), np.stack(right)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    return first @ second.T


@pytest.mark.parametrize(
    ("method", "take"),
    [(RDS(), lambda states: states.mean(0)), (FeatSim(), lambda states: states[:-1].mean(0))],
)
def test_rds_is_the_direct_computation(
    method, take, task, make_queries, sentences, model, monkeypatch
) -> None:
    monkeypatch.setattr(representations, "_BATCH_TOKENS", 50)
    method.fit(task)
    # transformers' last hidden_states are those after the norm
    expected = cosines(
        [take(states_of(model, text, -1)) for text in sentences[:9]],
        [take(states_of(model, text, -1)) for text in sentences],
    )
    np.testing.assert_allclose(score_all(method, make_queries(sentences[:9])), expected, atol=2e-5)
    assert method.bytes_per_chunk == 4 * model.d_model


def test_featsim_reads_scored_positions_only(task, sentences, model) -> None:
    from stride_cli.data.query_set import QuerySet

    ids = np.array(model.tokenizer.encode(sentences[0], add_special_tokens=False))
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 1
    method = FeatSim()
    method.fit(task)
    found = score_all(method, QuerySet([ids], [weights], ["0"]))
    own = states_of(model, sentences[0], -1)[-2]
    expected = cosines([own], [states_of(model, text, -1)[:-1].mean(0) for text in sentences])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("method", [FeatSim(), RDS()])
def test_a_classifiers_features_are_its_penultimate_activations(method, make_index) -> None:
    """Whatever is pooled: an example of a classifier has one state."""
    from stride_cli.data.batches import ChunkReader
    from stride_cli.data.workspace import Workspace
    from stride_cli.models.classifier.classifier_model import ClassifierModel
    from stride_cli.models.classifier.networks import MLP

    random = np.random.default_rng(0)
    data, labels = random.standard_normal((12, 6)), random.integers(0, 3, 12)
    torch.manual_seed(0)
    network = MLP(6, [5, 4], 3)
    with torch.no_grad():
        for block in network.blocks:
            block[1].bias.fill_(1.0)  # no features that are all zero
    standardisation = Standardisation.of(data, by_column=True)
    model = ClassifierModel(network, classes="abc", shape=(6,), standardisation=standardisation)
    model.attach(data, np.arange(10), labels, [str(row) for row in range(12)])
    index = make_index([[row, labels[row]] for row in range(10)], kind="classifier")
    method.fit(Workspace(index, model, ChunkReader(index), 0))
    found = score_all(method, queries_of_rows(model, [10, 11]))
    inputs = torch.from_numpy(standardisation.apply(data))
    with torch.no_grad():
        features = network.blocks[1](network.blocks[0](inputs)).numpy()
    np.testing.assert_allclose(found, cosines(list(features[10:]), list(features[:10])), atol=1e-5)
    assert method.bytes_per_chunk == 4 * 4
