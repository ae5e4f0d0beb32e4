"""`hvdkit.main`: from the command line to the exit code, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.ranks import agreement
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run import launched, modes
from hvdkit.run.loop import TrainFunction, run_once
from hvdkit.settings import config as config_lib
from hvdkit.settings.config import Config


def main(train: TrainFunction, argv: Sequence[str]) -> int:
    """Trains by `train(run)`; returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted.

    `train` may be called twice: after steps that are not finite a run goes back once.
    """
    settings = config_lib.from_command_line(argv)

    def work(world: World, stop_signal: StopSignal) -> None:
        run_on(world, settings, train, stop_signal=stop_signal)

    return launched.run(settings, work)


def run_on(
    world: World, settings: Config, train: TrainFunction, *, stop_signal: StopSignal
) -> None:
    """A run on ranks that are connected and have their devices. Raises Stop, on every rank."""
    agreement.check_settings(world, settings)
    with modes.folder(settings, world) as changed:
        run_once(train, changed, world, stop_signal=stop_signal)
