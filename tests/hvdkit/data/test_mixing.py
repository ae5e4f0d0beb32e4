"""Mixed pictures: the Beta distribution, boxes and shares, on any ranks; loss: test_losses.py."""

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data.augment import mixing
from hvdkit.data.pipeline import TrainingFeed
from hvdkit.data.sampler import Sampler, partner
from hvdkit.data.source import Arrays
from hvdkit.settings import Settings
from hvdkit.train.task import checks as task_checks
from tasks import classification

DRAW = np.random.default_rng(0)
SOURCE = Arrays(
    image=DRAW.integers(0, 256, (30, 8, 8, 3), np.uint8), label=np.arange(30) % 3
)


def of_keys(count: int, draw) -> np.ndarray:
    """`draw` of so many keys, in a graph."""
    keys = tf.constant(DRAW.integers(-(2**31), 2**31, (count, 2)), tf.int32)
    return np.asarray([*tf.data.Dataset.from_tensor_slices(keys).map(draw)])


@pytest.mark.parametrize("a", [1e-30, 0.01, 0.2, 1.0, 30.0, 999.0])
def test_shares_have_the_mean_and_the_variance_of_beta(a: float):
    shares = of_keys(4000, lambda key: mixing.beta(key, a))
    assert np.all((shares >= 0) & (shares <= 1))
    variance = 1 / (4 * (2 * a + 1))
    assert abs(shares.mean() - 0.5) < 4 * np.sqrt(variance / 4000)
    np.testing.assert_allclose(shares.var(), variance, rtol=0.1)


def test_a_box_has_the_pixels_that_its_share_says_also_where_it_is_cut_off():
    black = tf.zeros([9, 13, 3], tf.uint8)
    white = tf.fill([9, 13, 3], np.uint8(255))
    lost = 0
    for share in (0.0, 0.3, 0.9, 1.0):
        for place in ((0.0, 0.0), (0.5, 0.5), (0.99, 0.2)):
            image, kept = mixing.cut(
                (black, white), tf.constant(share), tf.constant(place)
            )
            pixels = np.count_nonzero(image[..., 0])
            assert float(kept) == np.float32(1) - np.float32(pixels) / np.float32(
                9 * 13
            )
            lost += float(kept) > share + 0.1
    assert lost > 3


def test_a_mixed_picture_is_of_each_label_by_its_share():
    """Blends of 0 and 200, and boxes of one in the other; each half of the time."""
    pair = (tf.fill([8, 8, 3], np.uint8(200)), tf.zeros([8, 8, 3], tf.uint8))

    def draw(key: tf.Tensor) -> tf.Tensor:
        image, share = mixing.mixed(pair, key, mixup=30.0, cutmix=30.0)
        return tf.concat([tf.cast(tf.reshape(image, [-1]), tf.float32), [share]], 0)

    images, shares = np.split(of_keys(400, draw), [-1], axis=1)
    np.testing.assert_allclose(images.mean(1) / 200, shares[:, 0], atol=0.0026)
    cuts = [bool(np.isin(image, (0, 200)).all()) for image in images]
    assert 160 < sum(cuts) < 240


def test_partners_are_any_other_sample():
    partners = of_keys(3000, lambda key: partner(tf.constant(2, tf.int64), key, 5))
    counts = np.bincount(partners, minlength=5)
    assert counts[2] == 0 and counts[[0, 1, 3, 4]].min() > 650
    assert partner(tf.constant(0, tf.int64), tf.constant([1, 2]), 1) == 0


def batches(
    steps: range, size: int, micro: int, **settings
) -> list[dict[str, np.ndarray]]:
    """Global batches, of `size` ranks, flat: image, label and, if mixed, other and share."""
    task = classification.Task(Settings(image_size=8, num_classes=3, **settings))
    examples = task_checks.reader(task, SOURCE, training=True)
    feeds = []
    for rank in range(size):
        order = Sampler(30, 12, micro, 1, rank, size)
        feeds.append(
            TrainingFeed(order, examples, first_step=steps.start, num_steps=steps.stop)
        )

    def flat(*parts):
        """The micro-batches of all ranks, one after the other."""
        return np.concatenate(parts, axis=1).reshape(12, *parts[0].shape[2:])

    return [
        tf.nest.map_structure(flat, *[feed.next() for feed in feeds]) for _ in steps
    ]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_batches_are_the_same_on_any_ranks_with_accumulation_and_resumed(mixup, cutmix):
    def mixed(steps: range, size: int, micro: int) -> list[dict[str, np.ndarray]]:
        return batches(steps, size, micro, mixup=mixup, cutmix=cutmix)

    whole = mixed(range(4), 1, 1)
    for other in (mixed(range(4), 2, 1), mixed(range(4), 5, 2)):
        tf.nest.map_structure(np.testing.assert_array_equal, whole, other)
    resumed = mixed(range(2, 4), 3, 1)
    tf.nest.map_structure(np.testing.assert_array_equal, whole[2:], resumed)
    shares = np.concatenate([batch["targets"]["share"] for batch in whole])
    assert len({*shares.tolist()}) > 12


def test_off_costs_nothing_and_an_evaluation_never_mixes():
    def reader(mixup: float, training: bool):
        task = classification.Task(Settings(image_size=8, num_classes=3, mixup=mixup))
        return task_checks.reader(task, SOURCE, training=training)

    assert not reader(0.0, training=True).is_paired
    assert reader(1.0, training=True).is_paired
    evaluation = reader(1.0, training=False)
    assert not evaluation.is_paired and evaluation.one(4)["targets"] == 1
