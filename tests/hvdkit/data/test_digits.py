"""Arrays and digits as samples, and random crops of small and large pictures."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data import augment, shipped
from hvdkit.data.shipped import ROWS, Digits
from hvdkit.data.source import Arrays

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def test_arrays_are_read_by_name_and_told_apart_by_content():
    arrays = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 7]))
    sample = arrays.read(tf.constant(1, tf.int64))
    assert len(arrays) == 3 and sample["x"].numpy().tolist() == [0, 1, 0] and sample["label"] == 6
    same = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 7]))
    other = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 8]))
    assert arrays.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("lengths", [{}, {"x": 0}, {"x": 2, "label": 3}])
def test_arrays_of_no_or_different_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="of one length") as error:
        Arrays(**{name: np.zeros(n) for name, n in lengths.items()})
    assert str(lengths) in str(error.value)


def test_what_is_shipped_is_what_scikit_learn_has():
    """SHA-256 of load_digits and load_sample_images as arrays of bytes."""
    arrays = [*shipped.digits(), *map(np.asarray, shipped.photographs())]
    assert [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays] == [
        "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3",
        "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0",
        "e701459344fd69797154c91add3bb5d70e5ed1a61d8bed889bab3a796104698d",
        "3202904ed246795bf616c66d7859cd7c6080eff736c6e38dc5cc62779742033f",
    ]


def test_the_splits_share_no_scan_and_hold_all():
    assert sorted([*ROWS["train"], *ROWS["val"]]) == list(range(1797))


def test_a_sample_is_a_picture_and_its_class():
    digits = Digits(None, "val")
    assert len(digits) == 359 and digits.fingerprint() != Digits(None, "train").fingerprint()
    sample = digits.read(tf.constant(358, tf.int64))
    assert sample["image"].shape == (8, 8, 3) and sample["image"].dtype == tf.uint8
    assert int(sample["label"]) == 8  # the last row
    labels = {int(digits.read(tf.constant(i, tf.int64))["label"]) for i in range(100)}
    assert labels == set(range(10))


def test_every_process_sees_the_same_digits():
    assert Digits(None, "val").fingerprint().startswith("472f7f2151d0e223")


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="test"):
        Digits(None, "test")
    with pytest.raises(ValueError, match="num_classes=11"):
        Digits(None, "train", 11)


@pytest.mark.parametrize("crop", [augment.shifted, augment.random_resized])
def test_a_crop_is_its_keys(crop):
    one, same, other = (
        crop({"image": NOISE}, tf.constant(k), size=16, mirror=True)
        for k in ([1, 2], [1, 2], [1, 3])
    )
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
    shift = tf.function(
        lambda key: augment.shifted({"image": tf.constant(image)}, key, size=32, mirror=True)
    )
    for number in range(500):
        crop = shift(tf.constant([number, 0])).numpy()
        ways = [places.get(c[::8, ::8].tobytes()) for c in (crop, crop[:, ::-1])]
        assert ways.count(None) == 1
        turned += ways[0] is None
        seen.add(ways[0] or ways[1])
    assert {y for y, _ in seen} == {x for _, x in seen} == set(range(9))
    assert 200 < turned < 300


def parts(height: int, width: int, keys: int, smallest: float = 0.08):
    """Ten draws a key, and the part that they give; float32 [keys, 10, 4] and int32 [keys, 4]."""
    draws = np.random.default_rng(0).random((keys, 10, 4), np.float32)
    shape = tf.constant([height, width])
    made = tf.function(lambda d: tf.map_fn(
        lambda one: augment.random_part(shape, one, smallest), d, fn_output_signature=tf.int32
    ))  # fmt: skip
    return draws, made(draws).numpy()


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (40, 200), (5, 3), (1, 1)])
def test_a_part_is_the_first_of_ten_that_fits_or_the_middle(height, width):
    """The rule of torchvision's RandomResizedCrop, written out one try after the other."""
    draws, found = parts(height, width, 400)
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


def test_parts_of_a_photograph_seldom_touch_both_sides():
    """Cut at the edge instead of drawn anew, 26 % of them would reach from side to side."""
    _, found = parts(375, 500, 4000)
    assert np.mean((found[:, 2] == 375) | (found[:, 3] == 500)) < 0.015
    area, ratio = found[:, 2] * found[:, 3] / (375 * 500), found[:, 3] / found[:, 2]
    assert 0.079 < area.min() < 0.09 and area.max() > 0.9
    assert 0.74 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.35


def test_fine_stripes_come_out_grey():
    """Of stripes of one pixel, a crop that leaves pixels out would take some and not others."""
    stripes = np.zeros((640, 640, 3), np.uint8)
    stripes[:, ::2] = 255
    sample = {"image": stripes}
    for crop in (
        augment.centred(sample, 64),
        augment.random_resized(sample, [1, 2], size=32, mirror=False, smallest=0.9),
    ):
        assert np.abs(crop[2:-2, 2:-2].numpy() - 127.5).max() < 13


def test_evaluation_takes_the_middle():
    image = np.zeros((40, 60, 3), np.uint8)
    image[4:36, 14:46] = 255  # 32 pixels, the middle of the 40 in the middle
    assert (augment.centred({"image": image}, 16, share=0.8).numpy() == 255).all()
    assert augment.centred({"image": image}, 16, share=1.0).numpy().min() == 0
    small = NOISE[:32, :32]
    np.testing.assert_array_equal(augment.centred({"image": small}, 32, share=1.0), small)
