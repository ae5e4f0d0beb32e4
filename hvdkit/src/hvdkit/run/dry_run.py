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
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import files, lease
from hvdkit.ranks.world import World, raw, say
from hvdkit.run import model_doctor
from hvdkit.run.benchmark import count_operations, peak_bytes
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.settings import Settings
from hvdkit.stop import DONE
from hvdkit.train import schedule
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run

STEPS = 2
_PREFIX = ".dry-run-"
_STEPS_OF_RATES = 200  # of --find_lr
BATCHES = 4  # of each rank, that are evaluated
_SHOWN = 8  # ranks, and samples of each
_RATES = 9  # that are shown, of steps at equal distances
_WIRE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}  # of a float32's bytes


@contextlib.contextmanager
def throwaway(config: Settings, world: World) -> Iterator[Settings]:
    """The settings with another run_dir, which is removed at the end; every rank must call it."""
    run_dir = Path(config.run_dir)
    made = ""
    with world.fail_together(f"--run_dir={run_dir}"):
        if world.is_chief:
            there = next(p for p in (run_dir, *run_dir.parents) if p.exists())
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise ValueError(f"{there} is no folder that can be written to")
            parent = there if there != run_dir else there.parent
            for lock in parent.glob(f"{_PREFIX}*/.lock"):  # of killed ones; a live one holds it
                with contextlib.suppress(OSError), whole_files.lock(lock):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            lease.take(Path(made))
            newest, _ = files.newest_sound(run_dir / "checkpoints")
            if newest and config.resume == "auto":
                say(world, f"from new weights; a run would resume from {newest}")
    made = world.broadcast_object(made, "dry_run.folder")
    tried_dir = str(Path(made) / run_dir.resolve().name)
    resume = "never" if config.resume == "auto" else config.resume
    tried = config.changed(run_dir=tried_dir, resume=resume)
    if config.find_lr:  # it continues where the loss is no number, to say so
        steps = min(config.num_steps, _STEPS_OF_RATES)
        tried = tried.changed(num_steps=steps, max_bad_steps=steps + 1)
    try:
        yield tried
    finally:
        if world.is_chief:
            shutil.rmtree(made, ignore_errors=True)


class DryRun:
    """The last action of a dry run: a save and an evaluation, then the run ends."""

    settles = True

    def __init__(self, run: Run) -> None:
        self._run = run.context
        self._save = run.save
        self._evaluate = run.evaluate
        self._loop = run
        first_step = run.start.step
        self._last = min(first_step + STEPS, run.settings.num_steps)
        if first_step >= run.settings.num_steps:
            say(run.world, "dry run: the checkpoint is of the last step, so there is none to try")

    def due(self, step: int) -> bool:
        return step == self._last

    def __call__(self, step: int, result: Result) -> Ending | None:
        start = time.monotonic()
        self._save(step)
        self._save.last(step)
        saved = time.monotonic()
        if ending := self._evaluate(step):
            return ending
        evaluated = time.monotonic() - saved
        memory = self._run.world.gather_numbers(list(map(float, peak_bytes())), "dry_run.memory")
        on_host, on_gpu = (_size(most) for most in memory.max(0))
        gpu = f", {on_gpu} on its GPU" if memory[:, 1].any() else ""
        say(
            self._run.world,
            f"saved in {saved - start:.1f} s, evaluated a few samples in {evaluated:.1f} s; "
            f"the rank with most used {on_host} of memory{gpu}",
        )
        tries = step < self._loop.settings.num_steps and not self._loop.parts.own_losses
        if tries and (ending := model_doctor.by_heart(self._loop)):
            return ending
        return Ending(DONE, "dry run", "dry run: it works; nothing was kept", save=False)


def describe(run: Run) -> None:
    """Settings, model, what goes over the wire and to the disk, shares, schedule; all ranks."""
    config = run.context.config
    world = run.world
    first = tf.constant(run.start.step, tf.int64)
    ids = run.sampler.local_samples(first)[0].numpy()
    everyone = world.gather_objects((len(ids), ids[:_SHOWN].tolist()), "dry_run.shares")
    if not world.is_chief:
        return
    say(world, "\nsettings that are not the defaults:")
    for name, value in run.given.not_defaults().items():
        say(world, f"  --{name}={value}")
    say(world, "")
    os.environ["COLUMNS"] = "100"  # or it is cut where a terminal, or none, has 80
    run.model.summary(line_length=100, print_fn=lambda line: say(world, line))
    for line in _sizes(run.context, run.feed.spec):
        say(world, line)
    for rank, (count, first) in enumerate(everyone[:_SHOWN]):
        named = ", ".join(map(str, first)) + (", ..." if count > len(first) else "")
        say(world, f"rank {rank}: {count} samples a step; the first step's: {named}")
    if world.size > _SHOWN:
        say(world, f"... and {world.size - _SHOWN} more ranks")
    rates = schedule.of_run(run.task, config, world.size)
    steps = sorted(set(np.linspace(1, config.num_steps, _RATES).astype(int).tolist()))
    values = [float(rates(tf.constant(step - 1, tf.int64))) for step in steps]
    shown = ", ".join(f"{value:.3g} at {step:,}" for step, value in zip(steps, values))
    policy = schedule.describe_policy(run.task, config, world.size)
    say(world, f"\nlearning rate ({policy}), by step: {shown}\n")


def _sizes(run: RunContext, spec: Any) -> list[str]:
    config = run.config
    model = run.model

    def bytes_of(variables: Iterable[object]) -> int:
        return sum(raw(v).shape.num_elements() * raw(v).dtype.size for v in variables)

    trained = bytes_of(model.trainable_variables)
    whole = bytes_of(run.state.variables.values())
    wire = trained * _WIRE[config.compression]
    flops = count_operations(run, spec)
    counted = f"operations not counted: {flops.get('not_counted')}"
    if "training_a_sample" in flops:
        counted = f"{flops['training_a_sample'] / 1e9:,.3g} GFLOP a sample, forward and backward"
    return [
        f"gradients: {_size(trained)} in {len(model.trainable_variables)} tensors; "
        + ("one rank sends none" if run.world.size == 1 else f"{_size(wire)} a step on the wire"),
        f"a checkpoint: {_size(whole)}; {config.keep} are kept, and the best",
        f"memory of a rank: at least {_size(whole + trained)} (weights, optimizer, gradients), "
        "without activations; below: what two steps took",
        counted,
    ]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
