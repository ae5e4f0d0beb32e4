"""All that a run is at one moment: model, optimizer, step, loss scale."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdkit.train import ema, variable_names
from hvdkit.train.gradients import LossScale


class State:
    """What a checkpoint holds and a start-up broadcasts.

    `step` is the one counter of the run: it picks the batch and the learning rate and says when
    the run ends. It counts global batches; `skipped` of them changed no weights because their
    gradients were not finite. `passed_over` batches were left out of the data (ending.go_back).
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer, precision: str
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss_scale = LossScale(precision)
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name="skipped")
        self.passed_over = tf.Variable(0, dtype=tf.int64, trainable=False, name="passed_over")

    @property
    def variables(self) -> dict[str, keras.Variable | tf.Variable]:
        """Every variable by a name that is unique and the same on every rank and in every process.

        model/0003/dense/kernel, its moving average ema/0003/dense/kernel where the optimizer
        keeps one, optimizer/0007/adam/dense/kernel/momentum; see hvdkit/train/variable_names.py.
        """
        named = {"step": self.step, "skipped": self.skipped, "passed_over": self.passed_over}
        named |= {"loss_scale": self.loss_scale.value, "sound_steps": self.loss_scale.sound_steps}
        named |= {"skipped_in_a_row": self.loss_scale.skipped_in_a_row}
        model = self.model.variables
        names = dict(zip(map(id, model), variable_names.of_model(self.model)))
        # The position makes it unique: two layers may have been given the same name.
        places = {id(v): f"{i:04d}/{names[id(v)]}" for i, v in enumerate(model)}
        named |= {f"model/{places[id(v)]}": v for v in model}
        averages = ema.average_variables(self.optimizer)
        trained = self.model.trainable_variables
        named |= {f"ema/{places[id(v)]}": average for v, average in zip(trained, averages)}
        averaged = set(map(id, averages))
        slots = zip(self.optimizer.variables, variable_names.of_optimizer(self.optimizer, names))
        named |= {
            f"optimizer/{i:04d}/{name}": v
            for i, (v, name) in enumerate(slots)
            if id(v) not in averaged
        }
        return named

    def advance(self, finite: tf.Tensor, readable: tf.Tensor) -> None:
        """After a step, inside its tf.function: a batch that no rank could read is not counted."""
        counted = tf.cast(readable, tf.int64)
        self.step.assign_add(counted)
        self.skipped.assign_add(tf.cast(~finite, tf.int64) * counted)
        self.loss_scale.update(finite, readable)
