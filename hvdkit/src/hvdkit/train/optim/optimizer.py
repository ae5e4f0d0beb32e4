"""The update rule, built with all its variables before anything is restored or broadcast."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.train.optim import averages, groups
from hvdkit.train.step.gradients import is_kernel

_TRUST = 0.001  # eta, the trust coefficient of LARS
# Only adam, adamw and lamb read them.
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
# What Keras's fit calls of an optimizer around its `apply`.
_OF_FIT = ("apply_gradients", "scale_loss", "finalize_variable_values")
_PLAIN = (str, Number, type(None))  # types of hyperparameters


class SGD(keras.optimizers.SGD):
    """u = momentum * u - rate * g; w += u, the same bits as Keras's (Polyak 1964).

    One TensorFlow operation instead of Keras's five, each a pass over weights or gradients.
    """

    def update_step(self, gradient, variable, learning_rate) -> None:
        if not self.momentum or self.nesterov:
            super().update_step(gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=raw(self.momentums[self._get_variable_index(variable)]).handle,
            lr=tf.cast(raw(learning_rate), dtype),
            grad=tf.cast(gradient, dtype),
            momentum=tf.cast(self.momentum, dtype),
        )


class Lars(keras.optimizers.SGD):
    """LARS (You et al. 2017, arXiv:1708.03888, algorithm 1). For a weight w with gradient g:

        rate = learning_rate * 0.001 * norm(w) / (norm(g) + weight_decay * norm(w))
        u = momentum * u - rate * (g + weight_decay * w); w += u

    with 0.001 for the paper's eta; where a norm is 0, rate = learning_rate. Weights named to
    `exclude_from_weight_decay` have no decay and the plain rate, as is usual for biases and norms.
    """

    def _apply_weight_decay(self, variables: list) -> None:
        """None apart from `update_step`."""

    def update_step(self, gradient, variable, learning_rate) -> None:
        gradient = tf.cast(gradient, variable.dtype)
        rate = tf.cast(raw(learning_rate), variable.dtype)
        if self._use_weight_decay(variable):
            decay = tf.constant(self.weight_decay or 0.0, variable.dtype)
            size = tf.norm(variable)
            slope = tf.norm(gradient)
            usable = (size > 0) & (slope > 0)
            # The inner tf.where keeps 0 out of the division.
            ratio = tf.constant(_TRUST, rate.dtype) * size
            ratio /= tf.where(usable, slope + decay * size, 1.0)
            rate = rate * tf.where(usable, ratio, 1.0)
            gradient += decay * variable
        super().update_step(gradient, variable, rate)


class Lamb(keras.optimizers.Lamb):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2). For a weight w with gradient g:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g ** 2
        u = m / (1 - beta_1 ** t) / (sqrt(v / (1 - beta_2 ** t)) + epsilon) + weight_decay * w
        w = w - learning_rate * norm(w) / norm(u) * u

    with t = 1 at the first update; the ratio of norms is 1 where one of them is 0 (the paper's phi
    is the identity). Weights named to `exclude_from_weight_decay` have no decay and a ratio of 1,
    as in the first author's code (github.com/fastalgo/imagenet_resnet50_lamb): a bias near 0 would
    otherwise hardly move. Keras's Lamb decays outside the ratio, and gives every weight a ratio.
    """

    def _apply_weight_decay(self, variables: list) -> None:
        """None apart from `update_step`."""

    def update_step(self, gradient, variable, learning_rate) -> None:
        dtype = variable.dtype
        gradient = tf.cast(gradient, dtype)
        rate = tf.cast(raw(learning_rate), dtype)
        index = self._get_variable_index(variable)
        m = raw(self._momentums[index])
        v = raw(self._velocities[index])
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        v.assign(self.beta_2 * v + (1 - self.beta_2) * tf.square(gradient))
        update = self._corrected(m, self.beta_1)
        update /= tf.sqrt(self._corrected(v, self.beta_2)) + self.epsilon
        if self._use_weight_decay(variable):
            update += (self.weight_decay or 0.0) * variable
            size = tf.norm(variable)
            step_size = tf.norm(update)
            usable = (size > 0) & (step_size > 0)
            # The inner tf.where keeps 0 out of the division.
            update *= tf.where(usable, size / tf.where(usable, step_size, 1.0), 1.0)
        variable.assign_sub(rate * update)

    def _corrected(self, average: tf.Variable, beta: float) -> tf.Tensor:
        """An average that started at 0, over the weights it has seen so far."""
        # float64, because in float32 1 - 0.999 ** 1 is off by 5e-5.
        steps = tf.cast(raw(self.iterations) + 1, tf.float64)
        return average / tf.cast(
            1 - tf.pow(tf.constant(beta, tf.float64), steps), average.dtype
        )


class UpdateRule(NamedTuple):
    """How weights change.

    `optimizer` has its slots for the model's trainable variables, in their order; the step sets its
    learning rate. `averages`: moving averages of weights, made of --ema_decay or of the optimizer's
    own `use_ema`. `described`: by name, what a task's optimizer was made with, as text.
    """

    optimizer: keras.optimizers.Optimizer
    averages: list[averages.Average]
    described: dict[str, str]


def build(
    config: Settings,
    model: keras.Model,
    own: Callable | None = None,
    *,
    trains: bool = True,
) -> UpdateRule:
    """The rule of the flags, or of `own`, a task's `optimizer`; `trains`: whether it is applied.

    Raises ValueError where settings, weights and the task's optimizer do not fit.
    """
    variables = model.trainable_variables
    _check_weights(config, variables)
    described = {}
    if own:
        returned = own(model)
        optimizer = returned
        if isinstance(returned, (list, tuple)):
            optimizer = groups.Groups(returned)
        for part in groups.optimizers_of(optimizer):
            _check_own(config, part)
        rates = [1.0]
        if isinstance(optimizer, groups.Groups):
            rates = [group.rate for group in optimizer.groups]
        for part, rate in zip(groups.optimizers_of(optimizer), rates):
            if trains:
                _check_of_fit(part)
                _check_rate(config, part, rate)
        described = hyperparameters(optimizer)
    else:
        optimizer = _of_flags(config, variables)
    requests = [
        averages.requested(part, config.ema_decay)
        for part in groups.optimizers_of(optimizer)
    ]
    optimizer.build(variables)
    averages_of_parts = []
    for weights, request in zip(groups.weights_of(optimizer), requests):
        if request:
            averages_of_parts.append(averages.Average(weights, request))
    return UpdateRule(optimizer, averages_of_parts, described)


def _of_flags(
    config: Settings, variables: Sequence[keras.Variable]
) -> keras.optimizers.Optimizer:
    by_momentum = config.optimizer in ("sgd", "lars")
    unread = _OF_ADAM if by_momentum else ("nesterov",)
    for name in unread:
        if name in config.not_defaults():
            raise ValueError(
                f"--{name}={getattr(config, name)}: --optimizer={config.optimizer} has no such "
                "number: leave it out, or choose another optimizer"
            )
    # Keras rounds a Python float to float32 (0.9 is then off by 2e-8), but no NumPy float64.
    number = np.float64 if config.precision == "float64" else float
    base_lr = config.base_lr
    momentum = number(config.momentum)
    nesterov = config.nesterov
    beta_1 = number(config.adam_beta1)
    beta_2 = number(config.adam_beta2)
    epsilon = number(config.adam_epsilon)
    decay = number(config.weight_decay)

    # L2 joins the gradients of these.
    if config.optimizer == "sgd":
        return SGD(base_lr, momentum=momentum, nesterov=nesterov)
    if config.optimizer == "adam":
        return keras.optimizers.Adam(
            base_lr, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon
        )

    # These decay weights by themselves, apart from the gradient.
    if config.optimizer == "lars":
        optimizer = Lars(
            base_lr, momentum=momentum, nesterov=nesterov, weight_decay=decay
        )
    else:
        rule = keras.optimizers.AdamW if config.optimizer == "adamw" else Lamb
        optimizer = rule(
            base_lr, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=decay
        )
    # Even if the decay is 0: LAMB and LARS give excluded weights no trust ratio.
    optimizer.exclude_from_weight_decay([v for v in variables if not is_kernel(v)])
    return optimizer


def _check_own(config: Settings, optimizer: Any) -> None:
    """A task's optimizer, or that of a group: refused where it does what the run does, or omits."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.built:
        raise ValueError(
            "optimizer must return a keras.optimizers.Optimizer that is not built yet, a new one "
            f"at each call, not {optimizer!r}"
        )
    # Older versions of Keras lack it.
    if isinstance(optimizer, getattr(keras.optimizers, "ScheduleFreeAdamW", ())):
        raise ValueError(
            "optimizer: ScheduleFreeAdamW is not supported, as the weights that it trains are not "
            "those to score and use: use AdamW with --ema_decay=0.999 and --lr_policy=constant"
        )
    for name, instead in (
        ("optimizers", "a list of hvdkit.train.groups.Group, each with a rate"),
        ("inner_optimizer", "--precision=float16"),
        ("gradient_accumulation_steps", "--accumulation_steps"),
        ("loss_scale_factor", "--precision=float16"),
    ):
        if getattr(optimizer, name, None) not in (None, 0, False):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} with {name} is not supported: use {instead}"
            )
    if _decays(optimizer) and config.weight_decay:
        raise ValueError(
            f"--weight_decay={config.weight_decay} and the task's optimizer both decay: choose one"
        )
    if callable(optimizer._learning_rate):
        raise ValueError(
            f"optimizer: give it a number as rate, not {optimizer._learning_rate!r:.80}; a task's "
            "`schedule` sets the rate"
        )


def _check_of_fit(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for a method of its own that a run does not call."""
    for name in _OF_FIT:
        module = getattr(getattr(optimizer, name), "__module__", "")
        if not module.startswith("keras."):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} has its own {name}, which only Keras's own "
                "loop calls: put what it does into `apply` or `update_step`"
            )


def _check_rate(
    config: Settings, optimizer: keras.optimizers.Optimizer, factor: float
) -> None:
    """Raises ValueError for a rate that a task's optimizer is given, as it is not used.

    One that its class has by default cannot be told from none. `factor`: of its group.
    """
    given = float(optimizer._learning_rate)
    unset = _default_rate(type(optimizer))
    if not isinstance(unset, float):
        return  # A class of one's own may choose it.
    usual = (unset, config.base_lr * factor, config.base_lr)
    if any(math.isclose(given, rate, rel_tol=1e-5) for rate in usual):
        return
    raise ValueError(
        f"optimizer: the rate {given:g} of {type(optimizer).__name__} is not used, as the schedule "
        "sets it (--base_lr, or the task's own): leave it out; a Group's rate is a factor of that"
    )


def _default_rate(kind: type) -> Any:
    """What `learning_rate` is by default in the first class of `kind` that has it."""
    for base in kind.__mro__:
        own_init = vars(base).get("__init__")
        parameters = inspect.signature(own_init).parameters if own_init else {}
        if "learning_rate" in parameters:
            return parameters["learning_rate"].default
    return None


def _decays(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it decays weights itself; Muon has a second decay, for what Adam updates."""
    for part in groups.optimizers_of(optimizer):
        if part.weight_decay or getattr(part, "adam_weight_decay", None):
            return True
    return False


def hyperparameters(optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """What a task's optimizer was made with, by name, as text; not the rate, which the run sets.

    To compare over ranks, and with a run that resumes. Call it before the optimizer is built.
    """
    if isinstance(optimizer, groups.Groups):
        described = {"optimizer": f"{len(optimizer.groups)} groups"}
        for number, group in enumerate(optimizer.groups):
            of_group = hyperparameters(group.optimizer) | {"rate": str(group.rate)}
            for name, value in of_group.items():
                described[f"group {number}'s {name}"] = value
        return described
    described = {"optimizer": type(optimizer).__name__}
    for name, value in vars(optimizer).items():
        if name.startswith("_") or name in ("name", "built"):
            continue
        if name.startswith("ema_") and not optimizer.use_ema:
            continue
        if isinstance(value, _PLAIN):
            described[name] = str(value)
        elif isinstance(value, (list, tuple)) and all(
            isinstance(x, _PLAIN) for x in value
        ):
            described[name] = str(list(value))
    return described


def of_weights(rule: UpdateRule, names: Mapping[int, str]) -> dict[str, str]:
    """By the name of a weight: its group, and whether it is left out of a decay.

    `names`: of a weight's id.
    """
    described = {}
    weights_of_parts = groups.weights_of(rule.optimizer)
    for number, part in enumerate(groups.optimizers_of(rule.optimizer)):
        for weight in weights_of_parts[number]:
            if isinstance(rule.optimizer, groups.Groups):
                described[f"group of {names[id(weight)]}"] = str(number)
            if _decays(part) and not _decays_weight(part, weight):
                described[f"weight decay of {names[id(weight)]}"] = "none"
    return described


def _decays_weight(
    optimizer: keras.optimizers.Optimizer, weight: keras.Variable
) -> bool:
    """Whether its weight decay takes this weight, asked as Keras asks in a step.

    Keras asks with TensorFlow's variable, whose name has the layers' names in it (Muon's own with
    Keras's), and keeps the answer by the weight, whatever it was asked with.
    """
    plain = keras.optimizers.SGD._apply_weight_decay
    is_own = type(optimizer)._apply_weight_decay is not plain
    kept = dict(getattr(optimizer, "_exclude_from_weight_decay_cache", {}))
    try:
        return optimizer._use_weight_decay(weight if is_own else raw(weight))
    finally:
        optimizer._exclude_from_weight_decay_cache = kept


def begins_with_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it began with copies of the weights, as Lookahead does; others with constants."""
    for variable in optimizer.variables:
        slot = tf.reshape(raw(variable), [-1])
        if slot.shape[0] > 1 and tf.reduce_any(slot != slot[0]):
            return True
    return False


def l2_weight(config: Settings, optimizer: keras.optimizers.Optimizer) -> float:
    """Weight of the L2 term in the gradient; 0 where the optimizer decays weights itself."""
    return 0.0 if _decays(optimizer) else config.weight_decay


def not_decayed(variables: Sequence[keras.Variable]) -> list[str]:
    """Paths of weights that surprisingly do not decay: no kernels, biases, gamma or beta."""
    usual = ("bias", "gamma", "beta")
    return [
        v.path for v in variables if not is_kernel(v) and not v.name.endswith(usual)
    ]


def check_trainable(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Raises ValueError when other weights are trainable than those the optimizer was built for."""
    built = {id(v): v for v in optimizer._trainable_variables}
    now = {id(v): v for v in model.trainable_variables}
    changed = [
        v.path for key, v in (built | now).items() if (key in built) != (key in now)
    ]
    if changed:
        raise ValueError(
            f"`trainable` changed after the optimizer was built, first of {changed[0]}, which has "
            "no effect: set it in the task's build_model. To train a part later, start another run "
            "from this one's weights (--init_from)"
        )


def _check_weights(config: Settings, variables: Sequence[keras.Variable]) -> None:
    if config.weight_decay and not any(is_kernel(variable) for variable in variables):
        raise ValueError(
            f"--weight_decay={config.weight_decay} decays weights whose name ends with 'kernel', "
            f"and the model has none ({variables[0].path}, ...): name them so or leave it out"
        )
