"""What `hvdkit start` measures on this machine: samples a second by batch, and a learning rate."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.commands import browse
from hvdkit.settings import Settings, project
from hvdkit.train import objective
from hvdkit.train import task as tasks

_FIRST = 8  # samples of the smallest batch that is tried
_STEPS = 3
_ENOUGH = 0.9  # of the highest speed


def batch(flag: str, most: int) -> tuple[int, str]:
    """The smallest batch that is nearly as fast as the fastest, of 8, 16, ... `most`; the speeds.

    Forward and backward pass on the first device of this host, in a process of its own, which
    leaves a GPU's memory free at its end. ValueError where that fails.
    """
    words = [sys.executable, "-m", __spec__.name, flag, str(most)]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=project.folder())
    if ended.returncode:
        raise ValueError("no batch could be measured (above: why); --quick does without")
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


def _batch(config: Settings, examples: Sequence[Any], most: int) -> tuple[int, str]:
    task = tasks.load(config)
    model, rates, size = task.build_model(), {}, min(_FIRST, most)

    @tf.function(autograph=False)
    def gradients(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            terms = objective.loss(task, model(batch["inputs"], training=True), batch["targets"])
            loss = tf.add_n([tf.reduce_sum(x * w) for x, w in terms.values()])
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    while size <= most:
        picked = [examples[i % len(examples)] for i in range(size)]
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *picked)
        try:
            gradients(stacked)
            start = time.perf_counter()
            for _ in range(_STEPS):
                [*filter(tf.is_tensor, gradients(stacked))][-1].numpy()
        except tf.errors.ResourceExhaustedError:
            break
        rates[size] = size * _STEPS / (time.perf_counter() - start)
        size *= 2
    if not rates:
        raise ValueError(f"{size} samples do not fit into memory: choose a smaller model or crop")
    fast = [size for size, rate in rates.items() if rate >= _ENOUGH * max(rates.values())]
    shown = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
    return fast[0], shown


def train(flags: str) -> list[str]:
    """The command that trains with these flags on all GPUs of this host, or on two ranks."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return ["make", "-sC", str(project.folder()), "-o", "setup", "train", f"ARGS={flags}"]


def rate(flags: str) -> float | None:
    """What a range test of these flags suggests; None where it suggests none."""
    ended = subprocess.run(train(f"{flags} --find_lr"), stdout=subprocess.PIPE, text=True)
    found = re.search(r"try --base_lr=([\d.e+-]+):", ended.stdout)
    return float(found[1]) if found else None


if __name__ == "__main__":
    made = settings_lib.load(["start", sys.argv[1]], settings_lib.of_project()).for_ranks(1)
    print(json.dumps(_batch(made, browse.samples(made, 32)[0], int(sys.argv[2]))))
