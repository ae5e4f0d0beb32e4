r"""Numbers instead of classes: where in a scanned digit the centre of its ink is, in pixels.

    hvdkit example regression
    horovodrun -np 2 python train.py --task=regression --run_dir=runs/regression \
        --optimizer=adam --base_lr=0.003 --num_steps=600 --eval_every=0
"""

import keras
import tensorflow as tf

from hvdkit.data.shipped import Digits
from hvdkit.evaluate.metrics import KerasMetrics
from hvdkit.train.preprocessing import scaled, wide


class Task:
    main_metric = "r2"

    def __init__(self, config):
        self.config = config
        error = keras.metrics.RootMeanSquaredError()
        self.scores = KerasMetrics(r2=keras.metrics.R2Score(), rmse=error)

    def sources(self):
        return Digits(None, self.config.train_split), Digits(
            None, self.config.val_split
        )

    def evaluation_example(self, sample):
        ink = tf.cast(sample["image"][..., 0], tf.float32)
        place = tf.range(8.0) - 3.5
        centre = [tf.reduce_sum(ink * place), tf.reduce_sum(ink * place[:, None])]
        inputs = self.picture_inputs(sample["image"])
        return {"inputs": inputs, "targets": tf.stack(centre) / tf.reduce_sum(ink)}

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def picture_inputs(self, image):
        return tf.ensure_shape(tf.image.resize(image, (8, 8)), (8, 8, 3))

    def build_model(self):
        image = keras.Input((8, 8, 3))
        x = keras.layers.Dense(64, activation="relu")(
            keras.layers.Flatten()(scaled(image))
        )
        return keras.Model(image, keras.layers.Dense(2, dtype=wide())(x))

    def loss(self, outputs, targets):
        """The squared distance of each picture's centre."""
        apart = outputs - tf.cast(targets, outputs.dtype)
        losses = tf.reduce_sum(tf.square(apart), -1)
        return losses, tf.ones_like(losses)

    def decode(self, outputs):
        return {"x": outputs[:, 0] + 3.5, "y": outputs[:, 1] + 3.5}

    def sums(self, outputs, targets):
        return self.scores.sums(tf.cast(targets, outputs.dtype), outputs)

    def metrics(self, sums):
        return self.scores.figures(sums)
