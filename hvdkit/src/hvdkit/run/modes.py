"""Kinds of runs: each is a list of actions and a folder; the loop knows none of them.

| flag | actions after a step | what it leaves |
| --- | --- | --- |
| (none) | sync, drift, log, the task's own, numbers, model doctor, save, evaluate | all |
| --dry_run | two steps, one save and one evaluation, one batch by heart, then the end | nothing |
| --find_lr | the same, but neither: the loss by learning rate | a page |
| --benchmark | the same, but neither: clocks | benchmark.json |
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.observe import trackers
from hvdkit.ranks.world import World, say
from hvdkit.run import dry_run, find_lr, model_doctor
from hvdkit.run.actions import Action, CheckDrift, CheckNumbers, Log, Own, Sync
from hvdkit.run.benchmark import Benchmark
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.train import task as tasks
from hvdkit.train import task_checks, trial

if TYPE_CHECKING:
    from hvdkit.run.loop import Run


def of(settings: Settings) -> str:
    """dry_run, find_lr, benchmark or train."""
    found = (name for name in ("dry_run", "find_lr", "benchmark") if getattr(settings, name))
    return next(found, "train")


def folder(settings: Settings, world: World) -> AbstractContextManager[Settings]:
    """The settings with the folder of this kind of run; every rank must call it."""
    leaves_nothing = of(settings) in ("dry_run", "find_lr")
    return dry_run.throwaway(settings, world) if leaves_nothing else nullcontext(settings)


def before_folder(run: Run) -> None:
    """What shows or tries the run before anything is written; every rank must call it."""
    trial.try_out(run.parts, run.feed.sample)
    with run.world.fail_together("reading the settings"):
        trackers.kinds(run.settings.tracker_names if run.world.is_chief else ())
    if run.mode == "dry_run":
        run.val_feed.rounds = min(run.val_feed.rounds, dry_run.BATCHES)
        dry_run.describe(run)
    if run.mode == "benchmark":
        run.benchmark = Benchmark(run)
    else:
        run.evaluator.try_out()
        run.evaluator.check_loss()
        with run.world.fail_together("reading the settings"):
            passed_over = tasks.check_read(run.task, run.context.config)
        for note in passed_over:
            say(run.world, f"note: {note}")
        with run.world.fail_together("looking at the first samples"):
            for note in model_doctor.notes(run) if run.world.is_chief else ():
                say(run.world, f"note: {note}")


def actions_of_task(context: RunContext) -> list[Action]:
    """The task's own actions, made with the run's context, in their order."""
    make = tasks.optional(context.task, "actions")
    if not make:
        return []
    what = "making the task's actions"
    with context.world.fail_together(what), task_checks.user_code_errors("actions"):
        seen = dataclasses.replace(context, config=tasks.settings_of(context.task, context.config))
        return [Own(context.world, action) for action in make(seen)]


def actions(run: Run, others: list[Action]) -> list[Action]:
    """What happens after a step, in this order: a checkpoint holds what the task's actions did."""
    context = run.context
    run_dir = Path(run.settings.run_dir)
    found = [Sync(context, run.sync), CheckDrift(context), Log(run), *others]
    found.append(CheckNumbers(context))
    if run.mode == "benchmark":
        return [*found, run.benchmark]
    if run.mode == "dry_run":
        return [*found, dry_run.DryRun(run)]
    if run.mode == "find_lr":
        page = run_dir.parent.parent / f"{run_dir.name}-find_lr.html"  # outside what is removed
        return [*found, find_lr.FindLr(context, page)]
    return [*found, model_doctor.FirstSteps(run), run.save, run.evaluate]
