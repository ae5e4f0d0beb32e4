"""The order of samples: the same for any number of ranks, each sample once an epoch, and random."""

import functools
import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from hvdkit.data.place import Place
from hvdkit.data.sampler import NO_SHARDS, Sampler, Shards, shards_of, share
from hvdkit.data.source import Synthetic

# Seeds that a mix of too few bits takes for one.
SEEDS = [0, 1, 256, 257, 2**31, 2**32 + 1, 2**64 - 1]
# Nothing below is that far off by chance: fewer than 1,000 pairs, normal tails.
SIGMAS = 5

properties = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


@functools.cache
def order(
    n: int,
    seed: int,
    epoch: int,
    places: int | None = None,
    *,
    shards: Shards = NO_SHARDS,
) -> np.ndarray:
    """Ids at the first `places` places (all) of an epoch."""
    positions = epoch * n + tf.range(n if places is None else places, dtype=tf.int64)
    return Sampler(n, 1, 1, seed, 0, 1, shards=shards).order(positions).numpy()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return np.corrcoef(a, b)[0, 1] * np.sqrt(len(a))


def test_no_order_comes_back_in_hundreds_of_epochs_or_seeds():
    epochs = [order(10_582, 1, epoch, 20).tobytes() for epoch in range(300)]
    seeds = [order(10_582, seed, 0, 20).tobytes() for seed in range(300)]
    assert len({*epochs, *seeds}) == 300 + 300 - 1  # epoch 0 of seed 1 is in both


@properties
@hypothesis.given(
    n=st.integers(1, 3_000)
    | st.builds(
        lambda bits, more: 2**bits + more, st.integers(4, 20), st.integers(-1, 2)
    ),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
)
@hypothesis.example(n=2**16 + 1, seed=1, epoch=0)
@hypothesis.example(n=2**18 + 1, seed=1, epoch=0)
@hypothesis.example(n=2**20 + 1, seed=1, epoch=0)
def test_an_epoch_holds_each_id_once_for_any_size(n, seed, epoch):
    assert np.array_equal(np.sort(order.__wrapped__(n, seed, epoch)), np.arange(n))


@properties
@hypothesis.given(st.data())
def test_ranks_share_a_batch_for_any_sizes(data):
    size = data.draw(st.integers(1, 9), "ranks")
    micro = data.draw(st.integers(1, 5), "micro-batches")
    batch = micro * data.draw(st.integers(size, 40), "micro-batch")
    step = data.draw(st.integers(0, 2**40), "step")
    ranks = [Sampler(50, batch, micro, 1, rank, size) for rank in range(size)]
    at = tf.constant(step, tf.int64)
    parts = [np.reshape(r.local_positions(at), [micro, -1]) for r in ranks]
    expected = np.arange(step * batch, (step + 1) * batch)
    assert np.array_equal(np.concatenate(parts, axis=1).ravel(), expected)
    # Ids and keys are those of one rank.
    samples = zip(*(r.local_samples(at) for r in ranks))
    for shares, whole in zip(
        samples, Sampler(50, batch, micro, 1, 0, 1).local_samples(at)
    ):
        rows = [np.reshape(part, [micro, -1, *whole.shape[1:]]) for part in shares]
        assert np.array_equal(np.concatenate(rows, axis=1).ravel(), np.ravel(whole))
    sizes = [p.shape[1] for p in parts]
    assert sizes == [r.local_micro_size for r in ranks] and max(sizes) - min(sizes) <= 1
    assert [r.weight for r in ranks] == pytest.approx(
        [p.size / batch for p in parts], rel=1e-15
    )
    assert sum(r.weight for r in ranks) == pytest.approx(1, abs=1e-12)


# Steps, global batch, micro-batches, ranks, virtual ranks of one start after the other.
STARTS = [
    (3, 16, 2, 2, 0),
    (4, 8, 1, 1, 0),
    (1, 5, 1, 3, 0),
    (2, 21, 3, 2, 7),
    (5, 16, 4, 4, 4),
]


@pytest.mark.parametrize("shuffle", [None, 3], ids=["plain", "by shards"])
def test_other_batches_from_start_to_start_repeat_and_leave_out_nothing(shuffle):
    shards = in_shards(48, 10, shuffle) if shuffle else NO_SHARDS
    place = Place()
    samples = []  # rows of position, id and key
    for steps, batch, micro, size, virtual in STARTS:
        ranks = [
            Sampler(48, batch, micro, 1, rank, size, virtual, place, shards)
            for rank in range(size)
        ]
        for step in range(place.step, place.step + steps):
            for rank in ranks:
                at = tf.constant(step, tf.int64)
                ids, keys = rank.local_samples(at)
                positions = rank.local_positions(at)
                samples += zip(
                    positions.numpy().tolist(),
                    ids.numpy().tolist(),
                    keys.numpy().tolist(),
                )
        place = ranks[0].place(place.step + steps)
    samples.sort()
    assert place == (15, 48 + 32 + 5 + 42 + 80, 0)
    assert [position for position, _, _ in samples] == [*range(place.samples)]
    # The order within an epoch and the keys are those of one size of batch.
    whole = Sampler(48, 48, 1, 1, 0, 1, shards=shards)
    for epoch in range(4):
        ids, keys = whole.local_samples(tf.constant(epoch, tf.int64))
        of_epoch = samples[48 * epoch : 48 * (epoch + 1)]
        assert [index for _, index, _ in of_epoch] == ids.numpy().tolist()
        assert sorted(ids.numpy()) == [*range(48)]
        assert [key for _, _, key in of_epoch] == keys.numpy().tolist()


def test_batches_that_were_left_out_stay_so_whatever_the_next_ones_size():
    place = Place().after(6, 12).left_out(4, 12)
    assert place == (6, 72, 48) and place.position == 120
    order = Sampler(200, 5, 1, 1, 0, 1, start=place)
    assert order.local_positions(tf.constant(7, tf.int64)).numpy().tolist() == [
        *range(125, 130)
    ]
    assert order.place(8) == (8, 82, 48)


@functools.cache
def keys(seed: int, epoch: int, n: int = 1_000) -> np.ndarray:
    """The random keys of an epoch by sample id, bool [n, 64]."""
    sampler = Sampler(n, n, 1, seed, 0, 1)
    dataset = tf.data.Dataset.from_tensors(tf.constant(epoch, tf.int64)).map(
        sampler.local_samples
    )
    ids, pairs = next(iter(dataset))
    assert pairs.dtype == tf.int32 and pairs.shape == [n, 2]
    assert np.array_equal(ids, order(n, seed, epoch))
    ordered = np.ascontiguousarray(pairs.numpy()[np.argsort(ids)])
    return np.unpackbits(ordered.view(np.uint8), axis=1).astype(bool)


def test_keys_of_samples_epochs_and_seeds_are_unrelated_in_every_bit():
    one = keys(1, 0)
    others = [
        keys(1, 1),
        *(keys(seed, 0) for seed in SEEDS if seed != 1),
        np.roll(one, 1, axis=0),
    ]
    for bits in (one, *(one ^ other for other in others)):
        far_off = (bits.mean(axis=0) - 0.5) * 2 * np.sqrt(len(bits))
        assert np.max(np.abs(far_off)) < SIGMAS, far_off


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "words"),
    [
        (9, 3, 1, "--global_batch_size=3 is smaller .* ranks, 4"),
        (9, 6, 2, "--accumulation_steps=2"),
        (2, 8, 1, "2 training samples are fewer than the 4 ranks"),
    ],
)
def test_too_little_for_the_ranks(samples: int, batch: int, micro: int, words: str):
    with pytest.raises(ValueError, match=words):
        Sampler(samples, batch, micro, seed=0, rank=0, size=4)


def in_shards(n: int, shards: int, at_once: int) -> Shards:
    """Shards of nearly the same size, as `hvdkit pack` makes them, and an empty one."""
    edges = [share(n, number, shards) for number in range(shards)]
    return Shards((*(last - first for first, last in edges), 0), at_once)


@properties
@hypothesis.given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=40).filter(any),
    at_once=st.integers(1, 45),
    epoch=st.integers(0, 2**40),
)
@hypothesis.example(sizes=[2**16, 1, 2**17 - 2**16, 5], at_once=1, epoch=0)
@hypothesis.example(sizes=[2**17 + 1], at_once=1, epoch=0)
def test_by_shards_an_epoch_holds_each_id_once_and_few_shards_at_a_time(
    sizes, at_once, epoch
):
    n = sum(sizes)
    ids = order.__wrapped__(n, 1, epoch, shards=Shards(tuple(sizes), at_once))
    assert np.array_equal(np.sort(ids), np.arange(n))
    # Shard at each place.
    shards = np.searchsorted(np.cumsum(sizes), ids, "right").tolist()
    first: dict[int, int] = {}  # first and last place of each shard
    last: dict[int, int] = {}
    for place, shard in enumerate(shards):
        first.setdefault(shard, place)
        last[shard] = place
    for place in range(0, n, n // 50 + 1):
        assert sum(first[shard] <= place <= last[shard] for shard in first) <= at_once


@pytest.mark.parametrize("batch", [7, 50, 230])
def test_by_shards_ranks_share_a_batch_and_resume_anywhere(batch):
    """Over the edges of windows and of several epochs."""
    n = 103
    shards = in_shards(n, 10, 3)
    whole = np.concatenate([order(n, 1, epoch, shards=shards) for epoch in range(5)])
    for size, step in itertools.product((1, 2, 3), (0, 1, 500 // batch - 1)):
        ranks = [
            Sampler(n, batch, 1, 1, rank, size, shards=shards) for rank in range(size)
        ]
        parts = [r.local_samples(tf.constant(step, tf.int64))[0] for r in ranks]
        assert np.array_equal(
            np.concatenate(parts), whole[step * batch : (step + 1) * batch]
        )


@pytest.mark.parametrize("n", [12_345, 65_536, 10**7])
@pytest.mark.parametrize("shuffle", [None, 12], ids=["plain", "by shards"])
def test_orders_are_as_random_as_ten_windows_let_them_be(n, shuffle):
    parts = in_shards(n, 120, 12)
    shards = parts if shuffle else NO_SHARDS
    sizes = parts.sizes[:-1]
    shard = np.repeat(np.arange(120), sizes)  # shard of each sample id
    pairs = [*itertools.combinations(orders_of(n, shards), 2)]
    neighbours = 0
    for one, other in pairs:
        first = places_of(one)
        second = places_of(other)
        first_means = np.bincount(shard, first) / sizes
        second_means = np.bincount(shard, second) / sizes
        assert abs(correlation(first_means, second_means)) < SIGMAS
        first_within = first - first_means[shard]
        second_within = second - second_means[shard]
        assert abs(correlation(first_within, second_within)) < SIGMAS
        neighbours += (np.abs(np.diff(second[one])) < 1.5 / n).sum()

    expected = 2 * len(pairs)
    if shards.sizes:
        # Neighbours are of one shard, or may be in one window again; there all are ten times as
        # near.
        expected *= 10 * (1 / 12 + 11 / 12 * 11 / 119)
    assert abs(neighbours - expected) < SIGMAS * np.sqrt(expected)

    # Places in 120 epochs.
    places = np.add.outer(np.arange(120) * n, np.arange(0, n, n // 7))
    ids = (
        Sampler(n, 1, 1, 1, 0, 1, shards=shards)
        .order(tf.constant(places.ravel()))
        .numpy()
    )
    # Tenths of the sample ids at one place.
    for tenths in (ids.reshape(places.shape) * 10 // n).T:
        counts = np.bincount(tenths, minlength=10)
        assert ((counts - 12) ** 2 / 12).sum() < 40  # chi-square, 9 degrees: 1 in 10^5


def orders_of(n: int, shards: Shards) -> list[np.ndarray]:
    """Of eight epochs and all seeds, and that of the files; of a large set, of two epochs."""
    if n > 10**6:
        return [order(n, 1, epoch, shards=shards) for epoch in range(2)]
    orders = [order(n, 1, epoch, shards=shards) for epoch in range(8)]
    orders += [order(n, seed, 0, shards=shards) for seed in SEEDS if seed != 1]
    if not shards.sizes:
        orders.append(np.arange(n))
    return orders


def places_of(ids: np.ndarray) -> np.ndarray:
    """By sample id, where in the epoch it comes, in [0, 1)."""
    places = np.empty(len(ids))
    places[ids] = np.arange(len(ids)) / len(ids)
    return places


def test_by_shards_a_billion_samples_are_no_more_work_and_other_sources_are_refused():
    sampler = Sampler(10**9, 1024, 1, 1, 0, 1, shards=Shards((10**6,) * 1000, 16))
    ids = sampler.local_samples(tf.constant(10**9, tf.int64))[0].numpy()
    assert len(np.unique(ids)) == 1024 and len(np.unique(ids // 10**6)) <= 2 * 16
    part = Synthetic(9, {})
    for part.shard_sizes in ((), (5, 5)):  # the second has the shards of another set
        with pytest.raises(
            ValueError, match="--shuffle_shards=2 is for training samples in"
        ):
            shards_of(part, 2)


def test_the_coming_shards_are_those_of_the_window_and_the_next():
    order = Sampler(60, 7, 1, 3, 0, 1, shards=Shards((10, 8, 12, 0, 20, 10), 2))
    owner = np.repeat(np.arange(6), order.shards.sizes)
    for step in range(40):
        listed = order.coming_shards(step)
        needed = owner[order.local_samples(tf.constant(step, tf.int64))[0].numpy()]
        assert {*needed} <= {*listed} and needed[0] in listed[:2] and len(listed) <= 4
    assert Sampler(60, 7, 1, 3, 0, 1).coming_shards(0) == []
