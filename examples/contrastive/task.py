r"""A contrastive loss over the global batch: two views of a sample find each other among all.

    hvdkit example contrastive
    horovodrun -np 2 python train.py --task=contrastive --run_dir=runs/contrastive \
        --optimizer=adam --base_lr=0.003 --num_steps=300 --eval_every=0

NT-Xent of SimCLR (Chen et al. 2020, arXiv:2002.05709, equation 1) with other samples' second views
as the negatives. In evaluation the batch is that of --eval_batch_size.
"""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train import across
from hvdkit.train.preprocessing import wide

FEATURES, TEMPERATURE = 8, 0.2


class Task:
    main_metric = "found"

    def __init__(self, config):
        self.config = config

    def sources(self):
        return numbers(1, 600), numbers(2, 64)

    def training_example(self, sample, key):
        noise = 0.3 * tf.random.stateless_normal([2, FEATURES], key)
        return {"inputs": sample["x"] + noise, "targets": ()}

    def evaluation_example(self, sample):
        return {"inputs": sample["x"] + [[0.0], [0.1]], "targets": ()}

    def build_model(self):
        """Two views [2, FEATURES] -> two vectors of length 1, [2, 4]."""
        views = keras.Input((2, FEATURES))
        x = keras.layers.Dense(32, activation="relu")(views)
        x = keras.layers.Dense(4, dtype=wide())(x)
        return keras.Model(views, keras.layers.UnitNormalization(dtype=wide())(x))

    def _scores(self, outputs):
        """Of each sample's first view to the second views of the batch, and its own place there."""
        first, second = tf.unstack(outputs, axis=1)
        everyone = across.gather(second)
        return first @ tf.transpose(everyone) / TEMPERATURE, across.places(second)

    def loss(self, outputs, targets):
        scores, own = self._scores(outputs)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)
        return losses, tf.ones_like(losses)

    def sums(self, outputs, targets):
        scores, own = self._scores(outputs)
        hits = tf.argmax(scores, axis=-1) == own
        return {"hits": tf.math.count_nonzero(hits), "samples": tf.size(own)}

    def metrics(self, sums):
        return {"found": float(sums["hits"] / sums["samples"])}


def numbers(seed, size):
    x = np.random.default_rng(seed).normal(size=(size, FEATURES))
    return Arrays(x=x.astype(np.float32))
