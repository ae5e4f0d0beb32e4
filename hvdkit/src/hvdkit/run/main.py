"""`hvdkit.main`: from the command line to the exit code, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.peers import Peers
from hvdkit.ranks.world import World
from hvdkit.run import modes
from hvdkit.run.loop import TrainFunction, run_once
from hvdkit.settings import config as config_lib
from hvdkit.settings.config import Config
from hvdkit.stop import DONE, Stop, complain, launch_rank
from hvdkit.train import reduction


def main(train: TrainFunction, argv: Sequence[str]) -> int:
    """Trains by `train(run)`; returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted.

    `train` may be called twice: after steps that are not finite a run goes back once.
    """
    settings = config_lib.from_command_line(argv)

    def work(world: World, stop_signal: StopSignal) -> None:
        run_on(world, settings, train, stop_signal=stop_signal)

    return on_ranks(settings, work)


def run_on(
    world: World, settings: Config, train: TrainFunction, *, stop_signal: StopSignal
) -> None:
    """A run on ranks that are connected and have their devices. Raises Stop, on every rank."""
    agreement.check_settings(world, settings)
    with modes.folder(settings, world) as changed:
        run_once(train, changed, world, stop_signal=stop_signal)


def on_ranks(settings: Config, work: Callable[[World, StopSignal], None]) -> int:
    """Does the work on the ranks that were launched, each with its device; returns the exit code.

    Where it ends in a Stop, rank 0 prints its one sentence.
    """
    # From here on: a run may be told to stop while it starts.
    stop_signal, code = StopSignal(launch_rank()), DONE
    try:
        world = world_lib.connect(reduction.environment(settings))
    except Stop as stop:
        if launch_rank() == 0:
            complain(str(stop))
        return stop.code
    try:
        world_lib.set_up(world, settings)
        with world.fail_together("choosing what carries gradients"):
            reduction.check_backend(settings)
        with Peers(world, reduction.stall_seconds(settings)):
            work(world, stop_signal)
    except Stop as stop:
        code = stop.code
        if world.is_chief:
            complain(str(stop))
    world_lib.finish(world)
    return code
