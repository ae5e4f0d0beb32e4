r"""Three terms, as in detection: which cells hold an object, of what class, and where.

    hvdkit example detection
    horovodrun -np 2 python train.py --task=detection --run_dir=runs/detection \
        --optimizer=adam --base_lr=0.01 --num_steps=300 --eval_every=0

Each has a count of its own: every cell for the first, cells with an object for the others. So the
class and box terms do not shrink where objects are rare or a rank's share has none.
"""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train.preprocessing import wide

CELLS, FEATURES, CLASSES = 4, 6, 3


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config

    def sources(self):
        return scenes(1, 400), scenes(2, 80)

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        targets = {name: sample[name] for name in ("object", "label", "box")}
        return {"inputs": sample["cells"], "targets": targets}

    def build_model(self):
        """Cells [CELLS, FEATURES] -> of each: object's logit, classes' logits, box [4]."""
        cells = keras.Input((CELLS, FEATURES))
        x = keras.layers.Dense(32, activation="relu")(cells)
        heads = {"object": 1, "label": CLASSES, "box": 4}
        return keras.Model(
            cells,
            {name: keras.layers.Dense(n, dtype=wide())(x) for name, n in heads.items()},
        )

    def loss(self, outputs, targets):
        logits, box = outputs["object"][..., 0], outputs["box"]
        there = tf.cast(targets["object"], logits.dtype)
        apart = tf.reduce_sum(tf.abs(box - tf.cast(targets["box"], box.dtype)), axis=-1)
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
            targets["label"], outputs["label"]
        )
        found = tf.nn.sigmoid_cross_entropy_with_logits(labels=there, logits=logits)
        return {
            "object": (found, tf.ones_like(found)),  # weights: every cell counts
            "label": (entropy, there),  # only cells with an object
            "box": (apart, there, 0.5),  # the same, times 0.5
        }

    def sums(self, outputs, targets):
        there = targets["object"]
        hits = tf.argmax(outputs["label"], axis=-1) == tf.cast(
            targets["label"], tf.int64
        )
        return {
            "hits": tf.math.count_nonzero(hits & there),
            "there": tf.math.count_nonzero(there),
        }

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / max(int(sums["there"]), 1))}


def scenes(seed, size):
    """An object stands in about a quarter of the cells: features say its class and box."""
    x = (
        np.random.default_rng(seed)
        .normal(size=(size, CELLS, FEATURES))
        .astype(np.float32)
    )
    label, box = np.argmax(x[..., :CLASSES], -1), np.tanh(x[..., 2:])
    return Arrays(cells=x, object=x[..., 3] > 0.7, label=label, box=box)
