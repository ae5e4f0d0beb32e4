"""What a model's outputs mean outside of training: what `hvdkit predict` and `export` give.

A task says it in `decode`. Without it, or where a subclass has a loss of its own, outputs are
logits of classes if the graph of the loss proves it.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import open as open_lib
from hvdkit.logs import one_line
from hvdkit.train.step.losses import at_least_float32, origin
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks
from hvdkit.train.task.inputs import batch_of, name_of
from hvdkit.train.task.protocol import Task

Decoded = dict[str, tf.Tensor]
_SOFTMAX_LOSSES = (
    "SparseSoftmaxCrossEntropyWithLogits",
    "SoftmaxCrossEntropyWithLogits",
)
_DEFINE = (
    "let its class Task say what outputs mean: decode(outputs), "
    "see hvdkit/train/task/protocol.py"
)


def softmax(logits: tf.Tensor) -> Decoded:
    """One of several classes: logits [..., classes] -> "probabilities" float32, "classes" int64.

    Raises ValueError for one class, whose probability would be 1 whatever the logit.
    """
    if logits.shape[-1] == 1:
        raise ValueError(
            "softmax of one logit is always 1: use hvdkit.train.outputs.one_logit"
        )

    probabilities = tf.cast(tf.nn.softmax(at_least_float32(logits)), tf.float32)
    return {"probabilities": probabilities, "classes": tf.argmax(logits, -1)}


def one_logit(logits: tf.Tensor) -> Decoded:
    """Two classes told apart by a sigmoid: logits [..., 1] -> as `softmax` of [0, logit]."""
    return softmax(tf.concat([tf.zeros_like(logits), logits], -1))


def sigmoid(logits: tf.Tensor) -> Decoded:
    """Several labels at once: logits [..., labels] -> "probabilities" float32, "labels" bool."""
    probabilities = tf.cast(tf.sigmoid(at_least_float32(logits)), tf.float32)
    return {"probabilities": probabilities, "labels": logits > 0}


def decoder(
    task: Task, outputs: Any, *, of_pictures: bool = True
) -> Callable[[Any], Decoded]:
    """The function of outputs that says what they mean; `outputs`: those of a batch, as a sample.

    Raises ValueError where `decode` returns something else; where nothing says what they mean, for
    pictures; where that cannot be known because the data, which the loss is tried with, are away.
    Outputs for other examples stay as they are where nothing says it.
    """
    decode = tasks.optional(task, "decode")
    if decode is None or not _made_for_its_loss(type(task)):
        fault = _no_softmax(task, outputs)
        if fault and of_pictures:
            raise ValueError(f"{type(task).__module__}: {fault}: {_DEFINE}")
        decode = named if fault else softmax

    with task_checks.user_code_errors("decode"):
        decoded = decode(outputs)
    samples = tf.nest.flatten(outputs)[0].shape[0]
    if not isinstance(decoded, dict) or not decoded or not _have_rows(decoded, samples):
        raise ValueError(
            "the task's decode must return a dict of tensors [batch, ...]; it returns "
            f"{decoded!r:.99}"
        )
    return decode


def _have_rows(tensors: dict[str, Any], count: int) -> bool:
    for tensor in tensors.values():
        if not tf.is_tensor(tensor):
            return False
        if tensor.shape.rank == 0 or tensor.shape[0] != count:
            return False
    return True


def one_each(decoded: Decoded, pictures: int | tf.Tensor) -> Decoded:
    """The same, whose tensors have one row a picture; tf.errors.InvalidArgumentError for others.

    A model that reshapes its input may make several samples of a picture of another size.
    """
    for name, value in decoded.items():
        tf.debugging.assert_equal(
            tf.shape(value)[0],
            pictures,
            f"the model gives {name} of more or fewer samples than there are pictures: does it "
            "take pictures of one size only?",
        )
    return decoded


def named(outputs: Any) -> Decoded:
    """A model's outputs as they are, by their keys; "outputs" ("outputs_0", ...) without keys."""
    named_outputs = {}
    for path, value in keras.tree.flatten_with_path(outputs):
        named_outputs[name_of(path, "outputs")] = tf.convert_to_tensor(value)
    return named_outputs


def check_softmax(task: Any, logits: tf.Tensor) -> None:
    """Raises ValueError unless a Task's outputs [..., classes] are known to be a softmax's logits.

    They are if the `decode` that was written for its loss gives their softmax as "probabilities",
    or if the graph of its loss proves it, for which the data are opened.
    """
    decode = tasks.optional(task, "decode")
    is_softmax = False
    with tf.init_scope():
        if decode is not None and _made_for_its_loss(type(task)):
            with task_checks.user_code_errors("decode"):
                is_softmax = _gives_softmax(decode, logits.shape[-1])
        else:
            # A loss that cannot be looked at proves nothing.
            with contextlib.suppress(ValueError):
                is_softmax = not _no_softmax(task, logits)
    if not is_softmax:
        kind = type(task)
        raise ValueError(
            "--eval_window, --eval_scales and --eval_flip average softmax probabilities, and "
            f"nothing says that the outputs of {kind.__module__}.{kind.__name__} are logits of a "
            "softmax: leave them out, or give the class with the loss a `decode` that returns "
            "hvdkit.train.outputs.softmax(outputs), or else a `predict` of its own"
        )


def _gives_softmax(decode: Callable[[Any], Any], classes: int) -> bool:
    logits = tf.reshape(tf.linspace(-1.0, 2.0, classes), [1, 1, 1, classes])
    wanted = tf.nn.softmax(logits)
    decoded = decode(logits)
    given = decoded.get("probabilities") if isinstance(decoded, dict) else None
    if given is None or given.shape != wanted.shape:
        return False
    # bfloat16 has a relative precision of 1/256.
    return np.allclose(tf.cast(given, tf.float32), wanted, atol=0.01)


def _made_for_its_loss(kind: type) -> bool:
    """Whether no subclass of the class that has `decode` replaced the loss it was written for."""
    return issubclass(_definer(kind, "decode"), _definer(kind, "loss"))


def _definer(kind: type, name: str) -> type:
    """The nearest of the class and its bases that defines the name."""
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def _no_softmax(task: Task, outputs: Any) -> str:
    """Why the loss is no softmax cross-entropy of all outputs, "" where it is; opens the data.

    Raises ValueError where they cannot be opened.
    """
    if not tf.is_tensor(outputs):
        kind = type(outputs).__name__
        return f"a picture's outputs are a {kind}, no logits of classes"
    if outputs.shape.rank not in (2, 3, 4) or outputs.shape[-1] == 1:
        return f"a picture's outputs are {outputs.shape}, no logits of classes"

    try:
        with open_lib.one_split.set(True):
            _, source = task.sources()
        reader = task_checks.reader(task, source, training=False)
        batch = tf.nest.map_structure(batch_of, reader.read.structured_outputs)
        spec = tf.TensorSpec([None, *outputs.shape[1:]], outputs.dtype, name="logits")
        traced = tf.function(task.loss, autograph=False)
        graph = traced.get_concrete_function(spec, batch["targets"]).graph
    except Exception as error:
        raise ValueError(
            f"{type(task).__module__}: its loss could not be looked at "
            f"({one_line(error)[:200]}): {_DEFINE}"
        ) from error

    for logits in softmax_logits(graph):
        # TensorFlow flattens logits of pictures of unknown size to [None, None].
        is_of_all = logits.shape[-1] in (None, outputs.shape[-1])
        if is_of_all and origin(logits) is graph.inputs[0]:
            return ""
    return "its loss is no softmax cross-entropy of all outputs"


def softmax_logits(graph: tf.Graph) -> list[tf.Tensor]:
    """Symbolic logits [..., classes] of each softmax cross-entropy in a graph."""
    return [op.inputs[0] for op in graph.get_operations() if op.type in _SOFTMAX_LOSSES]


def narrow(logits: tf.Tensor) -> str:
    """The type of less than 32 bits that symbolic logits had before they were cast; else ""."""
    while logits.op.type in ("Cast", "Identity", "Reshape"):
        logits = logits.op.inputs[0]
        if logits.dtype.is_floating and logits.dtype.size < 4:
            return logits.dtype.name
    return ""
