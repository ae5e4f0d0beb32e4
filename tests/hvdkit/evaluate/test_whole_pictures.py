"""Scales, and what is refused; tests/ranks/checks_whole_pictures.py compares scores."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.evaluate.whole_pictures import Passes, predict
from hvdkit.settings import Settings
from hvdkit.train.outputs import sigmoid, softmax
from tasks import segmentation


def test_a_small_scale_leaves_no_pixel_out():
    """Stripes that are finer than the scaled pixels become their mean."""
    stripes = np.zeros([1, 40, 40, 3], np.float32)
    stripes[:, ::2, :, 0] = 3.0
    stripes[:, 1::2, :, 0] = -3.0
    logits = predict(
        lambda images: images, tf.constant(stripes), Passes(1, scales=(0.2,))
    )
    np.testing.assert_allclose(np.exp(logits[0, 8:-8, 8:-8]), 1 / 3, atol=0.05)


def test_passes_of_one_logit_are_refused():
    with pytest.raises(
        ValueError, match="softmax probabilities, which of one logit are 1"
    ):
        predict(lambda x: x[..., :1], tf.zeros([1, 8, 8, 3]), Passes(1, mirror=True))


def test_a_window_that_the_model_cannot_take_is_refused():
    config = Settings(model="small", eval_window=20)
    with pytest.raises(
        ValueError, match="--eval_window=20: --model=small needs a multiple of 8"
    ):
        segmentation.Task(config)

    class Own(segmentation.Task):
        def build_model(self):
            return None

    task = Own(dataclasses.replace(config, eval_window=24))
    task.build_model()
    with pytest.raises(
        ValueError, match=r"test_whole_pictures.Own has a build_model.*stride = N"
    ):
        task.predict(None, {"image": tf.zeros([1, 9, 9, 3], tf.uint8)})
    Own.stride = 5
    assert Own(config).passes.stride == 5
    for stride, words in (
        (32, "--eval_window=20: the task's model .* 32"),
        (0, "stride = 0 must"),
    ):
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
    model = task.build_model()
    logits_of_picture = task.predict(model, {"image": tf.zeros([1, 9, 9, 3], tf.uint8)})
    assert task.passes.stride == 2 and logits_of_picture.shape[1:3] == (9, 9)
    # Padded with 128, pictures of 0 to 1 would be 256 times as bright there.
    with pytest.raises(ValueError, match=r"Frozen: .* given float32: give it uint8"):
        task.predict(model, {"image": tf.zeros([1, 9, 9, 3])})


def test_views_of_what_may_be_no_softmax_are_not_averaged():
    config = Settings(
        model="tiny",
        num_classes=3,
        image_size=16,
        eval_flip=True,
        synthetic_data=True,
        data_format="folders",
    )

    class Doubled(segmentation.Task):
        def loss(self, outputs, targets):
            losses, weights = super().loss(outputs, targets)
            return 2 * losses, weights

    class OwnLoss(segmentation.Task):
        def loss(self, outputs, targets):
            raise NotImplementedError

    class Labels(OwnLoss):
        def decode(self, outputs):
            return sigmoid(outputs)

    class Weighted(OwnLoss):
        def decode(self, outputs):
            return softmax(outputs)

    image = {"image": tf.zeros([1, 8, 8, 3], tf.uint8)}
    for kind in (segmentation.Task, Doubled, Weighted):
        task = kind(config)
        assert task.predict(task.build_model(), image).shape == (1, 8, 8, 3)
    for kind in (OwnLoss, Labels):
        task = kind(config)
        with pytest.raises(ValueError, match=rf"{kind.__name__} are logits of a softm"):
            task.predict(task.build_model(), image)
        task = kind(dataclasses.replace(config, eval_flip=False))
        assert task.predict(task.build_model(), image).shape == (1, 8, 8, 3)


def test_a_class_that_only_the_model_has_is_no_other_one():
    """Of 4 outputs and 3 classes, the last was counted as class 0 of the next label."""
    task = segmentation.Task(Settings(model="tiny", num_classes=3))
    labels = tf.constant([[[[0], [2], [255]]]], tf.uint8)
    logits = tf.one_hot([[[3, 2, 3]]], 4)
    confusion = task.sums(logits, {"label": labels})["confusion"].numpy()
    assert (
        confusion.shape == (4, 4)
        and confusion[0, 3] == confusion[2, 2] == 1
        and confusion.sum() == 2
    )
