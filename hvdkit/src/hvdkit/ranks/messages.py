"""What ranks send each other outside of a step, in collectives whose cost does not grow with them.

Outside a graph Horovod gives all collectives of a kind one name. So every exchange begins with the
same one (`most`), by which `World` sees that all ranks are at the same place, and the next may be
of any kind and length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.ranks import heartbeat

_PART = 2**22  # bytes of one message
_LENGTH = 8  # bytes of a number before each rank's object


def most(numbers: Sequence[int]) -> list[int]:
    """The largest of each number over the ranks; as many on all of them, each less than 2^63."""
    with tf.device("CPU:0"):
        found = hvd.allreduce(tf.constant(numbers, tf.int64), op=hvd.Max, name="messages.most")
    heartbeat.beat()
    return found.numpy().tolist()


def gather(value: Any, size: int) -> list[Any]:
    """Every rank's picklable `value`, in rank order: one collective, in which lengths travel."""
    content = cloudpickle.dumps(value)
    own = np.frombuffer(len(content).to_bytes(_LENGTH, "big") + content, np.uint8)
    with tf.device("CPU:0"):
        together = hvd.allgather(own, name="messages.gather").numpy().data
    heartbeat.beat()
    found, start = [], 0
    for _ in range(size):
        begin = start + _LENGTH
        start = begin + int.from_bytes(together[start:begin], "big")
        found.append(cloudpickle.loads(together[begin:start]))
    return found


def pickled(value: Any) -> np.ndarray:
    return np.frombuffer(cloudpickle.dumps(value), np.uint8)


def unpickled(content: np.ndarray) -> Any:
    return cloudpickle.loads(content.data)


def fill(array: np.ndarray, own: bool, root: int = 0) -> None:
    """Gives an array the values that rank `root`'s has, in parts; `own`: this is that rank."""
    data = array.reshape(-1).view(np.uint8)
    for start in range(0, data.size, _PART):
        part = data[start : start + _PART]
        with tf.device("CPU:0"):  # it may be more than a GPU has room for
            sent = hvd.broadcast(part, root_rank=root, name="messages.fill")
        if not own:
            part[:] = sent
        heartbeat.beat()


def digest(text: str) -> int:
    """63 bits of a text; of two texts they differ but for one case in 10^19."""
    found = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(found, "big") >> 1


class Aside(NamedTuple):
    """In place of an object whose arrays travel by themselves."""

    kind: type
    forms: list[tuple[tuple[int, ...], np.dtype]]  # shape and type of each array


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples anew, with `change` applied to what is in them."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, Aside) or not isinstance(value, (list, tuple)):
        return change(value)
    items = [mapped(item, change) for item in value]
    named = hasattr(value, "_fields")  # a NamedTuple takes its parts one by one
    return type(value)(*items) if named else type(value)(items)
