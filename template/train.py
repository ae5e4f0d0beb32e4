"""Trains a task on one GPU or a thousand, one process a GPU, with Horovod.

    python train.py --flagfile=configs/demo.cfg                          one rank
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg         two ranks on this host
    horovodrun -np 8 -H node1:4,node2:4 python train.py --flagfile=...   four GPUs on each of two

Typing the same command again resumes from the newest checkpoint in --run_dir.
`python train.py --help` lists the flags. Start reading at `fit`; the step itself is in step.py.
"""

from __future__ import annotations

import engine.quiet  # noqa: F401

# isort: split
import sys
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

import config as config_lib
from actions import Action, Evaluate, Log, Save, Sync
from config import Config
from data.pipeline import EvaluationFeed, TrainingFeed
from engine import batch_norm, health, reduction, warm_start
from engine import world as world_lib
from engine.health import Ending
from engine.sampler import Sampler
from engine.stop import BUG, DONE, PREEMPTED, WRONG_USE, Stop, complain, launch_rank
from engine.telemetry import Telemetry
from engine.world import World, say
from evaluation import Evaluator
from run import Run, assemble, describe
from step import make_train_step
from tasks import base as tasks


def fit(config: Config, world: World, stop_signal: health.StopSignal) -> None:
    """The run, in order. Raises Stop, on every rank, when it ends before its last step."""
    # 1. One GPU a process, or a share of the cores.
    world_lib.set_up(world, config)
    say(world, world_lib.describe(world))

    # 2. The run's folder, with the settings that make this run again.
    run_dir = Path(config.run_dir)
    with world.together("opening the run folder"):
        if world.is_chief:
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            config_lib.write(config, run_dir / "config.cfg")

    # 3. Task, data, model, and optimizer with all its variables, on every rank.
    run = assemble(config, world)
    state = run.state
    say(world, describe(run))

    # 4. The newest sound checkpoint, or another run's weights, chosen and read by rank 0.
    found = run.checkpoints.find(config.resume)
    if found:
        run.checkpoints.restore(found, state.variables, config)
    elif config.init_from:
        with world.together("reading the first weights"):
            if world.is_chief:
                warm_start.start(run.model, config)

    # 5. Everything from rank 0, before the first step.
    world.broadcast_variables(list(state.variables.values()))
    first_step = int(state.step)
    if found:
        say(world, f"resuming from {found} at step {first_step}")

    # 6. This rank's share of the data, and the step on all ranks together.
    with world.together("sharing out the data"):
        sampler = Sampler(
            len(run.train_source),
            config.global_batch_size,
            config.accumulation_steps,
            config.seed,
            world.rank,
            world.size,
        )
    feed = TrainingFeed(
        run.train_source, sampler, run.task.training_example, first_step, config.num_steps
    )
    train_step = make_train_step(config, world, run.task, state, feed.spec)

    # 7. What happens after a step.
    eval_feed = EvaluationFeed(
        run.val_source,
        run.task.evaluation_example,
        config.eval_batch_size,
        world.rank,
        world.size,
    )
    evaluator = Evaluator(run, eval_feed)
    if not config.benchmark:
        evaluator.try_out()
    telemetry = Telemetry(run_dir, world, first_step, config.num_steps)
    sync = batch_norm.make_sync(run.model, config.bn_sync, sampler.weight)
    save = Save(run, sync, telemetry, saved_at=first_step if found else None)
    evaluate = Evaluate(run, evaluator, sync, telemetry, stop_signal)
    actions: list[Action] = [Sync(run, sync), Log(run, telemetry)]
    if not config.benchmark:
        actions += [save, evaluate]
    more = tasks.optional(run.task, "actions")
    actions += more(run) if more else []

    # 8. Steps.
    monitor = health.Health(world, config, feed, stop_signal)
    ending = None if config.benchmark else begin(evaluate, first_step, config.num_steps)
    result = None
    for step in range(first_step + 1, config.num_steps + 1):
        if ending:
            break
        batch, previous = feed.next(), result
        result = train_step(batch, monitor.votes())
        due = [action for action in actions if action.due(step)]
        # Judged one step late, so that a GPU already has the next step to work on; at once where
        # an action looks at the weights. When the run ends, the step in flight is judged as well.
        ending = monitor.verdict(previous)
        if ending or any(action.settles for action in due):
            ending = monitor.verdict(previous, result)
        if ending:
            break
        for action in due:
            ending = action(step, result) or ending

    # 9. The last checkpoint, the records, the exit code.
    ending = ending or monitor.verdict(result)
    if ending and ending.save:
        save(int(state.step))
    sync()
    finish(run, telemetry, evaluate.figures, ending)


def begin(evaluate: Evaluate, step: int, num_steps: int) -> Ending | None:
    """Before the first step; a run that was given up, or has no step left, is told so."""
    if step == num_steps:
        return evaluate(step)
    return evaluate.given_up(step)


def finish(
    run: Run, telemetry: Telemetry, figures: Mapping[str, float], ending: Ending | None
) -> None:
    """The run's last words, and the proof that all ranks hold the same weights.

    Raises:
      Stop: on all ranks, when the weights differ, or with the ending's exit code if not done.
    """
    config, world, model, state = run.config, run.world, run.model, run.state
    step = int(state.step)
    sha = world_lib.weights_sha256(model.variables)
    shared = model.trainable_variables if config.bn_sync == "none" else model.variables
    world.check_same(world_lib.weights_sha256(shared), "the final weights")
    reason = ending.reason if ending else "benchmark" if config.benchmark else "done"
    telemetry.summary(
        {"step": step, "exit_reason": reason, "skipped_steps": int(state.skipped)}
        | {"samples_per_second": telemetry.median_speed()}
        | {f"eval_{name}": value for name, value in figures.items()}
        | {"weights_sha256": sha, "ranks": world.size}
    )
    if ending and ending.code != DONE:
        saved = f": saved at step {step}; rerun to resume" if ending.code == PREEMPTED else ""
        raise Stop(ending.code, ending.message + saved)
    if ending:
        say(world, ending.message)
    drawn = Path(config.run_dir) / "predictions.png"
    if drawn.exists() and not config.benchmark:
        say(world, f"predictions, drawn: {drawn}")
    if config.autotune and world.is_chief:
        print(f"best setting found: {reduction.write_autotuned(config)}")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted and saved."""
    try:
        config = config_lib.parse(argv)
    except ValueError as error:
        if launch_rank() == 0:
            complain(str(error))
        return WRONG_USE
    stop_signal = health.StopSignal()  # from here on: a run may be told to stop while it starts
    world, code = world_lib.connect(reduction.environment(config)), DONE
    try:
        fit(config, world, stop_signal)
    except Stop as stop:
        code = stop.code
        if world.is_chief:
            complain(str(stop))
    except tf.errors.OpError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        complain(f"rank {world.rank} on {world_lib.hostname()} ends: another rank ended before it")
        return BUG
    world_lib.finish(world)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
