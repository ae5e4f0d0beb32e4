r"""Points on a circle, a maker that imitates them, and a critic: two networks in one model.

    hvdkit example gan
    horovodrun -np 2 python train_gan.py --task=gan --run_dir=runs/gan \
        --base_lr=0.002 --num_steps=900 --eval_every=0
"""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train.groups import Group
from hvdkit.train.preprocessing import wide


class Task:
    main_metric = "distance"  # of made points from the circle
    main_metric_mode = "min"

    def __init__(self, config):
        self.config = config

    def sources(self):
        return points(1, 1000), points(2, 200)

    def training_example(self, sample, key):
        noise = tf.random.stateless_normal([4], key)
        return {"inputs": (sample["x"], noise), "targets": ()}

    def evaluation_example(self, sample):
        return {"inputs": (sample["x"], sample["noise"]), "targets": ()}

    def build_model(self):
        """(points [2], noise [4]) -> (points that the maker makes, the critic's score of each)."""
        real, noise = keras.Input((2,)), keras.Input((4,))
        self.maker, self.critic = network(4, 2, "maker"), network(2, 1, "critic")
        made = self.maker(noise)
        return keras.Model((real, noise), (made, self.critic(real), self.critic(made)))

    def optimizer(self, model):
        """One for each network, with momenta and a count of updates of its own."""
        of_critic = keras.optimizers.Adam(beta_1=0.5, beta_2=0.9)
        of_maker = keras.optimizers.Adam(beta_1=0.0)
        return [
            Group(self.critic.trainable_variables, of_critic),
            Group(self.maker.trainable_variables, of_maker, rate=0.25),
        ]

    def loss(self, outputs, targets):
        """What evaluation reports: how far the critic tells real points from made ones."""
        _, real, made = outputs
        return (made - real)[:, 0], tf.ones_like(real)[:, 0]

    def sums(self, outputs, targets):
        radius = tf.norm(outputs[0], axis=-1)
        off = tf.reduce_sum(tf.cast(tf.abs(radius - 1.0), tf.float64))
        return {"off": off, "samples": tf.size(radius)}

    def metrics(self, sums):
        return {"distance": float(sums["off"] / sums["samples"])}


def network(inputs, outputs, name):
    layers = [
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(outputs, dtype=wide()),
    ]
    return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


def points(seed, size):
    draw = np.random.default_rng(seed)
    angle = draw.uniform(0, 2 * np.pi, size)
    x = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    return Arrays(x=x, noise=draw.normal(size=(size, 4)).astype(np.float32))
