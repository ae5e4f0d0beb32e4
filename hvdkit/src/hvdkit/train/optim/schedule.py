"""Learning rate as a function of the step: --lr_policy with linear warm-up, or a task's own."""

import contextlib
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdkit.settings import Settings, project
from hvdkit.train.optim.plateau import Plateau
from hvdkit.train.task.checks import user_code_errors
from hvdkit.train.task.protocol import Task, optional, settings_of

Schedule = Callable[[tf.Tensor], tf.Tensor]

LOWEST, HIGHEST = 1e-7, 10.0  # the rates of --find_lr
_POINTS = 101


def of_run(
    task: Task, config: Settings, world_size: int, *, plateau: Plateau | None = None
) -> Schedule:
    """Step -> learning rate; both scalars, int64 -> float64, usable inside a tf.function.

    `plateau`: the run's, which its evaluations change; None: as it is at first. Raises ValueError
    where the task's own schedule gives no learning rate.
    """
    if config.find_lr:  # every step has the same factor (Smith 2017)
        growth = math.log(HIGHEST / LOWEST) / max(config.num_steps - 1, 1)
        return lambda step: LOWEST * tf.exp(tf.cast(step, tf.float64) * growth)
    if not optional(task, "schedule"):
        return make(config, world_size, plateau=plateau)
    policy = _of_task(task, config)
    scaling = config.lr_factor(world_size)

    def rate_of(step: tf.Tensor) -> tf.Tensor:
        rate = policy(step)  # tf.cast would round a Python float to float32 first
        rate = tf.constant(rate, tf.float64) if isinstance(rate, float) else rate
        return tf.cast(rate, tf.float64) * scaling

    return rate_of


def _of_task(task: Task, config: Settings) -> Schedule:
    with user_code_errors("schedule"):
        policy = task.schedule(settings_of(task, config))
    if not callable(policy):
        raise ValueError(
            f"{_line(task)}: schedule returns {policy!r:.80}: it must return a function of the "
            "step, as lambda step: 0.1"
        )
    for step in (0, config.num_steps - 1):
        _value(policy, step, task)
    return policy


def _line(task: Task) -> str:
    return project.line_of(optional(task, "schedule")) or "the task"


def _value(policy: Schedule, step: int, task: Task) -> float:
    """The rate after so many steps; ValueError where it is none."""
    with user_code_errors("schedule"):
        rate = policy(tf.constant(step, tf.int64))
    value = math.nan
    with contextlib.suppress(TypeError, ValueError):
        value = float(rate) if np.ndim(rate) == 0 else math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{_line(task)}: the task's schedule gives a learning rate of {rate!r:.80} after "
            f"{step} steps: it must be a number from 0"
        )
    return value


def points(task: Task, config: Settings) -> dict[str, str]:
    """Rates of the task's schedule at up to _POINTS steps, as text, for a later start to compare.

    Raises ValueError, as `of_run` does.
    """
    if config.find_lr or not optional(task, "schedule"):
        return {"rate": "that of --lr_policy"}
    policy = _of_task(task, config)
    rates = {"rate": "its own"}
    for step in (
        np.linspace(0, config.num_steps - 1, _POINTS).round().astype(int).tolist()
    ):
        rates[f"rate after {step} steps"] = f"{_value(policy, step, task):.9g}"
    return rates


def describe_policy(task: Task, config: Settings, world_size: int) -> str:
    """What sets the learning rate, for the lines at the start of a run."""
    if config.find_lr:
        return f"rates from {LOWEST:g} to {HIGHEST:g}"
    scaling = f" ({config.lr_scaling} scaling)" if config.lr_scaling != "none" else ""
    if optional(task, "schedule"):
        return f"the task's schedule{scaling}"
    first_rate = config.base_lr * config.lr_factor(world_size)
    description = f"{config.lr_policy} from {first_rate:g}{scaling}"
    if by_plateau(task, config):
        description += (
            f", times {config.plateau_factor:g} where {task.main_metric} stands still"
        )
    return description


def by_plateau(task: Task, config: Settings) -> bool:
    """Whether evaluations lower the rate."""
    is_own = config.find_lr or optional(task, "schedule")
    return config.lr_policy == "plateau" and not is_own


def make(
    config: Settings, world_size: int, *, plateau: Plateau | None = None
) -> Schedule:
    """The schedule of --lr_policy.

    With base = base_lr * scaling (--lr_scaling's factor), end = end_lr * scaling and N = num_steps,
    past which every policy is clamped:
      poly:     end + (base - end) * (1 - step / N) ** power   (ParseNet, arXiv:1506.04579)
      cosine:   end + (base - end) * (1 + cos(pi * step / N)) / 2   (SGDR, arXiv:1608.03983)
      step:     base * gamma ** (number of boundaries at or before step)
      constant: base
      plateau:  max(base * plateau.factor, plateau_min_lr * scaling); base without `plateau`
    During the first warmup_steps W the result is multiplied by (step + 1) / W.
    """
    scaling = config.lr_factor(world_size)
    base = config.base_lr * scaling
    end = config.end_lr * scaling
    boundaries = config.boundary_steps if config.lr_policy == "step" else []

    def rate(step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.float64)
        progress = tf.minimum(step / config.num_steps, 1.0)
        if config.lr_policy == "poly":
            value = end + (base - end) * (1.0 - progress) ** config.power
        elif config.lr_policy == "cosine":
            value = end + (base - end) * 0.5 * (1.0 + tf.cos(math.pi * progress))
        elif config.lr_policy == "step":
            passed = sum(tf.cast(step >= other, tf.float64) for other in boundaries)
            value = base * config.lr_gamma**passed
        elif config.lr_policy == "plateau" and plateau:
            value = tf.maximum(base * plateau.factor, config.plateau_min_lr * scaling)
        else:  # constant, and plateau without its state
            value = tf.constant(base, tf.float64)
        if config.warmup_steps:
            value *= tf.minimum((step + 1.0) / config.warmup_steps, 1.0)
        return value

    return rate
