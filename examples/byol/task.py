r"""BYOL: a network predicts what a mean teacher makes of another view of the same sample.

    hvdkit example byol
    horovodrun -np 2 python train.py --task=byol --run_dir=runs/byol \
        --optimizer=adam --base_lr=0.003 --num_steps=300 --eval_every=0

Grill et al. 2020, arXiv:2006.07733, equations 1 and 2. The teacher is an attribute of the task, so
it is part of the run: broadcast, saved, compared, restored. An action moves it after each step.
"""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays

# The teacher keeps this share of its weights at each step.
FEATURES, SIZE, KEPT = 8, 4, 0.9


def network(name):
    """Encoder and projector: [..., FEATURES] -> [..., SIZE]."""
    hidden = keras.layers.Dense(32, activation="relu")
    return keras.Sequential(
        [keras.Input((2, FEATURES)), hidden, keras.layers.Dense(SIZE)],
        name=name,
    )


class MoveTeacher:
    """teacher = KEPT * teacher + (1 - KEPT) * student, on every rank alike."""

    settles = True  # it reads weights

    def __init__(self, teacher, student):
        self.pairs = list(zip(teacher.variables, student.variables, strict=True))

    def due(self, step):
        return True

    def __call__(self, step, result):
        for slow, fast in self.pairs:
            slow.assign(KEPT * slow + (1 - KEPT) * fast)


class Task:
    main_metric = "agreement"

    def __init__(self, config):
        self.config, self.teacher = config, network("teacher")
        self.teacher.trainable = False

    def sources(self):
        return numbers(1, 600), numbers(2, 64)

    def training_example(self, sample, key):
        noise = 0.3 * tf.random.stateless_normal([2, FEATURES], key)
        return {"inputs": sample["x"] + noise, "targets": ()}

    def evaluation_example(self, sample):
        return {"inputs": sample["x"] + [[0.0], [0.1]], "targets": ()}

    def build_model(self):
        """Two views [2, FEATURES] -> what it predicts of each, [2, SIZE], and the views."""
        self.student = network("student")
        self.teacher.set_weights(self.student.get_weights())
        views = keras.Input((2, FEATURES))
        x = keras.layers.Dense(16, activation="relu")(self.student(views))
        return keras.Model(
            views, {"predicted": keras.layers.Dense(SIZE)(x), "views": views}
        )

    def actions(self, run):
        return [MoveTeacher(self.teacher, self.student)]

    def _likeness(self, outputs):
        """Cosine between each prediction and the teacher's vector of the other view, [B, 2]."""
        wanted = tf.reverse(self.teacher(outputs["views"], training=False), [1])
        both = (
            tf.math.l2_normalize(tf.stop_gradient(wanted), -1),
            outputs["predicted"],
        )
        return tf.reduce_sum(both[0] * tf.math.l2_normalize(both[1], -1), -1)

    def loss(self, outputs, targets):
        losses = 2 - 2 * self._likeness(outputs)
        return losses, tf.ones_like(losses)

    def sums(self, outputs, targets):
        likeness = self._likeness(outputs)
        return {"likeness": tf.reduce_sum(likeness), "views": tf.size(likeness)}

    def metrics(self, sums):
        return {"agreement": float(sums["likeness"] / sums["views"])}


def numbers(seed, size):
    x = np.random.default_rng(seed).normal(size=(size, FEATURES))
    return Arrays(x=x.astype(np.float32))
