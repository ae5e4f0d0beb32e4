"""The run's loss: terms, each a mean over the global batch with a count of its own."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE
from hvdkit.train.step.losses import above, at_least_float32, required, widest
from hvdkit.train.task.checks import describe_value, user_code_errors
from hvdkit.train.task.protocol import Task

# The loss is divided by the weights' sum: negative ones would turn the step round.
_WEIGHTS = "weights are finite numbers from 0 up; multiply a sign into the loss"
# Operations whose result has its positions, in their order, from the first input.
_KEEPS_POSITIONS = ("Cast", "Identity", "Reshape", "ExpandDims", "Squeeze")

# Losses and weights of each term by its name; "" where the loss is one term.
Terms = dict[str, tuple[tf.Tensor, tf.Tensor]]


def loss(
    task: Task, outputs: Any, targets: Any, *, samples: int | None = None
) -> Terms:
    """The terms of the task's loss for `samples` examples (None: any number)."""
    with user_code_errors("the task's loss"):
        returned = task.loss(outputs, targets)
    unmasked = {}
    for name, (losses, weights) in terms(returned, samples).items():
        unmasked[name] = (losses, _unmasked(losses, weights, outputs, name))
    if samples:
        check_independent(task.loss, outputs, targets, expected=unmasked)
    return unmasked


def _unmasked(
    losses: tf.Tensor, weights: tf.Tensor, outputs: Any, name: str
) -> tf.Tensor:
    """No weight where Keras's mask hides padding: its losses are zeros there, and no part of means.

    So does Keras's `fit`, also of losses with more axes than the mask, as [batch, time, features]
    with a mask [batch, time]. A term has the mask of the output of its `name`, else that of the
    outputs it comes from. Raises ValueError where these have several masks, or some have none.
    """
    shape = weights.shape.as_list()
    tensors = _outputs_of(losses, outputs, name)
    masks = {}
    of_fewer_axes = {}
    for output in tensors:
        mask = _mask(output)
        if mask is None:
            continue
        if mask.shape.as_list() == shape:
            masks[id(mask)] = mask
        elif mask.shape.as_list() == shape[: mask.shape.rank]:
            of_fewer_axes[id(mask)] = mask
    masks = masks or of_fewer_axes
    for mask in masks.values():
        positions = mask.shape.as_list()
        bare = [
            output
            for output in tensors
            if _mask(output) is None
            and output.shape.as_list()[: len(positions)] == positions
        ]
        if len(masks) > 1 or bare:
            some = " and some have none" if bare else ""
            raise ValueError(
                f"the task's loss: its outputs have {len(masks)} masks of padding{some}: return a "
                "dict of terms, each with the name of its output"
            )
        weights = _hidden(weights, mask)
    return weights


def _outputs_of(losses: tf.Tensor, outputs: Any, name: str) -> list[tf.Tensor]:
    """The output of a term's `name`, else those that may have a mask for its losses."""
    if isinstance(outputs, Mapping) and name in outputs:
        outputs = outputs[name]
    tensors = tf.nest.flatten(outputs)
    if len(tensors) > 1 and any(_mask(tensor) is not None for tensor in tensors):
        tensors = _sources(losses, tensors)
    return tensors


def note_on_masks(terms: Terms, outputs: Any) -> str:
    """A note where padding counts as masks of the outputs fit no losses of a term; "" if none.

    As where losses are of all words but the first, or one for each sequence.
    """
    for name, (losses, _) in terms.items():
        shape = losses.shape.as_list()
        unfit: list[list[int | None]] = []
        for output in _outputs_of(losses, outputs, name):
            mask = _mask(output)
            if mask is None:
                continue
            positions = mask.shape.as_list()
            if positions == shape[: len(positions)]:
                unfit = []
                break
            # The mask of a layer that pools over time may hang on its result.
            if positions == output.shape.as_list()[: len(positions)]:
                unfit.append(positions)
        if unfit:
            term = f"the loss {name!r}" if name else "the loss"
            return (
                f"the mask of padding {unfit[0]} does not fit {term} of shape {shape}: padding "
                "counts, unless the task's loss leaves it out or gives it the weight 0"
            )
    return ""


def _mask(output: Any) -> tf.Tensor | None:
    """Keras's mask of an output's padding; None where it has none."""
    mask = getattr(output, "_keras_mask", None)
    return None if mask is None or not mask.shape.rank else mask


def _sources(losses: tf.Tensor, outputs: list[Any]) -> list[tf.Tensor]:
    """Those of a graph's outputs, floats, that the losses come from; of no graph all.

    The nearest alone, if one of them has a mask: outputs may be made of each other.
    """
    floats = [
        output
        for output in outputs
        if isinstance(output, tf.Tensor)
        and output.dtype.is_floating
        and output.shape.rank
    ]
    if not tf.is_symbolic_tensor(losses):
        return floats
    floats = [output for output in floats if tf.is_symbolic_tensor(output)]
    nearest = above(losses, {output.op for output in floats})
    sources = [output for output in floats if output.op in nearest]
    if any(_mask(output) is not None for output in sources):
        return sources
    operations = above(losses)
    return [output for output in floats if output.op in operations]


def _hidden(weights: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """The weights, 0 where the mask of their first axes hides; as they are where it does not fit.

    In evaluation sizes are not known before a batch is there.
    """
    ones = [1] * (weights.shape.rank - mask.shape.rank)
    sizes = tf.concat([tf.shape(mask), tf.constant(ones, tf.int32)], 0)

    def hidden() -> tf.Tensor:
        shown = tf.cast(tf.reshape(mask, sizes), tf.bool)
        return tf.where(shown, weights, tf.zeros_like(weights))

    if not ones or None not in mask.shape.as_list():
        return hidden()
    fits = tf.reduce_all(tf.shape(mask) == tf.shape(weights)[: mask.shape.rank])
    return tf.ensure_shape(tf.cond(fits, hidden, lambda: weights), weights.shape)


def terms(returned: Any, samples: int | None) -> Terms:
    """What a loss returned for `samples` examples, all terms of one type, float32 at least."""
    if not isinstance(returned, Mapping):
        return {"": _losses_and_weights(returned, samples, "the task's loss")}
    by_name = {str(name): term for name, term in returned.items()}
    names = sorted(by_name)  # one order on all ranks
    wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]+", name)]
    if wrong or not names:
        raise ValueError(
            f"the task's loss returns terms named {wrong}: give at least one, and names of "
            "letters, digits and _"
        )
    made = {
        name: _term(by_name[name], samples, f"the task's loss {name!r}")
        for name in names
    }
    dtype = widest(losses for losses, _ in made.values())
    return {
        name: tuple(tf.cast(part, dtype) for part in term)
        for name, term in made.items()
    }


def _term(
    returned: Any, samples: int | None, subject: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Losses, times their factor if there is one, and weights."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        return _losses_and_weights(returned, samples, subject)
    losses, weights = _losses_and_weights(returned[:2], samples, subject)
    factor = returned[2]
    if not isinstance(factor, (int, float, np.number)) or not np.isfinite(factor):
        raise ValueError(
            f"{subject} has a factor of {factor!r:.80}: it must be a finite number of Python, the "
            "same at every step; multiply what changes into the losses"
        )
    return losses * tf.constant(factor, losses.dtype), weights


def _losses_and_weights(
    pair: Any, samples: int | None, subject: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """A loss and a weight for each of `samples` examples, in float32 at least."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"{subject} must return two tensors, a loss and a weight for each example; it returns "
            f"{describe_value(pair)}. Not the mean: that is taken over all ranks"
        )
    with user_code_errors(subject):
        losses, weights = (tf.convert_to_tensor(part) for part in pair)
    is_counted = losses.shape.rank and (
        not samples or losses.shape[0] in (samples, None)
    )
    are_alike = is_counted and losses.shape.as_list() == weights.shape.as_list()
    if not are_alike or not losses.dtype.is_floating:
        raise ValueError(
            f"{subject} must return a loss for each example and weights of the same shape, floats, "
            f"not losses {losses.shape} of {losses.dtype.name} and weights {weights.shape}"
        )
    losses = at_least_float32(losses)
    return losses, _counted(losses, tf.cast(weights, losses.dtype))


def _counted(losses: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """No weight where a loss of Keras ignores a label (`ignore_class`): the loss is 0 there.

    Keras's own mean leaves these out. It marks them on its tensor of losses; what becomes of that
    by a factor, as in every `keras.losses.Loss`, in another type or shape has no mark.
    """
    origins = [losses]
    for tensor in origins:  # The list grows meanwhile.
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None and mask.shape == tensor.shape:
            counts = tf.reshape(tf.cast(mask, tf.bool), tf.shape(weights))
            return tf.where(counts, weights, tf.zeros_like(weights))
        operation = tensor.op.type if tf.is_symbolic_tensor(tensor) else ""
        sources = []
        if operation in _KEEPS_POSITIONS:
            sources = tensor.op.inputs[:1]
        elif operation in ("Mul", "RealDiv"):
            sources = [x for x in tensor.op.inputs if x.shape == tensor.shape]
        origins += [x for x in sources if not any(x is origin for origin in origins)]
    return weights


def count(weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """What a term is divided by; how many weights are negative or not finite; the sum of these.

    Where there is one of them, the count is NaN, so that no rank applies the step.
    """
    refused = ~_sound(weights)
    number = tf.reduce_sum(tf.cast(refused, weights.dtype))
    total = tf.reduce_sum(weights)
    sound = (number == 0) & tf.math.is_finite(total)
    nan = tf.constant(np.nan, weights.dtype)
    refused_weights = tf.where(refused, weights, tf.zeros_like(weights))
    return tf.where(sound, total, nan), number, tf.reduce_sum(refused_weights)


def require_weights(weights: tf.Tensor, name: str) -> tf.Tensor:
    """The weights of the term `name` unchanged, in evaluation.

    When it runs, InvalidArgumentError names a weight that is negative or not finite.
    """
    text = f"{_weight_of(name)} is {{}} but {_WEIGHTS}"
    return required(weights, text, values=weights, sound=_sound(weights))


def refused_weights(result: Mapping[str, Any]) -> tuple[int, str, str] | None:
    """Weights that no step can use: exit code, a word or two, a sentence; or None."""
    for name, figures in result["refused_weights"].items():
        number, total = np.asarray(figures).tolist()
        if number:
            average = " on average" if number > 1 else ""
            message = (
                f"at step {int(result['step'])} {_weight_of(name)} is {total / number:g}{average} "
                f"({number:.0f} of the global batch): {_WEIGHTS}. Checkpoints are unchanged"
            )
            return WRONG_USE, "bad weights", message
    return None


def _sound(weights: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(weights) & (weights >= 0)


def _weight_of(name: str) -> str:
    return (
        f"a weight of the task's loss {name!r}"
        if name
        else "a weight of the task's loss"
    )


def check_independent(loss: Callable, *parts: Any, expected: Terms) -> None:
    """Raises ValueError where one example's losses depend on how many examples there are.

    `expected`: what `loss` returned for `parts`, nested tensors.
    Outputs [n, 1] and targets [n] give [n, n]: every output compared to every target.
    """

    def one_more(tensor: tf.Tensor) -> tf.TensorSpec:
        shape = tensor.shape
        if shape.rank and shape[0] is not None:
            shape = [shape[0] + 1, *shape[1:]]
        return tf.TensorSpec(shape, tensor.dtype)

    again = tf.function(lambda *more: terms(loss(*more), None), autograph=False)
    try:
        specs = [tf.nest.map_structure(one_more, part) for part in parts]
        others = again.get_concrete_function(*specs).structured_outputs
    except Exception:
        # The model takes no other number of examples, so there is nothing to compare.
        return
    for name, (losses, _) in expected.items():
        shape = losses.shape
        other = others[name][0].shape.as_list()
        if other[1:] != shape.as_list()[1:]:
            raise ValueError(
                f"the loss returns losses of shape {shape}, and {other} for one example "
                "more: its shape after the first dimension must not depend on the batch. Are "
                "outputs [n, 1] compared to targets [n]?"
            )


def nearness(settings: Settings) -> float:
    """Relative difference that sums in another order may have."""
    exact = (
        settings.precision in ("float32", "float64", "tf32")
        and settings.compression == "none"
    )
    return 1e-3 if exact else 0.05


def divides(settings: Settings, ranks: int) -> bool:
    """Whether a batch is computed in parts."""
    return ranks > 1 or settings.virtual_ranks > 0 or settings.accumulation_steps > 1


def check_sum(
    sums: Callable,
    samples: Sequence[Any],
    *,
    draws: Callable[[], bool],
    near: float,
    of: str = "",
) -> None:
    """Raises ValueError where sums of some samples are not those of two halves added up.

    `sums`: of samples, by name; `draws`: whether random numbers are in them; `of`: what samples
    they are, for the message.
    """
    middle = len(samples) // 2
    one = samples[:middle]
    other = samples[middle:]
    together = sums(*samples)
    alone = [sums(*half) for half in (one, other)]
    for name, total in together.items():
        parts = [half[name] for half in alone]
        least = near * (1 + sum(abs(part) for part in parts))
        if not abs(total - sum(parts)) > least:
            continue
        # A loss that draws may do it by a sample's place in its batch: then what each place adds
        # depends on its own sample alone.
        crossed = total + sums(*other, *one)[name]
        doubled = sums(*one, *one)[name] + sums(*other, *other)[name]
        is_by_place = len(one) == len(other) and abs(crossed - doubled) <= least
        if not (is_by_place and draws()):
            raise ValueError(
                f"the task's {name} of {len(samples)} samples{of} together is {total:.6g}, and "
                f"{sum(parts):.6g} in two halves: a sample depends on others of its batch, which "
                "ranks, virtual ranks and micro-batches divide. Bring them together with "
                "hvdkit.train.across.gather, or use one rank"
            )


def loss_sums(task: Task, outputs: Any, targets: Any) -> dict[str, tf.Tensor]:
    """Of each term of the loss "loss/NAME" and "weight/NAME", summed over a batch."""
    sums = {}
    for name, (losses, weights) in loss(task, outputs, targets).items():
        term = f"/{name}" if name else ""
        sums[f"loss{term}"] = tf.reduce_sum(tf.math.multiply_no_nan(losses, weights))
        sums[f"weight{term}"] = tf.reduce_sum(weights)
    return sums


def gradient(
    task: Task, outputs: Any, targets: Any, *, by_sample: Sequence[bool]
) -> float:
    """How large the loss's gradient by each output of a batch is, summed.

    `by_sample`: for each output, whether it has a row for each sample; others are left out.
    """
    floats = []
    for tensor, has_rows in zip(tf.nest.flatten(outputs), by_sample):
        if has_rows and isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating:
            floats.append(tensor)
    with tf.GradientTape() as tape:
        tape.watch(floats)
        terms_of_loss = loss(task, outputs, targets).values()
        total = tf.add_n(
            [tf.reduce_sum(tf.math.multiply_no_nan(*term)) for term in terms_of_loss]
        )
    try:
        by_output = tape.gradient(total, floats, unconnected_gradients="zero")
    except LookupError:
        # What `predict` returns may be scored by operations without a gradient.
        return 0.0
    dense = [tf.cast(tf.convert_to_tensor(g), tf.float64) for g in by_output]
    return sum(float(tf.reduce_sum(tf.abs(g))) for g in dense)
