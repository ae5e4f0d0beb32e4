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
_QUANTILE = 2.262157  # 97.5 % of Student's t with WINDOWS - 1 = 9 degrees of freedom


def window_ends(first_step: int, num_steps: int) -> range:
    """The last step of warm-up, and of each window; empty: too few steps.

    Warm-up is the first tenth (5 to 100 steps), and what does not fill windows of equal length.
    """
    steps = num_steps - first_step
    window = (steps - min(max(steps // 10, 5), 100)) // WINDOWS
    return (
        range(num_steps - WINDOWS * window, num_steps + 1, window)
        if window > 0
        else range(0)
    )


def spread(rates: Sequence[float]) -> dict[str, Any]:
    """Mean with its 95 % interval (Student's t), median and jitter of WINDOWS windows' rates.

    Jitter is 1.4826 times the median absolute deviation, as in tf_cnn_benchmarks (get_perf_timing).
    """
    mean = float(np.mean(rates))
    median = float(np.median(rates))
    half = _QUANTILE * float(np.std(rates, ddof=1)) / math.sqrt(WINDOWS)
    jitter = 1.4826 * float(np.median(np.abs(np.subtract(rates, median))))
    return {
        "mean": mean,
        "interval_95": [mean - half, mean + half],
        "median": median,
        "jitter": jitter,
    }


def table(record: Mapping[str, Any]) -> str:
    """The figures as lines of text."""
    shares = record["shares_of_a_step"]
    by_rank = record["by_rank"]
    waits = [rank["input"] for rank in by_rank]
    host_bytes = max(rank["host_peak_bytes"] for rank in by_rank)
    gpu_bytes = max(rank["gpu_peak_bytes"] or 0 for rank in by_rank)
    memory = f"host {host_bytes / 2**30:.2f} GiB"
    if gpu_bytes:
        memory += f", GPU {gpu_bytes / 2**30:.2f} GiB"
    rows = {
        "benchmark": f"{record['windows']} windows of {record['steps_a_window']} steps after "
        f"{record['warm_up_steps']}, {record['ranks']} rank(s) ({record['device']})",
        "a step": f"{record['seconds_a_step'] * 1e3:.4g} ms, {record['global_batch_size']} samples",
        "samples/s, in all": _rates(record["samples_per_second"]),
        "samples/s, a rank": _rates(record["samples_per_second_a_rank"]),
        "input wait": f"{shares['input']:.1%} of a step; rank {waits.index(max(waits))} has most, "
        f"{max(waits):.1%}",
        "bookkeeping": f"{shares['bookkeeping']:.2%} of a step",
        "peak memory of a rank": memory,
        "model FLOPs": _operations(record["model_flops"]),
    }
    alone = record["seconds_of_reduction_alone"]
    if alone is not None:
        rows["sum of gradients, alone"] = (
            f"{alone * 1e3:.3g} ms, {shares['reduction_alone']:.1%} of a step, part of it "
            "behind the backward pass"
        )
    return "\n".join(f"{name:<25}{text}" for name, text in rows.items())


def _rates(rates: Mapping[str, Any]) -> str:
    low, high = rates["interval_95"]
    return (
        f"mean {rates['mean']:.4g} (95 % interval {low:.4g} to {high:.4g}), median "
        f"{rates['median']:.4g}, jitter {rates['jitter']:.2g}"
    )


def _operations(flops: Mapping[str, Any]) -> str:
    if "not_counted" in flops:
        return f"not counted: {flops['not_counted']}"
    line = (
        f"{_short(flops['forward_a_sample'])} a sample forward, "
        f"{_short(flops['training_a_sample'])} in training (3 x forward); "
        f"{_short(flops['a_second_a_rank'])} a second on a rank"
    )
    if "utilization" in flops:
        line += (
            f" = {flops['utilization']:.1%} of the device's {_short(flops['peak_a_second'])} "
            f"({flops['peak_of']})"
        )
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
            inner = 0
            for value in op.node_def.attr.values():
                for function in (value.func, *value.list.func):
                    if function.name:
                        inner += graph_flops(graph._get_function(function.name).graph)
            if inner and not op.type.endswith("PartitionedCall"):
                raise NotCounted(
                    f"{op.type} ({op.name}): the number of its iterations is unknown"
                )
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
    kernel = _shape(op.inputs[1])
    kernel = kernel[:2] if "Depthwise" in op.type else kernel[:-1]
    return math.prod(_shape(numbers) + kernel)


def _matrices(op: tf.Operation) -> int:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return (
        math.prod(_shape(op.outputs[0]))
        * _shape(op.inputs[0])[-2 if transposed else -1]
    )


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
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _convolution,
    "Conv2DBackpropInput": _convolution,
    "Conv3DBackpropInputV2": _convolution,
    "DepthwiseConv2dNativeBackpropInput": _convolution,
    "MatMul": _matrices,
    "BatchMatMul": _matrices,
    "BatchMatMulV2": _matrices,
    "BatchMatMulV3": _matrices,
    "Einsum": _einsum,
}
_OPAQUE = {
    "CudnnRNN",
    "CudnnRNNV2",
    "CudnnRNNV3",
    "XlaCallModule",
    "PyFunc",
    "EagerPyFunc",
}


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
    r"H[12]00 NVL": (60.0, 417.5, 835.5, 835.5),
    r"(H100 80GB HBM3|H200(?! NVL))": (67.0, 494.5, 989.5, 989.5),  # SXM
}


def peak(device: str, precision: str) -> tuple[float, str] | None:
    """Peak operations a second, and their type; None if unknown, as of a part of a GPU (MIG)."""
    peaks = [row for name, row in _PEAKS.items() if re.search(rf"\b{name}\b", device)]
    if len(peaks) != 1 or "MIG" in device or precision == "float64":
        return None
    teraflops = dict(
        zip(("float32", "TF32", "bfloat16", "float16"), peaks[0], strict=True)
    )
    used = precision
    if precision == "float32" and teraflops["TF32"]:
        # TensorFlow uses TF32 unless it is told not to.
        is_on = tf.config.experimental.tensor_float_32_execution_enabled()
        if is_on and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            used = "TF32"
    peak_of_type = teraflops[used]
    return (peak_of_type * 1e12, used) if peak_of_type else None
