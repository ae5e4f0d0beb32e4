"""Several steps in one call of a graph: --steps_per_call.

A loop over batches calls the step once for them, and gets the result of the last one.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Never

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.ops import handle_data_util

from hvdkit.ranks import agreement
from hvdkit.ranks.stragglers import whole_step
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train.step.tracing import Result

# TensorFlow rewrites a function with this attribute by itself. Else it would put the function's
# operations into the caller's graph and rewrite them there, to other last digits.
CALLED_AS_A_WHOLE = {"_noinline": True}
REFUSED = (
    "--steps_per_call: what the loop of train.py gets are the batches of several steps, which only "
    "the step takes, as they are: leave the flag out"
)


class Batches:
    """The batches of a call and this rank's votes on each; a train.py cannot look into them.

    Raises Stop where it tries to.
    """

    def __init__(self, batches: Sequence[Any], votes: Sequence[tf.Tensor]) -> None:
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        self._tensors = [*tf.nest.flatten(stacked), tf.stack(votes)]

    def tensors(self) -> list[tf.Tensor]:
        """Parts of the batches, then the votes, each [steps, ...]."""
        return self._tensors

    def _refuse(self, *_: Any) -> Never:
        raise Stop(WRONG_USE, REFUSED)

    __getitem__ = __iter__ = __len__ = __array__ = keys = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these.
            raise AttributeError(name)
        self._refuse()


class CallResult(dict[str, Any]):
    """What the last step of a call returned; code of the user gets a plain dict of it.

    Attributes:
      steps: tensors that each step returned, with a first axis of steps.
      ended: when each step ended, seconds since 1970, float64 [steps].
    """

    def __init__(self, last: Result, *, steps: Result, ended: tf.Tensor) -> None:
        super().__init__(last)
        self.steps = steps
        self.ended = ended

    def with_last(self, last: Result) -> "CallResult":
        return CallResult(last, steps=self.steps, ended=self.ended)


def name_shapes(graph: tf.Graph) -> None:
    """Writes the shapes of the variables that `graph` was given to its arguments, while traced.

    TensorFlow rewrites a function by the shapes that it knows. A direct call tells it those of
    variables, a call by another function does not.
    """
    for _, argument in graph.captures:
        if argument.dtype != tf.resource:
            continue
        known = handle_data_util.get_resource_handle_data(argument)
        types = AttrValue()
        shapes = AttrValue()
        for part in known.shape_and_type:
            types.list.type.append(part.dtype)
            shapes.list.shape.append(part.shape)
        # A lookup table has none.
        if known.shape_and_type:
            argument.op._set_attr("_handle_dtypes", types)
            argument.op._set_attr("_handle_shapes", shapes)


def several(
    step: tf.types.experimental.ConcreteFunction, spec: Any
) -> Callable[[Batches], CallResult]:
    """Any number of calls of `step`, of (batch, votes), as one call.

    `spec`: of a batch. Raises ValueError where results of steps cannot be stacked.
    """
    votes_spec = tf.TensorSpec([agreement.NUM_VOTES], tf.float64)
    signature = tf.nest.map_structure(_stacked, [spec, votes_spec])
    returned: dict[str, Any] = {}
    absent: dict[str, None] = {}
    for name, value in step.structured_outputs.items():
        if value is None:
            absent[name] = None
        else:
            returned[name] = _specs(name, value)

    def one(inputs: tuple[Any, tf.Tensor]) -> tuple[dict[str, Any], tf.Tensor]:
        result = step(*inputs)
        tensors = {name: result[name] for name in returned}
        if "ready" not in result:  # No rank waits for this one.
            return tensors, tf.constant(0.0, tf.float64)
        return tensors, whole_step(result["step"])

    @tf.function(input_signature=signature, autograph=False)
    def steps(
        batches: Any, votes: tf.Tensor
    ) -> tuple[dict[str, Any], dict[str, Any], tf.Tensor]:
        # One after the other: collectives of two steps have the same names.
        results, ended = tf.map_fn(
            one,
            (batches, votes),
            parallel_iterations=1,
            fn_output_signature=(returned, tf.TensorSpec([], tf.float64)),
        )
        last = tf.nest.map_structure(lambda values: values[-1], results)
        return last, results, ended

    traced = steps.get_concrete_function()

    def call(batches: Batches) -> CallResult:
        last, results, ended = traced.inference_fn.call_preflattened(
            [*batches.tensors(), *traced.captured_inputs]
        )
        return CallResult({**last, **absent}, steps=results, ended=ended)

    return call


def _stacked(part: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *part.shape], part.dtype)


def _specs(name: str, value: Any) -> Any:
    """Of what a step returns under `name`."""

    def spec(part: Any) -> tf.TensorSpec:
        if isinstance(part, tf.Tensor) and part.shape.is_fully_defined():
            return tf.TensorSpec(part.shape, part.dtype)
        raise ValueError(
            f"--steps_per_call: the step returns {name!r}, which is no tensor of a fixed shape: "
            "leave it or the flag out"
        )

    return tf.nest.map_structure(spec, value)


def each(result: Result) -> list[Result]:
    """The result of each step of a call, in order; as NumPy arrays where they are several."""
    if not isinstance(result, CallResult):
        return [result]
    arrays = tf.nest.map_structure(lambda part: part.numpy(), result.steps)

    def of_step(place: int) -> Result:
        return tf.nest.map_structure(lambda part: part[place], arrays)

    return [of_step(place) for place in range(len(arrays["step"]))]


def times(result: Result) -> tuple[list[float], list[float]]:
    """When own sums of each step of a call were ready, and when the step ended; since 1970."""
    if isinstance(result, CallResult):
        return result.steps["ready"].numpy().tolist(), result.ended.numpy().tolist()
    return [float(result["ready"])], [time.time()]
