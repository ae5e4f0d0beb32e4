"""Trains a task on one GPU or a thousand, one process a GPU, with Horovod.

    python train.py --flagfile=configs/demo.cfg                          one rank
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg         two ranks on this host
    horovodrun -np 8 -H node1:4,node2:4 python train.py --flagfile=...   four GPUs on each of two

The same command again resumes from the newest checkpoint in --run_dir.
`python train.py --help` lists the flags. Start reading at `fit`; the step itself is in step.py.
"""

from __future__ import annotations

import sys

from hvdkit.ranks import interrupt
from hvdkit.settings import config as config_lib

if __name__ == "__main__":
    # Before TensorFlow's seconds of import: a wrong flag is told, and Ctrl-C leaves no trace.
    config_lib.from_command_line(sys.argv)
    interrupt.end_at_once()

import hvdkit.ranks.quiet  # noqa: F401

# isort: split
from pathlib import Path

import keras
from hvdkit.checkpoint import pretrained, run_folder, warm_start
from hvdkit.checkpoint.saver import Saver
from hvdkit.data.pipeline import EvaluationFeed, TrainingFeed
from hvdkit.data.sampler import Sampler
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import dry_run, find_lr, health, launched
from hvdkit.run.actions import Action, CheckDrift, Evaluate, Log, Own, Save, Sync, left_out
from hvdkit.run.assemble import assemble, describe, notes
from hvdkit.run.benchmark import Benchmark
from hvdkit.run.ending import finish, go_back
from hvdkit.settings.config import Config
from hvdkit.stop import PREEMPTED, GoBack
from hvdkit.train import batch_norm, task_checks
from hvdkit.train import task as tasks
from hvdkit.train.step import make_train_step


def fit(given: Config, world: World, stop_signal: StopSignal, back: GoBack | None = None) -> None:
    """The run, in order. Raises Stop, on every rank, when it ends before its last step.

    Raises GoBack, on every rank, when it is to be called once more, with that.
    """
    # 1. Settings that depend on the ranks.
    agreement.check_code(world, config_lib.PROJECT)
    where = world_lib.describe(world)
    say(world, where)
    with world.together("reading the settings"):
        config = config_lib.for_ranks(given, world.size)

    # 2. Task, data, model, and optimizer with all its variables, on every rank.
    run = assemble(config, world)
    state = run.state
    what = describe(run)
    say(world, what)
    for note in notes(run):
        say(world, f"note: {note}")

    # 3. The newest sound checkpoint, or other weights to begin with, chosen and read by rank 0.
    run_dir = Path(config.run_dir)
    with world.together("locking the run folder"):
        if world.is_chief:
            run_folder.lock(run_dir)
    found = run.checkpoints.find(back.path if back else config.resume, config.num_steps)
    if found:
        run.checkpoints.restore(found, state.variables, config)
        state.passed_over.assign_add(back.last - found.step if back else 0)
    elif config.init_from or config.backbone_weights:
        start = warm_start.start if config.init_from else pretrained.start
        with world.together("reading the first weights"):
            if world.is_chief:
                start(run.model, config)

    # 4. Everything from one rank, before the first step.
    world.broadcast_variables(list(state.variables.values()))
    first_step = int(state.step)

    # 5. This rank's share of the data, the step on all ranks together, and the evaluation.
    with world.together("sharing out the data"):
        sampler = Sampler(
            len(run.train_source),
            config.global_batch_size,
            config.accumulation_steps,
            config.seed,
            world.rank,
            world.size,
            config.virtual_ranks,
            int(state.passed_over),
        )
        sync = batch_norm.make_sync(run.model, config.bn_sync, sampler.weight, config.virtual_ranks)
    workers = world_lib.data_workers(world, config)
    feed = TrainingFeed(
        run.train_source,
        sampler,
        run.train_reader,
        first_step,
        config.num_steps,
        workers,
        world_lib.gpu(),
    )
    train_step = make_train_step(config, world, run.task, state, feed.spec)
    with world.together("reading the validation data"):
        val_reader = task_checks.reader(run.task, run.val_source, training=False)
        val_batch, share = config.eval_batch_size, (world.rank, world.size)
        scored = dry_run.Few(run.val_source, config, world) if config.dry_run else run.val_source
        val_feed = EvaluationFeed(scored, val_reader, val_batch, *share, workers)
    evaluator = Evaluator(run, val_feed)
    if config.dry_run:
        dry_run.describe(run, given, sampler, feed)
    saver = Saver(run.checkpoints, config.max_failed_saves)
    monitor = health.Health(world, config, sampler, feed, stop_signal, saver)
    if config.benchmark:
        measured = Benchmark(run, feed, monitor, train_step, first_step)
        train_step = measured.step
    else:
        evaluator.try_out()
    more, others = tasks.optional(run.task, "actions"), []
    if more:
        with world.together("making the task's actions"), task_checks.told("actions"):
            others = [Own(world, action) for action in task_checks.actions(more(run))]

    # 6. Nothing refuses the run any more: its folder becomes this run's.
    make_up = found is not None and left_out(run, found)
    with world.together("opening the run folder"):
        if world.is_chief:
            note = run_folder.begin(run_dir, found, config, make_up, given)
            if note:
                say(world, note)
        telemetry = Telemetry(config, world, first_step, len(run.train_source))
        about = {"what": what, "where": where, "score": run.task.main_metric}
        telemetry.started(first_step, about)
    if found:
        say(world, f"resuming from {found.path} at step {first_step}")

    # 7. What happens after a step, in this order: a checkpoint holds what the task's own actions
    #    did. A checkpoint of another folder is not here yet, nor are the scores before it;
    #    scores of another measure are none.
    is_own = found is not None and run.checkpoints.holds(found)
    saved_at = first_step if is_own else None
    save = Save(run, saver, monitor.save_clock, sync, telemetry, saved_at)
    other_step, other_measure = run.checkpoints.other_scores()
    if other_measure:
        say(world, f"note: {other_measure}")
    scored_since = other_step if is_own else first_step
    evaluate = Evaluate(run, evaluator, saver, sync, telemetry, stop_signal, scored_since)
    actions: list[Action] = [Sync(run, sync), CheckDrift(run)]
    actions += [Log(run, telemetry, feed, monitor.pace), *others]
    if config.benchmark:
        actions.append(measured)
    elif config.dry_run:
        actions.append(dry_run.DryRun(run, first_step, save, evaluate))
    elif config.find_lr:
        page = run_dir.parent.parent / f"{run_dir.name}-find_lr.html"  # outside what is thrown away
        actions.append(find_lr.FindLr(run, page))
    else:
        actions += [save, evaluate]

    # 8. Steps. One that an interruption left unevaluated is evaluated first.
    ending, result = None, None
    # However it ends: nothing reads ahead any more, what is being written is written.
    with feed, saver, telemetry:
        if make_up:
            save(first_step)  # a checkpoint of another run's folder is not in this one yet
            ending = evaluate(first_step)
        for step in range(first_step + 1, config.num_steps + 1):
            if ending:
                break
            batch, previous = feed.next(), result
            result = train_step(batch, monitor.votes())
            due = [action for action in actions if action.due(step)]
            # Judged one step late, so that a GPU already has the next step to work on; at once
            # where an action looks at the weights. When the run ends, the step in flight is judged
            # as well.
            ending = monitor.verdict(previous)
            if ending or any(action.settles for action in due):
                ending = monitor.verdict(previous, result)
            if ending and ending.code != PREEMPTED:
                break
            # A stop ends the run after this step, which is logged and saved like any other: a rerun
            # does not make it again. An evaluation it does make up for.
            for action in due:
                if not (ending and action is evaluate):
                    ending = action(step, result) or ending

        # 9. The last checkpoint, the records, the exit code.
        ending = ending or monitor.verdict(result)
        if (ending is None or ending.save) and not config.benchmark:
            save.last(int(state.step))
    if ending and ending.bad_since and not config.benchmark:
        go_back(run, ending)
    sync()
    finish(run, telemetry, evaluate.figures, ending)


def train(config: Config, world: World, stop_signal: StopSignal) -> None:
    """`fit`, and once more where it goes back. Raises Stop as `fit` does."""
    agreement.check_settings(world, config)
    if config.dry_run or config.find_lr:
        with dry_run.throwaway(config, world) as config:
            return fit(config, world, stop_signal)
    back = None
    while True:
        try:
            return fit(config, world, stop_signal, back)
        except GoBack as found:
            back = found.with_traceback(None)  # by which the model so far would be kept
            # Its layers' names, which SampleDropout draws by, are those of a run that resumes.
            keras.utils.clear_session()


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted and saved."""
    config = config_lib.from_command_line(argv)
    return launched.run(config, lambda *world: train(config, *world))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
