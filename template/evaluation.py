"""A task's figures over its validation set, the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.pipeline import EvaluationFeed
from engine import metrics
from engine.world import World
from tasks.base import Example, Task


class Evaluator:
    """Holds what does not change from one evaluation to the next."""

    def __init__(self, world: World, task: Task, model: keras.Model, feed: EvaluationFeed) -> None:
        self._world, self._task, self._feed = world, task, feed
        self._step = make_step(task, model, feed.spec)

    def run(self) -> tuple[dict[str, float], np.ndarray | None]:
        """Every rank must call it.

        Returns:
          Figures by name: `loss` and what the task's `metrics` returns.
          Pictures of the first batch, uint8 [n, height, width, 3], on rank 0; None on the others,
          and where the task draws none.
        Raises:
          Stop: on all ranks, when a sample cannot be read.
        """
        sums, shown = metrics.zeros(self._step), None
        with self._world.together("reading the validation data"):
            for batch in self._feed:
                outputs, more = self._step(batch)
                sums = {name: sums[name] + more[name].numpy() for name in sums}
                shown = shown or (batch, outputs)
        sums = metrics.add_over_ranks(sums)
        figures = {"loss": float(sums["loss"] / max(sums["weight"], 1))}
        return figures | self._task.metrics(sums), self._draw(*shown) if shown else None

    def _draw(self, batch: Example, outputs: Any) -> np.ndarray | None:
        draw = getattr(self._task, "draw", None)
        if not self._world.is_chief or draw is None:
            return None
        return draw(batch["inputs"], batch["targets"], outputs)


def make_step(task: Task, model: keras.Model, spec: Any):
    """Returns the function of one evaluation batch; it has no collectives."""

    @tf.function(input_signature=[spec], autograph=False)
    def eval_step(batch: Example) -> tuple[Any, dict[str, tf.Tensor]]:
        outputs = model(batch["inputs"], training=False)
        losses, weights = task.loss(outputs, batch["targets"])
        sums = task.sums(outputs, batch["targets"])
        sums["loss"] = tf.reduce_sum(tf.cast(losses * weights, tf.float64))
        sums["weight"] = tf.reduce_sum(tf.cast(weights, tf.float64))
        return outputs, sums

    return eval_step
