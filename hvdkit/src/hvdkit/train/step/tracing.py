"""A step while its function is traced: what is known so far, what it may return and change."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train.step import graph_checks
from hvdkit.train.step.gradients import StepTotals
from hvdkit.train.task.protocol import Example

Result = Mapping[str, tf.Tensor]  # what a step returns
StepFunction = Callable[[Example], Result]
_RETURNS = (
    "a step calls run.update(gradients) once and returns what it returns; "
    "entries that it adds have names of their own"
)


@dataclasses.dataclass
class Tracing:
    """What becomes known of a step while its function runs.

    Attributes:
      votes: this rank's, which are summed over ranks with the loss.
      old_values: of the variables that the step guards, at its start, by the variable's id.
      terms: names of the first loss's terms, once they are known.
      adds_losses: whether the model adds losses to them.
      totals: once there is a loss: all but the gradients, of the first one.
      factor: from the totals' sums to what makes means of summed gradients; None: they are means.
      kept: old values that the forward pass's program gave out, by the variable's id.
      has_loss: whether `run.loss` was called, which is allowed once.
      sums: of each loss, on this rank.
      means: the gradients to update by, in a trial.
      results: what each call of `run.update` returned.
    """

    votes: tf.Tensor
    old_values: dict[int, tf.Tensor]
    terms: tuple[str, ...] = ()
    adds_losses: bool = False
    totals: StepTotals | None = None
    factor: Callable[[tf.Tensor], tf.Tensor] | None = None
    kept: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    has_loss: bool = False
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)
    means: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    results: list[Result] = dataclasses.field(default_factory=list)
    _of_engine: list[tuple[tf.Graph, range]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def engine_operations(self) -> Iterator[None]:
        """Operations that are made inside are the engine's, not the step function's."""
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield
        last = len(graph.get_operations())
        self._of_engine.append((graph, range(first, last)))

    def check_result(self, result: Any) -> None:
        """Raises ValueError where `result` of the step's function is not that of `run.update`."""
        graph = tf.compat.v1.get_default_graph()
        if len(self.results) != 1 or not isinstance(result, Mapping):
            raise ValueError(_RETURNS)
        for name, value in self.results[0].items():
            # Results of a tf.function inside the step are tensors of another graph.
            is_here = getattr(value, "graph", graph) is graph
            if name not in result or (is_here and result[name] is not value):
                raise ValueError(
                    f"{_RETURNS}; this one leaves out or replaces {name!r}"
                )

    def changed_by_function(self, guarded: Sequence[tf.Variable]) -> list[tf.Variable]:
        """The guarded variables that the step changes outside of forward passes and the update."""
        graph = tf.compat.v1.get_default_graph()
        of_engine: set[int] = set()
        for engine_graph, places in self._of_engine:
            if engine_graph is graph:
                of_engine.update(places)
        operations = [
            operation
            for place, operation in enumerate(graph.get_operations())
            if place not in of_engine
        ]
        handles = {
            id(handle) for handle in graph_checks.assigned_handles(graph, operations)
        }
        return [variable for variable in guarded if id(variable.handle) in handles]

    def leave_no_trace(self, changed: Sequence[tf.Variable]) -> None:
        """Gives variables that the step's function changed their old values, if nothing updates."""
        figures = self.results[0]
        is_applied = figures["finite"] & (figures["votes"][agreement.DATA_FAILED] == 0)
        for variable in changed:
            old_value = self.old_values[id(variable)]
            variable.assign(tf.where(is_applied, variable.read_value(), old_value))


def direct_call(
    traced: tf.types.experimental.ConcreteFunction, spec: Any
) -> Callable[..., Any]:
    """`traced` of a batch and other tensors, for batches as `spec` says; Stop for others.

    A ConcreteFunction binds its arguments in Python at each call, a quarter of a small step; what
    is called here instead is no public part of TensorFlow.
    """
    forms = [(form.dtype, form.shape) for form in tf.nest.flatten(spec)]

    def call(batch: Any, *others: tf.Tensor) -> Any:
        tensors = []
        try:
            tf.nest.assert_same_structure(batch, spec)
            for part, (dtype, _) in zip(tf.nest.flatten(batch), forms):
                # tf.is_tensor would take variables and ragged tensors for tensors.
                is_tensor = isinstance(part, tf.Tensor)
                tensors.append(part if is_tensor else tf.convert_to_tensor(part, dtype))
        except (TypeError, ValueError):
            tensors = []
        if [(tensor.dtype, tensor.shape) for tensor in tensors] != forms:
            raise Stop(
                WRONG_USE,
                f"train.py: step(batch) takes what run.batches() gives: {spec}",
            )
        return traced.inference_fn.call_preflattened(
            [*tensors, *others, *traced.captured_inputs]
        )

    return call
