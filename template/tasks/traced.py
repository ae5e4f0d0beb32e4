"""What a task's traced functions hold that would break a promise of the run without a word."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from engine.words import some
from engine.world import raw
from tasks.base import Task

# Operations whose draws go on from a state inside the process: it is neither saved nor shared.
_DRAWS = {
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
    *("ParameterizedTruncatedNormal", "RandomShuffle", "Multinomial", "RandomGamma"),
    *("RandomPoisson", "RandomPoissonV2", "StatefulStandardNormalV2", "StatefulUniform"),
    *("SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2", "RandomCrop"),
}


def check_draws(graph: tf.Graph, what: str, instead: str) -> None:
    """Raises ValueError where a graph, or a function it calls, draws without a key or a saved seed.

    Such draws differ on other numbers of ranks and after an interruption.
    """
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    drawn = sorted({node.op for node in nodes if node.op in _DRAWS})
    if drawn:
        raise ValueError(
            f"{what} draws random numbers ({some(drawn)}) that are others on another number of "
            f"ranks and after an interruption: {instead}"
        )


def check_state(graph: tf.Graph, known: Iterable[keras.Variable | tf.Variable], task: Task) -> None:
    """Raises ValueError where a traced step uses variables that nobody trains or saves.

    Keras finds variables that layers make with `add_weight` and layers that are attributes of
    layers, and no others: a tf.Variable in a layer is left as it was made.

    Args:
      known: all that a checkpoint holds. Frozen models that the task has as attributes (a teacher,
        a perceptual loss) may be used besides.
    """
    layers = [x for x in vars(task).values() if isinstance(x, keras.Layer)]
    frozen = [v for layer in layers if not layer.trainable_variables for v in layer.variables]
    handles = {id(raw(v).handle) for v in [*known, *frozen]}
    named = {id(v.handle): v.name for v in graph.variables}
    used = [t for t in graph.external_captures if t.dtype == tf.resource and _of_variable(t)]
    others = [named.get(id(t), "one without a name") for t in used if id(t) not in handles]
    if others:
        raise ValueError(
            f"the step uses variables that the model does not hold: {some(others)}. They would be "
            "neither trained nor saved. Make weights with add_weight, keep layers (and a "
            "keras.random.SeedGenerator for random functions) as attributes of the model or of its "
            "layers, a frozen model as one of the task; use tf.constant for fixed numbers"
        )


def check_weights(tape: tf.GradientTape, weights: tf.Tensor, values: list[tf.Variable]) -> None:
    """Raises ValueError where weights of a loss depend on what is trained.

    They also divide the loss, over all ranks; the step's gradient takes them for constants.
    """
    if any(g is not None for g in tape.gradient(weights, values)):
        raise ValueError(
            "the task's loss returns weights that depend on the model's outputs: put them through "
            "tf.stop_gradient, or multiply them into the losses and return weights of their own"
        )


def _of_variable(handle: tf.Tensor) -> bool:
    """Tables and iterators are resources too; only a variable's handle has a shape and a type."""
    data = getattr(handle, "_handle_data", None)
    return bool(data is not None and data.is_set and data.shape_and_type)
