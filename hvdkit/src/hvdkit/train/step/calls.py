"""Several steps in one call of a graph: --steps_per_call.

The result of a call is that of its last step; "earlier" in it are those of the steps before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.ops import handle_data_util

from hvdkit.ranks import agreement
from hvdkit.ranks.stragglers import whole_step
from hvdkit.train.step.tracing import Result, direct_call

# With it TensorFlow calls a function as a whole, rewritten by itself: the callers' operations would
# change what it is rewritten to, and so its last digits.
CALLED_AS_A_WHOLE = {"_noinline": True}


class Batches(NamedTuple):
    """The batch of each step of a call, and this rank's votes on each."""

    batches: list[Any]
    votes: list[tf.Tensor]


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
    step: tf.types.experimental.ConcreteFunction, spec: Any, count: int
) -> Callable[..., list[Result]]:
    """`count` calls of `step`, of (batch, votes), as one call of the batches and the votes."""
    votes_spec = tf.TensorSpec([agreement.NUM_VOTES], tf.float64)
    signature = [[spec] * count, [votes_spec] * count]

    @tf.function(input_signature=signature, autograph=False)
    def steps(batches: list[Any], votes: list[tf.Tensor]) -> list[Result]:
        results: list[Result] = []
        done: list[tf.Tensor] = []
        for batch, votes_on_it in zip(batches, votes):
            # Collectives of two steps have the same names.
            with tf.control_dependencies(done):
                result: dict[str, Any] = dict(step(batch, votes_on_it))
            done = [result["step"]]
            if "ready" in result:  # Ranks wait for each other.
                result["ended"] = whole_step(result["step"])
            results.append(result)
        return results

    return direct_call(steps.get_concrete_function(), [spec] * count)


def each(result: Result) -> list[Result]:
    """The results of all steps of a call, in order."""
    return [*result.get("earlier", ()), result]
