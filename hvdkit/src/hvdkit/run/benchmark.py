"""--benchmark: measures samples a second, and where a step's time goes, over ten windows of steps.

The first tenth of the steps (5 to 100) is warm-up, and so are steps that do not fill ten windows.
The figures are printed as a table and written to RUN_DIR/benchmark.json.
"""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.observe import speed
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import raw, say
from hvdkit.run.context import RunContext
from hvdkit.run.parts import RunParts
from hvdkit.train.step import graph_checks, reduction
from hvdkit.train.step.step import Result
from hvdkit.train.task import checks as task_checks

_REDUCTIONS = 10  # So many sums of gradients are timed by themselves.


class Benchmark:
    """Reads clocks at the ends of windows, and reports after the last one."""

    # The action waits for the device once a window, so that windows hold whole steps.
    settles = True

    def __init__(self, parts: RunParts) -> None:
        """Every rank must call it; raises Stop, on all, where the model cannot be called."""
        self._parts = parts
        self._run = parts.context
        first_step = parts.start.step
        num_steps = parts.config.num_steps
        self._ends = speed.window_ends(first_step, num_steps)
        # Seconds so far; of them waited for data; and in steps' calls, or waited for such a step.
        self._clocks: list[tuple[float, float, float]] = []
        if not self._ends:
            say(
                parts.world,
                f"note: --benchmark measures no speed in {num_steps - first_step} step(s): "
                f"{speed.WINDOWS} windows need --num_steps={speed.FEWEST + first_step} or more",
            )
            return
        self._warm_up = self._ends[0] - first_step
        self._flops = {}
        with (
            parts.world.fail_together("counting the model's operations"),
            task_checks.user_code_errors("the model"),
        ):
            if parts.world.is_chief:
                self._flops = count_operations(parts.context, parts.feed.spec)

    def due(self, step: int) -> bool:
        return step in self._ends

    def __call__(self, step: int, result: Result) -> None:
        in_step = self._parts.seconds_in_steps + self._parts.health.waited
        self._clocks.append((time.perf_counter(), self._parts.feed.waited, in_step))
        if step != self._ends[-1]:
            return
        world = self._run.world
        everyone = world.gather_objects(self._of_this_rank(), "benchmark.figures")
        if world.is_chief:
            record = self._record(everyone)
        path = Path(self._run.config.run_dir) / "benchmark.json"
        with world.fail_together("writing benchmark.json"):
            if world.is_chief:
                whole_files.write_json(path, record)
                say(world, f"{speed.table(record)}\nwritten: {path}")

    def _of_this_rank(self) -> dict[str, Any]:
        """This rank's figures. Every rank must call it: gradients are summed in it."""
        on_host, on_gpu = peak_bytes()
        device = "CPU"
        gpus = tf.config.get_visible_devices("GPU")
        if gpus:
            details = tf.config.experimental.get_device_details(gpus[0])
            device = details.get("device_name", "GPU")
        samples_a_micro_batch = tf.nest.flatten(self._parts.feed.spec)[0].shape[1]
        samples_a_step = samples_a_micro_batch * self._run.config.accumulation_steps
        clocks = np.array(self._clocks)
        whole, waited, in_step = (clocks[-1] - clocks[0]).tolist()
        return {
            "host": world_lib.hostname(),
            "device": device,
            "samples_per_second": (
                samples_a_step * self._ends.step / np.diff(clocks[:, 0])
            ).tolist(),
            "seconds_a_step": whole / speed.WINDOWS / self._ends.step,
            "input": waited / whole,
            "bookkeeping": (whole - waited - in_step) / whole,
            "host_peak_bytes": on_host,
            "gpu_peak_bytes": on_gpu or None,
            "seconds_of_reduction": reduction_alone(self._run, self._parts.traced_step),
        }

    def _record(self, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        config = self._run.config
        size = self._run.world.size
        rates = np.sum([figures["samples_per_second"] for figures in everyone], axis=0)
        seconds = _mean(everyone, "seconds_a_step")
        reduction_seconds = reduction_share = None
        if everyone[0]["seconds_of_reduction"] is not None:
            reduction_seconds = _mean(everyone, "seconds_of_reduction")
            reduction_share = reduction_seconds / seconds
        trained = self._run.model.trainable_variables
        return {
            "task": config.task,
            "model": self._run.model.name,
            "ranks": size,
            "device": everyone[0]["device"],
            "precision": config.precision,
            "trained_parameters": sum(v.shape.num_elements() for v in trained),
            "global_batch_size": config.global_batch_size,
            "warm_up_steps": self._warm_up,
            "windows": speed.WINDOWS,
            "steps_a_window": self._ends.step,
            "samples_per_second": speed.spread(rates),
            "samples_per_second_a_rank": speed.spread(rates / size),
            "seconds_a_step": seconds,
            "shares_of_a_step": {
                "input": _mean(everyone, "input"),
                "bookkeeping": _mean(everyone, "bookkeeping"),
                "reduction_alone": reduction_share,
            },
            "seconds_of_reduction_alone": reduction_seconds,
            "model_flops": self._flops
            | self._utilization(float(np.mean(rates)) / size, everyone),
            "by_rank": everyone,
        }

    def _utilization(
        self, rate: float, everyone: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What a rank computes a second, at `rate` samples; where it is known, its share of the
        peak of the device, which is the same on all ranks."""
        if "training_a_sample" not in self._flops:
            return {}
        figures = {"a_second_a_rank": rate * self._flops["training_a_sample"]}
        devices = {figures_of_rank["device"] for figures_of_rank in everyone}
        if len(devices) > 1:
            return figures
        peak = speed.peak(devices.pop(), self._run.config.precision)
        if peak:
            most, dtype = peak
            figures["peak_a_second"] = most
            figures["peak_of"] = dtype
            figures["utilization"] = figures["a_second_a_rank"] / most
        return figures


def _mean(everyone: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([figures[name] for figures in everyone]))


def reduction_alone(run: RunContext, train_step: Any) -> float | None:
    """Seconds (a median) of the sum of all gradients over ranks with nothing else running.

    It sums zeros in the gradients' shapes, grouped, compressed and carried as in the traced step.
    Every rank must call it. None with one rank, and where gradients are sparse, of any size.
    """
    config = run.config
    model = run.model
    graph = train_step.graph
    gathers = any(node.op == "HorovodAllgather" for node in graph_checks.nodes(graph))
    if run.world.size == 1 or (gathers and config.compression != "bf16"):
        return None
    virtual = [
        op for op in graph.get_operations() if op.name.startswith("virtual.gradients")
    ]
    if virtual:
        summed = [operation.inputs[0] for operation in virtual]
    else:
        summed = [raw(variable) for variable in model.trainable_variables]
    zeros = [tf.zeros(tensor.shape, tensor.dtype) for tensor in summed]

    @tf.function(autograph=False)
    def once() -> tf.Tensor:
        if virtual:
            device = reduction.device(config)
            sums = []
            for operation, zero in zip(virtual, zeros):
                total = hvd.allreduce(
                    zero, op=hvd.Sum, name=operation.name, device_dense=device
                )
                sums.append(total)
        else:
            sums = reduction.rank_sums(zeros, config, model.trainable_variables)
        # Reading the sum of one number of each waits for all of them.
        return tf.add_n(
            [tf.cast(tf.reshape(part, [-1])[0], tf.float64) for part in sums]
        )

    times = []
    for _ in range(2 + _REDUCTIONS):
        start = time.perf_counter()
        once().numpy()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def count_operations(run: RunContext, spec: Any) -> dict[str, Any]:
    """Operations a sample; or why they are not counted."""
    config = run.config
    # The model is called with so many samples at a time.
    micro_batch = config.global_batch_size // config.accumulation_steps
    samples = math.ceil(micro_batch / (config.virtual_ranks or run.world.size))
    inputs = tf.nest.map_structure(
        lambda part: tf.TensorSpec([samples, *part.shape[2:]], part.dtype),
        spec["inputs"],
    )
    try:
        forward = speed.forward_flops(run.model, inputs) / samples
    except speed.NotCounted as reason:
        return {"not_counted": str(reason)}
    if any(not layer.trainable for layer in run.model._flatten_layers()):
        return {"not_counted": "frozen layers take less than three passes"}
    return {"forward_a_sample": forward, "training_a_sample": speed.TRAINING * forward}


def peak_bytes() -> tuple[int, int]:
    """Bytes of memory that this process held at most, and of its GPU's (0: it has none)."""
    # The kernel's VmHWM, where /proc says it: getrusage also counts memory of the parent process.
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s*(\d+)", status)
    kibibytes = (
        int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    on_gpu = 0
    if tf.config.get_visible_devices("GPU"):
        on_gpu = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return 1024 * kibibytes, on_gpu
