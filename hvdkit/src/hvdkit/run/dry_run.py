"""--dry_run: shows what a run would be, and tries it: two steps, an evaluation, a save.

All of it is real (ranks, data, disk), but what it writes goes to a folder beside --run_dir that is
removed at the end, and only a few samples are evaluated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import files, lease
from hvdkit.ranks.world import World, raw, say
from hvdkit.run import model_doctor
from hvdkit.run.actions import Evaluate, Save
from hvdkit.run.benchmark import count_operations, peak_bytes
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.run.parts import RunParts
from hvdkit.settings import Settings
from hvdkit.stop import DONE
from hvdkit.train.optim import schedule
from hvdkit.train.step.step import Result

STEPS = 2
BATCHES = 4  # Each rank evaluates at most so many.
_PREFIX = ".dry-run-"
_STEPS_OF_RATES = 200  # --find_lr takes at most so many.
_SHOWN = 8  # So many ranks, and samples of each, are shown.
_RATES = 9  # So many learning rates are shown, of steps at equal distances.
_WIRE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}  # Shares of a float32's bytes.


@contextlib.contextmanager
def throwaway(config: Settings, world: World) -> Iterator[Settings]:
    """The settings with another run_dir, which is removed at the end; every rank must call it."""
    run_dir = Path(config.run_dir)
    folder = ""
    with world.fail_together("--run_dir=", path=run_dir):
        if world.is_chief:
            folder = _make_folder(run_dir)
            newest, _ = files.newest_sound(run_dir / "checkpoints")
            if newest and config.resume == "auto":
                say(world, f"from new weights; a run would resume from {newest}")
    folder = world.broadcast_object(folder, "dry_run.folder")
    changed = config.changed(
        run_dir=str(Path(folder) / run_dir.resolve().name),
        resume="never" if config.resume == "auto" else config.resume,
    )
    if config.find_lr:
        steps = min(config.num_steps, _STEPS_OF_RATES)
        # It goes on where the loss is no number, to say so.
        changed = changed.changed(num_steps=steps, max_bad_steps=steps + 1)
    try:
        yield changed
    finally:
        if world.is_chief:
            shutil.rmtree(folder, ignore_errors=True)


def _make_folder(run_dir: Path) -> str:
    """A new folder beside `run_dir`; those that killed processes left are removed first."""
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{existing} is no folder that can be written to")
    parent = run_dir.parent if existing == run_dir else existing
    for lock in parent.glob(f"{_PREFIX}*/.lock"):
        # A live process holds its lock, which raises here.
        with contextlib.suppress(OSError), whole_files.lock(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    lease.take(Path(folder))
    return folder


class DryRun:
    """The last action of a dry run: a save and an evaluation, then the run ends."""

    settles = True

    def __init__(self, parts: RunParts, save: Save, evaluate: Evaluate) -> None:
        self._parts = parts
        self._save = save
        self._evaluate = evaluate
        first_step = parts.start.step
        num_steps = parts.config.num_steps
        self._last = min(first_step + STEPS, num_steps)
        if first_step >= num_steps:
            say(
                parts.world,
                "dry run: the checkpoint is of the last step, so there is none to try",
            )

    def due(self, step: int) -> bool:
        return step == self._last

    def __call__(self, step: int, result: Result) -> Ending | None:
        start = time.monotonic()
        self._save(step)
        self._save.last(step)
        saved = time.monotonic()
        if ending := self._evaluate(step):
            return ending
        evaluated = time.monotonic()
        memory = self._parts.world.gather_numbers(peak_bytes(), "dry_run.memory")
        on_host, on_gpu = memory.max(0)
        line = (
            f"saved in {saved - start:.1f} s, evaluated a few samples in "
            f"{evaluated - saved:.1f} s; the rank with most used {_size(on_host)} of memory"
        )
        if on_gpu:
            line += f", {_size(on_gpu)} on its GPU"
        say(self._parts.world, line)
        ending = None
        if step < self._parts.config.num_steps and not self._parts.step.own_losses:
            ending = model_doctor.by_heart(self._parts)
        if ending:
            return ending
        return Ending(
            DONE, "dry run", "dry run: it works; nothing was kept", save=False
        )


def describe(parts: RunParts, given: Settings) -> None:
    """Prints settings, model, what goes over the wire and to the disk, shares and schedule.

    Every rank must call it. `given`: the settings before they were counted for ranks and data.
    """
    world = parts.world
    first_step = tf.constant(parts.start.step, tf.int64)
    ids = parts.sampler.local_samples(first_step)[0].numpy()
    everyone = world.gather_objects((len(ids), ids[:_SHOWN].tolist()), "dry_run.shares")
    if not world.is_chief:
        return
    say(world, "\nsettings that are not the defaults:")
    for name, value in given.not_defaults().items():
        say(world, f"  --{name}={value}")
    say(world, "")
    # Keras would cut the summary at a terminal's width, or at 80 columns without one.
    os.environ["COLUMNS"] = "100"
    parts.context.model.summary(line_length=100, print_fn=lambda line: say(world, line))
    for line in _sizes(parts.context, parts.feed.spec):
        say(world, line)
    for rank, (count, first_ids) in enumerate(everyone[:_SHOWN]):
        words = [str(number) for number in first_ids]
        if count > len(first_ids):
            words.append("...")
        say(
            world,
            f"rank {rank}: {count} samples a step; the first step's: {', '.join(words)}",
        )
    if world.size > _SHOWN:
        say(world, f"... and {world.size - _SHOWN} more ranks")
    say(world, _schedule_line(parts.context))


def _schedule_line(run: RunContext) -> str:
    rate_at = schedule.of_run(run.task, run.config, run.world.size)
    steps = np.linspace(1, run.config.num_steps, _RATES).astype(int).tolist()
    shown = []
    for step in sorted(set(steps)):
        rate = float(rate_at(tf.constant(step - 1, tf.int64)))
        shown.append(f"{rate:.3g} at {step:,}")
    policy = schedule.describe_policy(run.task, run.config, run.world.size)
    return f"\nlearning rate ({policy}), by step: {', '.join(shown)}\n"


def _sizes(run: RunContext, spec: Any) -> list[str]:
    config = run.config
    model = run.model

    def bytes_of(variables: Iterable[object]) -> int:
        return sum(raw(v).shape.num_elements() * raw(v).dtype.size for v in variables)

    trained = bytes_of(model.trainable_variables)
    whole = bytes_of(run.state.variables.values())
    gradients = (
        f"gradients: {_size(trained)} in {len(model.trainable_variables)} tensors"
    )
    if run.world.size == 1:
        gradients += "; one rank sends none"
    else:
        gradients += (
            f"; {_size(trained * _WIRE[config.compression])} a step on the wire"
        )
    flops = count_operations(run, spec)
    if "training_a_sample" in flops:
        operations = f"{flops['training_a_sample'] / 1e9:,.3g} GFLOP a sample, forward and backward"
    else:
        operations = f"operations not counted: {flops['not_counted']}"
    return [
        gradients,
        f"a checkpoint: {_size(whole)}; {config.keep} are kept, and the best",
        f"memory of a rank: at least {_size(whole + trained)} (weights, optimizer, gradients), "
        "without activations; below: what two steps took",
        operations,
    ]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
