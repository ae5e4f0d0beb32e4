"""Ranks that exchange numbers until rank 1 fails: waits.py stop|hang|raise|exit SECONDS
sum|message."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "template"))

import hvdkit.ranks.quiet  # noqa: F401

# isort: split
import horovod.tensorflow as hvd
import strangers
import tensorflow as tf

from hvdkit import settings as settings_lib
from hvdkit.logs import complain
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.peers import Peers
from hvdkit.settings import project

project.use(Path(__file__).resolve().parent)  # its lines are named, as a fork's own are


def fail(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        complain("only here")
        sys.exit(1)
    if how == "raise":
        raise RuntimeError("only here")
    os._exit(9)  # mpirun has it go on before it is killed


def main() -> None:
    config = settings_lib.Settings(stall_shutdown_s=int(sys.argv[2]), cpu_threads=1)
    world = world_lib.connect()
    world = world_lib.set_up(world, config)
    # Before the end of a first step, a rank may take as long as a start.
    heartbeat.enter_step()
    heartbeat.leave_step()
    with Peers(world, config.stall_shutdown_s) as peers:
        if sys.argv[1] == "stop" and world.rank == 0:
            # A silent rank is found all the same.
            strangers.hold(peers._places[1].doors, 1000)
        for step in range(1_000_000):
            if step == 5 and world.rank == 1:
                time.sleep(3)  # each has heard its neighbour
                fail(sys.argv[1])
            if sys.argv[3] == "message":
                world.barrier_max("sum")
            else:
                hvd.allreduce(tf.zeros([2]), name="sum")
                heartbeat.beat()


if __name__ == "__main__":
    main()
