"""A run that was trained: its settings, and its model with the weights of a checkpoint."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdkit import logs, scores
from hvdkit import settings as settings_lib
from hvdkit.checkpoint import checkpoints as checkpoints_lib
from hvdkit.checkpoint import files, warm_start
from hvdkit.data import open as open_lib
from hvdkit.data.readers import pictures
from hvdkit.launcher import launch_rank
from hvdkit.logs import refuse
from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run import sample_figures
from hvdkit.run.context import RunContext, bring_to_all, make_task, prepare
from hvdkit.run.main import with_ranks
from hvdkit.settings import Settings, project, runs, typed
from hvdkit.settings.typed import path_argument
from hvdkit.train.optim import optimizer as optimizers
from hvdkit.train.step.state import TaskState
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import inputs as inputs_lib
from hvdkit.train.task import outputs
from hvdkit.train.task import protocol as tasks
from hvdkit.train.task.inputs import Inputs
from hvdkit.train.task.protocol import Task

Decode = Callable[[Any], dict[str, tf.Tensor]]
# Called with settings, world, stop signal and arguments=, what `parser` has parsed.
Work = Callable[..., None]

# These flags take back what only a new run begins with.
_NOT_NEW = (
    "--init_from=",
    "--noinit_ema",
    "--noinit_skip_mismatched",
    "--backbone_weights=",
    "--backbone_preprocessing=",
)


def parser(about: str) -> argparse.ArgumentParser:
    """The parser of a command on a trained run; `about` is the docstring of its module."""
    parser = logs.parser(about)
    parser.add_argument(
        "--run_dir", type=path_argument, required=True, help="the run's folder"
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="best (by its score), last, a step, or the path of a checkpoint",
    )
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the averaged weights, if the run has them (--ema_decay), as its scores do",
    )
    return parser


def settings(run_dir: Path, flags: Sequence[str]) -> Settings:
    """The same as `settings_of`, but what is wrong with them ends all ranks with code 2."""
    try:
        return settings_of(run_dir, flags)
    except ValueError as error:
        refuse(str(error))


def settings_of(run_dir: Path, flags: Sequence[str] = ()) -> Settings:
    """The run's settings, changed by `flags`.

    Raises ValueError: it is no run's folder, or a flag is wrong.
    """
    file = run_dir.absolute() / runs.CONFIG
    if not run_dir.exists():
        raise ValueError(f"--run_dir={run_dir} does not exist")
    if not file.is_file() or file.is_symlink():
        raise ValueError(
            f"--run_dir={run_dir} is no run's folder: it holds no config.cfg"
        )
    words = [
        "",
        f"--flagfile={typed.written(file, is_path=True)}",
        f"--run_dir={typed.written(run_dir.absolute(), is_path=True)}",
        "--resume=auto",
        *_NOT_NEW,
        *flags,
    ]
    return settings_lib.load(words, settings_lib.of_project(), file)


def on_ranks(config: Settings, arguments: argparse.Namespace, work: Work) -> int:
    """Does the work on the ranks that were launched; returns the exit code.

    `arguments`: what `parser` found, the same on every rank but for paths.
    """

    def on_each(world: World, stop_signal: StopSignal) -> None:
        stop_signal.words = "stopping"
        stop_signal.saved = True  # There is nothing to save.
        agreement.check_settings(
            world, config, {"checkpoint": arguments.checkpoint, "ema": arguments.ema}
        )
        agreement.check_code(world)
        with world.fail_together("reading the settings"):
            resolved = config.untrained().for_ranks(world.size)
        with world_lib.kept_numbers():
            work(resolved, world, stop_signal, arguments=arguments)

    return with_ranks(config, on_each, trains=False)


@contextlib.contextmanager
def written_by_chief(
    world: World, out: Path, replaced: contextlib.AbstractContextManager[Path]
) -> Iterator[Path]:
    """Yields rank 0's folder of `replaced`, which takes the place of `out` at the end; else Path().

    Raises Stop: on all ranks, before their work, where rank 0 cannot write there.
    """
    with contextlib.ExitStack() as replacing:
        folder = Path()
        with world.fail_together("writing ", path=out):
            if world.is_chief:
                folder = replacing.enter_context(replaced)
        yield folder
        with world.fail_together("writing ", path=out):
            replacing.pop_all().close()


def restored(config: Settings, world: World, which: str) -> tuple[RunContext, Path]:
    """The run with the weights of one of its checkpoints, on all ranks, and its path.

    Raises Stop: on all ranks, when there is none such, it is damaged, or it does not fit the model.
    """
    task = make_task(config, world)
    flag = f"--checkpoint={which}"
    folder = Path(config.run_dir) / "checkpoints"
    path = Path(world.from_chief(flag, lambda: str(chosen(folder, which, task))))
    with world.fail_together("comparing settings with the checkpoint's"):
        _say_other_settings(config, path)
    with open_lib.one_split.set(True):
        run = prepare(task, config, world, checkpoint=path)
    world.from_chief(flag, checkpoints_lib.load, path, run.state.variables)
    bring_to_all(world, run.state)
    return run, path


class Trained(NamedTuple):
    """A task and its model with the weights of the checkpoint at `path`, on this rank."""

    task: Task
    model: keras.Model
    path: Path
    inputs: Inputs


def trained(
    config: Settings, which: str, ema: bool, *, for_pictures: bool = False
) -> Trained:
    """The model with a checkpoint's weights; `ema`: their averages, where the run has them.

    Raises ValueError: there is no such checkpoint, it is damaged or does not fit; what the model is
    called with is not known; it is no picture, `for_pictures`.
    """
    world_lib.set_numbers(config)
    pictures.limit(config.max_pixels)
    with task_checks.user_code_errors("making the task"):
        task = tasks.load_task(config)
    if for_pictures and not tasks.optional(task, "picture_inputs"):
        raise ValueError(
            f"tasks/{config.task}.py: its Task has no picture_inputs(image), which says what the "
            "model is called with for a picture (hvdkit/train/task/protocol.py). Other examples "
            "are read from .jsonl and .npz files"
        )
    path = chosen(Path(config.run_dir) / "checkpoints", which, task)
    _say_other_settings(config, path)
    with task_checks.user_code_errors("build_model"):
        model = task.build_model()
    inputs = inputs_lib.of_model(task, model, config.image_size)
    warm_start.load(
        model, path, skip=False, averages=ema and warm_start.has_averages(path)
    )
    # The task may hold its optimizer, whose variables are the run's in the checkpoint.
    optimizer_variables = []
    with task_checks.user_code_errors("optimizer"):
        if make := tasks.optional(task, "optimizer"):
            optimizer_variables = optimizers.build(
                config, model, make, trains=False
            ).optimizer.variables
    warm_start.load_task_state(TaskState(task, model, optimizer_variables), path)
    return Trained(task, model, path, inputs)


def decoder(run: Trained, config: Settings, example: Any) -> Decode:
    """What the model's outputs mean; `example`: inputs of a batch, to try the model with.

    Raises ValueError: they mean nothing that is known.
    """
    model_outputs = task_checks.outputs(run.task, run.model, example)
    of_pictures = tasks.optional(run.task, "picture_inputs") is not None
    decode = outputs.decoder(run.task, model_outputs, of_pictures=of_pictures)
    if of_pictures:
        _check_one(decode(model_outputs))
    tasks.check_read(run.task, config, tasks.EVALUATION[:-1])
    return decode


def _check_one(decoded: outputs.Decoded) -> None:
    """Raises ValueError for outputs of one picture that are of more samples, or of none."""
    rows = {value.shape[0] for value in decoded.values()}
    if rows - {1}:
        raise ValueError(
            f"the model makes {max(rows - {1})} samples of one picture: does it take pictures of "
            "one size only? (export: --check=FILE gives one of that size)"
        )


def model_of(
    config: Settings, which: str, ema: bool
) -> tuple[Task, keras.Model, Path, Decode]:
    """A trained model of a task with pictures, its checkpoint, and what its outputs mean."""
    run = trained(config, which, ema, for_pictures=True)
    with task_checks.user_code_errors("picture_inputs"):
        size = config.image_size
        example = run.task.picture_inputs(tf.zeros([size, size, 3], tf.uint8))
    batch = tf.nest.map_structure(lambda part: part[None], example)
    return run.task, run.model, run.path, decoder(run, config, batch)


def load(run_dir: str | Path, checkpoint: str, ema: bool) -> keras.Model:
    """See hvdkit.load."""
    folder = Path(
        typed.path(run_dir) if isinstance(run_dir, str) else run_dir
    ).absolute()
    fork = project.above(folder) or project.above(Path.cwd())
    if not fork:
        raise ValueError(
            f"{run_dir}: neither it nor the working folder lies in a fork that only you or root "
            "can change, with train.py and tasks/: change to yours"
        )
    project.use(fork)
    project.importable()
    with world_lib.kept_numbers():
        return trained(settings_of(folder), checkpoint, ema).model


def _say_other_settings(config: Settings, path: Path) -> None:
    """Rank 0 prints which settings of the run's config.cfg a checkpoint was saved without.

    A resume with other settings writes them there, and may end before it saves again.
    """
    if launch_rank() != 0:
        return
    others = sample_figures.other_settings(files.read_manifest(path), config)
    before = []
    now = []
    for name, saved in others.items():
        if config.came_with_file.get(name) == runs.CONFIG:
            before.append(f"--{name}={saved}")
            now.append(f"--{name}={getattr(config, name)}")
    if before:
        logs.say(
            f"note: {path.name} was saved with {logs.join(before)}, and {runs.CONFIG} now has "
            f"{logs.join(now)}, which is used: give the former for outputs as they were then"
        )


def chosen(folder: Path, which: str, task: Task) -> Path:
    """A sound checkpoint of a run; "best" is of the scores by its newest score's measure.

    Raises ValueError: there is no such checkpoint, it is damaged, or the task's main metric is no
    more that of the scores.
    """
    checkpoints = files.candidates(folder)
    names = ", ".join(path.name for path in checkpoints) or "no checkpoint"
    if which == "best":
        is_chief = launch_rank() == 0
        unread = files.telling(logs.say if is_chief else lambda note: None)
        path, note = files.best_now(
            files.scored(checkpoints, unread), scores.of_task(task)
        )
        if not path:
            raise ValueError(
                f"{folder} holds {names}, none with a score: give --checkpoint=last or a step"
            )
        if note and launch_rank() == 0:
            logs.say(note)
    elif which == "last":
        path, faults = files.newest_sound(folder)
        if faults and not path:
            raise ValueError(f"{folder} holds {names}, none of them sound: {faults[0]}")
        if not path:
            raise ValueError(f"{folder} holds {names}, none of them sound")
        if launch_rank() == 0:
            for fault in faults:
                logs.say(f"note: passed over: {fault}")
    elif which.isdecimal():
        path = folder / files.name_of(int(which))
        if not path.exists():
            raise ValueError(f"{folder} holds {names}, but none of step {which}")
    else:
        path = Path(typed.path(which))
    files.verify(path)
    return path
