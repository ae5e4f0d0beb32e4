"""Keras's masks of padding that are lost on their way through a model."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.train.step.losses import above
from hvdkit.train.task.checks import user_code_errors


def notes_on_lost_masks(model: keras.Model, inputs: Any) -> list[str]:
    """A note where a mask that a layer makes of `inputs`, a batch, does not reach what needs it.

    Plain operations, and layers without `supports_masking`, give tensors that have none.
    """
    makers = [layer for layer in model._flatten_layers() if _makes_mask(layer)]
    if not makers:
        return []
    # A layer may do nothing in evaluation, and lose the mask in training.
    evaluation = _note_on_call(model, inputs, makers, training=False)
    return evaluation or _note_on_call(model, inputs, makers, training=True)


def _note_on_call(
    model: keras.Model, inputs: Any, makers: Sequence[keras.Layer], *, training: bool
) -> list[str]:
    outputs: list[tf.Tensor] = []
    masked: list[str] = []  # layers that get a mask
    # The inputs of layers that take a mask and get none, by the layer's name.
    bare: dict[str, tf.Tensor] = {}

    def seen(layer: keras.Layer, x: Any, masks: list[Any]) -> None:
        if any(mask is not None for mask in masks):
            masked.append(layer.name)
        elif isinstance(x, tf.Tensor):
            bare[layer.path or layer.name] = x

    def call(batch: Any) -> None:
        outputs[:] = tf.nest.flatten(model(batch, training=training))

    mode = "training" if training else "evaluation"
    with user_code_errors(f"the model, called in {mode},"), _watched(model, seen):
        tf.function(call, autograph=False).get_concrete_function(inputs)
    without = [name for name, tensor in bare.items() if _lost(tensor)]
    if any(_lost(output) for output in outputs):
        without.append("the outputs")
    if not without and not masked and all(_mask(output) is None for output in outputs):
        without = ["any layer that uses it"]
    if not without:
        return []
    names = join(layer.path or layer.name for layer in makers)
    return [
        f"the mask of padding that {names} makes does not reach {join(without)}, where padding "
        f"counts in {mode}: an operation dropped it that is in no layer, or in one without "
        "supports_masking = True (a loss may also give padding the weight 0)"
    ]


def _makes_mask(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Masking) or bool(
        getattr(layer, "mask_zero", False)
    )


@contextlib.contextmanager
def _watched(model: keras.Model, seen: Callable) -> Iterator[None]:
    """Inside, `seen(layer, first argument, masks)` is called when a layer that takes masks is."""
    layers = []
    for layer in model._flatten_layers():
        parameters = layer.call_signature_parameters if hasattr(layer, "call") else ()
        takes_mask = any(name.endswith("mask") for name in parameters)
        if (
            takes_mask
            and not isinstance(layer, keras.Model)
            and "call" not in vars(layer)
        ):
            layers.append(layer)

    def watch(layer: keras.Layer) -> None:
        call = layer.call

        def watched(*args: Any, **named: Any) -> Any:
            masks = [value for name, value in named.items() if name.endswith("mask")]
            first = args[0] if args else next(iter(named.values()), None)
            seen(layer, first, tf.nest.flatten(masks))
            return call(*args, **named)

        # Keras's own __setattr__ would track the function.
        object.__setattr__(layer, "call", watched)

    try:
        for layer in layers:
            watch(layer)
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "call")


def _mask(tensor: tf.Tensor) -> tf.Tensor | None:
    return getattr(tensor, "_keras_mask", None)


def _lost(tensor: tf.Tensor) -> bool:
    """Whether a tensor [batch, time, ...] has no mask, and one with as many times above it has."""
    if _mask(tensor) is not None or tensor.shape.rank is None or tensor.shape.rank < 3:
        return False
    for operation in above(tensor):
        for output in operation.outputs:
            mask = _mask(output)
            if (
                mask is not None
                and mask.shape.rank == 2
                and mask.shape[1] == tensor.shape[1]
            ):
                return True
    return False
