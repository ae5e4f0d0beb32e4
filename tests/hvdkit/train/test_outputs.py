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


def of(loss, decode=None, base=Small):
    return type("Of", (base,), {"loss": loss} | ({"decode": decode} if decode else {}))


def by_label(function, **how):
    return lambda task, out, targets: (found := function(targets, out, **how), tf.ones_like(found))


OfProbabilities = of(by_label(keras.losses.sparse_categorical_crossentropy))
OfKeras = of(by_label(keras.losses.sparse_categorical_crossentropy, from_logits=True))
OfHalf = of(lambda task, out, targets: losses.cross_entropy(out[:, :2], targets))
OfLabels = of(
    by_label(lambda y, x: tf.nn.sigmoid_cross_entropy_with_logits(tf.one_hot(y, CLASSES), x)),
    decode=lambda task, out: outputs.sigmoid(out),
)
Wrong = of(OfLabels.loss, decode=lambda task, out: {"mean": tf.reduce_mean(out)})
# An inherited decode was written for another loss.
BackToClasses = of(Small.loss, base=OfLabels)
ToOthers = of(OfProbabilities.loss, base=OfLabels)


@pytest.mark.parametrize("task", [Small, OfKeras, BackToClasses])
def test_softmax_where_the_loss_is_softmax_cross_entropy_of_the_outputs(task):
    found = outputs.decoder(task(Settings()), LOGITS)(LOGITS)
    np.testing.assert_allclose(found["probabilities"], softmax(LOGITS.numpy()), rtol=1e-6)
    np.testing.assert_array_equal(found["classes"], np.argmax(LOGITS, -1))


def test_what_decode_says():
    found = outputs.decoder(OfLabels(Settings()), LOGITS)(LOGITS)
    chances = 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_allclose(found["probabilities"], chances, rtol=1e-6)
    np.testing.assert_array_equal(found["labels"], LOGITS.numpy() > 0)
    found = outputs.one_logit(LOGITS[:, :1])
    np.testing.assert_allclose(found["probabilities"][:, 1], chances[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(found["classes"], LOGITS[:, 0] > 0)


@pytest.mark.parametrize(
    ("task", "out", "words"),
    [
        (OfProbabilities, LOGITS, "no softmax cross-entropy of all outputs: let its class Task"),
        (OfHalf, LOGITS, "no softmax cross-entropy of all outputs"),
        (ToOthers, LOGITS, "no softmax cross-entropy of all outputs"),
        (Small, LOGITS[:, :1], r"are \(4, 1\), no logits of classes: let its class Task say"),
        (Small, {"a": LOGITS}, "are a dict, no logits of classes"),
        (Wrong, LOGITS, r"must return a dict of tensors \[batch, ...\]"),
    ],
)
def test_outputs_that_nothing_explains_are_refused(task, out, words):
    with pytest.raises(ValueError, match=words):
        outputs.decoder(task(Settings()), out)
