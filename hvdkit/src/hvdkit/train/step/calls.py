"""Several steps in one call of a graph: --steps_per_call.

The result of a call is that of its last step; "earlier" in it are those of the steps before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.ranks.stragglers import whole_step
from hvdkit.train.step.tracing import Result, direct_call


class Batches(NamedTuple):
    """The batch of each step of a call, and this rank's votes on each."""

    batches: list[Any]
    votes: list[tf.Tensor]


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
