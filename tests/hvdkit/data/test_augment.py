"""Augmentation: drawn from the key alone, image and label stay on each other."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data import augment, image_ops

# No colour changes, so that pixels can be told again.
PLAIN = augment.Augmentation(size=(32, 40), brightness=0, contrast=0, saturation=0)


def pairs(image: np.ndarray, label: np.ndarray, how: augment.Augmentation, keys: int):
    """Augmented pairs, one a key, made as training makes them: in a graph, on several threads."""
    sample = {"image": tf.constant(image), "label": tf.constant(label)}

    def one(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        key = tf.stack([3, tf.cast(index, tf.int32)])
        return augment.training_pair(sample, key, how)

    dataset = tf.data.Dataset.range(keys).map(one, num_parallel_calls=2)
    return [(image.numpy(), label.numpy()[..., 0]) for image, label in dataset]


def noise(height: int, width: int, values: tuple[int, ...] = (0, 7, 200)):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image, rng.choice(np.array(values, np.uint8), (height, width, 1))


def test_image_and_label_stay_on_each_other():
    # A ramp says where a pixel came from: bilinear gives the exact column, nearest rounds it.
    columns = np.tile(np.arange(50, dtype=np.uint8), (60, 1))
    rows = np.tile(np.arange(60, dtype=np.uint8)[:, None], (1, 50))
    image = np.dstack([columns, rows, rows])
    steps = set()
    for channel, coordinate in ((0, columns), (1, rows)):
        last = coordinate.max()
        for drawn, label in pairs(image, coordinate[..., None], PLAIN, 60):
            place = drawn[..., channel].astype(int)
            inner = (label > 0) & (label < last)  # beside the edge the fill colour mixes in
            on_both_edges = np.isin(label, (0, last)) | (label == 255)
            near_edge = on_both_edges | _beside(label == 255)
            assert np.abs(place - label)[inner & ~near_edge].max() <= 1  # both are rounded
            if channel == 0:
                steps.add(int(np.sign(np.diff(place[16][(inner & ~near_edge)[16]]).sum())))
    assert steps == {-1, 1}  # some were mirrored and some were not


def _beside(mask: np.ndarray) -> np.ndarray:
    """The mask grown by two pixels (a source pixel is two at most)."""
    grown = mask.copy()
    for _ in range(2):
        padded = np.pad(grown, 1)
        grown = padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:] | grown
    return grown


@pytest.mark.parametrize("shape", [(64, 64), (20, 30), (20, 90), (1, 1)])
def test_labels_hold_only_values_that_were_there_or_ignore(shape: tuple[int, int]):
    image, label = noise(*shape)
    allowed = {*np.unique(label).tolist(), 255}
    for drawn, picked in pairs(image, label, augment.Augmentation(size=(32, 40)), 40):
        assert drawn.shape == (32, 40, 3) and drawn.dtype == np.uint8
        assert picked.shape == (32, 40) and picked.dtype == np.uint8
        assert set(np.unique(picked).tolist()) <= allowed


def test_shapes_are_known_before_anything_is_read():
    spec = {
        "image": tf.TensorSpec([None, None, 3], tf.uint8),
        "label": tf.TensorSpec([None, None, 1], tf.uint8),
    }
    train = tf.function(lambda sample, key: augment.training_pair(sample, key, PLAIN))
    evaluate = tf.function(lambda sample: augment.evaluation_pair(sample, PLAIN))
    key = tf.TensorSpec([2], tf.int32)
    for made in (train.get_concrete_function(spec, key), evaluate.get_concrete_function(spec)):
        assert [tuple(out.shape) for out in made.outputs] == [(32, 40, 3), (32, 40, 1)]


def test_a_key_says_it_all():
    image, label = noise(48, 48)
    how = augment.Augmentation(size=(32, 32))
    first, again = pairs(image, label, how, 20), pairs(image, label, how, 20)
    for (image_1, label_1), (image_2, label_2) in zip(first, again, strict=True):
        np.testing.assert_array_equal(image_1, image_2)
        np.testing.assert_array_equal(label_1, label_2)
    assert len({image.tobytes() for image, _ in first}) == 20
    sample = {"image": image, "label": label}
    eager = augment.training_pair(sample, tf.constant([3, 5]), how)
    np.testing.assert_allclose(eager[0], first[5][0], atol=1)  # rounded
    np.testing.assert_array_equal(eager[1][..., 0], first[5][1])
    other = augment.training_pair(sample, tf.constant([4, 5]), how)
    assert not np.array_equal(other[0], first[5][0])


def test_beside_a_small_image_are_fill_colour_and_ignore_label():
    # Colours change inside only: were the padding recoloured too, a model would learn from it.
    how = augment.Augmentation(
        size=(32, 40), scale=(1, 1), fill=10, ignore_label=99, brightness=0.5
    )
    image, label = noise(20, 30)
    corners = set()
    for drawn, picked in pairs(image, label, how, 60):
        outside = picked == 99
        assert outside.sum() == 32 * 40 - 20 * 30
        rows, columns = np.nonzero(~outside)
        assert np.ptp(rows) == 19 and np.ptp(columns) == 29
        corners.add((rows.min(), columns.min()))
        assert (drawn[outside] == 10).all()
    assert len(corners) > 40  # it lies anywhere, not in the middle
    plain = dataclasses.replace(how, brightness=0, contrast=0, saturation=0, mirror=False)
    for drawn, picked in pairs(image, label, plain, 5):
        np.testing.assert_array_equal(drawn[picked != 99], image.reshape(-1, 3))


def test_crops_reach_every_place():
    how = dataclasses.replace(PLAIN, size=(8, 8), scale=(1, 1), mirror=False)
    label = np.arange(8 * 10, dtype=np.uint8).reshape(8, 10)[..., None]
    image = np.repeat(label, 3, axis=-1)
    seen = [picked[0, 0] for _, picked in pairs(image, label, how, 200)]
    assert set(seen) == {0, 1, 2}
    assert min(seen.count(column) for column in (0, 1, 2)) > 40


def test_scales_cover_their_range():
    label = np.tile(np.arange(200, dtype=np.uint8), (200, 1))[..., None]
    how = dataclasses.replace(PLAIN, size=(64, 64), scale=(0.5, 2.0), mirror=False)
    drawn = pairs(np.repeat(label, 3, axis=-1), label, how, 300)
    scales = np.array([63 / (int(picked[0, -1]) - int(picked[0, 0])) for _, picked in drawn])
    assert 0.48 < scales.min() < 0.55 and 1.9 < scales.max() < 2.1
    assert 0.42 < np.mean(scales < 1) < 0.58  # halving and doubling are as likely


def test_fine_stripes_come_out_grey_where_much_is_scaled_down():
    """Bilinear alone takes the middle two of four pixels, which are the bright ones here."""
    image = np.zeros((160, 160, 3), np.uint8)
    image[:, np.isin(np.arange(160) % 4, (1, 2))] = 255
    label = image[..., :1] // 255
    how = dataclasses.replace(PLAIN, size=(32, 40), scale=(0.25, 0.25))
    for drawn, picked in pairs(image, label, how, 8):
        assert np.abs(drawn[2:-2, 2:-2] - 127.5).max() < 20
        assert set(np.unique(picked)) <= {0, 1}


def test_mirrors_half_of_the_samples_or_none():
    image, label = noise(32, 40)
    for mirror, low, high in ((True, 0.35, 0.65), (False, 0, 0)):
        how = dataclasses.replace(PLAIN, scale=(1, 1), mirror=mirror)
        turned = []
        for drawn, picked in pairs(image, label, how, 100):
            turned.append(not np.array_equal(picked, label[..., 0]))
            step = -1 if turned[-1] else 1
            np.testing.assert_array_equal(picked[:, ::step], label[..., 0])
            np.testing.assert_array_equal(drawn[:, ::step], image)
        assert low <= np.mean(turned) <= high


def jittered(draws: tf.Tensor, pixels: tf.Tensor, how: augment.Augmentation) -> np.ndarray:
    drawn = augment.jitter(pixels, draws, how)
    assert drawn.dtype == tf.uint8
    return drawn.numpy().astype(float)


def test_jitter_is_its_formula_and_each_part_does_its_own():
    image, _ = noise(16, 16)
    values = tf.constant(image, tf.float32)
    most = augment.Augmentation(size=(16, 16), brightness=1, contrast=1, saturation=1)
    brighter = dataclasses.replace(PLAIN, brightness=0.2)
    flatter = dataclasses.replace(PLAIN, contrast=0.5)
    greyer = dataclasses.replace(PLAIN, saturation=0.5)
    for number in range(10):
        uniform = image_ops.uniform(tf.constant([1, number]), 3)
        draws = 2 * uniform.numpy() - 1
        jitter = functools.partial(jittered, uniform)
        grey = image.mean(-1, keepdims=True)
        found = grey + (1 + draws[2]) * (image - grey)
        found = grey.mean() + (1 + draws[1]) * (found - grey.mean()) + 255 * draws[0]
        assert np.abs(jitter(values, most) - np.clip(found, 0, 255)).max() <= 0.5 + 1e-3
        np.testing.assert_array_equal(jitter(values, PLAIN), image)
        soft = 128 + (values - 128) * 0.3  # far from the ends, where nothing is clipped
        shift = jitter(soft, brighter) - soft
        assert np.ptp(shift) <= 1.001 and 0.4 < np.abs(shift).max() <= 51.5
        ratio = np.std(jitter(soft, flatter)) / np.std(soft)
        assert 0.49 <= ratio <= 1.51 and abs(ratio - 1) > 1e-3
        colours = jitter(soft, greyer)
        np.testing.assert_allclose(np.mean(colours, -1), np.mean(soft, -1), atol=0.51)
        assert np.abs(colours - soft).max() > 1


@pytest.mark.parametrize("shape", [(32, 40), (33, 43), (50, 20), (7, 9)])
def test_evaluation_takes_the_centre(shape: tuple[int, int]):
    image, label = noise(*shape)
    sample = {"image": image, "label": label}
    drawn, picked = (part.numpy() for part in augment.evaluation_pair(sample, PLAIN))
    assert drawn.shape == (32, 40, 3) and picked.shape == (32, 40, 1)
    top, left = max(shape[0] - 32, 0) // 2, max(shape[1] - 40, 0) // 2
    image, label = (part[top:, left:][:32, :40] for part in (image, label))
    inside = picked[..., 0] != 255
    assert inside.sum() == min(shape[0], 32) * min(shape[1], 40)
    np.testing.assert_array_equal(picked[inside], label.reshape(-1, 1))
    np.testing.assert_array_equal(drawn[inside], image.reshape(-1, 3))
    assert (drawn[~inside] == 128).all()
    rows, columns = np.nonzero(inside)
    for places, size in ((rows, 32), (columns, 40)):
        assert abs(places.min() - (size - 1 - places.max())) <= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", (0, 4)), ("scale", (0, 1)), ("scale", (2, 1)), ("brightness", -0.1),
        ("contrast", 1.1), ("saturation", 2), ("fill", 256), ("ignore_label", 256),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(name: str, value: object):
    with pytest.raises(ValueError) as error:
        augment.Augmentation(**{"size": (4, 4), name: value})
    assert f"{name}={value}" in str(error.value)
