"""What a model's outputs mean: said by `decode`, proved by the loss, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.utils.extmath import softmax
from small_runs import CLASSES, Small

from hvdkit.settings import Settings
from hvdkit.train.step import losses
from hvdkit.train.task import outputs

LOGITS = tf.constant(np.random.default_rng(3).normal(size=(4, CLASSES)), tf.float32)


def unweighted(each: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return each, tf.ones_like(each)


class OfProbabilities(Small):
    def loss(self, logits, targets):
        return unweighted(keras.losses.sparse_categorical_crossentropy(targets, logits))


class OfKeras(Small):
    def loss(self, logits, targets):
        return unweighted(
            keras.losses.sparse_categorical_crossentropy(
                targets, logits, from_logits=True
            )
        )


class OfHalf(Small):
    def loss(self, logits, targets):
        return losses.cross_entropy(logits[:, :2], targets)


class OfLabels(Small):
    def loss(self, logits, targets):
        is_of_class = tf.one_hot(targets, CLASSES)
        return unweighted(tf.nn.sigmoid_cross_entropy_with_logits(is_of_class, logits))

    def decode(self, logits):
        return outputs.sigmoid(logits)


class Wrong(OfLabels):
    def decode(self, logits):
        return {"mean": tf.reduce_mean(logits)}


class BackToClasses(OfLabels):
    """The decode that it inherits was written for another loss."""

    loss = Small.loss


class ToOthers(OfLabels):
    """As BackToClasses."""

    loss = OfProbabilities.loss


@pytest.mark.parametrize("task", [Small, OfKeras, BackToClasses])
def test_softmax_where_the_loss_is_softmax_cross_entropy_of_the_outputs(task):
    decoded = outputs.decoder(task(Settings()), LOGITS)(LOGITS)
    np.testing.assert_allclose(
        decoded["probabilities"], softmax(LOGITS.numpy()), rtol=1e-6
    )
    np.testing.assert_array_equal(decoded["classes"], np.argmax(LOGITS, -1))


def test_what_decode_says():
    decoded = outputs.decoder(OfLabels(Settings()), LOGITS)(LOGITS)
    probabilities = 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_allclose(decoded["probabilities"], probabilities, rtol=1e-6)
    np.testing.assert_array_equal(decoded["labels"], LOGITS.numpy() > 0)
    decoded = outputs.one_logit(LOGITS[:, :1])
    np.testing.assert_allclose(
        decoded["probabilities"][:, 1], probabilities[:, 0], rtol=1e-6
    )
    np.testing.assert_array_equal(decoded["classes"], LOGITS[:, 0] > 0)


@pytest.mark.parametrize(
    ("task", "out", "words"),
    [
        (
            OfProbabilities,
            LOGITS,
            "no softmax cross-entropy of all outputs: let its class Task",
        ),
        (OfHalf, LOGITS, "no softmax cross-entropy of all outputs"),
        (ToOthers, LOGITS, "no softmax cross-entropy of all outputs"),
        (
            Small,
            LOGITS[:, :1],
            r"are \(4, 1\), no logits of classes: let its class Task say",
        ),
        (Small, {"a": LOGITS}, "are a dict, no logits of classes"),
        (Wrong, LOGITS, r"must return a dict of tensors \[batch, ...\]"),
    ],
)
def test_outputs_that_nothing_explains_are_refused(task, out, words):
    with pytest.raises(ValueError, match=words):
        outputs.decoder(task(Settings()), out)
