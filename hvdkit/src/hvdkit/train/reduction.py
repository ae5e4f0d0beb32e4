"""How gradients travel: backend, grouping and packing.

docs/gradients.md compares the flags with the options of tf_cnn_benchmarks' all-reduce.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdkit.settings import Settings

_CACHED = 8192  # tensors; beyond its cache (by default 1,024) Horovod negotiates each anew
NO_GRADIENTS = "the loss depends on none of the model's weights"
_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"

# make_step of the template's train.py.
TEMPLATE_STEP = """
def make_step(run):
    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        gradients = tape.gradient(loss, run.weights, use_generic_names=True)
        return run.update(gradients)
    return step
"""

Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]


def environment(config: Settings) -> dict[str, str]:
    """What hvd.init reads; HOROVOD_* that whoever started the run has set come first."""
    knobs = {}
    if "HOROVOD_CACHE_CAPACITY" not in os.environ:
        knobs["HOROVOD_CACHE_CAPACITY"] = str(_CACHED)
    # horovodrun sets 0 by default.
    if config.stall_shutdown_s and os.environ.get(_STALL_SHUTDOWN, "0") == "0":
        knobs[_STALL_SHUTDOWN] = str(config.stall_shutdown_s)
        if config.stall_shutdown_s < 120:  # Horovod looks every minute, and not before that
            knobs["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(1, config.stall_shutdown_s // 2))
    return knobs


def stall_seconds(config: Settings) -> int:
    """How long ranks wait for one that hangs, once Horovod was started; 0: for ever."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0", "False"):
        return 0
    return int(os.environ.get(_STALL_SHUTDOWN) or config.stall_shutdown_s)


def check_backend(config: Settings) -> None:
    """Raises ValueError when the launcher chose another backend than --reduce_backend.

    On GPUs, naming gloo or mpi reduces in host memory.
    """
    wanted = config.reduce_backend
    if wanted == "nccl":
        if not hvd.nccl_built() or not tf.config.get_visible_devices("GPU"):
            raise ValueError("--reduce_backend=nccl: this Horovod has no NCCL, or there is no GPU")
    elif wanted != "auto" and wanted != ("mpi" if hvd.mpi_enabled() else "gloo"):
        raise ValueError(f"--reduce_backend={wanted}: start the run with horovodrun --{wanted}")


def arguments(config: Settings) -> dict[str, Any]:
    """What hvd.DistributedGradientTape takes besides `op`.

    With --deterministic all gradients are one group, one message with a fixed layout: fusion by
    arrival time would change which bytes share a ring chunk, and so the order of additions.
    """
    device = "/cpu:0" if config.reduce_backend in ("gloo", "mpi") else ""
    groups = 1 if config.deterministic else None
    fp16 = config.compression == "fp16"
    return {
        "device_dense": device,
        "device_sparse": device,
        "compression": hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        "groups": groups,
        "sparse_as_dense": groups is not None,  # a group of sparse and dense ones is refused
    }


@contextlib.contextmanager
def refuse_empty_group(config: Settings) -> Iterator[None]:
    """Turns what Horovod raises at a group without any gradient into a sentence."""
    try:
        yield
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if config.deterministic and "/horovod/" in frames[-1].filename and "unpack" in str(error):
            raise ValueError(NO_GRADIENTS) from error
        raise


def needs_own_step(config: Settings) -> str:
    """The flag whose messages hvd.DistributedGradientTape cannot send; "" where there is none."""
    if config.compression == "bf16":
        return "compression"
    flags = ("virtual_ranks", "pack_bytes", "gradient_groups")
    return next((name for name in flags if getattr(config, name)), "")


def check_make_step(make: Callable, settings: Settings) -> None:
    """Raises ValueError where `make` is not the template's: the engine's step would ignore it."""
    try:
        if _form(inspect.getsource(make)) == _form(TEMPLATE_STEP):
            return
    except (OSError, TypeError, SyntaxError):
        pass  # a lambda, a partial: not the template's
    flag = needs_own_step(settings)
    raise ValueError(
        f"--{flag}={getattr(settings, flag)} brings a step of the engine's own, and make_step in "
        f"train.py is not the template's: leave out --{flag}, or use the template's make_step"
    )


def _form(source: str) -> str:
    """Code without comments, docstrings and annotations."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(tree)


def rank_sums(
    own: Gradients, config: Settings, variables: Sequence[keras.Variable]
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """This rank's gradients `own` of `variables` summed over ranks, in messages as flags say.

    Only known gradients show which variables have one: Horovod fails on a group without any.
    """
    if config.compression == "bf16":
        return _sums_as_bfloat16(own)
    sizes = [v.value.shape.num_elements() * v.value.dtype.size for v in variables]
    connected = [i for i, g in enumerate(own) if g is not None]
    if config.deterministic:
        groups = 1
    elif config.pack_bytes:
        # As tf_cnn_benchmarks: agg_small_grads_max_bytes ("at most") and agg_small_grads_max_group.
        small = [_Place(i) for i in connected if sizes[i] <= config.pack_bytes]
        most = config.pack_count
        groups = [small[i : i + most] for i in range(0, len(small), most)]
    else:
        groups = min(config.gradient_groups, len(connected)) or None

    class Known(tf.GradientTape):
        """The base class of Horovod's tape, which reduces what this `gradient` returns."""

        def gradient(self, target, sources, output_gradients=None):
            return own

    own_groups = {"groups": groups, "sparse_as_dense": groups is not None}
    tape = hvd.DistributedGradientTape(Known(), op=hvd.Sum, **arguments(config) | own_groups)
    places = [_Place(i) for i in range(len(own))]
    return tape.gradient(None, places, use_generic_names=True)


def _sums_as_bfloat16(own: Gradients) -> list[tf.Tensor | None]:
    """Sums over ranks in one message of bfloat16: half the bytes on the wire, float32's range.

    Horovod 0.28.1 reduces no bfloat16, so it only carries the bits: every rank gets its part of the
    vector from all others, adds them in float32, and sends the sum to all. That moves the bytes of
    a ring allreduce, and rounds once.
    """
    dense = [tf.convert_to_tensor(g) for g in own if g is not None]
    if hvd.size() > 1 and dense:
        sizes = [g.shape.num_elements() for g in dense]
        flat = tf.concat([tf.cast(tf.reshape(g, [-1]), tf.bfloat16) for g in dense], 0)
        part = -(-sum(sizes) // hvd.size())
        bits = tf.bitcast(tf.pad(flat, [[0, part * hvd.size() - sum(sizes)]]), tf.int16)
        received, _ = hvd.alltoall(bits, splits=[part] * hvd.size(), name="grads.parts")
        parts = tf.bitcast(tf.reshape(received, [hvd.size(), part]), tf.bfloat16)
        total = tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), axis=0), tf.bfloat16)
        total = hvd.allgather(tf.bitcast(total, tf.int16), name="grads.sums")
        total = tf.split(tf.bitcast(total, tf.bfloat16)[: sum(sizes)], sizes)
        dense = [tf.reshape(tf.cast(t, g.dtype), g.shape) for g, t in zip(dense, total)]
    sums = iter(dense)
    return [g if g is None else next(sums) for g in own]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for the variable at a place of the list, in what Horovod's tape asks of one.

    Horovod puts gradients into groups by their variables' names. In a subclassed Keras model those
    repeat, and of two gradients of one name the first would be lost.
    """

    number: int

    @property
    def name(self) -> str:
        return f"variable_{self.number}"

    def ref(self) -> _Place:
        return self

    def deref(self) -> _Place:
        return self
