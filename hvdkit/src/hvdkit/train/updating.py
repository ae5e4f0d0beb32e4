"""The end of a step: the gradients' norm, and one update or none, alike on every rank.

`judged(gradients, rate, sound)` gives the norm, whether it is finite and all else sound, and the
function that updates. Where the step must not update, all goes back that its forward pass changed.
`by_branch` and `by_choice` return the norm, and whether all is finite.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdkit.train import graph_checks

Judged = Callable[..., tuple[tf.Tensor, tf.Tensor, Callable[[], None]]]
Undo = Sequence[tuple[tf.Variable, tf.Tensor]]  # what a forward pass changes, and its value before


class UpdateInputs(NamedTuple):
    """What a step would update by."""

    grads: Sequence[tf.Tensor]
    rate: tf.Tensor  # float64
    sound: tf.Tensor  # bool
    readable: tf.Tensor  # bool


def by_branch(judged: Judged, undo: Undo, offered: UpdateInputs) -> tuple[tf.Tensor, tf.Tensor]:
    """For a CPU: one of two branches runs."""
    norm, finite, update = judged(offered.grads, offered.rate, offered.sound)

    def leave_no_trace() -> None:
        for variable, value in undo:
            variable.assign(value)

    tf.cond(finite & offered.readable, update, leave_no_trace)
    return norm, finite


def by_choice(
    judged: Judged, undo: Undo, offered: UpdateInputs, *, trained: Sequence[tf.Variable]
) -> tuple[tf.Tensor, tf.Tensor]:
    """For a GPU, which at a branch would wait for the host: 82 ms a step of ResNet-50 for 71.

    One program of XLA updates `trained` and takes the old values again where it must not.
    `by_branch` where XLA cannot compile the optimizer, or a variable is on the host.
    """
    floats = [(v, value) for v, value in undo if v.dtype.is_floating]
    others = [(v, value) for v, value in undo if not v.dtype.is_floating]
    variables = [*trained, *(v for v, _ in floats)]
    before = [value for _, value in floats]

    @tf.function(autograph=False, jit_compile=True)
    def compiled(offered, before):
        old = [v.read_value() for v in trained]
        norm, finite, update = judged(offered.grads, offered.rate, offered.sound)
        update()
        for variable, value in zip(variables, [*old, *before]):
            variable.assign(tf.where(finite & offered.readable, variable, value))
        return norm, finite

    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), (offered, before))
    try:
        with tf.init_scope():
            graph_checks.check_compiles([compiled.get_concrete_function(*specs)])
    except ValueError:
        return by_branch(judged, undo, offered)
    if len({v.device for v in variables}) > 1:
        return by_branch(judged, undo, offered)
    norm, finite = compiled(offered, before)
    for variable, value in others:
        variable.assign(tf.where(finite & offered.readable, variable, value))
    return norm, finite
