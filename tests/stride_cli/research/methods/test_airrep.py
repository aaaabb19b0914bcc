"""AirRep: scores of groups and the ranking loss by hand, exact gradients, checkpoints, a planted effect."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stride_cli.research.methods.airrep import AirRep, AirRepOptions
from stride_cli.research.methods.airrep_encoder import new_airrep
from stride_cli.research.methods.airrep_training import (
    Split,
    _backward_in_batches,
    group_scores,
    ranking_loss,
    step_loss,
    train_encoder,
)
from tests.stride_cli.research.methods.gradients.scored import score_all


@pytest.fixture(scope="module")
def base(tmp_path_factory, word_tokenizer):
    """A BERT of 2 layers × 32 with random weights, saved."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=len(word_tokenizer), max_position_embeddings=40)
    model = BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    word_tokenizer.pad_token = "?"
    word_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def encoder(base):
    return new_airrep(base, device="cpu", seed=0)


def test_scores_are_inner_products(encoder, task, make_queries, sentences, tmp_path) -> None:
    encoder.save(tmp_path)
    method = AirRep(model=str(tmp_path))
    method.fit(task)
    vectors = encoder.embed(sentences).numpy()
    queries = make_queries(sentences[:33])
    scores = score_all(method, queries)
    np.testing.assert_allclose(scores, vectors[:33] @ vectors.T, rtol=1e-4, atol=1e-4)
    assert method.bytes_per_chunk == 4 * 32


def test_group_scores_by_hand() -> None:
    products = torch.tensor([[2.0, -3.0, 0.5], [0.0, 1.0, 1.0]])
    members = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
    found = group_scores(products, members)
    weight = [math.exp(2), math.exp(3)]
    assert float(found[0, 0]) == pytest.approx((weight[0] * 2 - weight[1] * 3) / sum(weight))
    assert float(found[0, 1]) == pytest.approx(0.5)
    assert float(found[1, 0]) == pytest.approx(math.e / (1 + math.e))
    assert found[:, 2].tolist() == [0, 0]


def test_ranking_loss_by_hand() -> None:
    scores = torch.tensor([[1.0, 0.0, 3.0]])
    targets = torch.tensor([[0.5, 0.0, 0.5]])  # ordered pairs: (0, 1) and (2, 1), each worth 0.5
    expected = 0.5 * (math.log1p(math.exp(-1)) + math.log1p(math.exp(-3))) / 2
    assert float(ranking_loss(scores, targets)) == pytest.approx(expected)
    assert float(ranking_loss(scores, torch.zeros(1, 3))) == 0


def test_gradients_in_batches_are_the_gradient_of_the_whole(encoder, sentences) -> None:
    texts = sentences[:14]  # 10 chunks and 4 examples
    random = np.random.default_rng(0)
    members = torch.from_numpy(random.random((5, 10)) < 0.5)
    targets = torch.from_numpy(random.standard_normal((4, 5)).astype(np.float32))
    loss = step_loss(encoder(texts), members, targets)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad()
    again = _backward_in_batches(encoder, texts, members, targets, batch_size=4)
    assert again.item() == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in encoder.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_training_learns_what_words_alone_do_not_say(encoder, sentences, whole) -> None:
    """An example's loss falls with the chunks that name its partner word; told by subsets not trained on."""
    random = np.random.default_rng(3)
    words, partners = ["river", "snow", "bread", "wolves"], ["mill", "pines", "soil", "north"]
    named = random.integers(0, 4, 60)
    chunks = [f"{partners[number]} {random.choice(sentences).split()[0]}" for number in named]
    masks = random.random((240, 60)) < 0.3
    losses = -(masks @ (named[:, None] == np.arange(4)).astype(float))
    split = Split(words, masks[:200], losses[:200])

    def agreement() -> float:
        vectors = encoder.embed(words + chunks)
        scores = group_scores(vectors[:4] @ vectors[4:].T, torch.from_numpy(masks[200:])).numpy()
        pairs = zip(scores, -losses[200:].T, strict=True)
        return float(np.mean([np.corrcoef(score, truth)[0, 1] for score, truth in pairs]))

    before = agreement()
    settings = AirRepOptions(epochs=12, learning_rate=3e-3, tune="all" if whole else "projector")
    frozen = {name: parameter.clone() for name, parameter in encoder.bert.named_parameters()}
    history = train_encoder(encoder, chunks, [split], settings, seed=0)
    assert history[-1] < 0.8 * history[0]
    assert agreement() > max(before + 0.2, 0.45)
    unchanged = all(torch.equal(p, frozen[name]) for name, p in encoder.bert.named_parameters())
    assert unchanged is not whole
