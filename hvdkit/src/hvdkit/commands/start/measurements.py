"""What `hvdkit start` measures on this machine: samples a second by batch, and a learning rate."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.commands import browse
from hvdkit.settings import Settings, project
from hvdkit.train.step import objective
from hvdkit.train.task import protocol as tasks

_FIRST = 8  # the smallest batch that is tried
_STEPS = 3  # so many steps of each batch are timed
_ENOUGH = 0.9  # a batch is fast enough at this share of the highest speed
_SAMPLES = 32  # a batch repeats so many samples


def batch(flag: str, most: int) -> tuple[int, str]:
    """The smallest batch that is nearly as fast as the fastest, of 8, 16, ... `most`; the speeds.

    Forward and backward pass on the first device of this host, in a process of its own, which
    leaves a GPU's memory free at its end. ValueError where that fails.
    """
    command = [sys.executable, "-m", __spec__.name, flag, str(most)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=project.folder()
    )
    if ended.returncode:
        raise ValueError(
            "no batch could be measured (above: why); --quick does without"
        )
    size, speeds = json.loads(ended.stdout.splitlines()[-1])
    return size, speeds


def _fastest(config: Settings, most: int) -> tuple[int, str]:
    """As `batch`, in this process."""
    examples, _ = browse.samples(config, _SAMPLES)
    task = tasks.load_task(config)
    model = task.build_model()

    @tf.function(autograph=False)
    def gradients(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            terms = objective.loss(
                task, model(batch["inputs"], training=True), batch["targets"]
            )
            loss = tf.add_n(
                [tf.reduce_sum(x * weights) for x, weights in terms.values()]
            )
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    size = min(_FIRST, most)
    speeds: dict[int, float] = {}  # samples a second, by batch size
    while size <= most:
        chosen = [examples[i % len(examples)] for i in range(size)]
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *chosen)
        try:
            gradients(stacked)  # the first call traces
            start = time.perf_counter()
            for _ in range(_STEPS):
                last = [part for part in gradients(stacked) if part is not None][-1]
                tf.convert_to_tensor(last).numpy()  # waits for the device
        except tf.errors.ResourceExhaustedError:
            break
        speeds[size] = size * _STEPS / (time.perf_counter() - start)
        size *= 2
    if not speeds:
        raise ValueError(
            f"{size} samples do not fit into memory: choose a smaller model or crop"
        )
    fastest = max(speeds.values())
    fast = [size for size, speed in speeds.items() if speed >= _ENOUGH * fastest]
    return fast[0], ", ".join(f"{size}: {speed:,.0f}" for size, speed in speeds.items())


def train(flags: str) -> list[str]:
    """The command that trains with these flags on all GPUs of this host, or on two ranks."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [
        "make",
        "-sC",
        str(project.folder()),
        "-o",
        "setup",
        "train",
        f"ARGS={flags}",
    ]


def rate(flags: str) -> float | None:
    """What a range test of these flags suggests; None where it suggests none.

    Raises ValueError: it did not end well, as where the batch does not fit the whole step.
    """
    ended = subprocess.run(
        train(f"{flags} --find_lr"), stdout=subprocess.PIPE, text=True
    )
    if ended.returncode:
        raise ValueError(
            "the range test of the learning rate failed: the lines above say why; --quick does "
            "without it"
        )
    match = re.search(r"try --base_lr=([\d.e+-]+):", ended.stdout)
    return float(match[1]) if match else None


if __name__ == "__main__":
    settings = settings_lib.load(["start", sys.argv[1]], settings_lib.of_project())
    print(json.dumps(_fastest(settings.for_ranks(1), most=int(sys.argv[2]))))
