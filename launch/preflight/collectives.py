"""Horovod's collectives: right on every type, and how fast. Every rank calls these together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

KB, MB = 1 << 10, 1 << 20


def clock_differences(hvd: Any, tf: Any) -> np.ndarray:
    """Each rank's clock less rank 0's, in seconds: the smallest of some readings."""
    readings = []
    for number in range(8):
        hvd.allreduce(tf.zeros([1]), name=f"doctor.clock.{number}")  # all leave it together
        now = tf.constant([time.time()], tf.float64)
        times = hvd.allgather(now, name=f"doctor.times.{number}").numpy()
        readings.append(times - times[0])
    readings = np.array(readings)
    return readings[np.abs(readings).argmin(0), np.arange(readings.shape[1])]


def types(op: str) -> list[str]:
    """Types that Horovod registers for the operation."""
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry

    attributes = op_def_registry.get(f"Horovod{op}").attr
    allowed = next(a for a in attributes if a.name == "T").allowed_values.list.type
    return [tf.as_dtype(number).name for number in allowed]


def wrong_results(hvd: Any, tf: Any) -> list[str]:
    """What came out wrong on this rank, by operation and type; empty when all is right."""
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    for op in ("Allreduce", "Allgather", "Broadcast"):
        for dtype in types(op):
            try:
                got, expected = _try(hvd, tf, op, tf.as_dtype(dtype), rank, size)
            except (tf.errors.OpError, RuntimeError, ValueError) as error:
                wrong.append(f"{op.lower()} {dtype}: {str(error).splitlines()[0]}")
                continue
            if got.shape != expected.shape or not np.array_equal(got, expected):
                wrong.append(f"{op.lower()} {dtype}: wrong numbers")
    return wrong


def _try(hvd: Any, tf: Any, op: str, dtype: Any, rank: int, size: int):
    kind, name = dtype.as_numpy_dtype, f"doctor.{op}.{dtype.name}"
    if op == "Allreduce":  # how many ranks leave each remainder
        own = (np.arange(16) == rank % 16).astype(kind)
        expected = np.bincount(np.arange(size) % 16, minlength=16).astype(kind)
        return hvd.allreduce(tf.constant(own), op=hvd.Sum, name=name).numpy(), expected
    if op == "Allgather":  # uneven shares
        shares = [np.full([r % 3 + 1, 2], r % 100).astype(kind) for r in range(size)]
        got = hvd.allgather(tf.constant(shares[rank]), name=name)
        return got.numpy(), np.concatenate(shares)
    root = size - 1
    own = (np.arange(7) + rank % 100).astype(kind)
    expected = (np.arange(7) + root % 100).astype(kind)
    return hvd.broadcast(tf.constant(own), root, name=name).numpy(), expected


def speeds(hvd: Any, tf: Any, largest: int, full: bool) -> list[dict[str, Any]]:
    """Time and bandwidth by size, as nccl-tests define them (its doc/PERFORMANCE.md).

    algbw = bytes / time, time being the mean over ranks; busbw = algbw x 2 (n - 1) / n for
    allreduce, x (n - 1) / n for allgather, where the bytes are those of the result, x 1 for
    broadcast. Sizes go from 1 KB to `largest` bytes, each 4 times the one before.
    """
    rows, size = [], hvd.size()
    factors = {"allreduce": 2 * (size - 1) / size}
    if full:
        factors |= {"allgather": (size - 1) / size, "broadcast": 1.0}
    for op, factor in factors.items():
        count = KB
        while count <= largest:
            seconds = _time(hvd, tf, op, count)
            algbw = count / seconds
            rows.append({"op": op, "bytes": count, "seconds": seconds, "algbw": algbw})
            rows[-1]["busbw"] = algbw * factor
            count *= 4
    return rows


def _time(hvd: Any, tf: Any, op: str, count: int) -> float:
    size = hvd.size()
    share = tf.ones([max(1, count // 4 // (size if op == "allgather" else 1))])
    name = f"doctor.speed.{op}.{count}"
    call = {
        "allreduce": lambda: hvd.allreduce(share, op=hvd.Sum, name=name),
        "allgather": lambda: hvd.allgather(share, name=name),
        "broadcast": lambda: hvd.broadcast(share, 0, name=name),
    }[op]
    call()
    repeats = int(np.clip(16 * MB // count, 3, 20))
    hvd.allreduce(tf.zeros([1]), name=f"{name}.start")
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    result[:1].numpy()  # a GPU has finished
    own = tf.constant([(time.perf_counter() - start) / repeats], tf.float64)
    return float(hvd.allgather(own, name=f"{name}.times").numpy().mean())
