"""The end of a step: one update or none, alike on every rank, and the step's figures.

Where the step must not update, every variable that the forward pass changed gets its old value
back. `by_branch` and `by_choice` return what the step's `figures` gives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdkit.train.step import graph_checks
from hvdkit.train.step.tracing import Result

# What a forward pass changes, and its old value.
Undo = Sequence[tuple[tf.Variable, tf.Tensor]]


class UpdateInputs(NamedTuple):
    """What a step would update by."""

    received: tf.Tensor  # StepTotals has it
    grads: Sequence[tf.Tensor]


class Verdict(NamedTuple):
    """Whether a step updates, the function that does it, and what comes after in any case."""

    is_applied: tf.Tensor
    update: Callable[[], None]
    figures: Callable[[], Result]


Judge = Callable[[UpdateInputs], Verdict]


def by_branch(judge: Judge, undo: Undo, inputs: UpdateInputs) -> Result:
    """For a CPU: one of two branches runs."""
    verdict = judge(inputs)

    def leave_no_trace() -> None:
        for variable, value in undo:
            variable.assign(value)

    tf.cond(verdict.is_applied, verdict.update, leave_no_trace)
    return verdict.figures()


def by_choice(
    judge: Judge, undo: Undo, inputs: UpdateInputs, *, trained: Sequence[tf.Variable]
) -> Result:
    """For a GPU, which waits for the host at a tf.cond: 82 ms a step of ResNet-50, not 71.

    One program of XLA updates `trained`, and selects the old values where it must not.

    Raises:
      ValueError: XLA cannot compile it, or a variable that it uses is on another device.
    """
    device = trained[0].device
    inside = [
        (variable, value) for variable, value in undo if variable.device == device
    ]
    outside = [
        (variable, value) for variable, value in undo if variable.device != device
    ]
    variables = [*trained, *[variable for variable, _ in inside]]
    old_values = [value for _, value in inside]

    @tf.function(autograph=False, jit_compile=True)
    def update(inputs: UpdateInputs, old_values: list[tf.Tensor]):
        old_trained = [variable.read_value() for variable in trained]
        verdict = judge(inputs)
        verdict.update()
        for variable, value in zip(variables, [*old_trained, *old_values]):
            variable.assign(tf.where(verdict.is_applied, variable, value))
        return verdict.is_applied, verdict.figures()

    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), (inputs, old_values)
    )
    with tf.init_scope():
        traced = update.get_concrete_function(*specs)
        fault = graph_checks.xla_fault(traced, "the update")
    if fault:
        raise ValueError(f"XLA {fault}")
    elsewhere = [v.name for v in traced.graph.variables if v.device != device]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} is on another device than the weights")
    is_applied, figures = traced(inputs, old_values)
    for variable, value in outside:
        variable.assign(tf.where(is_applied, variable, value))
    return figures
