"""Padding, windows, scales and mirror images against plain NumPy, with a filter as the model."""

import dataclasses
import itertools

import numpy as np
import plain_evaluation as plain
import pytest
import tensorflow as tf

from hvdkit.evaluate.whole_pictures import Passes, predict
from hvdkit.settings import Settings
from hvdkit.train import task as base
from tasks import segmentation

STRIDE, CLASSES = 4, 3
RNG = np.random.default_rng(2)
KERNEL = tf.constant(RNG.normal(size=(5, 5, 3, CLASSES)), tf.float32)
PICTURES = [RNG.normal(size=(*size, 3)) for size in ((3, 5), (8, 8), (9, 21), (31, 16), (23, 40))]


def model(images):
    assert not any(side and side % STRIDE for side in images.shape[1:3])
    if tf.executing_eagerly():
        assert not any(side % STRIDE for side in images.shape[1:3])
    return tf.nn.conv2d(images, KERNEL, 1, "SAME")


def alone(image):
    return model(tf.constant(image[None], tf.float32)).numpy()[0]


@pytest.mark.parametrize(
    ("window", "scales", "mirror"),
    [(8, (1.0,), False), (0, (0.6, 1.0, 1.5), False), (0, (1.0,), True), (12, (0.5, 1.3), True)],
)
def test_probabilities_are_plain_numpys(window, scales, mirror):
    how = Passes(STRIDE, window, scales, mirror)
    run = tf.function(lambda images: predict(model, images, how), autograph=False)
    run = run.get_concrete_function(tf.TensorSpec([None, None, None, 3], tf.float32))
    for image in PICTURES:
        logits = run(tf.constant(image[None], tf.float32)).numpy()
        expected = plain.probabilities(alone, image, STRIDE, window, scales, mirror)
        np.testing.assert_allclose(tf.nn.softmax(logits)[0], expected, atol=2e-5)
        np.testing.assert_allclose(np.exp(logits[0]), expected, atol=2e-5)  # their logarithms


def test_a_small_scale_leaves_no_pixel_out():
    """Stripes that are finer than the scaled pixels become their mean."""
    pattern = np.tile([[3.0], [-3.0]], (20, 40))[None, ..., None] * [1, 0, 0]
    stripes = tf.constant(pattern, tf.float32)
    logits = predict(lambda images: images, stripes, Passes(1, scales=(0.2,)))
    np.testing.assert_allclose(np.exp(logits[0, 8:-8, 8:-8]), 1 / 3, atol=0.05)


def test_one_pass_gives_the_models_own_logits():
    for image in PICTURES:
        logits = predict(model, tf.constant(image[None], tf.float32), Passes(STRIDE))
        assert logits.dtype == tf.float32
        np.testing.assert_array_equal(logits[0], plain.padded(alone, image.astype("f4"), STRIDE))


def test_what_lies_beside_a_picture_is_the_fill_colour():
    image = tf.constant(PICTURES[0][None], tf.float32)
    found = predict(model, image, Passes(STRIDE, fill=7))
    canvas = np.full((4, 8, 3), 7, np.float32)
    canvas[:3, :5] = PICTURES[0]
    np.testing.assert_allclose(found[0], alone(canvas)[:3, :5], atol=1e-5)


@pytest.mark.parametrize(("length", "side"), [*itertools.product([5, 8, 9, 24, 31], [8, 12])])
def test_the_last_window_is_moved_in(length, side):
    """Every window but a small picture's is whole, and neighbours share a third."""
    seen = []

    def watch(images):
        seen.append(images.shape[2])
        return model(images)

    tf.config.run_functions_eagerly(True)
    try:
        predict(watch, tf.zeros([1, 4, length, 3]), Passes(STRIDE, side))
    finally:
        tf.config.run_functions_eagerly(False)
    starts = plain.starts(length, side)
    width = side if length >= side else -(-length // STRIDE) * STRIDE
    assert seen[-len(starts) :] == [width] * len(starts)
    assert all(b - a <= 2 * side // 3 for a, b in itertools.pairwise(starts))


def test_pictures_are_drawn_in_squares_of_one_size():
    task, sheets = segmentation.Task(Settings(num_classes=3)), []
    for size in ((3, 5), (700, 300), (256, 256), (1, 2000)):
        inputs = {"image": tf.fill([1, *size, 3], tf.constant(255, tf.uint8))}
        targets = {"label": tf.ones([1, *size, 1], tf.uint8)}
        outputs = tf.eye(3)[:1][None, None] * tf.ones([1, *size, 1])
        sheets.append(task.draw(inputs, targets, outputs))
    sheet = np.concatenate(sheets)
    assert sheet.shape == (4, 256, 768, 3) and sheet.dtype == np.uint8
    white = np.all(sheet[:, :, :256] == 255, axis=-1)  # the picture itself
    assert white.sum((1, 2)).tolist() == [51 * 51 * 15, 256 * 110, 256 * 256, 256]


def test_a_window_that_the_model_cannot_take_is_refused():
    """A task's own model says its stride."""
    config = Settings(model="small", eval_window=20)
    with pytest.raises(ValueError, match="--eval_window=20: --model=small needs a multiple of 8"):
        segmentation.Task(config)
    assert set(segmentation.MODELS) == set(segmentation.STRIDES)
    assert base.load(Settings(train_split="trainaug")).config.train_split == "trainaug"

    class Own(segmentation.Task):
        def build_model(self):
            return None

    task = Own(dataclasses.replace(config, eval_window=24))
    task.build_model()
    with pytest.raises(ValueError, match=r"test_whole_pictures.Own has a build_model.*stride = N"):
        task.predict(None, {"image": tf.zeros([1, 9, 9, 3])})
    Own.stride = 5
    assert Own(config).passes.stride == 5
    for stride, words in ((32, "--eval_window=20: the task's model .* 32"), (0, "stride = 0 must")):
        Own.stride = stride
        with pytest.raises(ValueError, match=words):
            Own(config)

    class Frozen(segmentation.Task):
        """Its model is the project's, and so is its stride."""

        def build_model(self):
            model = super().build_model()
            model.trainable = False
            return model

    task = Frozen(dataclasses.replace(config, model="tiny", image_size=16))
    found = task.predict(task.build_model(), {"image": tf.zeros([1, 9, 9, 3])})
    assert task.passes.stride == 2 and found.shape[1:3] == (9, 9)
