"""Sequences: has this word been there before? A task as a new user would write it."""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.settings import Settings
from hvdkit.train import losses

WORDS, LONGEST, WIDTH = 12, 10, 16


def sequences(seed: int, size: int) -> Arrays:
    """Words, int32 [size, LONGEST], of which the first `length` count; 1 where said before."""
    rng = np.random.default_rng(seed)
    words = rng.integers(WORDS, size=(size, LONGEST))
    before = [[w in row[:i] for i, w in enumerate(row)] for row in words.tolist()]
    lengths = rng.integers(2, LONGEST + 1, size)
    return Arrays(words=words.astype(np.int32), before=np.array(before, np.int32), length=lengths)


class Task:
    main_metric = "accuracy"

    def __init__(self, config: Settings) -> None:
        self.config = config

    def sources(self):
        return sequences(1, 500), sequences(2, 100)

    def training_example(self, sample, key):
        """Now and then a word is shortened away at the end, drawn by the sample's own key."""
        cut = tf.random.stateless_uniform([], key, 0, 2, tf.int64)
        return self.evaluation_example(sample | {"length": sample["length"] - cut})

    def evaluation_example(self, sample):
        valid = tf.range(LONGEST, dtype=tf.int64) < sample["length"]
        return {"inputs": sample["words"], "targets": {"before": sample["before"], "valid": valid}}

    def build_model(self) -> keras.Model:
        """An embedding and one transformer block (Vaswani et al. 2017, arXiv:1706.03762).

        Attention looks back only, so what is padded at the end cannot matter.
        """
        words = keras.Input((LONGEST,), dtype="int32")
        x = keras.layers.Embedding(WORDS, WIDTH)(words)
        seen = keras.layers.MultiHeadAttention(2, WIDTH)(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, seen]))
        wide = keras.layers.Dense(4 * WIDTH, activation="gelu")(x)
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(wide)])
        logits = keras.layers.Dense(2)(keras.layers.LayerNormalization()(x))
        return keras.Model(words, logits, name="transformer")

    def loss(self, outputs, targets):
        """Logits [batch, LONGEST, 2]; a word beyond the end has weight 0."""
        return losses.cross_entropy(outputs, targets["before"], valid=targets["valid"])

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, -1, tf.int32) == targets["before"]
        counted = tf.math.count_nonzero
        valid = targets["valid"]
        return {"hits": counted(hits & valid), "words": counted(valid)}

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / max(int(sums["words"]), 1))}
