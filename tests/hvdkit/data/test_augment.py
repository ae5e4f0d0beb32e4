"""Augmentation: drawn from the key alone, image and label stay on each other; by which settings."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageFilter

from hvdkit.data import augment, image_ops
from hvdkit.data.scenes import MARKER
from hvdkit.settings import Settings
from tasks import classification, segmentation

# No colour changes, so that pixels can be recognized.
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
    steps = []
    for channel, coordinate in ((0, columns), (1, rows)):
        last = coordinate.max()
        for drawn, label in pairs(image, coordinate[..., None], PLAIN, 60):
            place = drawn[..., channel].astype(int)
            inner = (label > 0) & (label < last)  # beside the edge the fill colour mixes in
            on_both_edges = np.isin(label, (0, last)) | (label == 255)
            outside = Image.fromarray(np.uint8(label == 255)).filter(ImageFilter.MaxFilter(5))
            near_edge = on_both_edges | np.asarray(outside, bool)  # a source pixel is two at most
            assert np.abs(place - label)[inner & ~near_edge].max() <= 1  # both are rounded
            if channel == 0:
                steps.append(int(np.sign(np.diff(place[16][(inner & ~near_edge)[16]]).sum())))
    assert set(steps) == {-1, 1} and 20 < steps.count(-1) < 40  # half of them were mirrored


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
    how = augment.Augmentation(size=(32, 32))
    first, again = pairs(image, label, how, 20), pairs(image, label, how, 20)
    tf.nest.map_structure(np.testing.assert_array_equal, first, again)
    assert len({image.tobytes() for image, _ in first}) == 20
    sample = {"image": image, "label": label}
    eager = augment.training_pair(sample, tf.constant([3, 5]), how)
    np.testing.assert_allclose(eager[0], first[5][0], atol=1)  # rounded
    np.testing.assert_array_equal(eager[1][..., 0], first[5][1])
    other = augment.training_pair(sample, tf.constant([4, 5]), how)
    assert not np.array_equal(other[0], first[5][0])


def test_beside_a_small_image_are_fill_colour_and_ignore_label():
    # Colours change inside only: were the padding recoloured too, a model would learn from it.
    how = {"scale": (1, 1), "fill": 10, "ignore_label": 99, "brightness": 0.5}
    how = augment.Augmentation(size=(32, 40), **how)
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


def test_jitter_is_its_formula():
    image, _ = noise(16, 16)
    none = {"brightness": 0, "contrast": 0, "saturation": 0}
    for changed in ({}, dict.fromkeys(none, 1), *({name: 0.5} for name in none)):
        how = augment.Augmentation(size=(16, 16), **none | changed)
        limits = (how.brightness, how.contrast, how.saturation)
        for number in range(10):
            draws = image_ops.uniform(tf.constant([1, number]), 3)
            found = augment.jitter(tf.constant(image, tf.float32), draws, limits)
            assert found.dtype == tf.uint8
            brighter, more, deeper = 2 * draws.numpy() - 1
            grey = image.mean(-1, keepdims=True)
            expected = grey + (1 + how.saturation * deeper) * (image - grey) - grey.mean()
            expected = grey.mean() + (1 + how.contrast * more) * expected
            expected = np.clip(expected + 255 * how.brightness * brighter, 0, 255)
            assert np.abs(found.numpy() - expected.astype(np.float64)).max() <= 0.5 + 1e-3


NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


@pytest.mark.parametrize("crop", [augment.shifted, augment.random_resized])
def test_a_crop_is_its_keys(crop):
    keys = map(tf.constant, ([1, 2], [1, 2], [1, 3]))
    one, same, other = (crop({"image": NOISE}, key, size=16, mirror=True) for key in keys)
    assert one.shape == (16, 16, 3) and one.dtype == tf.uint8
    np.testing.assert_array_equal(one, same)
    assert np.abs(one.numpy().astype(int) - other).max() > 12


def test_shifts_reach_an_eighth_both_ways_and_no_further():
    """Each crop is the picture at one of 9 x 9 places, mirrored or not; all of them come up."""
    image = NOISE[:32, :32]
    padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
    places = {padded[y : y + 32, x : x + 32][::8, ::8].tobytes(): (y, x)
              for y in range(9) for x in range(9)}  # fmt: skip
    seen, turned = set(), 0
    sample = {"image": tf.constant(image)}
    shift = tf.function(lambda key: augment.shifted(sample, key, size=32, mirror=True))
    for number in range(500):
        crop = shift(tf.constant([number, 0])).numpy()
        ways = [places.get(c[::8, ::8].tobytes()) for c in (crop, crop[:, ::-1])]
        assert ways.count(None) == 1
        turned += ways[0] is None
        seen.add(ways[0] or ways[1])
    assert {y for y, _ in seen} == {x for _, x in seen} == set(range(9))
    assert 200 < turned < 300


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (40, 200), (5, 3), (1, 1)])
def test_a_part_is_the_first_of_ten_that_fits_or_the_middle(height, width):
    """The rule of torchvision's RandomResizedCrop, written out one try after the other."""
    draws, shape = np.random.default_rng(0).random((400, 10, 4), np.float32), [height, width]
    made = tf.function(lambda d: tf.map_fn(
        lambda one: augment.random_part(tf.constant(shape), one, 0.08), d,
        fn_output_signature=tf.int32
    ))  # fmt: skip
    found = made(draws).numpy()
    fell_back = 0
    for own, (top, left, high, wide) in zip(draws.astype(np.float64), found):
        for y, x, area, ratio in own:
            area, ratio = height * width * (0.08 + 0.92 * area), 0.75 * (16 / 9) ** ratio
            h, w = np.round(np.sqrt([area / ratio, area * ratio]))
            if 1 <= h <= height and 1 <= w <= width:
                place = np.floor([y * (height - h + 1), x * (width - w + 1)])
                break
        else:
            h, w = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
            place = (height - h) // 2, (width - w) // 2
            fell_back += 1
        assert np.abs(np.array([*place, h, w]) - [top, left, high, wide]).max() <= 1  # rounding
        assert 0 <= top <= height - high and 0 <= left <= width - wide
    assert (fell_back > 50) == (width == 200)


def test_evaluation_takes_the_middle():
    image = np.zeros((40, 60, 3), np.uint8)
    image[4:36, 14:46] = 255  # 32 pixels, the middle of the 40 in the middle
    assert (augment.centred({"image": image}, 16, share=0.8).numpy() == 255).all()
    assert augment.centred({"image": image}, 16, share=1.0).numpy().min() == 0
    small = NOISE[:32, :32]
    np.testing.assert_array_equal(augment.centred({"image": small}, 32, share=1.0), small)


DEMO, USUAL = ((0.8, 1.25), False), ((0.5, 2.0), True)


def opened(root: Path, **settings) -> tuple[tuple[tuple[float, float], bool], str]:
    """Its scales and whether it is mirrored; its fingerprint."""
    task = segmentation.Task(Settings(data_dir=str(root), image_size=32, **settings))
    train, val = task.sources()
    return (task.options.scale, task.options.mirror), train.fingerprint() + val.fingerprint()


def test_a_copy_of_the_demo_is_the_demo(tiny_data, tmp_path, monkeypatch):
    """Also to a run, to the bit: test_loop.py."""
    copy, plain = tmp_path / "staged", tmp_path / "plain"
    shutil.copytree(tiny_data, copy)
    # Where the demo is made, under its usual name, it is no other set.
    monkeypatch.setattr(segmentation, "DEMO", tiny_data)
    assert (demo := opened(tiny_data)) == opened(copy) and demo[0] == DEMO
    shutil.copytree(copy, plain, ignore=shutil.ignore_patterns(MARKER))
    how, fingerprint = opened(plain)
    # A rank that lacks the marker does not go unnoticed.
    assert how == USUAL and fingerprint != demo[1]


def test_flags_have_the_last_word(tiny_data):
    options = segmentation.Task(Settings(colour_range="0.5,0,0.1")).options
    assert (options.brightness, options.contrast, options.saturation) == (0.5, 0, 0.1)
    assert opened(tiny_data, mirror="on", scale_range="1,3")[0] == ((1.0, 3.0), True)
    assert opened(tiny_data, synthetic_data=True)[0] == USUAL
    assert opened(tiny_data, synthetic_data=True, mirror="off")[0] == (USUAL[0], False)


def test_pictures_of_a_class_have_other_colours_where_a_flag_says():
    sample, found = {"image": tf.constant(NOISE), "label": tf.constant(0)}, []
    for flag in ("", "0.5,0,0"):
        task = classification.Task(Settings(image_size=32, colour_range=flag))
        found.append(task.training_example(sample, tf.constant([3, 5]))["inputs"]["image"])
    assert np.any(found[0] != found[1])


def test_the_mean_is_over_the_classes_that_occur():
    """Class 0: 3 of 4 right, IoU 3/5; class 1: 1 of 2, IoU 1/3; class 2 occurs nowhere."""
    task = segmentation.Task(Settings(num_classes=3))
    figures = task.metrics({"confusion": np.array([[3, 1, 0], [1, 1, 0], [0, 0, 0]])})
    np.testing.assert_allclose(figures["miou"], (3 / 5 + 1 / 3) / 2)
    np.testing.assert_allclose(figures["pixel_accuracy"], 4 / 6)
    assert np.isnan(figures["iou_2"])
    assert task.metrics({"confusion": np.zeros((3, 3), int)})["miou"] == 0.0
