"""What the data are, not where they lie, decides how they are augmented, unless flags do."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data.scenes import MARKER
from hvdkit.settings import Settings
from tasks import segmentation

DEMO, USUAL = ((0.8, 1.25), False), ((0.5, 2.0), True)


def opened(root: Path, **settings) -> tuple[segmentation.Task, str]:
    config = dataclasses.replace(Settings(), data_dir=str(root), image_size=32, **settings)
    task = segmentation.Task(config)
    train, val = task.sources()
    return task, train.fingerprint() + val.fingerprint()


def how(root: Path, **settings) -> tuple[tuple[float, float], bool]:
    task, _ = opened(root, **settings)
    return task.how.scale, task.how.mirror


def test_a_copy_of_the_demo_is_the_demo(tiny_data, tmp_path, monkeypatch):
    copy, plain = tmp_path / "staged", tmp_path / "plain"
    shutil.copytree(tiny_data, copy)
    # Where the demo is made, under its usual name, it is no other set.
    monkeypatch.setattr(segmentation, "DEMO", tiny_data)
    tasks, prints = zip(opened(tiny_data), opened(copy))
    assert how(tiny_data) == how(copy) == DEMO and prints[0] == prints[1]
    one, other = (
        task.training_example(task.sources()[0].read(tf.constant(3, tf.int64)), tf.constant([1, 2]))
        for task in tasks
    )
    np.testing.assert_array_equal(one["inputs"]["image"], other["inputs"]["image"])

    shutil.copytree(copy, plain, ignore=shutil.ignore_patterns(MARKER))
    assert how(plain) == USUAL
    assert opened(plain)[1] != prints[0]  # a rank that lacks the marker does not go unnoticed
    monkeypatch.setattr(segmentation, "DEMO", plain)
    with pytest.raises(ValueError, match=f"{plain} is not empty and not a finished demo"):
        opened(plain)[0].prepare()


def test_flags_have_the_last_word(tiny_data):
    assert how(tiny_data, mirror="on", scale_range="1,3") == ((1.0, 3.0), True)
    assert how(tiny_data, synthetic_data=True) == USUAL
    assert how(tiny_data, synthetic_data=True, mirror="off") == (USUAL[0], False)


def test_dropout_smoothing_and_classes_are_those_of_the_flags(tiny_data):
    """Logits 0 and ln 3: probabilities 1/4 and 3/4; smoothed, the target of class 1 is 1/8, 7/8."""
    settings = {"model": "tiny", "num_classes": 2, "dropout": 0.3, "label_smoothing": 0.25}
    task, _ = opened(tiny_data, **settings)
    model = task.build_model()
    assert model.get_layer("dropout").rate == 0.3 and model.output_shape[-1] == 2
    logits = tf.reshape(tf.constant([0.0, np.log(3.0)], tf.float32), (1, 1, 1, 2))
    losses, _ = task.loss(logits, {"label": tf.ones([1, 1, 1, 1], tf.uint8)})
    expected = -(np.log(1 / 4) / 8 + np.log(3 / 4) * 7 / 8)
    np.testing.assert_allclose(losses[0, 0, 0], expected, rtol=1e-6)


def test_an_evaluation_is_in_evaluation_mode(tiny_data):
    task, _ = opened(tiny_data, model="tiny", dropout=0.5)
    model = task.build_model()
    inputs = {"image": tf.random.stateless_uniform([2, 32, 32, 3], [1, 2], maxval=255.0)}
    inputs["key"] = tf.zeros([2, 2], tf.int32)
    outputs = task.predict(model, inputs)
    np.testing.assert_array_equal(outputs, model(inputs, training=False))
    assert np.any(outputs != model(inputs, training=True))


def test_the_mean_is_over_the_classes_that_occur(tiny_data):
    """Class 0: 3 of 4 right, IoU 3/5; class 1: 1 of 2, IoU 1/3; class 2 occurs nowhere."""
    task, _ = opened(tiny_data, num_classes=3)
    figures = task.metrics({"confusion": np.array([[3, 1, 0], [1, 1, 0], [0, 0, 0]])})
    np.testing.assert_allclose(figures["miou"], (3 / 5 + 1 / 3) / 2)
    np.testing.assert_allclose(figures["pixel_accuracy"], 4 / 6)
    assert np.isnan(figures["iou_2"])
    assert task.metrics({"confusion": np.zeros((3, 3), int)})["miou"] == 0.0
