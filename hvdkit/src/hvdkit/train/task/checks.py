"""A task's mistakes as one sentence, a ValueError, before the first step; no traceback after it."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import pipeline
from hvdkit.data.readers.pictures import decode_image
from hvdkit.data.source import Source
from hvdkit.logs import join, one_line
from hvdkit.ranks.world import raw, unoptimized
from hvdkit.settings import project
from hvdkit.stop import Stop
from hvdkit.train.step import graph_checks
from hvdkit.train.task.protocol import Example, Task, optional

_LEAST_BYTES = 4  # of a number that a sum over a batch may have
_GRAPHS_RUN_IN = ("evaluate/evaluator.py", "data/pipeline.py", "train/task/checks.py")
_RUNS_GRAPHS = [project.ENGINE / name for name in _GRAPHS_RUN_IN]

# What Keras's fit, evaluate and predict call of a model, and where a task has it.
_OF_KERAS_LOOP = {
    "train_step": "loss",
    "compute_loss": "loss",
    "test_step": "loss, sums and metrics",
    "predict_step": "predict or decode",
}

# Keras hands a layer's whole call to tf.recompute_grad, which takes no keywords in a graph.
_OF_REMAT_SCOPE = "custom_gradient decorator currently supports keywords"
_REMAT_SCOPE = (
    "keras.RematScope does not work in a graph of TensorFlow: leave it out, and call "
    "tf.recompute_grad in a layer around those to compute again (docs/speed.md of the engine's "
    "repository has one)"
)


@contextlib.contextmanager
def user_code_errors(what: str, function: Callable | None = None) -> Iterator[None]:
    """Re-raises errors of user code as one-line ValueErrors: what failed, where and why.

    A ValueError or OSError that the project's own code raised itself stays as it is. Where no line
    of the user's is in the traceback, it is the first one of `function`.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if project.is_own(frame.filename)]
        last = own_frames[-1]  # the first one is this function's
        # Keras removes its own frames from the traceback; its messages have several lines.
        is_raised_here = last is frames[-1] and "\n" not in str(error)
        if isinstance(error, Stop) or (
            isinstance(error, (ValueError, OSError)) and is_raised_here
        ):
            raise
        is_op = isinstance(error, tf.errors.OpError)
        parts = [_sentence(pipeline.reason_of(error) if is_op else str(error))]
        if _OF_REMAT_SCOPE in parts[0]:
            parts.insert(0, _REMAT_SCOPE)
        if not (is_op and Path(last.filename) in _RUNS_GRAPHS):  # a graph has no lines
            place = project.line_in_fork(own_frames) or project.line_of(function)
            place = place or f"{Path(last.filename).name}, line {last.lineno}"
            parts = [place, type(error).__name__, *parts]
        raise ValueError(f"{what} failed: {': '.join(parts)}") from error


def _sentence(message: str) -> str:
    """A library's message on one line, without colours and without its list of arguments."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", message).split("Arguments received by")[0]
    message = one_line(message)
    return message if len(message) <= 400 else message[:400] + " ..."


def reader(task: Task, source: Source, training: bool) -> pipeline.Reader:
    """How a feed gets examples from the source."""
    name = "training_example" if training else "evaluation_example"
    paired = training and bool(getattr(task, "mixes", False))
    with user_code_errors(name):
        made = pipeline.reader(
            source, getattr(task, name), keyed=training, paired=paired
        )
    example = made.read.structured_outputs
    if not isinstance(example, Mapping) or set(example) != {"inputs", "targets"}:
        returned = (
            sorted(example) if isinstance(example, Mapping) else type(example).__name__
        )
        raise ValueError(
            f'{name} must return a dict of "inputs" and "targets", not {returned}'
        )
    for part, nested in example.items():
        if _holds_list(nested):
            raise ValueError(
                f'{name} returns a list in "{part}", which tf.data would stack into one tensor: '
                "use a tuple or a dict"
            )
    for spec in tf.nest.flatten(example):
        is_dense = isinstance(spec, (tf.Tensor, tf.TensorSpec))
        if not is_dense or (training and not spec.shape.is_fully_defined()):
            raise ValueError(
                f"{name} must return dense tensors, of shapes that are known before training; "
                f"it returns {describe_value(spec)}: crop or pad (tf.ensure_shape sets the shape), "
                "and return () where there are no targets"
            )
    instead = "use `key`, with tf.random.stateless_*" if training else "leave them out"
    graph_checks.check_draws(made.read.graph, name, instead)
    graph_checks.check_stateless(made.read.graph, name)
    graph_checks.check_collectives(made.read.graph, name)
    return made


def read_example(made: pipeline.Reader, training: bool, *, bad: int = 0) -> Example:
    """The source's first sample as an example, its tensors with a batch dimension of 1.

    `bad`: how many samples may be passed over because they cannot be read.
    """
    name = "training_example" if training else "evaluation_example"
    last = min(bad, len(made.source) - 1)
    for number in range(last + 1):
        with user_code_errors(name), unoptimized():
            try:
                keys = [tf.zeros([2], tf.int32)] if training else []
                example = made.one(number, *keys)
                if made.parts >= {"file", "image"}:
                    check_file(made.source.read(tf.constant(number, tf.int64)))
                break
            except tf.errors.OpError as error:
                if number == last:
                    raise ValueError(made.explain([number], error)) from None
    return tf.nest.map_structure(lambda t: t[None], example)


def check_file(sample: Mapping[str, tf.Tensor]) -> None:
    """Raises ValueError where a sample's "file" holds another picture than its "image"."""
    if not np.array_equal(sample["image"], decode_image(sample["file"])):
        raise ValueError(
            'a sample\'s "file" and "image" are different pictures, and crops are read from '
            '"file": code that changes "image" must remove "file" from the sample'
        )


def _holds_list(nested: Any) -> bool:
    if isinstance(nested, Mapping):
        nested = tuple(nested.values())
    if isinstance(nested, tuple):
        return any(_holds_list(part) for part in nested)
    return isinstance(nested, list)


def build_variables(model: Any, example: Example) -> None:
    """Makes all variables of the model, also those that only its first calls would make."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"build_model must return a keras.Model; it returns {model!r}")
    for name, part in _OF_KERAS_LOOP.items():
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"the model {model.name} defines its own {name}, which only Keras's own loop "
                f"calls: put what it does into the task's {part}"
            )
    inputs = example["inputs"]
    # A functional model is built and knows its inputs.
    is_functional = hasattr(model, "_inputs_struct")
    if is_functional:
        _check_input_names(model, inputs, "training_example's")
    with user_code_errors("the model, called with the inputs of training_example,"):
        if not is_functional:
            model(inputs, training=False)
        # Tracing makes the variables that only training needs, and changes no state.
        called = tf.function(lambda x: model(x, training=True), autograph=False)
        # A functional model may take no single sample in training, as one that splits its batch.
        unfit = (Exception,) if is_functional else ()
        with contextlib.suppress(*unfit):
            called.get_concrete_function(inputs)
    if not model.trainable_variables:
        raise ValueError(f"the model {model.name} has no variable to train")
    _check_upsampling(model)
    _check_traced_calls(model, inputs)
    stateful = []
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            stateful.append(layer.path)
    if stateful:
        raise ValueError(
            f"{join(stateful)} has stateful=True, which carries a state from one batch to the "
            "next; here batches hold unrelated samples: remove it"
        )


def _check_traced_calls(model: keras.Model, inputs: Any) -> None:
    """Refuses a layer's tf.function that computes with other numbers than the layer's weights.

    Where Keras lets a first call make the weights of layers inside, and that call is traced, the
    graph holds their initializers instead, and later calls of such inputs use it again.
    """
    if not any(_has_function(layer) for layer in model._flatten_layers()):
        return
    lost: set[int] = set()
    for training in (True, False):
        # As in `build_variables`, it may take no single sample.
        with contextlib.suppress(Exception):
            read = _handles_read(model, inputs, training=training)
            with _functions_as_code():
                needed = _handles_read(model, inputs, training=training)
            lost |= needed - read
    paths = [v.path for v in model.variables if id(raw(v).handle) in lost]
    if paths:
        raise ValueError(
            f"the model {model.name} has a tf.function that does not read {join(paths, 4)}, as "
            "Keras made them while it was traced: leave out tf.function (a step is one graph "
            "without it), or make the weights in the layer's `build`"
        )


def _handles_read(model: keras.Model, inputs: Any, *, training: bool) -> set[int]:
    """The ids of the handles of the variables that a call of the model uses."""
    called = tf.function(partial(model, training=training), autograph=False)
    graph = called.get_concrete_function(inputs).graph
    return {id(handle) for handle, _ in graph.captures}


@contextlib.contextmanager
def _functions_as_code() -> Iterator[None]:
    """Inside, the functions that a new graph calls are no functions of their own in it."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _has_function(layer: keras.Layer) -> bool:
    """Whether a method or an attribute of it is a tf.function."""
    attributes = [*vars(layer).values()]
    for kind in type(layer).__mro__:
        attributes += vars(kind).values()
    return any(
        isinstance(value, tf.types.experimental.PolymorphicFunction)
        for value in attributes
    )


def _check_upsampling(model: keras.Model) -> None:
    """Refuses what fails as soon as a graph does not know a picture's size, as in evaluation."""
    for layer in model._flatten_layers():
        if (
            not isinstance(layer, keras.layers.UpSampling2D)
            or layer.interpolation == "nearest"
        ):
            continue
        shapes = [node.input_tensors[0].shape for node in layer._inbound_nodes]
        if shapes and all(None not in shape[1:] for shape in shapes):
            continue
        raise ValueError(
            f"{layer.path}: Keras's UpSampling2D with interpolation={layer.interpolation!r} needs "
            "sizes that are known when the model is built: give keras.Input a height and a width, "
            "or use hvdkit.models.upsampling.BilinearUpsampling"
        )


def _check_input_names(model: keras.Model, inputs: Any, whose: str) -> None:
    by_name = isinstance(model._inputs_struct, dict)
    wanted = sorted(model._inputs_struct if by_name else [x.name for x in model.inputs])
    is_dict = isinstance(inputs, Mapping)
    names = sorted(inputs) if is_dict else "no dict"
    fit = set(wanted) <= set(inputs) if is_dict else not by_name
    # Keras's own call takes a dict's values for a dict of inputs in the order of their names.
    if by_name and is_dict and type(model).call.__module__.startswith("keras."):
        fit = names[: len(wanted)] == wanted
    if not fit:
        raise ValueError(
            f"the model's inputs are {wanted}, {whose} are {names}: give both the same "
            'names, keras.Input(..., name="...") and keys of "inputs"'
        )


def outputs(task: Task, model: keras.Model, inputs: Any) -> Any:
    """The outputs for a batch that is not trained on: the task's `predict`, or the model's."""
    predict = optional(task, "predict")
    what = "predict" if predict else "the model, called in evaluation,"
    if not predict and hasattr(model, "_inputs_struct") and isinstance(inputs, Mapping):
        _check_input_names(model, inputs, "those in evaluation")
    with user_code_errors(what, predict or task.build_model):
        return predict(model, inputs) if predict else model(inputs, training=False)


def sums(task: Task, outputs: Any, targets: Any) -> dict[str, tf.Tensor]:
    """The task's `sums` as int64 and float64: totals outgrow smaller types."""
    with user_code_errors("the task's sums"):
        totals = _tensors(task.sums(outputs, targets))
    taken = [name for name in totals if name.split("/")[0] in ("loss", "weight")]
    if taken:
        raise ValueError(
            f"the task's sums use {join(taken)}, a name reserved for the loss"
        )
    for name, value in totals.items():
        is_number = value.dtype.is_floating or value.dtype.is_integer
        if not is_number or not value.shape.is_fully_defined():
            raise ValueError(
                f"the task's sums have {name}, {value.dtype.name} {value.shape}: add numbers up "
                "over the batch; the shape must not depend on it (tf.ensure_shape says it)"
            )
        if value.dtype.size < _LEAST_BYTES:
            raise ValueError(
                f"the task's sums have {name} in {value.dtype.name}, which does not hold a sum of "
                "many: cast before adding up (to tf.float32, tf.int32)"
            )
        totals[name] = tf.cast(
            value, tf.float64 if value.dtype.is_floating else tf.int64
        )
    return totals


def _tensors(returned: Any) -> dict[str, tf.Tensor]:
    """A dict that a task's function returned."""
    return {
        str(name): tf.convert_to_tensor(value) for name, value in dict(returned).items()
    }


def per_sample(
    task: Task, outputs: Any, targets: Any, *, taken: Set[str]
) -> dict[str, tf.Tensor]:
    """The task's `per_sample`: tensors [batch, ...] of fixed shapes; no name of `taken` sums."""
    keep = optional(task, "per_sample")
    if not keep:
        return {}
    with user_code_errors("the task's per_sample"):
        rows = _tensors(keep(outputs, targets))
    for name, value in rows.items():
        dtype = value.dtype
        is_number = dtype.is_bool or dtype.is_floating or dtype.is_integer
        is_gathered = is_number and dtype not in (tf.bfloat16, tf.uint32, tf.uint64)
        is_fixed = value.shape.rank and value.shape[1:].is_fully_defined()
        if name in taken or not (is_gathered and is_fixed):
            raise ValueError(
                f"the task's per_sample has {name}, {dtype.name} {value.shape}: give it a "
                "name that no sum has, and numbers of one shape for each sample, of a type that "
                "Horovod gathers (not bfloat16, uint32, uint64)"
            )
    return rows


def metrics(
    task: Task, sums: dict[str, np.ndarray], losses: Mapping[str, float]
) -> dict[str, float]:
    """The run's losses, then the task's figures from its sums; its main metric is among them."""
    with user_code_errors("the task's metrics"):
        figures = {
            str(name): float(value) for name, value in task.metrics(sums).items()
        }
    for name in figures:
        if name.split("/")[0] == "loss":
            raise ValueError(
                f"the task's metrics return {name!r}, the run's own: choose another name"
            )
    figures = {**losses, **figures}
    if task.main_metric not in figures:
        raise ValueError(
            f'main_metric = "{task.main_metric}" is none of the run\'s figures: {sorted(figures)}'
        )
    return figures


def pictures(drawn: Any) -> np.ndarray:
    """What `draw` returned: uint8 [n, height, width, 3]."""
    is_bytes = isinstance(drawn, np.ndarray) and drawn.dtype == np.uint8 and drawn.size
    if is_bytes and drawn.ndim == 4 and drawn.shape[-1] == 3:
        return drawn
    raise ValueError(
        "draw must return pictures, uint8 [n, height, width, 3]; it returns "
        + describe_value(drawn)
    )


def describe_value(value: Any) -> str:
    if isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return f"one tensor of shape {value.shape}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"
