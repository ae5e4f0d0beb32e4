"""How gradients travel: backend, grouping and packing.

docs/gradients.md of the engine's repository compares the flags with tf_cnn_benchmarks' options.
"""

import ast
import contextlib
import hashlib
import inspect
import math
import os
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.util import split_list

from hvdkit.ranks.world import gpu, raw
from hvdkit.settings import Settings
from hvdkit.train.step import compression
from hvdkit.train.step.gradients import overwritten

_PART = 2.0**12  # `split` says how numbers are split by it
NO_GRADIENTS = "the loss depends on none of the model's weights"

# SHA-256 of make_step in the template's train.py, as `_digest` takes it.
_TEMPLATE_STEP = "725f5a7a4246e8eea3c3fb0cf033bacc2d2710f18dd99fe16f593fc4a3efb690"

Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]


def check_backend(config: Settings) -> None:
    """Raises ValueError where this run cannot reduce gradients by --reduce_backend.

    nccl needs a Horovod built with it, and a GPU. Of gloo and mpi, only the one that the launcher
    started can be named; on GPUs, gradients are then reduced in host memory (see `device`).
    Autotuning tries other orders of additions while a run goes on. Virtual ranks add integers.
    """
    is_autotuned = os.environ.get("HOROVOD_AUTOTUNE", "") not in ("", "0")
    if config.deterministic and not config.virtual_ranks and is_autotuned:
        raise ValueError(
            "--deterministic needs one order of additions, and HOROVOD_AUTOTUNE="
            f"{os.environ['HOROVOD_AUTOTUNE']} changes it during a run: leave out horovodrun "
            "--autotune"
        )
    wanted = config.reduce_backend
    if wanted == "auto":
        return

    if wanted == "nccl":
        if not hvd.nccl_built() or not tf.config.get_visible_devices("GPU"):
            raise ValueError(
                "--reduce_backend=nccl: this Horovod has no NCCL, or there is no GPU"
            )
        return

    launched = "mpi" if hvd.mpi_enabled() else "gloo"
    if wanted != launched:
        raise ValueError(
            f"--reduce_backend={wanted}: start the run with horovodrun --{wanted}"
        )


def arguments(config: Settings, variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """What hvd.DistributedGradientTape takes besides `op`, for gradients of `variables`.

    With --deterministic all gradients are one group, one message with a fixed layout: fusion by
    arrival time would change which bytes share a ring chunk, and so the order of additions. With
    --jit no gradient is known before all are: one group needs one operation. It has one type.

    On GPUs sparse gradients become dense before they are summed. Otherwise each rank would add the
    gathered rows by itself, in the order in which its GPU's threads come, and weights would part.
    """
    where = device(config)
    has_one_type = len({raw(variable).dtype for variable in variables}) == 1
    is_one_group = config.deterministic or (config.jit and has_one_type)
    return {
        "device_dense": where,
        "device_sparse": where,
        "compression": _compression(config),
        "groups": 1 if is_one_group else None,
        # Horovod refuses a group of sparse and dense ones.
        "sparse_as_dense": is_one_group or bool(gpu()),
    }


def _compression(config: Settings) -> Any:
    if config.compression == "fp16":
        return compression.ScaledFloat16(device(config))
    return hvd.Compression.none


def device(config: Settings) -> str:
    """Where Horovod reduces; "": where the tensor is."""
    return "/cpu:0" if config.reduce_backend in ("gloo", "mpi") else ""


@contextlib.contextmanager
def refuse_empty_group() -> Iterator[None]:
    """Turns what Horovod raises at a group without any gradient into a sentence."""
    try:
        yield
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "/horovod/" in frames[-1].filename and "unpack" in str(error):
            raise ValueError(NO_GRADIENTS) from error
        raise


def needs_own_step(config: Settings, variables: Sequence[keras.Variable]) -> str:
    """What hvd.DistributedGradientTape cannot send, a flag or weights; "" where there is none."""
    flags = ["virtual_ranks", "pack_bytes", "gradient_groups"]
    if config.compression == "bf16":
        flags = ["compression"]
    for flag in flags:
        value = getattr(config, flag)
        if value:
            return f"--{flag}={value}"

    for variable in variables:
        if overwritten(variable):
            return f"{variable.path}, which its gradient overwrites (as in float8),"

    kinds = {raw(v).dtype.name: v.path for v in variables}
    if config.deterministic and len(kinds) > 1:
        return f"--deterministic with weights of several types ({kinds})"
    return ""


def check_make_step(make: Callable, why: str) -> None:
    """Raises ValueError where `make` is not the template's: the engine's step would ignore it.

    `why`: what `needs_own_step` found.
    """
    if is_template(make):
        return
    raise ValueError(
        f"{why} brings a step of the engine's own, and make_step in train.py is not the "
        "template's: leave it out, or use the template's make_step"
    )


def is_template(make: Callable) -> bool:
    """Whether it is the template's make_step, but for comments."""
    try:
        return _digest(inspect.getsource(make)) == _TEMPLATE_STEP
    except (OSError, TypeError, SyntaxError):
        return False  # it has no source of its own, like a lambda or a partial


def _digest(source: str) -> str:
    """Of code without comments, docstrings and annotations."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        if isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def split(
    numbers: tf.Tensor, config: Settings, variables: Sequence[keras.Variable]
) -> tf.Tensor:
    """A step's numbers, float64 [n], as they travel.

    Horovod sends what is ready at one time and has one type in one message. So where gradients are
    float32, each number travels as two: a multiple of _PART, and the rest. Whole numbers stay exact
    up to 2**36 in all, on up to 4,096 ranks; others get float32's precision. Not with
    --deterministic: what arrives first would change the layout of the gradients' message.
    """
    if config.deterministic or any(raw(v).dtype != tf.float32 for v in variables):
        return numbers

    # tf.floor would make -4096 + 4095.9 of -0.1.
    high = tf.cast(tf.round(numbers / _PART), tf.float32)
    rest = tf.cast(numbers - _PART * tf.cast(high, tf.float64), tf.float32)
    rest = tf.where(tf.math.is_finite(high), rest, high)  # or inf - inf would be NaN
    return tf.stack([high, rest])


def join(received: tf.Tensor) -> tf.Tensor:
    """The numbers, float64 [n], of what `split` made, summed over ranks or not."""
    if received.dtype == tf.float64:
        return received
    parts = tf.cast(received, tf.float64)
    return _PART * parts[0] + parts[1]


def rank_sums(
    gradients: Gradients, config: Settings, variables: Sequence[keras.Variable]
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """This rank's gradients of `variables` summed over ranks, in messages as flags say.

    What overwrites its variable becomes the largest over ranks: float8's amax.
    """
    overwriting = {}
    summed = list(gradients)
    for place, gradient in enumerate(gradients):
        if gradient is not None and overwritten(variables[place]):
            overwriting[place] = gradient
            summed[place] = None

    if config.compression == "bf16":
        sums = _sums_as_bfloat16(summed, device(config))
    else:
        sums = _sums_in_groups(summed, config, variables)

    if overwriting:
        flat = [tf.reshape(tf.cast(g, tf.float64), [-1]) for g in overwriting.values()]
        largest = hvd.allreduce(
            tf.concat(flat, 0),
            op=hvd.Max,
            name="grads.overwriting",
            device_dense=device(config),
        )
        parts = tf.split(largest, [part.shape[0] for part in flat])
        for (place, gradient), part in zip(overwriting.items(), parts):
            sums[place] = tf.cast(tf.reshape(part, gradient.shape), gradient.dtype)
    return sums


def _sums_in_groups(
    gradients: Gradients, config: Settings, variables: Sequence[keras.Variable]
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Only known gradients show which variables have one: Horovod's tape fails on empty groups."""
    sums = list(gradients)
    if hvd.size() == 1:
        return sums

    where = device(config)
    wire_format = _compression(config)
    asked_for_groups = config.pack_bytes or config.gradient_groups
    if not (config.deterministic or config.jit or asked_for_groups):
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                if gpu():  # `arguments` says why.
                    gradient = tf.convert_to_tensor(gradient)
                sums[place] = hvd.allreduce(
                    gradient,
                    op=hvd.Sum,
                    name=f"grad_{place}",
                    device_dense=where,
                    device_sparse=where,
                    compression=wire_format,
                    ignore_name_scope=True,
                )
        return sums

    for number, group in enumerate(_groups(gradients, config, variables)):
        parts = hvd.grouped_allreduce(
            [tf.convert_to_tensor(gradients[place]) for place in group],
            op=hvd.Sum,
            name=f"grad_{number}",
            device_dense=where,
            device_sparse=where,
            compression=wire_format,
            ignore_name_scope=True,
        )
        for place, part in zip(group, parts):
            sums[place] = part
    return sums


def _groups(
    gradients: Gradients, config: Settings, variables: Sequence[keras.Variable]
) -> list[list[int]]:
    """Places of gradients of one type that travel in one message."""
    by_type: dict[tf.DType, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            by_type.setdefault(gradient.dtype, []).append(place)

    of_one_type = list(by_type.values())
    if config.deterministic:
        return of_one_type
    if config.pack_bytes:
        return _small_ones_together(of_one_type, config, variables)
    if config.gradient_groups:
        groups = []
        for places in of_one_type:
            groups += split_list(places, min(config.gradient_groups, len(places)))
        return groups
    return of_one_type


def _small_ones_together(
    places_by_type: list[list[int]],
    config: Settings,
    variables: Sequence[keras.Variable],
) -> list[list[int]]:
    """--pack_count gradients of at most --pack_bytes in a message, larger ones alone.

    As tf_cnn_benchmarks has it: agg_small_grads_max_bytes, agg_small_grads_max_group.
    """
    groups = []
    large = []
    for places in places_by_type:
        small = []
        for place in places:
            value = variables[place].value
            size = value.shape.num_elements() * value.dtype.size
            if size <= config.pack_bytes:
                small.append(place)
            else:
                large.append(place)
        for first in range(0, len(small), config.pack_count):
            groups.append(small[first : first + config.pack_count])
    return groups + [[place] for place in sorted(large)]


def _sums_as_bfloat16(gradients: Gradients, where: str) -> list[tf.Tensor | None]:
    """Sums over ranks in one message of bfloat16: half the bytes on the wire, float32's range.

    `where`: the device on which Horovod exchanges, "" for that of the gradients.

    Horovod 0.28.1 reduces no bfloat16, so it only carries the bits: a rank gets its share of the
    vector from all others, adds them in float32, and sends the sum to all. That moves the bytes of
    a ring allreduce. A gradient is rounded before it travels, a sum once. One rank rounds nothing.
    """
    dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    if hvd.size() > 1 and dense:
        dense = _dense_sums_as_bfloat16(dense, where)
    sums = iter(dense)
    return [None if gradient is None else next(sums) for gradient in gradients]


def _dense_sums_as_bfloat16(gradients: list[tf.Tensor], where: str) -> list[tf.Tensor]:
    ranks = hvd.size()
    sizes = [gradient.shape.num_elements() for gradient in gradients]
    share = math.ceil(sum(sizes) / ranks)  # numbers that each rank adds up
    padding = share * ranks - sum(sizes)

    flat = [tf.cast(tf.reshape(g, [-1]), tf.bfloat16) for g in gradients]
    bits = tf.bitcast(tf.pad(tf.concat(flat, 0), [[0, padding]]), tf.int16)
    splits = [share for _ in range(ranks)]
    with tf.device(where):
        received, _ = hvd.alltoall(bits, splits=splits, name="grads.parts")

    parts = tf.bitcast(tf.reshape(received, [ranks, share]), tf.bfloat16)
    share_sum = tf.reduce_sum(tf.cast(parts, tf.float32), axis=0)
    bits = tf.bitcast(tf.cast(share_sum, tf.bfloat16), tf.int16)
    with tf.device(where):
        gathered = hvd.allgather(bits, name="grads.sums")

    sums = tf.split(tf.bitcast(gathered, tf.bfloat16)[: sum(sizes)], sizes)
    return [tf.reshape(tf.cast(s, g.dtype), g.shape) for g, s in zip(gradients, sums)]
