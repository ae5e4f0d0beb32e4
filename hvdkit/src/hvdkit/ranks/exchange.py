"""Sums over ranks within a step whose order the graph fixes: batch norm's of --bn_sync=full.

Horovod's ranks negotiate which sum comes next, and each waits for the next cycle. The operation of
exchange.cc does neither. TensorFlow runs operations that take the same resource in the order of the
program, in functions and loops too, so that all ranks make the same calls in the same order. Where
set-up did not compile it, and on GPUs, Horovod sums.
"""

import ctypes
import fcntl
import functools
import os
import sys
from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.ranks import messages
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World

# With HVDKIT_EXCHANGE=horovod Horovod sums, for comparisons.
_VARIABLE = "HVDKIT_EXCHANGE"
_MOST = 32 << 10  # numbers of one tensor; exchange.cc knows it too


# The operation, with the resource that orders its calls; None on all ranks where Horovod sums.
in_use: Callable[..., tf.Tensor] | None = None


def is_expected() -> bool:
    """Whether the operation will carry the sums, as far as a rank knows before it meets others.

    Horovod was built with NCCL for GPUs, and there it carries the sums itself.
    """
    is_compiled = os.path.exists(library_file()) and not os.environ.get(_VARIABLE)
    return is_compiled and not hvd.nccl_built()


def start(world: World, seconds: int) -> None:
    """Has this run's ranks use the operation, if all of them can; every rank must call it.

    In memory where all are on one host, else over MPI. A call waits for another rank for so many
    seconds before it fails; 0: for ever.
    """
    global in_use
    in_use = None
    if world.size == 1 or any(world.gather_alike(world_lib.gpu(), "exchange.gpu")):
        return
    carrier = world.carrier
    one_host = world.local_size == world.size
    fault = ""
    file = -1
    communicator = None
    try:
        operation, library = _load()
        if one_host and world.is_chief:
            file = _memory(library.hvdkit_exchange_bytes(world.size))
        if not one_host and not isinstance(carrier, messages.Mpi):
            raise ValueError("between hosts the operation takes MPI")
    except (OSError, ValueError, tf.errors.OpError) as error:
        fault = str(error)
    if not _all_can(world, fault, "exchange.library"):
        return
    try:
        if one_host:
            file = _shared(world, file)
        elif isinstance(carrier, messages.Mpi):
            communicator = ctypes.c_void_p(carrier.communicator())
        number = library.hvdkit_exchange_open(
            file, communicator, world.rank, world.size, seconds
        )
        if number:
            raise OSError(number, os.strerror(number))
    except (OSError, ValueError) as error:
        fault = str(error)
    if _all_can(world, fault, "exchange.open"):
        # A handle alone: no operation reads what it leads to.
        order = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], shared_name="hvdkit.exchange"
        )
        in_use = functools.partial(operation, order=order)


def over_ranks(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sum of `tensor` over ranks, which all call it in the same order; without a gradient.

    `name` is the same on every rank. More than two ranks add in the order of ranks, but for MPI
    between hosts, which has an order of its own, the same each time.
    """
    if in_use is None or not _is_small(tensor) or not _keeps_order():
        return hvd.allreduce(tensor, op=hvd.Sum, name=name)
    return in_use(x=tensor, tensor_name=name, name=name)


def library_file() -> str:
    """Where set-up leaves the operation: it fits this environment's TensorFlow and MPI only."""
    return f"{sys.prefix}/lib/hvdkit-exchange.so"


def _is_small(tensor: tf.Tensor) -> bool:
    count = tensor.shape.num_elements()
    return tensor.dtype == tf.float64 and count is not None and count <= _MOST


def _keeps_order() -> bool:
    """Whether what is made now runs in the order of the program.

    In the graph of the gradient of a tf.function that the user's code calls it does not.
    """
    graph = tf.compat.v1.get_default_graph()
    return tf.executing_eagerly() or graph._add_control_dependencies


def _load() -> tuple[Callable[..., tf.Tensor], ctypes.CDLL]:
    """The operation, and the library's functions."""
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        raise ValueError(f"{_VARIABLE}={chosen}")
    if not os.path.exists(library_file()):
        raise ValueError(f"set-up has not compiled {library_file()}")
    # TensorFlow knows only operations that it loads itself, so it comes first.
    operations = tf.load_op_library(library_file())
    return operations.horovod_ordered_allreduce, ctypes.CDLL(library_file())


def _all_can(world: World, fault: str, name: str) -> bool:
    """Whether no rank has a fault; rank 0 says the first one."""
    faults = [fault for fault in world.gather_alike(fault, name) if fault]
    if faults:
        world_lib.say(world, f"note: Horovod sums batch norm's statistics: {faults[0]}")
    return not faults


def _memory(size: int) -> int:
    """A file in memory, without a name, which nobody can shrink."""
    file = os.memfd_create("hvdkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(file, 0o600)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK)
    return file


def _shared(world: World, file: int) -> int:
    """Rank 0's file, opened by this rank: through /proc, where its user alone reaches it."""
    place = []
    if world.is_chief:
        place = [os.getpid(), file, os.fstat(file).st_ino]
    process, number, identity = world.broadcast_object(place, "exchange.memory")
    if not world.is_chief:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(f"/proc/{process}/fd/{number}", flags)
        if os.fstat(file).st_ino != identity:
            raise ValueError("ranks of this host do not see each other's processes")
    # It ends with this process, which others thus see, and no process that it forks has it.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, world.rank)
    return file
