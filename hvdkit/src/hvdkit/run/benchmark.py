"""--benchmark: measures samples a second, and where a step's time goes, over ten windows of steps.

The first tenth of the steps (5 to 100) is warm-up, and so are steps that do not fill ten windows.
The figures are printed as a table and written to RUN_DIR/benchmark.json.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.observe import speed
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import raw, say
from hvdkit.run.context import RunContext
from hvdkit.train import graph_checks, reduction, task_checks
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run

_REDUCTIONS = 10  # that are timed by themselves


class Benchmark:
    """Reads clocks at the ends of windows, and reports after the last one."""

    settles = True  # one wait for the device a window, so that it holds whole steps

    def __init__(self, run: Run) -> None:
        """Every rank must call it; raises Stop, on all, where the model cannot be called."""
        self._loop = run
        self._run = run.context
        first_step = run.start.step
        num_steps = run.settings.num_steps
        self._ends = speed.window_ends(first_step, num_steps)
        # Seconds so far; of them waited for data; and in steps' calls, or waited for such a step.
        self._clocks: list[tuple[float, float, float]] = []
        if not self._ends:
            say(
                run.world,
                f"note: --benchmark measures no speed in {num_steps - first_step} step(s): "
                f"{speed.WINDOWS} windows need --num_steps={speed.FEWEST + first_step} or more",
            )
            return
        self._warm_up = self._ends[0] - first_step
        what = "counting the model's operations"
        with run.world.fail_together(what), task_checks.user_code_errors("the model"):
            self._flops = count_operations(run.context, run.feed.spec) if run.world.is_chief else {}

    def due(self, step: int) -> bool:
        return step in self._ends

    def __call__(self, step: int, result: Result) -> None:
        in_step = self._loop.seconds_in_steps + self._loop.health.waited
        self._clocks.append((time.perf_counter(), self._loop.feed.waited, in_step))
        if step != self._ends[-1]:
            return
        world = self._run.world
        everyone = world.gather_objects(self._own(), "benchmark.figures")
        if world.is_chief:
            record = self._record(everyone)
        path = Path(self._run.config.run_dir) / "benchmark.json"
        with world.fail_together("writing benchmark.json"):
            if world.is_chief:
                whole_files.write_json(path, record)
                say(world, f"{speed.table(record)}\nwritten: {path}")

    def _own(self) -> dict[str, Any]:
        """This rank's figures. Every rank must call it: gradients are summed in it."""
        on_host, on_gpu = peak_bytes()
        gpus = tf.config.get_visible_devices("GPU")
        about = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
        _, per_step, *_ = tf.nest.flatten(self._loop.feed.spec)[0].shape
        samples = per_step * self._run.config.accumulation_steps * self._ends.step
        clocks = np.array(self._clocks)
        whole, waited, in_step = (clocks[-1] - clocks[0]).tolist()
        return {
            "host": world_lib.hostname(),
            "device": about.get("device_name", "GPU") if gpus else "CPU",
            "samples_per_second": (samples / np.diff(clocks[:, 0])).tolist(),
            "seconds_a_step": whole / speed.WINDOWS / self._ends.step,
            "input": waited / whole,
            "bookkeeping": (whole - waited - in_step) / whole,
            "host_peak_bytes": on_host,
            "gpu_peak_bytes": on_gpu or None,
            "seconds_of_reduction": reduction_alone(self._run, self._loop.traced_step),
        }

    def _record(self, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        config = self._run.config
        size = self._run.world.size
        rates = np.sum([own["samples_per_second"] for own in everyone], axis=0)
        seconds = float(np.mean([own["seconds_a_step"] for own in everyone]))
        alone = [own["seconds_of_reduction"] for own in everyone]
        reduced = None if None in alone else float(np.mean(alone))
        shares = {n: float(np.mean([o[n] for o in everyone])) for n in ("input", "bookkeeping")}
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
            "shares_of_a_step": shares | {"reduction_alone": reduced and reduced / seconds},
            "seconds_of_reduction_alone": reduced,
            "model_flops": self._flops | self._utilization(float(np.mean(rates)) / size, everyone),
            "by_rank": everyone,
        }

    def _utilization(self, rate: float, everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a rank computes a second, at `rate` samples; where it is known, its share of the
        peak of the device, which is the same on all ranks."""
        if "training_a_sample" not in self._flops:
            return {}
        done = rate * self._flops["training_a_sample"]
        devices = {own["device"] for own in everyone}
        known = speed.peak(*devices, self._run.config.precision) if len(devices) == 1 else None
        if known is None:
            return {"a_second_a_rank": done}
        most, kind = known
        return {
            "a_second_a_rank": done,
            "peak_a_second": most,
            "peak_of": kind,
            "utilization": done / most,
        }


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
    virtual = [op for op in graph.get_operations() if op.name.startswith("virtual.gradients")]
    likes = [op.inputs[0] for op in virtual] or [raw(v) for v in model.trainable_variables]
    zeros = [tf.zeros(like.shape, like.dtype) for like in likes]

    @tf.function(autograph=False)
    def once() -> tf.Tensor:
        if virtual:
            where = reduction.device(config)
            sums = []
            for op, like in zip(virtual, zeros):
                sums.append(hvd.allreduce(like, op=hvd.Sum, name=op.name, device_dense=where))
        else:
            sums = reduction.rank_sums(zeros, config, model.trainable_variables)
        # One number of each: reading their sum waits for all of them.
        return tf.add_n([tf.cast(tf.reshape(part, [-1])[0], tf.float64) for part in sums])

    times = []
    for _ in range(2 + _REDUCTIONS):
        start = time.perf_counter()
        once().numpy()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def count_operations(run: RunContext, spec: Any) -> dict[str, Any]:
    """Operations a sample; or why they are not counted."""
    config = run.config
    micro = config.global_batch_size // config.accumulation_steps
    samples = -(-micro // (config.virtual_ranks or run.world.size))  # the model is called with
    inputs = tf.nest.map_structure(
        lambda part: tf.TensorSpec([samples, *part.shape[2:]], part.dtype), spec["inputs"]
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
    # getrusage's also counts its parent's.
    [line] = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    gpu = bool(tf.config.get_visible_devices("GPU"))
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpu else 0
    return int(line.split()[1]) * 1024, peak
