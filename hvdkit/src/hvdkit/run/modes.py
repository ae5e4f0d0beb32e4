"""Kinds of runs: each is a list of actions and a folder; the loop knows none of them.

| flag | actions after a step | what it leaves |
| --- | --- | --- |
| (none) | sync, drift, log, the task's own, numbers, model doctor, save, evaluate | all |
| --dry_run | two steps, one save and one evaluation, one batch by heart, then the end | nothing |
| --find_lr | the same, but neither: the loss by learning rate | a page |
| --benchmark | the same, but neither: clocks | benchmark.json and records, no checkpoint |
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hvdkit.observe import profile, trackers
from hvdkit.ranks.world import World, say
from hvdkit.run import dry_run, find_lr, model_doctor, sample_figures
from hvdkit.run.actions import (
    Action,
    AtStep,
    CheckDrift,
    CheckNumbers,
    Evaluate,
    Log,
    Save,
    Sync,
    TaskAction,
)
from hvdkit.run.benchmark import Benchmark
from hvdkit.run.context import RunContext
from hvdkit.run.parts import RunParts
from hvdkit.settings import Settings
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks
from hvdkit.train.trial import trial


def of(config: Settings) -> str:
    """dry_run, find_lr, benchmark or train."""
    for name in ("dry_run", "find_lr", "benchmark"):
        if getattr(config, name):
            return name
    return "train"


def folder(settings: Settings, world: World) -> AbstractContextManager[Settings]:
    """The settings with the folder of this kind of run; every rank must call it."""
    leaves_nothing = of(settings) in ("dry_run", "find_lr")
    return (
        dry_run.throwaway(settings, world) if leaves_nothing else nullcontext(settings)
    )


def before_folder(parts: RunParts, given: Settings) -> Benchmark | None:
    """Shows or tries the run before anything is written; every rank must call it.

    `given`: the settings before they were counted for these ranks and data. Returns the action of
    --benchmark.
    """
    config = parts.config
    world = parts.world
    mode = of(config)
    size = len(parts.feed.reader.source)
    trial.try_out(parts.step, parts.feed.sample, size=size)
    with world.fail_together("reading the settings"):
        trackers.kinds(config.tracker_names if world.is_chief else ())
    if mode == "benchmark":
        return Benchmark(parts)
    if mode == "dry_run":
        parts.val_feed.rounds = min(parts.val_feed.rounds, dry_run.BATCHES)
        dry_run.describe(parts, given)
    parts.evaluator.try_out()
    parts.evaluator.check_sums()
    sample_figures.check(parts)
    if parts.start.path:
        sample_figures.say_on_restart(
            parts.context,
            parts.evaluator,
            reader=parts.val_feed.reader,
            checkpoint=parts.start.path,
        )
    with world.fail_together("reading the settings"):
        passed_over = tasks.check_read(parts.context.task, config)
    for note in passed_over:
        say(world, f"note: {note}")
    with world.fail_together("looking at the first samples"):
        if world.is_chief:
            for note in model_doctor.notes(parts):
                say(world, f"note: {note}")
    return None


def actions_of_task(context: RunContext) -> list[TaskAction]:
    """The task's own actions, made with the run's context, in their order."""
    make = tasks.optional(context.task, "actions")
    if not make:
        return []
    with (
        context.world.fail_together("making the task's actions"),
        task_checks.user_code_errors("actions"),
    ):
        # What actions read of these settings counts as read by the task.
        config = tasks.settings_of(context.task, context.config)
        task_context = dataclasses.replace(context, config=config)
        return [TaskAction(context.world, action) for action in make(task_context)]


def profiler(parts: RunParts) -> profile.Recorder | None:
    """The recorder of --profile, on every rank, so that all have the same actions."""
    config = parts.config
    world = parts.world
    steps = config.profiled_steps
    if not steps:
        return None
    first = parts.start.step + 2  # The first step of a start compiles.
    if not first <= steps[0] <= steps[1] <= config.num_steps:
        say(
            world,
            f"note: --profile={config.profile} records nothing: name some of the steps {first} to "
            f"{config.num_steps} of this start",
        )
        return None
    records = world.is_chief or config.profile.endswith(":all")
    folder = Path(config.run_dir) / "profile"
    table = folder / "operations.json" if world.is_chief else None
    own_folder = folder / f"rank-{world.rank}" if records else None
    return profile.Recorder(own_folder, table, steps=steps)


def actions(
    parts: RunParts,
    task_actions: list[TaskAction],
    *,
    save: Save,
    evaluate: Evaluate,
    benchmark: Benchmark | None,
    recorder: profile.Recorder | None,
) -> list[Action]:
    """What happens after a step, in their order.

    What is profiled are steps alone: the profile ends before the other actions of its last step,
    and begins after those of the step before.
    """
    ordered = _actions(
        parts, task_actions, save=save, evaluate=evaluate, benchmark=benchmark
    )
    if not recorder:
        return ordered
    before = AtStep(recorder.first - 1, recorder.start)
    return [AtStep(recorder.last, recorder.stop), *ordered, before]


def _actions(
    parts: RunParts,
    task_actions: list[TaskAction],
    *,
    save: Save,
    evaluate: Evaluate,
    benchmark: Benchmark | None,
) -> list[Action]:
    """What happens after a step, in this order: a checkpoint holds what the task's actions did."""
    context = parts.context
    mode = of(parts.config)
    ordered: list[Action] = [
        Sync(context, parts.sync),
        CheckDrift(context),
        Log(parts),
        *task_actions,
        CheckNumbers(context, task_actions),
    ]
    if benchmark:
        return [*ordered, benchmark]
    if mode == "dry_run":
        return [*ordered, dry_run.DryRun(parts, save, evaluate)]
    if mode == "find_lr":
        run_dir = Path(parts.config.run_dir)
        # The folder above run_dir is removed at the end, so the page lies beside that.
        page = run_dir.parent.parent / f"{run_dir.name}-find_lr.html"
        return [*ordered, find_lr.FindLr(context, page)]
    return [*ordered, model_doctor.FirstSteps(parts), save, evaluate]
