"""The update rule, built with all its variables before anything is restored or broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np

from hvdkit.settings import Settings
from hvdkit.train.gradients import is_kernel
from hvdkit.train.lamb import Lamb
from hvdkit.train.sgd import SGD

# These decay weights themselves, apart from the gradient; for the others L2 joins the gradient.
_DECOUPLED = {"adamw": keras.optimizers.AdamW, "lamb": Lamb}


def build(
    config: Settings, model: keras.Model, own: Callable | None = None
) -> keras.optimizers.Optimizer:
    """Optimizer with its slots made for the model's trainable variables, in their order.

    Its learning rate is a variable that the step sets from the schedule, float64 in a float64 run.
    With --ema_decay it keeps a moving average of the weights among its variables (train/ema.py).
    docs/optimizer-and-schedule.md has the formulas.

    Args:
      own: a task's `optimizer`, in place of --optimizer.
    Raises:
      ValueError: nothing to train or, with --weight_decay, to decay; --ema_decay with a weight
        that has a constraint.
    """
    variables = model.trainable_variables
    _check(config, variables)
    if own is not None:
        return _own(config, own, variables)
    # Keras makes a float32 of a Python float (0.9 is then off by 2e-8) before it casts it to the
    # weight's type; a NumPy float64 stays one.
    number = np.float64 if config.precision == "float64" else float
    average = {"use_ema": True, "ema_momentum": config.ema_decay} if config.ema_decay else {}
    betas = {"beta_1": number(0.9), "beta_2": number(0.999)}
    if config.optimizer == "sgd":
        momentum = number(config.momentum)
        optimizer = SGD(config.base_lr, momentum=momentum, **average)
    elif config.optimizer == "adam":
        optimizer = keras.optimizers.Adam(config.base_lr, **betas, **average)
    else:
        decay = number(config.weight_decay)
        rule = _DECOUPLED[config.optimizer]
        optimizer = rule(config.base_lr, weight_decay=decay, **betas, **average)
        # Without decay too: LAMB's trust ratio goes by it.
        optimizer.exclude_from_weight_decay([v for v in variables if not is_kernel(v)])
    optimizer.build(variables)
    return optimizer


def _own(
    config: Settings, make: Callable, variables: Sequence[keras.Variable]
) -> keras.optimizers.Optimizer:
    """What the task makes, with its slots; flags of a rule that does not run are refused."""
    for name in ("optimizer", "momentum", "ema_decay"):
        if getattr(config, name) != getattr(Settings, name):
            raise ValueError(
                f"--{name}={getattr(config, name)}: the task's own optimizer does not read it: "
                "leave it out"
            )
    optimizer = make(config)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer must return a keras.optimizers.Optimizer, not {optimizer!r}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError("optimizer: LossScaleOptimizer is not supported: use --precision=float16")
    if optimizer.built:
        raise ValueError("optimizer must not be built: the run builds it for the model's weights")
    if optimizer.weight_decay and config.weight_decay:
        raise ValueError(
            f"--weight_decay={config.weight_decay} and the task's optimizer both decay: choose one"
        )
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError("optimizer: give it a number as rate; a task's `schedule` sets the rate")
    for name, instead in (
        ("gradient_accumulation_steps", "--accumulation_steps"),
        ("loss_scale_factor", "--precision=float16"),
        ("use_ema", "--optimizer with --ema_decay"),
    ):
        if getattr(optimizer, name):
            raise ValueError(f"optimizer: {name} is not supported: use {instead}")
    optimizer.build(variables)
    return optimizer


def l2_weight(config: Settings) -> float:
    """Weight of the L2 term in the gradient; 0 where the optimizer decays weights itself."""
    return 0.0 if config.optimizer in _DECOUPLED else config.weight_decay


def not_decayed(variables: Sequence[keras.Variable]) -> list[str]:
    """Paths of the weights that a person may expect to decay, and that do not.

    All but kernels, biases and norms' gamma and beta: embeddings, and what a layer of one's own
    calls otherwise. For a note at the start of a run with --weight_decay.
    """
    plain = ("bias", "gamma", "beta")
    return [v.path for v in variables if not is_kernel(v) and not v.name.endswith(plain)]


def check_trainable(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Raises ValueError when other weights are trainable than those the optimizer was built for.

    A step goes on updating the latter: freezing or unfreezing a layer in mid-run does nothing.
    """
    built = {id(v): v for v in optimizer._trainable_variables}
    now = {id(v): v for v in model.trainable_variables}
    changed = [v.path for key, v in (built | now).items() if (key in built) != (key in now)]
    if changed:
        raise ValueError(
            f"`trainable` changed after the optimizer was built, first of {changed[0]}, which has "
            "no effect: set it in the task's build_model"
        )


def _check(config: Settings, variables: Sequence[keras.Variable]) -> None:
    if not variables:
        raise ValueError(
            "the model has no trainable weights: set `trainable = True` for some of its layers"
        )
    if config.weight_decay and not any(map(is_kernel, variables)):
        raise ValueError(
            f"--weight_decay={config.weight_decay} decays weights whose name ends with 'kernel', "
            f"and the model has none ({variables[0].path}, ...): name them so or leave it out"
        )
    bound = [v.path for v in variables if v.constraint is not None]
    if config.ema_decay and bound:
        raise ValueError(
            f"--ema_decay={config.ema_decay} averages weights before their constraint is applied, "
            f"and {bound[0]} has one: leave out one of the two"
        )
