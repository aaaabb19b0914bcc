"""Every chunk once a pass, within the budget, in an order that only seed and pass decide."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stride_cli.corpus.chunking import Chunk
from stride_cli.models.language.language_recipe import LateStarts
from stride_cli.training.epoch_batches import as_read, plan_epoch
from tests.stride_cli.training.test_language_loop import a_recipe


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=200),
    batch_tokens=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 50),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_a_pass(lengths: list[int], batch_tokens: int, seed: int, epoch: int, data: st.DataObject) -> None:
    sizes = np.array(lengths)
    among = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    members = np.array(sorted(data.draw(st.sets(st.sampled_from(among.tolist()), min_size=1))))
    how: dict[str, int] = {"batch_tokens": batch_tokens, "seed": seed, "epoch": epoch}
    for part in (None, among):
        plan = plan_epoch(sizes, members, **how, among=part)
        assert sorted(np.concatenate(plan)) == members.tolist()
        assert all(len(batch) == 1 or len(batch) * sizes[batch].max() <= batch_tokens for batch in plan)
    whole, again = plan_epoch(sizes, among, **how), plan_epoch(sizes, among, **how, among=among)
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_part_is_visited_in_the_order_of_all() -> None:
    """One chunk less moves hardly any other; of a half, chunks come as early or late as among all."""
    sizes = np.random.default_rng(0).integers(2, 512, 3000)
    place = np.empty(3000)
    whole = plan_epoch(sizes, np.arange(3000), batch_tokens=4096, seed=0, epoch=0)
    place[np.concatenate(whole)] = np.repeat(np.linspace(0, 1, len(whole)), [len(b) for b in whole])

    def shift(members: np.ndarray) -> np.ndarray:
        plan = plan_epoch(sizes, members, batch_tokens=4096, seed=0, epoch=0, among=np.arange(3000))
        here = np.repeat(np.linspace(0, 1, len(plan)), [len(b) for b in plan])
        return np.abs(place[np.concatenate(plan)] - here)

    assert np.mean(shift(np.delete(np.arange(3000), 1234)) < 0.02) > 0.9
    half = np.sort(np.random.default_rng(1).permutation(3000)[:1500])
    assert shift(half).mean() < 0.25  # 1/3 where one order has nothing to do with the other


@given(
    texts=st.lists(st.lists(st.integers(2, 9), min_size=2, max_size=30), min_size=1, max_size=8),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    begin=st.sampled_from([None, 1]),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
@settings(deadline=None, max_examples=100)
def test_chunks_are_read_whole_or_from_a_later_sentence_on(
    texts: list[list[int]], share: float, begin: int | None, seed: int, epoch: int
) -> None:
    ends = [2, 3]
    chunks = [Chunk(np.array(text, np.int32), 1, None) for text in texts]
    chunks.append(Chunk(np.array([4, 2, *range(4, 12)], np.int32), 3, None))  # an answer to a prompt
    recipe = dataclasses.replace(a_recipe(chunks), seed=seed, late=LateStarts(share, ends, begin))
    batch = np.arange(len(chunks))
    found = as_read(chunks, batch, recipe, epoch)
    assert found[-1] is chunks[-1]
    for chunk, read in zip(chunks[:-1], found[:-1], strict=True):
        whole, tokens = chunk.tokens.tolist(), read.tokens.tolist()
        starts = [at + 1 for at in range(len(whole) - 5) if whole[at] in ends]
        later = [([] if begin is None else [begin]) + whole[start:] for start in starts]
        allowed = [whole] if share == 0 or not later else later if share == 1 else [whole, *later]
        assert tokens in allowed and read.loss_start == 1 and read.tokens.dtype == np.int32
    # what stands beside a chunk in a batch is no matter
    for number, read in enumerate(found):
        (alone,) = as_read(chunks, np.array([number]), recipe, epoch)
        np.testing.assert_array_equal(alone.tokens, read.tokens)


def test_each_pass_reads_a_chunk_from_elsewhere() -> None:
    chunk = Chunk(np.array([1, *([5, 6, 2] * 20)], np.int32), 1, None)
    recipe = dataclasses.replace(a_recipe([chunk]), late=LateStarts(0.5, [2], 1))
    lengths = [len(as_read([chunk], np.zeros(1, np.int64), recipe, epoch)[0].tokens) for epoch in range(200)]
    assert 60 < lengths.count(61) < 140 and len(set(lengths)) > 15
