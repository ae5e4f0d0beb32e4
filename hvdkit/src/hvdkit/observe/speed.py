"""Figures of --benchmark: rates from windows of steps, model FLOPs, a GPU's peak, and their table.

Matrix products and convolutions are counted, a multiplication and an addition as two operations:
the model FLOPs of Chowdhery et al. 2022 (arXiv:2204.02311, appendix B), whose share of the device's
peak is the model FLOPs utilization. All else in a network is a few per cent and is left out there
too.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WINDOWS = 10
FEWEST = 15  # steps: 5 of warm-up, and windows of one step
TRAINING = 3  # forward passes that a training step counts as (in that paper)
_T = 2.262157  # 97.5 % quantile of Student's t with WINDOWS - 1 = 9 degrees of freedom


def window_ends(first_step: int, num_steps: int) -> range:
    """The last step of warm-up, and of each window; empty: too few steps.

    Warm-up is the first tenth (5 to 100 steps), and what does not fill windows of equal length.
    """
    steps = num_steps - first_step
    window = (steps - min(max(steps // 10, 5), 100)) // WINDOWS
    return range(num_steps - WINDOWS * window, num_steps + 1, window) if window > 0 else range(0)


def spread(rates: Sequence[float]) -> dict[str, Any]:
    """Mean with its 95 % interval (Student's t), median and jitter of WINDOWS windows' rates.

    Jitter is 1.4826 times the median absolute deviation, as in tf_cnn_benchmarks (get_perf_timing).
    """
    mean = float(np.mean(rates))
    median = float(np.median(rates))
    half = _T * float(np.std(rates, ddof=1)) / math.sqrt(WINDOWS)
    jitter = 1.4826 * float(np.median(np.abs(np.subtract(rates, median))))
    interval = [mean - half, mean + half]
    return {"mean": mean, "interval_95": interval, "median": median, "jitter": jitter}


def table(record: Mapping[str, Any]) -> str:
    """The figures as lines of text."""
    shares = record["shares_of_a_step"]
    by_rank = record["by_rank"]
    waits = [own["input"] for own in by_rank]
    host = max(own["host_peak_bytes"] for own in by_rank)
    gpu = max(own["gpu_peak_bytes"] or 0 for own in by_rank)
    rows = {
        "benchmark": f"{record['windows']} windows of {record['steps_a_window']} steps after "
        f"{record['warm_up_steps']}, {record['ranks']} rank(s) ({record['device']})",
        "a step": f"{record['seconds_a_step'] * 1e3:.4g} ms, {record['global_batch_size']} samples",
        "samples/s, in all": _rates(record["samples_per_second"]),
        "samples/s, a rank": _rates(record["samples_per_second_a_rank"]),
        "input wait": f"{shares['input']:.1%} of a step; rank {waits.index(max(waits))} has most, "
        f"{max(waits):.1%}",
        "bookkeeping": f"{shares['bookkeeping']:.2%} of a step",
        "peak memory of a rank": f"host {host / 2**30:.2f} GiB"
        + f", GPU {gpu / 2**30:.2f} GiB" * bool(gpu),
        "model FLOPs": _operations(record["model_flops"]),
    }
    if (alone := record["seconds_of_reduction_alone"]) is not None:
        rows["sum of gradients, alone"] = (
            f"{alone * 1e3:.3g} ms, {shares['reduction_alone']:.1%} of a step, part of it "
            "behind the backward pass"
        )
    return "\n".join(f"{name:<25}{text}" for name, text in rows.items())


def _rates(found: Mapping[str, Any]) -> str:
    low, high = found["interval_95"]
    return (
        f"mean {found['mean']:.4g} (95 % interval {low:.4g} to {high:.4g}), median "
        f"{found['median']:.4g}, jitter {found['jitter']:.2g}"
    )


def _operations(found: Mapping[str, Any]) -> str:
    if "not_counted" in found:
        return f"not counted: {found['not_counted']}"
    line = (
        f"{_short(found['forward_a_sample'])} a sample forward, "
        f"{_short(found['training_a_sample'])} in training (3 x forward); "
        f"{_short(found['a_second_a_rank'])} a second on a rank"
    )
    if "utilization" in found:
        most = _short(found["peak_a_second"])
        line += f" = {found['utilization']:.1%} of the device's {most} ({found['peak_of']})"
    return line


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:.0f}"


class NotCounted(Exception):
    """The graph has no fixed number of operations; the message says why."""


def forward_flops(model: keras.Model, inputs: Any) -> int:
    """Operations of model(inputs, training=True), which is traced but not run.

    Raises NotCounted for a loop, as of a recurrent layer, or a shape that is not fixed.
    """
    traced = tf.function(lambda x: model(x, training=True), autograph=False)
    return graph_flops(traced.get_concrete_function(inputs).graph)


def graph_flops(graph: tf.Graph) -> int:
    """Operations of a graph and of the functions that it calls. Raises NotCounted."""
    total = 0
    for op in graph.get_operations():
        if op.type in _PRODUCTS:
            total += 2 * _PRODUCTS[op.type](op)
        elif op.type in _OPAQUE:
            raise NotCounted(f"{op.type} ({op.name}) does not say what it computes")
        else:
            values = op.node_def.attr.values()
            names = [part.name for v in values for part in (v.func, *v.list.func) if part.name]
            inner = sum(graph_flops(graph._get_function(name).graph) for name in names)
            if inner and not op.type.endswith("PartitionedCall"):
                raise NotCounted(f"{op.type} ({op.name}): the number of its iterations is unknown")
            total += inner
    return total


def _out(op: tf.Operation) -> tf.Tensor:
    """The output of a convolution, without the ops that TensorFlow adds around a dilated one."""
    after = op.outputs[0].consumers()
    moved_back = len(after) == 1 and after[0].type == "BatchToSpaceND"
    return after[0].outputs[0] if moved_back else op.outputs[0]


def _convolution(op: tf.Operation) -> int:
    """For each output number, the filter's height, width and, unless depthwise, input channels.

    A transposed convolution: for each input number.
    """
    numbers = op.inputs[2] if "Backprop" in op.type else _out(op)
    of_filter = slice(2) if "Depthwise" in op.type else slice(-1)
    return math.prod(_shape(numbers) + _shape(op.inputs[1])[of_filter])


def _matrices(op: tf.Operation) -> int:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return math.prod(_shape(op.outputs[0])) * _shape(op.inputs[0])[-2 if transposed else -1]


def _einsum(op: tf.Operation) -> int:
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs):
        shape = _shape(tensor)
        before, dots, after = term.partition("...")
        unnamed = len(shape) - len(before) - len(after) if dots else 0
        # Counted from the right: one of two inputs may have fewer dimensions.
        names = [*before, *(f"...{unnamed - i}" for i in range(unnamed)), *after]
        for name, size in zip(names, shape):
            sizes[name] = max(size, sizes.get(name, 1))  # 1 is broadcast
    return math.prod(sizes.values())


# Multiply-adds of an operation, by its type.
_PRODUCTS: dict[str, Callable[[tf.Operation], int]] = {
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _convolution),
    "DepthwiseConv2dNativeBackpropInput": _convolution,
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrices),
    "Einsum": _einsum,
}
_OPAQUE = {"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "XlaCallModule", "PyFunc", "EagerPyFunc"}


def _shape(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise NotCounted(f"{tensor.op.name} has no fixed shape: {tensor.shape}")
    return tensor.shape.as_list()


# TFLOPS: float32, TF32, bfloat16, float16 (tensor cores); None: not supported. From NVIDIA's data
# sheets, dense: half of a figure that is given with sparsity.
_PEAKS: dict[str, tuple[float | None, ...]] = {
    r"V100-PCIE": (14.0, None, None, 112.0),
    r"V100-SXM2": (15.7, None, None, 125.0),
    r"V100S-PCIE": (16.4, None, None, 130.0),
    r"T4": (8.1, None, None, 65.0),
    r"A10": (31.2, 62.5, 125.0, 125.0),
    r"A30": (10.3, 82.0, 165.0, 165.0),
    r"A100": (19.5, 156.0, 312.0, 312.0),
    r"L4": (30.3, 60.0, 121.0, 121.0),
    r"L40S": (91.6, 183.0, 362.0, 362.0),
    r"H100 PCIe": (51.0, 378.0, 756.5, 756.5),
    r"H100 NVL": (60.0, 417.5, 835.5, 835.5),
    r"H100 80GB HBM3": (67.0, 494.5, 989.5, 989.5),  # SXM
    r"H200 NVL": (60.0, 417.5, 835.5, 835.5),
    r"H200(?! NVL)": (67.0, 494.5, 989.5, 989.5),  # SXM
}


def peak(device: str, precision: str) -> tuple[float, str] | None:
    """Peak operations a second, and their type; None if unknown, as of a part of a GPU (MIG)."""
    found = [row for name, row in _PEAKS.items() if re.search(rf"\b{name}\b", device)]
    if len(found) != 1 or "MIG" in device or precision == "float64":
        return None
    types = dict(zip(("float32", "TF32", "bfloat16", "float16"), found[0], strict=True))
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()  # TensorFlow's default
    tf32 = tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0" and types["TF32"]
    used = "TF32" if precision == "float32" and tf32 else precision
    return (types[used] * 1e12, used) if types[used] else None
