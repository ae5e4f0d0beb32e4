"""A task for benchmarks/reproduce.py: MNIST-1D, digits as rows of 40 numbers.

Data: PyPI's mnist1d, made from its seed 42: 4,000 to train on, 1,000 to score. Networks, a rate of
0.01 of Adam, 100 samples a step and 6,000 steps as the authors' notebooks have them; weights start
as Keras starts them. Greydanus and Kobak, Scaling Down Deep Learning with MNIST-1D, ICML 2024.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from mnist1d.data import make_dataset

from hvdkit.data.source import Arrays
from hvdkit.train import losses


def _mlp(x):
    x = layers.Dense(100, activation="relu")(x)
    x = layers.Add()([x, layers.Dense(100, activation="relu")(x)])
    return layers.Dense(10)(x)


def _cnn(x):
    x = layers.Reshape((40, 1))(x)
    for kernel in (5, 3, 3):
        x = layers.ZeroPadding1D(1)(x)
        x = layers.Conv1D(25, kernel, strides=2, activation="relu")(x)
    return layers.Dense(10)(layers.Flatten()(x))


def _gru(x):
    x = layers.Reshape((40, 1))(x)
    x = layers.Bidirectional(layers.GRU(6, return_sequences=True))(x)
    return layers.Dense(10)(layers.Flatten()(x))


NETWORKS = {"linear": lambda x: layers.Dense(10)(x), "mlp": _mlp, "cnn": _cnn, "gru": _gru}


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config

    def sources(self):
        data = make_dataset()
        parts = [(data["x" + of], data["y" + of]) for of in ("", "_test")]
        return tuple(Arrays(x=np.float32(x), y=np.int32(y)) for x, y in parts)

    def evaluation_example(self, sample):
        return {"inputs": sample["x"], "targets": sample["y"]}

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def build_model(self):
        row = keras.Input((40,))
        return keras.Model(row, NETWORKS[self.config.model](row))

    def loss(self, outputs, targets):
        return losses.cross_entropy(outputs, targets)

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, -1, tf.int32) == targets
        return {"hits": tf.math.count_nonzero(hits), "samples": tf.size(targets)}

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["samples"])}
