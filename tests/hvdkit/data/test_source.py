"""Arrays, and the scanned digits."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from hvdkit.data import shipped
from hvdkit.data.shipped import ROWS, Digits
from hvdkit.data.source import Arrays


def test_arrays_are_read_by_name_and_compared_by_content():
    arrays = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 7]))
    sample = arrays.read(tf.constant(1, tf.int64))
    assert (
        len(arrays) == 3
        and sample["x"].numpy().tolist() == [0, 1, 0]
        and sample["label"] == 6
    )
    same = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 7]))
    other = Arrays(x=np.eye(3, dtype=np.float32), label=np.array([5, 6, 8]))
    assert arrays.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("lengths", [{}, {"x": 0}, {"x": 2, "label": 3}])
def test_arrays_of_no_or_different_lengths_are_refused(lengths):
    arrays = {name: np.zeros(n) for name, n in lengths.items()}
    refused(lambda: Arrays(**arrays), "of one length", lengths)


@pytest.mark.parametrize("dtype", [">i4", ">f8", "datetime64[s]", "i4,f4", "O"])
def test_arrays_that_tensorflow_would_read_as_others_are_refused(dtype: str):
    refused(lambda: Arrays(odd=np.zeros(3, dtype)), "array odd is of ", "byte order")


def test_masked_values_are_no_numbers():
    masked = np.ma.masked_greater(np.array([1.0, 2.0, 9.97e36, 4.0]), 1e30)
    refused(lambda: Arrays(x=masked), "array x has masked values", "filled")
    counts = np.ma.masked_equal(np.array([1, 7]), 7)
    refused(lambda: Arrays(x=counts), "masked", "leave those samples out")
    sound = Arrays(x=np.ma.masked_greater(np.array([1.0, 2.0]), 1e30))
    assert float(sound.read(tf.constant(1))["x"]) == 2.0


def test_what_is_shipped_is_what_scikit_learn_has():
    """SHA-256 of load_digits and load_sample_images as arrays of bytes."""
    arrays = [*shipped.digits(), *shipped.photographs()]
    assert [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in arrays] == [
        "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3",
        "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0",
        "e701459344fd69797154c91add3bb5d70e5ed1a61d8bed889bab3a796104698d",
        "3202904ed246795bf616c66d7859cd7c6080eff736c6e38dc5cc62779742033f",
    ]


def test_a_sample_is_a_picture_and_its_class():
    """The splits share no scan and hold all; every process sees the same digits."""
    assert sorted([*ROWS["train"], *ROWS["val"]]) == list(range(1797))
    digits = Digits(None, "val")
    assert (
        len(digits) == 359
        and digits.fingerprint() != Digits(None, "train").fingerprint()
    )
    assert digits.fingerprint().startswith("472f7f2151d0e223")
    sample = digits.read(tf.constant(358, tf.int64))
    assert sample["image"].shape == (8, 8, 3) and sample["image"].dtype == tf.uint8
    assert int(sample["label"]) == 8  # the last row is an 8
    labels = {int(digits.read(tf.constant(i, tf.int64))["label"]) for i in range(100)}
    assert labels == set(range(10))
    with pytest.raises(
        ValueError, match="no split 'test'; there are \\['train', 'val'\\]"
    ):
        Digits(None, "test")
