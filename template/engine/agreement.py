"""Proof, before the first step, that all ranks will run the same collectives.

Horovod matches collectives by name. A rank with another name waits for ever, one with another
shape fails in mid-step. Both are known once the step is traced, so the traced steps are compared
instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from engine.stop import BUG, Stop
from engine.words import some
from engine.world import World


def check_gradients(
    world: World, variables: Sequence[keras.Variable], connected: Sequence[bool]
) -> None:
    """Raises Stop on all ranks when a variable has a gradient on some of them only.

    Args:
      connected: for each variable, whether the loss depends on it on this rank.
    """
    everyone = world.gather_objects(list(connected), "agreement.gradients")
    for place, variable in enumerate(variables):
        without = [rank for rank, flags in enumerate(everyone) if not flags[place]]
        if 0 < len(without) < world.size:
            raise Stop(
                BUG,
                f"{variable.path} has no gradient on rank {some(without)} but has one on the "
                "others: every rank's loss must depend on the same variables (multiply by 0 "
                "rather than leave out)",
            )


def check_collectives(world: World, step: tf.types.experimental.ConcreteFunction) -> None:
    """Raises Stop on all ranks when the traced step's collectives differ from rank 0's."""
    own = sorted(_collectives(step.graph.as_graph_def(add_shapes=True)))
    everyone = world.gather_objects(own, "agreement.collectives")
    different = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if different:
        first, other = set(everyone[0]), set(everyone[different[0]])
        raise Stop(
            BUG,
            f"the step's collectives differ: rank {some(different)} would run "
            f"{some(sorted(other - first)) or 'nothing'} where rank 0 runs "
            f"{some(sorted(first - other)) or 'nothing'}. Names, types and shapes must be the "
            "same on every rank",
        )


def _collectives(graph: tf.compat.v1.GraphDef) -> Iterable[str]:
    """Name, type and shape of each Horovod operation in a graph and the functions it calls."""
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes.extend(function.node_def)
    for node in nodes:
        if node.op.startswith("Horovod"):
            name = node.attr["tensor_name"].s.decode() or node.name
            shapes = [_shape(s) for s in node.attr["_output_shapes"].list.shape]
            kind = node.attr["T"].type or 0
            dtype = tf.as_dtype(kind).name if kind else ""
            yield f"{name} ({node.op.removeprefix('Horovod')}, {dtype} {' '.join(shapes)})"


def _shape(shape: tf.compat.v1.TensorShapeProto) -> str:
    sizes = ["?" if d.size < 0 else str(d.size) for d in shape.dim]
    return f"[{', '.join(sizes)}]"
