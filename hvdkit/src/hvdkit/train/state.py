"""The state of a run: model, optimizer, step, loss scale; averaged weights for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from hvdkit.ranks.world import raw
from hvdkit.train import variable_names
from hvdkit.train.gradients import LossScale
from hvdkit.train.optimizer import check_trainable


class State:
    """What a checkpoint holds and a start-up broadcasts.

    `step` is the one counter of the run: it picks the batch and the learning rate and says when
    the run ends. It counts global batches; `skipped` of them changed no weights because their
    gradients were not finite. `passed_over` batches were left out when the run went back.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer, precision: str
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss_scale = LossScale(precision)
        self.step, self.skipped, self.passed_over = (
            tf.Variable(0, dtype=tf.int64, trainable=False, name=name)
            for name in ("step", "skipped", "passed_over")
        )

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
        averages = average_variables(self.optimizer)
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


def average_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Averages of the model's trainable weights (Polyak and Juditsky 1992); empty without EMA.

    Keras's optimizer updates them at every step that it applies and keeps them among its
    variables. They are zeros until the first applied step.
    """
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


@contextlib.contextmanager
def averaged_weights(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, the model's trainable weights are their averages; afterwards its own again.

    It takes the memory of a second copy of the weights. Batch norm's moving statistics stay as
    they are. Without averages or before the first step nothing happens.

    Raises:
      ValueError: `trainable` of a layer changed since the optimizer was built.
    """
    if not optimizer.use_ema or not int(optimizer.iterations):
        yield
        return
    check_trainable(optimizer, model)
    variables = model.trainable_variables
    own = [tf.identity(raw(v)) for v in variables]
    try:
        for variable, average in zip(variables, average_variables(optimizer), strict=True):
            raw(variable).assign(raw(average))
        yield
    finally:
        for variable, value in zip(variables, own):
            raw(variable).assign(value)
