"""A run that was trained: its settings, and its model with the weights of a checkpoint."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdkit import logs
from hvdkit import settings as settings_lib
from hvdkit.checkpoint import checkpoints, files, warm_start
from hvdkit.data import open as open_lib
from hvdkit.data.readers import pictures
from hvdkit.logs import refuse
from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run.context import RunContext, bring_to_all, prepare
from hvdkit.run.main import with_ranks
from hvdkit.settings import Settings, runs, typed
from hvdkit.settings.typed import path_argument
from hvdkit.stop import launch_rank
from hvdkit.train import optimizer as optimizers
from hvdkit.train import outputs, task_checks
from hvdkit.train import task as tasks
from hvdkit.train.state import Held
from hvdkit.train.task import Task

Decode = Callable[[Any], dict[str, tf.Tensor]]
Work = Callable[..., None]  # of settings, world, stop signal; own: what `parser` found
# What only a new run begins with.
_NEW = ("--init_from=", "--noinit_ema", "--noinit_skip_mismatched")
_NEW += ("--backbone_weights=", "--backbone_preprocessing=")


def parser(about: str) -> argparse.ArgumentParser:
    """What all commands on a trained run take; `about` is the module's docstring."""
    made = logs.parser(about)
    made.add_argument("--run_dir", type=path_argument, required=True, help="the run's folder")
    which = "best (by its score), last, a step, or the path of a checkpoint"
    made.add_argument("--checkpoint", default="best", help=which)
    why = "use the averaged weights, if the run has them (--ema_decay), as its scores do"
    made.add_argument("--ema", action=argparse.BooleanOptionalAction, default=True, help=why)
    return made


def settings(run_dir: Path, flags: Sequence[str]) -> Settings:
    """The run's settings, then `flags`; what is wrong with them ends all ranks with code 2."""
    file = run_dir / runs.CONFIG
    flagfile = typed.written(file.absolute(), is_path=True)
    folder = typed.written(run_dir.absolute(), is_path=True)
    own = [f"--flagfile={flagfile}", f"--run_dir={folder}", "--resume=auto"]
    try:
        if not file.is_file() or file.is_symlink():
            raise ValueError(f"--run_dir={run_dir} is no run's folder: it holds no config.cfg")
        words, past = ["", *own, *_NEW, *flags], file.absolute()
        return settings_lib.load(words, settings_lib.of_project(), past)
    except ValueError as error:
        refuse(str(error))


def on_ranks(config: Settings, own: argparse.Namespace, work: Work) -> int:
    """Does the work on the ranks that were launched; returns the exit code.

    `own`: what `parser` found, the same on every rank but for paths.
    """

    def on_each(world: World, stop_signal: StopSignal) -> None:
        stop_signal.words = "stopping"
        stop_signal.saved = True  # there is nothing to save
        agreement.check_settings(world, config, {"checkpoint": own.checkpoint, "ema": own.ema})
        agreement.check_code(world)
        with world.fail_together("reading the settings"):
            resolved = config.for_ranks(world.size)
        work(resolved, world, stop_signal, own=own)

    return with_ranks(config, on_each)


def restored(config: Settings, world: World, which: str) -> tuple[RunContext, Path]:
    """The run with the weights of one of its checkpoints, on all ranks, and its path.

    Raises Stop: on all ranks, when there is none such, it is damaged, or it does not fit the model.
    """
    found = ""
    with world.fail_together(f"--checkpoint={which}"):
        if world.is_chief:
            found = str(chosen(Path(config.run_dir) / "checkpoints", which))
    path = Path(world.broadcast_object(found, "trained.restored"))
    with open_lib.one_split():
        run = prepare(config, world, path)
    with world.fail_together(f"--checkpoint={which}"):
        if world.is_chief:
            checkpoints.load(path, run.state.variables)
    bring_to_all(world, run.state)
    return run, path


def model_of(config: Settings, which: str, ema: bool) -> tuple[Task, keras.Model, Path, Decode]:
    """Task, model with a checkpoint's weights, that checkpoint, what outputs mean; on this rank.

    `ema`: of the weights' averages, where the run has them. Raises ValueError: there is no
    such checkpoint, it is damaged or does not fit; nothing says what the model's outputs mean.
    """
    world_lib.set_numbers(config)
    pictures.limit(config.max_pixels)
    with task_checks.user_code_errors("making the task"):
        task = tasks.load(config)
    with task_checks.user_code_errors("build_model"):
        model = task.build_model()
    path = chosen(Path(config.run_dir) / "checkpoints", which)
    inputs_of = tasks.optional(task, "picture_inputs")
    if inputs_of is None:
        raise ValueError(
            f"tasks/{config.task}.py: its Task has no picture_inputs(image), which says what the "
            "model is called with for a picture (hvdkit/train/task.py)"
        )
    with task_checks.user_code_errors("picture_inputs"):
        example = inputs_of(tf.zeros([config.image_size, config.image_size, 3], tf.uint8))
        example = tf.nest.map_structure(lambda part: part[None], example)
    # A model that makes its variables at the first call has them then.
    decode = outputs.decoder(task, task_checks.outputs(task, model, example))
    tasks.check_read(task, config, tasks.EVALUATION[:-1])
    warm_start.load(model, path, skip=False, averages=ema and warm_start.has_averages(path))
    with task_checks.user_code_errors("optimizer"):
        own = tasks.optional(task, "optimizer")
        # The task may hold it; in the checkpoint it is the run's.
        others = optimizers.build(config, model, own).optimizer.variables if own else []
    warm_start.load_held(Held(task, model, others), path)
    return task, model, path, decode


def chosen(folder: Path, which: str) -> Path:
    """A sound checkpoint of a run; "best" is of the scores by its newest score's measure.

    Raises ValueError: there is no such checkpoint, or it is damaged.
    """
    there = files.candidates(folder)
    names = f"{folder} holds {', '.join(path.name for path in there) or 'no checkpoint'}"
    if which == "best":
        path = files.best(files.scored(there))
        if path is None:
            raise ValueError(f"{names}, none with a score: give --checkpoint=last or a step")
    elif which == "last":
        path, damaged = files.newest_sound(folder)
        if path is None:
            raise ValueError(f"{names}, none of them sound{': '.join(['', *damaged[:1]])}")
        for why in damaged if launch_rank() == 0 else ():
            logs.say(f"note: passed over: {why}")
    elif which.isdecimal():
        path = folder / f"step-{int(which):08d}"
        if not path.exists():
            raise ValueError(f"{names}, but none of step {which}")
    else:
        path = Path(typed.path(which))
    files.verify(path)
    return path
