"""Whether a model computes in the type that --precision names; layers of whole numbers."""

import keras
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks import world as world_lib
from hvdkit.train.step.state import is_frame

# By --precision: types in which a layer may compute on purpose, as one that gives logits.
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "float64": (),
}
_WAY_OUT = (
    "leave out the layers' own dtype, and of a model that was loaded, cloned or made of a config, "
    "which keeps its types, set dtype_policy = keras.config.dtype_policy() for each layer"
)


def check_types(model: keras.Model, precision: str) -> list[str]:
    """Notes about layers that compute in a wider type; `model` is built.

    Raises ValueError, which names layers: where one computes in a narrower type than the run or
    another of 16 bits, most of the model in a wider one, or a trained weight has 16 bits.
    """
    policy_changed = _policy_changed(precision)
    way_out = policy_changed or _WAY_OUT
    layers = [layer for layer in model._flatten_layers() if _computes_floats(layer)]
    wider = _WIDER[precision]
    narrower = [
        layer for layer in layers if layer.compute_dtype not in (precision, *wider)
    ]
    if narrower:
        message = _computing(narrower, precision)
        if narrower[0].compute_dtype == "float16":
            message += ", which needs the loss scale of --precision=float16"
        raise ValueError(f"{message}: {way_out}")
    sizes = {}
    for layer in layers:
        size = _kernel_size(layer)
        if size:
            sizes[layer] = size
    wide = [layer for layer in sizes if layer.compute_dtype in wider]
    most_layers = 2 * len(wide) > len(sizes)
    most_weights = 2 * sum(sizes[layer] for layer in wide) > sum(sizes.values())
    if most_layers and most_weights:
        raise ValueError(f"{_computing(wide, precision)}, most of the model: {way_out}")
    if policy_changed:
        raise ValueError(f"--precision={precision}: {policy_changed}")
    half = [
        v.path for v in model.trainable_variables if v.dtype in ("float16", "bfloat16")
    ]
    if half:
        raise ValueError(
            f"the weights {join(half, 3)} have 16 bits, in which small updates are lost: leave out "
            "the layers' own dtype, or give a policy of mixed precision, as mixed_float16"
        )
    if wide and wide != list(sizes)[-1:]:  # the last layer gives the logits, on purpose
        return [f"{_computing(wide, precision)}, which takes longer"]
    return []


def quantized(model: keras.Model) -> list[str]:
    """Names of layers whose kernels stand still, as whole numbers without LoRA; not of float8."""
    names = []
    for layer in model._flatten_layers():
        mode = layer.dtype_policy.quantization_mode
        if mode not in (None, "float8") and not getattr(layer, "lora_enabled", False):
            names.append(layer.path or layer.name)
    return names


def _computes_floats(layer: keras.Layer) -> bool:
    """Whether it computes floats by itself: models of layers do not, nor inputs and look-ups."""
    if is_frame(layer) or isinstance(layer, keras.layers.InputLayer):
        return False
    dtype = layer.compute_dtype
    return dtype not in (None, "string") and tf.as_dtype(dtype).is_floating


def _kernel_size(layer: keras.Layer) -> int:
    """Elements of its own matrices, without those of layers in it."""
    below: set[int] = set()
    for part in layer._flatten_layers(include_self=False, recursive=False):
        below.update(id(variable) for variable in part.variables)
    size = 0
    for variable in layer.variables:
        if id(variable) not in below and len(variable.shape) > 1:
            size += variable.value.shape.num_elements()
    return size


def _computing(layers: list[keras.Layer], precision: str) -> str:
    names = join([layer.path or layer.name for layer in layers], 3)
    verb = "computes" if len(layers) == 1 else "compute"
    return f"with --precision={precision} {names} {verb} in {layers[0].compute_dtype}"


def _policy_changed(precision: str) -> str:
    """Says that Keras's own settings are not the run's any more; or ""."""
    policy = keras.config.dtype_policy().name
    floatx = keras.config.floatx()
    if [policy, floatx] == world_lib.types_of(precision):
        return ""
    return (
        f"Keras's policy became {policy} (floatx {floatx}) at import or in build_model: leave out "
        "keras.backend.clear_session, set_dtype_policy and set_floatx, and give the flag"
    )
