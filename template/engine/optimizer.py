"""The update rule, built with all its variables before anything is restored or broadcast."""

from __future__ import annotations

import keras

from config import Config
from engine.gradients import is_kernel

# These decay weights themselves, apart from the gradient; for the others L2 joins the gradient.
_DECOUPLED = {"adamw": keras.optimizers.AdamW, "lamb": keras.optimizers.Lamb}


def build(config: Config, model: keras.Model) -> keras.optimizers.Optimizer:
    """Optimizer with its slots made for the model's trainable variables, in their order.

    Its learning rate is a variable that the step sets from the schedule. With --ema_decay it keeps
    a moving average of the weights among its variables (engine/ema.py).
    """
    average = {"use_ema": True, "ema_momentum": config.ema_decay} if config.ema_decay else {}
    if config.optimizer == "sgd":
        optimizer = keras.optimizers.SGD(config.base_lr, momentum=config.momentum, **average)
    elif config.optimizer == "adam":
        optimizer = keras.optimizers.Adam(config.base_lr, **average)
    else:
        decay = config.weight_decay or None
        optimizer = _DECOUPLED[config.optimizer](config.base_lr, weight_decay=decay, **average)
        if decay:
            others = [v for v in model.trainable_variables if not is_kernel(v)]
            optimizer.exclude_from_weight_decay(var_list=others)
    optimizer.build(model.trainable_variables)
    return optimizer


def l2_weight(config: Config) -> float:
    """Weight of the L2 term in the gradient; 0 where the optimizer decays weights itself."""
    return 0.0 if config.optimizer in _DECOUPLED else config.weight_decay
