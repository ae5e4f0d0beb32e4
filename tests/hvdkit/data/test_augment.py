"""Augmentation: drawn from the key alone, image and label stay on each other; by which settings."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageFilter

from hvdkit.data.augment import crops as augment
from hvdkit.data.augment import image_ops
from hvdkit.data.readers.pairs import MARKER
from hvdkit.settings import Settings
from tasks import classification, segmentation

# No colour changes, so that pixels can be recognized.
PLAIN = augment.Augmentation(size=(32, 40), brightness=0, contrast=0, saturation=0)


def pairs(
    image: np.ndarray, label: np.ndarray, options: augment.Augmentation, keys: int
):
    """Augmented pairs, one a key, made as training makes them: in a graph, on several threads."""
    sample = {"image": tf.constant(image), "label": tf.constant(label)}

    def pair(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        key = tf.stack([3, tf.cast(index, tf.int32)])
        return augment.training_pair(sample, key, options)

    dataset = tf.data.Dataset.range(keys).map(pair, num_parallel_calls=2)
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
    steps = []
    for channel, coordinate in ((0, columns), (1, rows)):
        last = coordinate.max()
        for drawn, label in pairs(image, coordinate[..., None], PLAIN, 60):
            place = drawn[..., channel].astype(int)
            # The fill colour mixes in beside the edge.
            inner = (label > 0) & (label < last)
            on_both_edges = np.isin(label, (0, last)) | (label == 255)
            outside = Image.fromarray(np.uint8(label == 255)).filter(
                ImageFilter.MaxFilter(5)
            )
            # A source pixel is two pixels at most.
            near_edge = on_both_edges | np.asarray(outside, bool)
            # Both are rounded.
            assert np.abs(place - label)[inner & ~near_edge].max() <= 1
            if channel == 0:
                steps.append(
                    int(np.sign(np.diff(place[16][(inner & ~near_edge)[16]]).sum()))
                )
    # Half of them were mirrored.
    assert set(steps) == {-1, 1} and 20 < steps.count(-1) < 40


@pytest.mark.parametrize("shape", [(64, 64), (20, 30), (20, 90), (1, 1)])
def test_labels_hold_only_values_that_were_there_or_ignore(shape: tuple[int, int]):
    image, label = noise(*shape)
    allowed = {*np.unique(label).tolist(), 255}
    for drawn, picked in pairs(image, label, augment.Augmentation(size=(32, 40)), 40):
        assert drawn.shape == (32, 40, 3) and drawn.dtype == np.uint8
        assert picked.shape == (32, 40) and picked.dtype == np.uint8
        assert set(np.unique(picked).tolist()) <= allowed


def test_a_key_says_it_all():
    image, label = noise(48, 48)
    options = augment.Augmentation(size=(32, 32))
    first = pairs(image, label, options, 20)
    again = pairs(image, label, options, 20)
    tf.nest.map_structure(np.testing.assert_array_equal, first, again)
    assert len({image.tobytes() for image, _ in first}) == 20
    sample = {"image": image, "label": label}
    fifth_image, fifth_label = first[5]
    eager_image, eager_label = augment.training_pair(
        sample, tf.constant([3, 5]), options
    )
    # The graph rounds otherwise.
    np.testing.assert_allclose(eager_image, fifth_image, atol=1)
    np.testing.assert_array_equal(eager_label[..., 0], fifth_label)
    other_image, _ = augment.training_pair(sample, tf.constant([4, 5]), options)
    assert not np.array_equal(other_image, fifth_image)


def test_beside_a_small_image_are_fill_colour_and_ignore_label():
    # Colours change inside only: were the padding recoloured too, a model would learn from it.
    options = augment.Augmentation(
        size=(32, 40), scale=(1, 1), fill=10, ignore_label=99, brightness=0.5
    )
    image, label = noise(20, 30)
    corners = set()
    for drawn, picked in pairs(image, label, options, 60):
        outside = picked == 99
        assert outside.sum() == 32 * 40 - 20 * 30
        rows, columns = np.nonzero(~outside)
        assert np.ptp(rows) == 19 and np.ptp(columns) == 29
        corners.add((rows.min(), columns.min()))
        assert (drawn[outside] == 10).all()
    assert len(corners) > 40  # the image lies anywhere
    plain = dataclasses.replace(
        options, brightness=0, contrast=0, saturation=0, mirror=False
    )
    for drawn, picked in pairs(image, label, plain, 5):
        np.testing.assert_array_equal(drawn[picked != 99], image.reshape(-1, 3))


def test_scales_cover_their_range():
    label = np.tile(np.arange(200, dtype=np.uint8), (200, 1))[..., None]
    options = dataclasses.replace(PLAIN, size=(64, 64), scale=(0.5, 2.0), mirror=False)
    scales = []
    for _, picked in pairs(np.repeat(label, 3, axis=-1), label, options, 300):
        first_column = int(picked[0, 0])
        last_column = int(picked[0, -1])
        scales.append(63 / (last_column - first_column))
    scales = np.array(scales)
    assert 0.48 < scales.min() < 0.55 and 1.9 < scales.max() < 2.1
    assert 0.42 < np.mean(scales < 1) < 0.58  # halving and doubling are as likely


def test_fine_stripes_come_out_grey_where_much_is_scaled_down():
    """Bilinear alone takes the middle two of four pixels, which are the bright ones here."""
    image = np.zeros((160, 160, 3), np.uint8)
    image[:, np.isin(np.arange(160) % 4, (1, 2))] = 255
    label = image[..., :1] // 255
    options = dataclasses.replace(PLAIN, size=(32, 40), scale=(0.25, 0.25))
    for drawn, picked in pairs(image, label, options, 8):
        assert np.abs(drawn[2:-2, 2:-2] - 127.5).max() < 20
        assert set(np.unique(picked)) <= {0, 1}


@pytest.mark.parametrize(
    ("brightness", "contrast", "saturation"),
    [(0, 0, 0), (1, 1, 1), (0.5, 0, 0), (0, 0.5, 0), (0, 0, 0.5)],
)
def test_jitter_is_its_formula(brightness: float, contrast: float, saturation: float):
    image, _ = noise(16, 16)
    for number in range(10):
        draws = image_ops.uniform(tf.constant([1, number]), 3)
        jittered = augment.jitter(
            tf.constant(image, tf.float32), draws, (brightness, contrast, saturation)
        )
        assert jittered.dtype == tf.uint8
        brighter, more, deeper = 2 * draws.numpy() - 1
        grey = image.mean(-1, keepdims=True)
        expected = grey + (1 + saturation * deeper) * (image - grey) - grey.mean()
        expected = grey.mean() + (1 + contrast * more) * expected
        expected = np.clip(expected + 255 * brightness * brighter, 0, 255)
        assert (
            np.abs(jittered.numpy() - expected.astype(np.float64)).max() <= 0.5 + 1e-3
        )


NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


@pytest.mark.parametrize("crop", [augment.shifted, augment.random_resized])
def test_a_crop_is_its_keys(crop):
    def of_key(*key: int) -> tf.Tensor:
        return crop({"image": NOISE}, tf.constant(key), size=16, mirror=True)

    one = of_key(1, 2)
    same = of_key(1, 2)
    other = of_key(1, 3)
    assert one.shape == (16, 16, 3) and one.dtype == tf.uint8
    np.testing.assert_array_equal(one, same)
    assert np.abs(one.numpy().astype(int) - other).max() > 12


@pytest.mark.parametrize(("most", "reach"), [(-1, 4), (0, 0), (1, 1)])
def test_shifts_reach_an_eighth_or_what_is_asked_both_ways_and_no_further(most, reach):
    """Each crop is the picture at one of the places, mirrored or not; all of them come up."""
    image = NOISE[:32, :32]
    padded = np.pad(image, [(reach, reach), (reach, reach), (0, 0)])
    span = range(2 * reach + 1)
    place_of = {}  # places by every eighth pixel of their crop
    for y in span:
        for x in span:
            crop = padded[y : y + 32, x : x + 32]
            place_of[crop[::8, ::8].tobytes()] = (y, x)
    places = set()
    mirrored_crops = 0
    sample = {"image": tf.constant(image)}
    shift = tf.function(
        lambda key: augment.shifted(sample, key, size=32, mirror=True, most=most)
    )
    for number in range(500):
        crop = shift(tf.constant([number, 0])).numpy()
        place = place_of.get(crop[::8, ::8].tobytes())
        mirrored_place = place_of.get(crop[:, ::-1][::8, ::8].tobytes())
        assert (place is None) != (mirrored_place is None)
        if place is None:
            mirrored_crops += 1
        places.add(place or mirrored_place)
    assert {y for y, _ in places} == {x for _, x in places} == set(span)
    assert 200 < mirrored_crops < 300


@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (500, 333), (40, 200), (5, 3), (1, 1)]
)
def test_a_part_is_the_first_of_ten_that_fits_or_the_middle(height, width):
    """The rule of torchvision's RandomResizedCrop, written out one try after the other."""

    def part(tries: tf.Tensor) -> tf.Tensor:
        return augment.random_part(tf.constant([height, width]), tries, 0.08)

    @tf.function
    def parts(draws: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(part, draws, fn_output_signature=tf.int32)

    draws = np.random.default_rng(0).random((400, 10, 4), np.float32)
    middles = 0
    for tries, (top, left, high, wide) in zip(
        draws.astype(np.float64), parts(draws).numpy()
    ):
        expected = first_that_fits(height, width, tries)
        if expected is None:
            middles += 1
            h = min(height, round(width * 4 / 3))
            w = min(width, round(height * 4 / 3))
            expected = [(height - h) // 2, (width - w) // 2, h, w]
        # Both round.
        assert np.abs(np.array(expected) - [top, left, high, wide]).max() <= 1
        assert 0 <= top <= height - high and 0 <= left <= width - wide
    assert (middles > 50) == (width == 200)


def first_that_fits(height: int, width: int, tries: np.ndarray) -> list[float] | None:
    """Top, left, height and width of a part, from rows of four draws each."""
    for y, x, area_draw, ratio_draw in tries:
        area = height * width * (0.08 + 0.92 * area_draw)
        ratio = 0.75 * (16 / 9) ** ratio_draw
        h = np.round(np.sqrt(area / ratio))
        w = np.round(np.sqrt(area * ratio))
        if 1 <= h <= height and 1 <= w <= width:
            return [np.floor(y * (height - h + 1)), np.floor(x * (width - w + 1)), h, w]
    return None


def test_evaluation_takes_the_middle():
    image = np.zeros((40, 60, 3), np.uint8)
    image[4:36, 14:46] = 255  # 32 pixels, the middle of the 40 in the middle
    assert (augment.centred({"image": image}, 16, share=0.8).numpy() == 255).all()
    assert augment.centred({"image": image}, 16, share=1.0).numpy().min() == 0
    small = NOISE[:32, :32]
    np.testing.assert_array_equal(
        augment.centred({"image": small}, 32, share=1.0), small
    )


DEMO = ((0.8, 1.25), False)
USUAL = ((0.5, 2.0), True)


def opened(root: Path, **settings) -> tuple[tuple[tuple[float, float], bool], str]:
    """Its scales and whether it is mirrored; its fingerprint."""
    task = segmentation.Task(Settings(data_dir=str(root), image_size=32, **settings))
    train, val = task.sources()
    return (
        task.options.scale,
        task.options.mirror,
    ), train.fingerprint() + val.fingerprint()


def test_a_copy_of_the_demo_is_the_demo(tiny_data, tmp_path, monkeypatch):
    """Also to a run, to the bit: test_loop.py."""
    copy = tmp_path / "staged"
    plain = tmp_path / "plain"
    shutil.copytree(tiny_data, copy)
    # Where the demo is made, under its usual name, it is no other set.
    monkeypatch.setattr(segmentation, "DEMO", tiny_data)
    options, demo_fingerprint = opened(tiny_data)
    assert options == DEMO
    assert opened(copy) == (DEMO, demo_fingerprint)
    shutil.copytree(copy, plain, ignore=shutil.ignore_patterns(MARKER))
    options, fingerprint = opened(plain)
    # A rank that lacks the marker does not go unnoticed.
    assert options == USUAL and fingerprint != demo_fingerprint


def test_flags_have_the_last_word(tiny_data):
    options = segmentation.Task(Settings(colour_range="0.5,0,0.1")).options
    assert (options.brightness, options.contrast, options.saturation) == (0.5, 0, 0.1)
    usual_scales, _ = USUAL
    assert opened(tiny_data, mirror="on", scale_range="1,3")[0] == ((1.0, 3.0), True)
    assert opened(tiny_data, synthetic_data=True)[0] == USUAL
    assert opened(tiny_data, synthetic_data=True, mirror="off")[0] == (
        usual_scales,
        False,
    )


def test_pictures_of_a_class_have_other_colours_where_a_flag_says():
    def image(colour_range: str) -> tf.Tensor:
        task = classification.Task(Settings(image_size=32, colour_range=colour_range))
        sample = {"image": tf.constant(NOISE), "label": tf.constant(0)}
        return task.training_example(sample, tf.constant([3, 5]))["inputs"]["image"]

    assert np.any(image("") != image("0.5,0,0"))


def test_the_mean_is_over_the_classes_that_occur():
    """Class 0: 3 of 4 right, IoU 3/5; class 1: 1 of 2, IoU 1/3; class 2 occurs nowhere."""
    task = segmentation.Task(Settings(num_classes=3))
    figures = task.metrics({"confusion": np.array([[3, 1, 0], [1, 1, 0], [0, 0, 0]])})
    np.testing.assert_allclose(figures["miou"], (3 / 5 + 1 / 3) / 2)
    np.testing.assert_allclose(figures["pixel_accuracy"], 4 / 6)
    assert np.isnan(figures["iou_2"])
    assert task.metrics({"confusion": np.zeros((3, 3), int)})["miou"] == 0.0
