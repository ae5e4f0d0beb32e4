r"""Several labels at once: of a scanned digit, whether it is even, above four, and prime.

    hvdkit example multilabel
    horovodrun -np 2 python train.py --task=multilabel --run_dir=runs/multilabel \
        --optimizer=adam --base_lr=0.003 --num_steps=300 --eval_every=0
"""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.shipped import Digits
from hvdkit.evaluate.metrics import KerasMetrics
from hvdkit.train import outputs as meanings
from hvdkit.train.preprocessing import scaled, wide

PRIMES = (2, 3, 5, 7)


class Task:
    main_metric = "average_precision"

    def __init__(self, config):
        self.config = config
        self.scores = KerasMetrics(
            auc=keras.metrics.AUC(multi_label=True, num_labels=3)
        )

    def sources(self):
        return Digits(None, self.config.train_split), Digits(
            None, self.config.val_split
        )

    def evaluation_example(self, sample):
        digit = sample["label"]
        labels = [digit % 2 == 0, digit > 4, tf.reduce_any(digit == PRIMES)]
        inputs = self.picture_inputs(sample["image"])
        return {"inputs": inputs, "targets": tf.cast(tf.stack(labels), tf.float32)}

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def picture_inputs(self, image):
        return tf.ensure_shape(tf.image.resize(image, (8, 8)), (8, 8, 3))

    def build_model(self):
        image = keras.Input((8, 8, 3))
        x = keras.layers.Dense(64, activation="relu")(
            keras.layers.Flatten()(scaled(image))
        )
        return keras.Model(image, keras.layers.Dense(3, dtype=wide())(x))

    def loss(self, outputs, targets):
        """One loss for each label of each picture."""
        targets = tf.cast(targets, outputs.dtype)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
        return losses, tf.ones_like(losses)

    def decode(self, outputs):
        return meanings.sigmoid(outputs)

    def sums(self, outputs, targets):
        return self.scores.sums(targets, tf.sigmoid(outputs))

    def per_sample(self, outputs, targets):
        return {"labels": targets, "scores": outputs}

    def metrics(self, sums):
        found = [
            average_precision(*pair) for pair in zip(sums["labels"].T, sums["scores"].T)
        ]
        return self.scores.figures(sums) | {"average_precision": float(np.mean(found))}


def average_precision(labels, scores):
    """Sum of the precision at each threshold, times the recall that it adds; as scikit-learn's."""
    order = np.argsort(-scores)
    hits, last = np.cumsum(labels[order]), np.append(np.diff(scores[order]) != 0, True)
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / max(hits[-1], 1)
    return np.sum(np.diff(recall[last], prepend=0) * precision[last])
