"""`hvdkit.main`: from the command line to the exit code, on every rank."""

import functools
import gc
from collections.abc import Callable, Sequence

from absl import app

from hvdkit import logs, streams
from hvdkit import settings as settings_lib
from hvdkit.checkpoint import lease
from hvdkit.launcher import launch_fault, launch_rank
from hvdkit.logs import complain
from hvdkit.ranks import agreement, exchange, start
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.peers import Peers
from hvdkit.ranks.world import World
from hvdkit.run import modes
from hvdkit.run.loop import Run
from hvdkit.settings import Settings, absl_flags, project
from hvdkit.stop import DONE, WRONG_USE, GoBack, Stop
from hvdkit.train.step import reduction

Work = Callable[[World, StopSignal], None]


def main(
    train: Callable[[Run], None], kind: type[Settings], argv: Sequence[str]
) -> int:
    """Trains by `train(run)`; returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted.

    `train` may be called twice: after steps that are not finite a run goes back once. It runs in
    absl's app.run, which hands on what the flags' parser returns: the settings.
    """

    def train_on_ranks(settings: Settings) -> int:
        return with_ranks(settings, _training(settings, train))

    streams.never_wait()
    try:
        parser = functools.partial(settings_lib.from_command_line, kind=kind)
        app.run(train_on_ranks, list(argv), flags_parser=parser)
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints it: train.py's own words.
            raise
        return end.code or DONE


def main_with(train: Callable[[Run], None], settings: Settings) -> int:
    """Trains in a process that goes on, as a notebook's: its signals are then as before."""
    if settings.jit_cache:
        complain("jit_cache counts on train.py's command line only: leave it out here")
        return WRONG_USE
    project.importable()
    stop_signal = StopSignal(launch_rank(), in_notebook=True)
    try:
        return with_ranks(settings, _training(settings, train), stop_signal)
    finally:
        stop_signal.end()
        lease.release()


def _training(settings: Settings, train: Callable[[Run], None]) -> Work:
    def work(world: World, stop_signal: StopSignal) -> None:
        run_on(world, settings, train, stop_signal=stop_signal)

    return work


def run_on(
    world: World, settings: Settings, train: Callable, *, stop_signal: StopSignal
) -> None:
    """A run on connected ranks; once more where it goes back. Raises Stop, on every rank."""
    flags = absl_flags.values_of_the_fork()
    values = {name.removeprefix("--"): value for name, value in flags.items()}
    agreement.check_settings(world, settings, values)
    if settings.bn_sync == "full":
        exchange.start(world, settings.stall_shutdown_s)
    back = None
    with modes.folder(settings, world) as changed, world_lib.kept_numbers():
        while True:
            try:
                return _train_once(
                    world, changed, train, stop_signal=stop_signal, back=back
                )
            except GoBack as error:
                # The traceback would keep the old model alive.
                back = error.with_traceback(None)
                # Its weights must be gone before the new run's are made.
                gc.collect()


def _train_once(
    world: World,
    settings: Settings,
    train: Callable,
    *,
    stop_signal: StopSignal,
    back: GoBack | None,
) -> None:
    """A run to its end. Raises Stop, or GoBack, on every rank."""
    with world_lib.names_of_a_new_process():
        run = Run(settings, world, stop_signal=stop_signal, back=back)
        with run.open_parts:
            train(run)
            run.finish()


def with_ranks(
    config: Settings,
    work: Work,
    stop_signal: StopSignal | None = None,
    *,
    trains: bool = True,
) -> int:
    """Does the work on every launched rank; returns DONE, or the code of the Stop it raised.

    `trains`: whether it makes steps; else --stall_shutdown_s counts from its beginning.
    """
    # Signals count from here on, also while a run starts.
    stop_signal = stop_signal or StopSignal(launch_rank())
    logs.use()
    fault = launch_fault()
    if fault:
        complain(fault)
        return WRONG_USE
    if config.bn_sync == "full" and not exchange.is_expected():
        start.shorten_cycle()
    with world_lib.arithmetic_as_written(config):
        return _connected(config, work, stop_signal, trains=trains)


def _connected(
    config: Settings, work: Work, stop_signal: StopSignal, *, trains: bool
) -> int:
    try:
        world = world_lib.connect(config.start_limit_s)
    except Stop as stop:
        if launch_rank() == 0:
            complain(str(stop))
        return stop.code
    code = DONE
    try:
        # One GPU a process, or a share of the cores.
        with start.waiting("all ranks to choose a device", config.start_limit_s):
            world = world_lib.set_up(world, config)
        with world.fail_together("choosing what carries gradients"):
            reduction.check_backend(config)
        start_seconds = config.start_limit_s
        if not trains:
            limits = (config.start_limit_s, config.stall_shutdown_s)
            start_seconds = min(filter(None, limits), default=0)
        with Peers(world, config.stall_shutdown_s, start_seconds):
            work(world, stop_signal)
    except Stop as stop:
        code = stop.code
        if world.is_chief:
            complain(str(stop))
    world_lib.finish(world)
    return code
