"""The order of samples: the same for any number of ranks, each sample once an epoch."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from engine.sampler import Sampler, share


def local_ids(step, rank, size, *, n=23, batch=10, micro=1, seed=3):
    sampler = Sampler(n, batch, micro, seed, rank, size)
    positions = sampler.local_positions(tf.constant(step, tf.int64))
    pairs = [sampler.sample(p) for p in positions]
    return [(int(i), tuple(k.numpy())) for i, k in pairs]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(size):
    for step in (0, 2, 5):
        whole = local_ids(step, 0, 1)
        parts = [pair for rank in range(size) for pair in local_ids(step, rank, size)]
        assert parts == whole


def test_micro_batches_too_are_the_same_for_any_number_of_ranks():
    whole = np.reshape([i for i, _ in local_ids(4, 0, 1, micro=2)], [2, 5])
    parts = [np.reshape([i for i, _ in local_ids(4, r, 3, micro=2)], [2, -1]) for r in range(3)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert [p.shape[1] for p in parts] == [1, 2, 2]


def test_an_epoch_holds_each_sample_once_and_the_next_is_in_another_order():
    ids = [i for step in range(23) for i, _ in local_ids(step, 0, 1)]
    epochs = np.reshape(ids, [10, 23])
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_keys_differ_by_sample_epoch_and_seed():
    pairs = [p for step in range(5) for p in local_ids(step, 0, 1)]
    assert len({key for _, key in pairs}) == len(pairs)
    assert {k for _, k in local_ids(0, 0, 1, seed=4)}.isdisjoint(k for _, k in pairs)


def test_shares_are_even_and_cover_everything():
    for total in range(1, 30):
        for size in range(1, total + 1):
            edges = [share(total, rank, size) for rank in range(size)]
            lengths = [last - first for first, last in edges]
            assert sum(lengths) == total and max(lengths) - min(lengths) <= 1
            assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_batch_size": 3}, "--global_batch_size=3 is smaller .* ranks, 4"),
        ({"global_batch_size": 6, "micro_batches": 2}, "--accumulation_steps=2"),
        ({"num_samples": 2}, "2 training samples are fewer than the 4 ranks"),
    ],
)
def test_too_little_for_the_ranks(settings, words):
    usual = {"num_samples": 9, "global_batch_size": 8, "micro_batches": 1, "seed": 0}
    with pytest.raises(ValueError, match=words):
        Sampler(**(usual | settings), rank=0, size=4)
