"""Networks: shapes, seeds and parts."""

from __future__ import annotations

import pytest
import torch

from stride_cli.models.classifier.networks import build_network, choose_network, split_network


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (6,)),
        ("mlp", (2, 3)),
        ("logistic", (6,)),
        ("resnet9", (8, 8)),
        ("resnet9", (64,)),
        ("resnet9", (3, 9, 7)),
        ("resnet9", (28, 28, 3)),
    ],
)
def test_logits_and_seeds(name: str, shape: tuple[int, ...]) -> None:
    spec = choose_network(name, width=8)
    inputs = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    one, same, other = (build_network(spec, shape, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one(inputs).shape == (3, 4)
    torch.testing.assert_close(one(inputs), same(inputs), rtol=0, atol=0)
    if name != "logistic":  # which starts at zero
        assert not torch.equal(one(inputs), other(inputs))
    blocks, head = split_network(one)
    state_ = inputs
    for block in blocks:
        state_ = block(state_)
    torch.testing.assert_close(head(state_), one(inputs))


def test_an_example_does_not_depend_on_its_batch() -> None:
    network = build_network(choose_network("resnet9", width=8), (8, 8), 4, seed=0)
    inputs = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.train()(inputs)[:2], network.eval()(inputs[:2]), rtol=1e-4, atol=1e-5)
