"""Seconds for a million rows of 8 numbers: `hvdkit` on one rank, and Keras on the same arrays.

    python benchmarks/small_samples.py [--rows=1000000] [--batch=1000]

A linear model is trained on all rows once and scored on all rows once. Each figure is the time of
a program for all rows less the time of one for a thousandth of them, so that starts do not count.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERAS = """
import sys

import keras
import numpy as np

rows, batch, part = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
draw = np.random.default_rng(0)
x, y = draw.normal(size=(rows, 8)).astype("f"), draw.integers(0, 10, rows)
model = keras.Sequential([keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss, metrics=["accuracy"])
call = model.fit if part == "training" else model.evaluate
call(x, y, batch_size=batch, verbose=0)
"""
TASK = """
import keras
import numpy as np
from hvdkit.data.source import Arrays

from tasks import blank


class Task(blank.Task):
    def sources(self):
        draw = np.random.default_rng(0)

        def part(rows):
            x = draw.normal(size=(rows, 8)).astype("f")
            return Arrays(numbers=x, label=draw.integers(0, 10, rows))

        return part(self.config.train_rows), part(self.config.val_rows)

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def build_model(self):
        row = keras.Input((8,))
        return keras.Model(row, keras.layers.Dense(10)(row))
"""
SETTINGS = """
    train_rows: int = hvdkit.setting(1000, "rows to train on", low=1)
    val_rows: int = hvdkit.setting(1000, "rows to score", low=1)
"""


def fork(folder: Path) -> None:
    """A fork whose task reads rows of numbers."""
    (folder / "tasks").mkdir()
    for name in ("train.py", "tasks/blank.py"):
        shutil.copy(ROOT / "template" / name, folder / name)
    settings = (ROOT / "template" / "settings.py").read_text()
    (folder / "settings.py").write_text(settings.rstrip() + "\n" + SETTINGS)
    (folder / "tasks" / "rows.py").write_text(TASK)


def seconds(words: list[object], folder: Path) -> float:
    begin = time.monotonic()
    command = [str(word) for word in (sys.executable, *words)]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(
            f"{command}: exit code {ended.returncode}\n{ended.stderr[-2000:]}"
        )
    return time.monotonic() - begin


def ours(folder: Path, *, rows: int, batch: int, part: str) -> float:
    train_rows = rows if part == "training" else batch
    val_rows = rows if part == "evaluation" else 1
    flags = [
        "--task=rows",
        "--num_classes=10",
        "--optimizer=sgd",
        f"--train_rows={train_rows}",
        f"--val_rows={val_rows}",
        f"--global_batch_size={batch}",
        f"--eval_batch_size={batch}",
        f"--num_steps={train_rows // batch}",
        "--warmup_steps=0",
        "--log_every=1000",
        "--checkpoint_every=0",
        f"--run_dir={folder / f'run-{part}-{rows}'}",
    ]
    return seconds(["train.py", *flags], folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1000)
    args = parser.parse_args()
    print("| all rows once | Keras, s | hvdkit, s | ratio |")
    print("| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork(folder)
        for part in ("training", "evaluation"):
            keras = hvdkit = 0.0
            for sign, rows in ((1, args.rows), (-1, args.rows // 1000)):
                batch = min(args.batch, rows)
                keras += sign * seconds(["-c", KERAS, rows, batch, part], folder)
                hvdkit += sign * ours(folder, rows=rows, batch=batch, part=part)
            print(
                f"| {part} | {keras:.1f} | {hvdkit:.1f} | {hvdkit / keras:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
