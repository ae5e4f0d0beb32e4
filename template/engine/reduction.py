"""How gradients travel: grouping and packing, and the knobs of Horovod that flags turn.

What tf_cnn_benchmarks' all-reduce offered on one machine, flag by flag; docs/reduction.md has
the table. Knobs are environment variables that Horovod reads when it starts.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from config import Config

_MIB = 1 << 20


class BFloat16Compressor:
    """Gradients travel as bfloat16: half the bytes, float32's range, 8 bits of mantissa."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        wire = tf.cast(tensor, tf.bfloat16) if tensor.dtype.is_floating else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


_COMPRESSORS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": BFloat16Compressor,
}


def environment(config: Config) -> dict[str, str]:
    """Horovod's environment variables for the flags that were set; read by hvd.init."""
    knobs = {}
    if config.fusion_threshold_mb >= 0:
        knobs["HOROVOD_FUSION_THRESHOLD"] = str(config.fusion_threshold_mb * _MIB)
    if config.cycle_time_ms >= 0:
        knobs["HOROVOD_CYCLE_TIME"] = str(config.cycle_time_ms)
    if config.cache_capacity >= 0:
        knobs["HOROVOD_CACHE_CAPACITY"] = str(config.cache_capacity)
    if config.hierarchical_allreduce:
        knobs["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
    if config.hierarchical_allgather:
        knobs["HOROVOD_HIERARCHICAL_ALLGATHER"] = "1"
    if config.reduce_backend in ("gloo", "mpi"):
        knobs["HOROVOD_CPU_OPERATIONS"] = config.reduce_backend
    if config.autotune:
        knobs["HOROVOD_AUTOTUNE"] = "1"
        knobs["HOROVOD_AUTOTUNE_LOG"] = str(autotune_log(config))
    return knobs


def tape_settings(config: Config, variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """How hvd.DistributedGradientTape is to reduce the gradients of `variables`.

    Sums, not means: shares and valid-pixel counts differ between ranks, so the one division, by
    the global count, comes after (`gradients.unscale`).
    """
    groups: Any = config.gradient_groups or None
    if config.deterministic:
        # One group is one message with a fixed layout: fusion by arrival time would change
        # which bytes share a ring chunk, and with it the order of additions.
        groups = 1
    elif config.pack_bytes:
        groups = pack(variables, config.pack_bytes, config.pack_count)
    return {
        "op": hvd.Sum,
        "compression": _COMPRESSORS[config.compression],
        "groups": groups,
        "sparse_as_dense": groups is not None,  # a group of sparse and dense ones is refused
    }


def pack(
    variables: Sequence[keras.Variable], max_bytes: int, max_count: int
) -> list[list[tf.Variable]]:
    """Small variables in packs of at most `max_count`, in order; the others travel alone.

    The packing of tf_cnn_benchmarks (agg_small_grads_max_bytes, agg_small_grads_max_group):
    small is a gradient of at most `max_bytes`.
    """
    small = [v.value for v in variables if _bytes(v) <= max_bytes]
    return [small[i : i + max_count] for i in range(0, len(small), max_count)]


def autotune_log(config: Config) -> Path:
    return Path(config.run_dir).absolute() / "autotune.csv"


def write_autotuned(config: Config) -> Path | None:
    """Writes the best setting that Horovod's autotuner logged as a flagfile; None if it has none.

    The log's columns are those of Horovod's ParameterManager: switches, cycle time (ms), fusion
    threshold (MiB), score (bytes a microsecond, higher is better).
    """
    log = autotune_log(config)
    if not log.exists():
        return None
    rows = [row for row in csv.DictReader(log.open()) if row.get("score")]
    if not rows:
        return None
    best = max(rows, key=lambda row: float(row["score"]))
    path = Path(config.run_dir) / "autotune.cfg"
    path.write_text(
        "# Found by --autotune; use it: train.py --flagfile=... --flagfile=THIS_FILE\n"
        "--noautotune\n"
        f"--fusion_threshold_mb={round(float(best['tensor_fusion_threshold']))}\n"
        f"--cycle_time_ms={best['cycle_time_ms']}\n"
        f"--{_switch(best['hierarchical_allreduce'])}hierarchical_allreduce\n"
        f"--{_switch(best['hierarchical_allgather'])}hierarchical_allgather\n"
    )
    return path


def _switch(value: str) -> str:
    return "" if float(value) else "no"


def _bytes(variable: keras.Variable) -> int:
    return variable.value.shape.num_elements() * variable.value.dtype.size
