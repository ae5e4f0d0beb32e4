"""--lr_policy=plateau: the learning rate is lowered where the main metric stands still.

The rule is that of Keras's ReduceLROnPlateau, with evaluations in place of epochs. Evaluations
during warm-up do not count against the rate.
"""

import hashlib
import math

import tensorflow as tf

from hvdkit.scores import MainMetric
from hvdkit.settings import Settings


class Plateau:
    """What decides about the rate, a part of every checkpoint; all ranks must call it alike.

    Attributes:
      factor: float64; the rate is --base_lr times this.
    """

    def __init__(self) -> None:
        self.factor = _variable(1.0, tf.float64)
        # The best score's height (scores.py).
        self._best = _variable(math.nan, tf.float64)
        # Evaluations in a row that were no better.
        self._waited = _variable(0, tf.int64)
        # So many evaluations on, one that is no better counts again.
        self._resting = _variable(0, tf.int64)
        self._judged = _variable(0, tf.int64)  # step of the newest evaluation
        self._measure = _variable(0, tf.int64)  # 63 bits of what scores measure

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """By name."""
        return {
            "plateau/factor": self.factor,
            "plateau/best": self._best,
            "plateau/waited": self._waited,
            "plateau/resting": self._resting,
            "plateau/judged": self._judged,
            "plateau/measure": self._measure,
        }

    def measures(self, measure: object) -> None:
        """What the scores to come measure: one of another measure is not compared with them."""
        digest = hashlib.sha256(repr(measure).encode()).digest()
        number = int.from_bytes(digest[:8], "big") >> 1
        if number != int(self._measure):
            self._measure.assign(number)
            self._best.assign(math.nan)
            self._waited.assign(0)

    def judge(
        self,
        config: Settings,
        metric: MainMetric,
        *,
        value: float,
        step: int,
        scaling: float = 1.0,
    ) -> str:
        """After the evaluation of `step`, whose score is `value`; a second call changes nothing.

        Returns a sentence where it lowers the rate, else "". `scaling`: --lr_scaling's factor.
        """
        if step <= int(self._judged):
            return ""
        self._judged.assign(step)
        if int(self._resting):
            self._resting.assign_sub(1)
            self._waited.assign(0)
        best = float(self._best)
        height = metric.height(value)
        is_better = math.isnan(best) or height > best + config.plateau_min_delta
        if math.isfinite(height) and is_better:
            self._best.assign(height)
            self._waited.assign(0)
            return ""
        if int(self._resting) or step < config.warmup_steps:
            return ""
        self._waited.assign_add(1)
        rate = config.base_lr * float(self.factor)
        if int(self._waited) < config.plateau_patience or rate <= config.plateau_min_lr:
            return ""
        self.factor.assign(self.factor * config.plateau_factor)
        self._waited.assign(0)
        self._resting.assign(config.plateau_cooldown)
        lowered = max(rate * config.plateau_factor, config.plateau_min_lr)
        return (
            f"step {step}: the learning rate is lowered from {rate * scaling:.3g} to "
            f"{lowered * scaling:.3g}: {metric.name} is not better than "
            f"{metric.height(best):.4f} by {config.plateau_min_delta:g} "
            f"(--plateau_patience={config.plateau_patience})"
        )


def _variable(value: float, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(value, trainable=False, dtype=dtype)
