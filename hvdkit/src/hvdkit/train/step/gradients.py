"""From a loss to the gradients every rank applies: accumulate, unscale, L2, clip; loss scale."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record, tape

from hvdkit.ranks.world import raw
from hvdkit.train.step.programs import Programs

# What a forward pass gives: scalars to differentiate (the loss's terms; what the model adds, if it
# adds any), and float64 [_OF_TERM * terms + 1]: of each term the sum of losses, count, positions,
# how many weights are negative or not finite, and the sum of these; what the model added.
Forward = Callable[[Any], tuple[list[tf.Tensor], tf.Tensor]]
_OF_TERM = 5


class StepTotals(NamedTuple):
    """Of a global batch; the same on every rank but for `losses` and `ready`."""

    # The sums of `Forward` and the votes; reduction.join gives the numbers.
    received: tf.Tensor
    losses: tf.Tensor  # the mean loss of this rank, [1], or of every virtual one
    # float64 scalar: when this rank had its sums (hvdkit/ranks/stragglers.py).
    ready: tf.Tensor
    grads: Sequence[tf.Tensor | None] = ()  # over the global batch
    faults: tf.Tensor | None = None  # fixed_point.overflow says what each number is


def of_terms(sums: tf.Tensor) -> tf.Tensor:
    """The sums of `Forward` by term, [..., terms, _OF_TERM], without what the model added."""
    return tf.reshape(
        sums[..., :-1], [*sums.shape[:-1], sums.shape[-1] // _OF_TERM, _OF_TERM]
    )


def means_of(sums: tf.Tensor) -> tf.Tensor:
    """The mean of each term of the loss, [..., terms], from sums of `Forward`; 0 without weight."""
    terms = of_terms(sums)
    return tf.math.divide_no_nan(terms[..., 0], terms[..., 1])


def to_means(sums: tf.Tensor) -> tf.Tensor:
    """[terms]: from sums divided by positions to means."""
    terms = of_terms(sums)
    return tf.math.divide_no_nan(terms[:, 2], terms[:, 1])


def overwritten(variable: keras.Variable) -> bool:
    """Whether its gradient is its new value, as of float8's scales: no sum, unscaled, unclipped."""
    return getattr(variable, "overwrite_with_gradient", False)


class MicroBatches:
    """Forward and backward passes over a step's micro-batches, one after the other."""

    def __init__(self, steps: int, weights: Sequence[keras.Variable]) -> None:
        self._steps = steps
        self._weights = [raw(weight) for weight in weights]
        self._overwritten = {
            i for i, weight in enumerate(weights) if overwritten(weight)
        }

    def loss(self, forward: Forward, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """`forward` summed over a batch [steps, micro-batch, ...], differentiable as one pass.

        Only one micro-batch's activations are alive at a time. The tape around the call receives
        sums of gradients, so that it reduces once a step.
        """
        if self._steps == 1:
            return forward(tf.nest.map_structure(lambda t: t[0], batch))
        targets, sums, gradients = self.gradients(forward, batch)
        return self.attached(targets, gradients, Programs(jit=False)), sums

    def attached(
        self,
        targets: list[tf.Tensor],
        gradients: list[dict[int, tf.Tensor]],
        programs: Programs,
    ) -> list[tf.Tensor]:
        """The targets as functions of the weights, whose gradients are known."""

        def backward(*upstreams: tf.Tensor) -> list[tf.Tensor | None]:
            # A tape's own upstream is the constant 1.
            if len(upstreams) == 1 and tf.get_static_value(upstreams[0]) == 1.0:
                return [gradients[0].get(place) for place in range(len(self._weights))]
            # In a graph a term that is not differentiated has a constant 0: its weights have no
            # gradient. In a trial, without one, every value is known, and 0 may be a factor's.
            used = []
            for place, upstream in enumerate(upstreams):
                value = None
                if tf.is_symbolic_tensor(upstream):
                    value = tf.get_static_value(upstream)
                if value is None or np.any(value != 0.0):
                    used.append(place)
            return programs.run(
                self._weighted,
                [upstreams[place] for place in used],
                [gradients[place] for place in used],
            )

        # The gradient of the loop would keep all activations. tf.custom_gradient would read every
        # weight.
        for weight in self._weights:
            tape.variable_accessed(weight)
        with record.stop_recording():
            attached = [tf.identity(target) for target in targets]
        handles = [weight.handle for weight in self._weights]
        record.record_operation("Attached", attached, handles, backward)
        return attached

    def _weighted(
        self, upstreams: Sequence[tf.Tensor], gradients: list[dict[int, tf.Tensor]]
    ) -> list[tf.Tensor | None]:
        """By weight, the targets' gradients times their upstreams, added up."""
        total: list[tf.Tensor | None] = [None] * len(self._weights)
        for upstream, of_target in zip(upstreams, gradients):
            for i, gradient in of_target.items():
                if i not in self._overwritten:
                    gradient = gradient * tf.cast(upstream, gradient.dtype)
                is_first = total[i] is None
                total[i] = gradient if is_first else self._joined(i, total[i], gradient)
        return total

    def gradients(
        self, forward: Forward, batch: Any
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[dict[int, tf.Tensor]]]:
        """What `forward` gives, and by target the dense gradients of the weights it depends on.

        These by the weights' places; all summed over a batch of tensors [steps, micro-batch, ...].
        """
        # For each target: the places of the weights with a gradient.
        connected: list[list[int]] = []

        @tf.function(autograph=False)
        def passes(micro: Any):
            with tf.GradientTape(persistent=True) as recorded:
                targets, sums = forward(micro)
            connected.clear()
            dense = []
            for target in targets:
                gradients = recorded.gradient(target, self._weights)
                places = [
                    i for i, gradient in enumerate(gradients) if gradient is not None
                ]
                connected.append(places)
                dense.append([tf.convert_to_tensor(gradients[i]) for i in places])
            return targets, sums, dense

        def micro_batch(index: tf.Tensor) -> Any:
            return tf.nest.map_structure(lambda t: t[index], batch)

        def body(index, total):
            targets, sums, gradients = total
            more_targets, more_sums, more_gradients = passes(micro_batch(index))
            targets = [one + other for one, other in zip(targets, more_targets)]
            joined = []
            for places, ones, others in zip(connected, gradients, more_gradients):
                joined.append(
                    [self._joined(*each) for each in zip(places, ones, others)]
                )
            return index + 1, (targets, sums + more_sums, joined)

        total = passes(micro_batch(tf.constant(0)))
        if self._steps > 1:
            _, total = tf.while_loop(
                lambda index, _: index < self._steps,
                body,
                (tf.constant(1), total),
                # One at a time bounds memory, and keeps a layer's collectives in order.
                parallel_iterations=1,
            )
        targets, sums, gradients = total
        by_place = [
            dict(zip(places, each)) for places, each in zip(connected, gradients)
        ]
        return targets, sums, by_place

    def _joined(self, place: int, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.maximum(one, other) if place in self._overwritten else one + other


def unscale(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    factor: tf.Tensor,
    variables: Sequence[keras.Variable] = (),
) -> list[tf.Tensor | None]:
    """Global means: summed gradients, made dense (which adds rows named twice), times `factor`."""
    unscaled = {
        place for place, variable in enumerate(variables) if overwritten(variable)
    }
    means = []
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            gradient = tf.convert_to_tensor(gradient)
            if place not in unscaled:
                gradient = gradient * tf.cast(factor, gradient.dtype)
        means.append(gradient)
    return means


def finish(
    gradients: list[tf.Tensor],
    variables: list[keras.Variable],
    *,
    l2: float,
    clip_norm: float,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """What the optimizer applies, from means over the global batch; and their norm unclipped.

    `l2` adds the gradient of l2 / 2 * sum(w ** 2) over kernels. Above `clip_norm` (0: none) all
    gradients are scaled by clip_norm / norm (Pascanu et al. 2013, arXiv:1211.5063).
    """
    finished = list(gradients)
    squares = []
    for place, variable in enumerate(variables):
        if l2 and is_kernel(variable):
            gradient = finished[place]
            finished[place] = gradient + l2 * tf.cast(raw(variable), gradient.dtype)
        if not overwritten(variable):
            square = tf.reduce_sum(tf.square(finished[place]))
            squares.append(tf.cast(square, tf.float64))
    norm = tf.sqrt(tf.add_n(squares))  # finite only if all gradients are
    if clip_norm:
        finished = unscale(finished, clip_norm / tf.maximum(norm, clip_norm), variables)
    return finished, norm


def descend(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
    """An update of a trial: a step of plain SGD."""
    for gradient, variable in zip(gradients, variables):
        if not overwritten(variable):
            step = tf.cast(0.1 * gradient, variable.value.dtype)
            variable.assign(variable - step)


def layer_figures(gradients: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Sum, norm and share of non-finite values of each gradient, float64 [n, 3]; 0 for None."""
    rows = []
    for gradient in gradients:
        wide = (
            tf.zeros([1], tf.float64)
            if gradient is None
            else tf.cast(gradient, tf.float64)
        )
        share = 1.0 - tf.reduce_mean(tf.cast(tf.math.is_finite(wide), tf.float64))
        rows.append(tf.stack([tf.reduce_sum(wide), tf.norm(wide), share]))
    return tf.stack(rows)


def is_kernel(variable: keras.Variable) -> bool:
    """Whether weight decay applies: the name ends with "kernel" (also depthwise_kernel, ...)."""
    return variable.name.endswith("kernel")


class LossScale(tf.Module):
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740); else 1.

    The scale halves when a step's reduced gradients are not finite and doubles after
    `GROWTH_STEPS` sound steps, alike on all ranks.
    """

    GROWTH_STEPS = 1000
    MIN_SCALE = 2.0**-10
    MAX_SCALE = 2.0**24

    def __init__(self, precision: str) -> None:
        super().__init__(name="loss_scale")
        self.dynamic = precision == "float16"
        # It exists at every precision: a run in float16 may resume from this one's checkpoint.
        self.value = tf.Variable(2.0**15, trainable=False, name="value")
        self.sound_steps = tf.Variable(0, False, dtype=tf.int64, name="sound_steps")
        self.skipped_in_a_row = tf.Variable(
            0, False, dtype=tf.int64, name="skipped_in_a_row"
        )

    def read(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The scale of this step, scalar; a constant where it never changes."""
        return tf.cast(self.value, dtype) if self.dynamic else tf.ones([], dtype)

    def update(self, finite: tf.Tensor, counted: tf.Tensor) -> None:
        """After a step; without effect where not `counted` (a rank could not read its batch)."""
        in_a_row = tf.where(finite, tf.constant(0, tf.int64), self.skipped_in_a_row + 1)
        self.skipped_in_a_row.assign(tf.where(counted, in_a_row, self.skipped_in_a_row))
        if not self.dynamic:
            return
        sound = tf.where(finite, self.sound_steps + 1, tf.constant(0, tf.int64))
        grow = sound >= self.GROWTH_STEPS
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        scale = tf.clip_by_value(self.value * factor, self.MIN_SCALE, self.MAX_SCALE)
        self.value.assign(tf.where(counted, scale, self.value))
        sound = tf.where(grow, tf.constant(0, tf.int64), sound)
        self.sound_steps.assign(tf.where(counted, sound, self.sound_steps))
