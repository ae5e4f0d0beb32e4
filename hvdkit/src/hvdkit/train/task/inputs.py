"""What a model is called with outside of training: names, shapes and types of its inputs."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdkit.data import open as open_lib
from hvdkit.logs import join
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks
from hvdkit.train.task.protocol import Task

# Names that Keras makes where keras.Input was given none: they change with each model.
_MADE_UP = re.compile(r"(keras_tensor|input_layer|input)(_\d+)?")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a model, a tf.TensorSpec [batch, ...] each, by name; None: of any size.

    A name is the input's key in a dict of inputs ("a/b" in nested ones), or that of its
    keras.Input, or "inputs" ("inputs_0", ... of several).
    """

    structure: Any  # nested specs, as the model takes them
    names: Sequence[str]  # in the order of keras.tree

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        return dict(zip(self.names, keras.tree.flatten(self.structure)))

    def nested(self, tensors: Mapping[str, Any]) -> Any:
        """Tensors or arrays by name, as tensors that the model takes."""
        flat = []
        for name, spec in self.specs.items():
            flat.append(tf.convert_to_tensor(tensors[name], spec.dtype))
        return keras.tree.pack_sequence_as(self.structure, flat)

    def arguments(self) -> dict[str, tf.TensorSpec]:
        """By name, specs whose own names a SavedModel's signature can have."""
        arguments: dict[str, tf.TensorSpec] = {}
        taken: set[str] = set()
        for name, spec in self.specs.items():
            argument = re.sub(r"\W", "_", name, flags=re.ASCII)
            if not argument[:1].isalpha():
                argument = "input_" + argument
            while argument in taken:
                argument += "_"
            taken.add(argument)
            arguments[name] = tf.TensorSpec(spec.shape, spec.dtype, argument)
        return arguments

    def __str__(self) -> str:
        return join(
            [f"{name} {describe_input(spec)}" for name, spec in self.specs.items()],
            most=20,
        )


def describe_input(spec: tf.TensorSpec) -> str:
    """Type and shape of one example."""
    sizes = ", ".join("any" if size is None else str(size) for size in spec.shape[1:])
    return f"{spec.dtype.name} [{sizes}]" if sizes else f"one {spec.dtype.name}"


def of_model(task: Task, model: keras.Model, image_size: int) -> Inputs:
    """The inputs of the model, which has all its variables then.

    They are those of a functional model. Where a model is of another kind, or the task has a
    `predict`, which may take more, they are what `picture_inputs` returns, or without it
    `evaluation_example` for the first sample: then the data are opened.

    Raises ValueError: the data cannot be opened, or the inputs are not dense tensors.
    """
    network = getattr(model, "_functional", None) or model  # that of a keras.Sequential
    structure = getattr(network, "_inputs_struct", None)
    if structure is not None and not tasks.optional(task, "predict"):
        return _of_functional(structure)
    of_picture = tasks.optional(task, "picture_inputs")
    if of_picture:
        structure, example = _of_picture(of_picture, image_size)
    else:
        structure, example = _of_data(task)
    task_checks.outputs(task, model, example)
    names = _names(structure)
    batches = keras.tree.map_structure(batch_of, structure)
    return Inputs(batches, names)


def _of_functional(structure: Any) -> Inputs:
    names = _names(structure)
    for name, tensor in zip(names, keras.tree.flatten(structure)):
        if tensor.sparse or tensor.ragged:
            kind = "sparse" if tensor.sparse else "ragged"
            raise ValueError(
                f"the model's input {name} is {kind}: only dense ones are taken"
            )
    specs = keras.tree.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype), structure
    )
    return Inputs(specs, names)


def _of_picture(inputs_of: Any, size: int) -> tuple[Any, Any]:
    with task_checks.user_code_errors("picture_inputs"):
        picture = tf.TensorSpec([None, None, 3], tf.uint8)
        traced = tf.function(inputs_of, autograph=False).get_concrete_function(picture)
        example = inputs_of(tf.zeros([size, size, 3], tf.uint8))
    return traced.structured_outputs, keras.tree.map_structure(
        lambda x: x[None], example
    )


def _of_data(task: Task) -> tuple[Any, Any]:
    try:
        with open_lib.one_split.set(True), task_checks.user_code_errors("sources"):
            _, source = task.sources()
        reader = task_checks.reader(task, source, training=False)
        example = task_checks.read_example(reader, training=False)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the data, which say what the model is called with, cannot be read: {error}"
        ) from error
    return reader.read.structured_outputs["inputs"], example["inputs"]


def batch_of(part: Any) -> tf.TensorSpec:
    """Of any size, of examples such as this tensor."""
    return tf.TensorSpec([None, *part.shape], part.dtype)


def _names(structure: Any) -> list[str]:
    leaves = keras.tree.flatten_with_path(structure)
    names = [_name(path, leaf) for path, leaf in leaves]
    if len(set(names)) < len(names):
        names = [name_of(path, "inputs") for path, _ in leaves]
    return names


def _name(path: tuple[Any, ...], leaf: Any) -> str:
    has_keys = all(isinstance(key, str) for key in path)
    is_named = isinstance(leaf, keras.KerasTensor) and not _MADE_UP.fullmatch(leaf.name)
    if is_named and not (path and has_keys):
        return leaf.name
    return name_of(path, "inputs")


def name_of(path: tuple[Any, ...], default: str) -> str:
    """Of a tensor in nested ones: "key", "key/key", "key/0"; `default`, or "default_0"."""
    keys = [str(key) for key in path]
    if path and isinstance(path[0], str):
        return "/".join(keys)
    return "_".join([default, *keys])
