"""Padding, scales, drawn pictures; tests/ranks/checks_whole_pictures.py compares scores."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.evaluate.whole_pictures import Passes, predict
from hvdkit.settings import Settings
from hvdkit.train import task as base
from tasks import segmentation

STRIDE = 4
RNG = np.random.default_rng(2)


def test_a_small_scale_leaves_no_pixel_out():
    """Stripes that are finer than the scaled pixels become their mean."""
    pattern = np.tile([[3.0], [-3.0]], (20, 40))[None, ..., None] * [1, 0, 0]
    stripes = tf.constant(pattern, tf.float32)
    logits = predict(lambda images: images, stripes, Passes(1, scales=(0.2,)))
    np.testing.assert_allclose(np.exp(logits[0, 8:-8, 8:-8]), 1 / 3, atol=0.05)


def test_passes_of_one_logit_are_refused():
    with pytest.raises(ValueError, match="softmax probabilities, which of one logit are 1"):
        predict(lambda x: x[..., :1], tf.zeros([1, 8, 8, 3]), Passes(1, mirror=True))


@pytest.mark.parametrize("size", [(3, 5), (8, 8), (9, 21)])
def test_one_pass_gives_the_models_own_logits_of_a_padded_picture(size):
    kernel = tf.constant(RNG.normal(size=(5, 5, 3, 3)), tf.float32)

    def model(images):
        assert not any(side % STRIDE for side in images.shape[1:3])
        return tf.nn.conv2d(images, kernel, 1, "SAME")

    image = RNG.normal(size=(1, *size, 3)).astype(np.float32)
    found = predict(model, tf.constant(image), Passes(STRIDE, fill=7))
    beside = [(0, 0), *((0, -side % STRIDE) for side in size), (0, 0)]
    whole = model(tf.constant(np.pad(image, beside, constant_values=7)))
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found, whole[:, : size[0], : size[1]])


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
