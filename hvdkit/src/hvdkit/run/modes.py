"""Kinds of runs: each is a list of actions and a folder; the loop knows none of them.

| flag | actions after a step | what it leaves |
| --- | --- | --- |
| (none) | sync, drift, log, the task's own, save, evaluate | all |
| --dry_run | the same, but one save and one evaluation after two steps, then the end | nothing |
| --find_lr | the same, but neither: the loss by learning rate | a page |
| --benchmark | the same, but neither: clocks | benchmark.json |
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.data.source import Source
from hvdkit.ranks.world import World, say
from hvdkit.run import dry_run, find_lr
from hvdkit.run.actions import Action, CheckDrift, Evaluate, Log, Own, Save, Sync
from hvdkit.run.benchmark import Benchmark
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.train import task as tasks
from hvdkit.train import task_checks

if TYPE_CHECKING:
    from hvdkit.run.loop import Run


def of(settings: Settings) -> str:
    """dry_run, find_lr, benchmark or train."""
    found = (name for name in ("dry_run", "find_lr", "benchmark") if getattr(settings, name))
    return next(found, "train")


@contextlib.contextmanager
def folder(settings: Settings, world: World) -> Iterator[Settings]:
    """The settings with the folder of this kind of run; every rank must call it."""
    if of(settings) in ("dry_run", "find_lr"):
        with dry_run.throwaway(settings, world) as changed:
            yield changed
    else:
        yield settings


def scored(context: RunContext) -> Source:
    """The validation samples that an evaluation takes."""
    if of(context.config) == "dry_run":
        return dry_run.Few(context.val_source, context.config, context.world)
    return context.val_source


def before_folder(run: Run) -> None:
    """What shows or tries the run before anything is written; every rank must call it."""
    run.parts.try_state(run.feed.sample)
    if run.mode == "dry_run":
        dry_run.describe(run.context, run.given, sampler=run.sampler, spec=run.feed.spec)
    if run.mode == "benchmark":
        run.benchmark = Benchmark(run)
    else:
        run.evaluator.try_out()
        run.evaluator.check_loss()
        with run.world.fail_together("reading the settings"):
            tasks.check_read(run.task, run.context.config)


def actions_of_task(context: RunContext) -> list[Action]:
    """The task's own actions, made with the run's context, in their order."""
    make = tasks.optional(context.task, "actions")
    if not make:
        return []
    what = "making the task's actions"
    with context.world.fail_together(what), task_checks.user_code_errors("actions"):
        seen = dataclasses.replace(context, config=tasks.settings_of(context.task, context.config))
        return [Own(context.world, action) for action in task_checks.actions(make(seen))]


def save_and_evaluate(run: Run) -> tuple[Save, Evaluate]:
    """The two actions that write checkpoints and scores.

    A checkpoint of another folder is not in this one yet, nor are the scores before it; scores of
    another measure do not count.
    """
    start = run.start
    is_own = start.source == "own"
    other_step, other_measure = run.context.checkpoints.other_scores()
    if other_measure:
        say(run.world, f"note: {other_measure}")
    save = Save(run, start.step if is_own else None)
    return save, Evaluate(run, other_step if is_own else start.step)


def actions(run: Run, others: list[Action]) -> list[Action]:
    """What happens after a step, in this order: a checkpoint holds what the task's actions did."""
    context, run_dir = run.context, Path(run.settings.run_dir)
    found = [Sync(context, run.sync), CheckDrift(context), Log(run), *others]
    if run.mode == "benchmark":
        return [*found, run.benchmark]
    if run.mode == "dry_run":
        return [*found, dry_run.DryRun(run)]
    if run.mode == "find_lr":
        page = run_dir.parent.parent / f"{run_dir.name}-find_lr.html"  # outside what is removed
        return [*found, find_lr.FindLr(context, page)]
    return [*found, run.save, run.evaluate]
