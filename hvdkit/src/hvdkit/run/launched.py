"""A program on the ranks that were launched: from Horovod's start to the exit code."""

from __future__ import annotations

from collections.abc import Callable

from hvdkit import logs
from hvdkit.logs import complain
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.peers import Peers
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from hvdkit.stop import DONE, Stop, launch_rank
from hvdkit.train import reduction


def run(config: Settings, work: Callable[[World, StopSignal], None]) -> int:
    """Does the work on every rank; returns the exit code: DONE, or that of the Stop it raised."""
    # From here on: a run may be told to stop while it starts.
    stop_signal = StopSignal(launch_rank())
    logs.use()
    try:
        world = world_lib.connect(reduction.environment(config))
    except Stop as stop:
        if launch_rank() == 0:
            complain(str(stop))
        return stop.code
    code = DONE
    try:
        # One GPU a process, or a share of the cores.
        world_lib.set_up(world, config)
        with world.fail_together("choosing what carries gradients"):
            reduction.check_backend(config)
        with Peers(world, reduction.stall_seconds(config)):
            work(world, stop_signal)
    except Stop as stop:
        code = stop.code
        if world.is_chief:
            complain(str(stop))
    world_lib.finish(world)
    return code
