"""One run while ranks come and go (--elastic).

Every rank keeps the newest commit in memory: a copy of what a checkpoint holds. When a rank is
lost, or hosts have come or are to go, each process that is left gives up what it was doing, asks
the driver (horovodrun --host-discovery-script) for its place in the next world, and makes the run
anew from that commit (train.main). Who has joined does the same from its start: all ranks run the
same collectives in the same order, and there is no other way in.

Horovod's own loop (hvd.elastic.run) is not used: it takes a grouped allreduce that fails for the
end of the run (0.28.1), and cannot tell a process that has no place any more from a slow network.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import notification_manager
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World, raw
from hvdkit.settings import Settings
from hvdkit.stop import BUG, WRONG_USE, Stop, complain
from hvdkit.words import some

from engine import guard

_STARTED = "HOROVOD_ELASTIC"  # horovodrun's word for it
# What the driver answers, in this order, and where Horovod reads it when it starts.
_PLACE = (
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)
LOCK_PATIENCE = 120.0  # seconds: a network disk forgets a host that was cut off after 90
_PATIENCE = 60.0  # seconds until a rank of a new world has started Python and TensorFlow
_GAVE_UP = "gave up"
# Of a collective that fails: Horovod's word or Gloo's, whose message names its file; of Horovod's
# functions when it has noticed a moment before.
_LOST = ("Horovod", "gloo/transport/", "Process set does not exist")
_TRIES = 5  # worlds in a row that could not be connected


class WorldChanged(Exception):
    """The run is to go on from its newest commit, with the ranks that there are then."""


class Kept(NamedTuple):
    """The newest commit of all ranks: its step, and the lowest rank that has it."""

    step: int
    rank: int


class Commits:
    """This rank's newest commit, and whether the driver knows of other hosts.

    Attributes:
      hosts_changed: the driver tells one rank only.
    """

    def __init__(self) -> None:
        self.hosts_changed = False
        self._step = -1
        self._values: dict[str, np.ndarray] = {}

    def keep(self, step: int, variables: Mapping[str, keras.Variable | tf.Variable]) -> None:
        """The values as they are now; every rank calls it, after a step known to be sound."""
        self._values = {name: raw(v).numpy() for name, v in variables.items()}
        self._step = step

    def newest(self, world: World) -> Kept | None:
        """The same on every rank; None where no rank has any."""
        steps = world.gather_objects(self._step, "elastic.newest")
        step = max(steps)
        return Kept(step, steps.index(step)) if step >= 0 else None

    def restore(
        self, variables: Mapping[str, keras.Variable | tf.Variable], world: World, kept: Kept
    ) -> None:
        """Sets the variables on the rank that has them; the start-up broadcast brings them to all.

        Raises:
          Stop: on all ranks, when they are others: who has joined runs other code.
        """
        with world.together("going on from memory"):
            if world.rank == kept.rank:
                if missing := variables.keys() ^ self._values.keys():
                    raise ValueError(f"the model has other variables than before: {some(missing)}")
                for name, variable in variables.items():
                    raw(variable).assign(self._values[name])

    def on_hosts_updated(self, timestamp: int, change: int) -> None:
        """Horovod's thread calls it when hosts have come, or are to go."""
        self.hosts_changed = True


def check(config: Settings) -> None:
    """Raises Stop where --elastic and what started this process do not fit."""
    started = os.environ.get(_STARTED, "0") == "1"
    if config.elastic and not started:
        raise Stop(
            WRONG_USE,
            "--elastic needs a launcher that lets hosts come and go: launch/hosts.sh --discover "
            "(horovodrun --host-discovery-script)",
        )
    if started and not config.elastic:
        raise Stop(
            WRONG_USE,
            "horovodrun --host-discovery-script lets hosts come and go, and the run must know of "
            "it: add --elastic",
        )


def connect(knobs: Mapping[str, str], commits: Commits) -> World:
    """The first world of this process, which may have begun long before."""
    # Else Horovod would ask the driver by itself, and give one error for all that goes wrong.
    del os.environ[_STARTED]
    guard.start()
    os.environ.update(knobs)
    # Else whoever was there when this process was started has gone on without it.
    world = _connected() or next_world(commits)
    notification_manager.init()
    notification_manager.register_listener(commits)
    return world


def check_device(config: Settings) -> None:
    """Raises ValueError for --elastic on GPUs."""
    if config.elastic and tf.config.get_visible_devices("GPU"):
        raise ValueError(
            "--elastic was never tried over NCCL: give --device=cpu, or leave it out and start "
            "the run by launch/again.sh"
        )


def run(in_world: Callable[[World], int], world: World, commits: Commits) -> int:
    """What `in_world` returns at the run's end; it is called anew where the ranks have changed."""
    while True:
        with contextlib.suppress(WorldChanged), _told():
            return in_world(world)
        world = next_world(commits)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns Horovod's error, where a rank was lost, into WorldChanged."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.AbortedError, ValueError) as error:
        if not any(words in str(error) for words in _LOST):
            raise
        raise WorldChanged from error


def next_world(commits: Commits) -> World:
    """Waits for the other ranks of the next world; ends the process where it has no place there."""
    commits.hosts_changed = False
    keras.utils.clear_session()  # its names would be others than those of a process that joins
    gc.collect()
    for _ in range(_TRIES):
        _leave()
        place = _ask_for_place()
        if place["HOROVOD_RANK"] == "-1":
            print("this rank's host has left the run: it ends here", flush=True)
            os._exit(0)  # at once: were the host to come back, its end would be taken for the run's
        os.environ.update(place)
        if world := _connected():
            return world
    complain(f"the ranks could not be connected {_TRIES} times in a row: Horovod's lines say why")
    sys.exit(BUG)


def _leave() -> None:
    """Ends this process's part in its world; the others notice it at once.

    Horovod keeps its connections when it is shut down, until it starts again (0.28.1). Who waits
    for data of this rank, and not of the one that was lost, would wait for Gloo's 30 s.
    """
    hvd.shutdown()
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", *_PLACE)
    own = {name: os.environ.pop(name) for name in names}
    hvd.init()  # alone
    hvd.shutdown()
    os.environ.update(own)


def _connected() -> World | None:
    """This process's world; None where a rank of it was lost meanwhile."""
    if _all_there():
        with contextlib.suppress(ValueError, RuntimeError):
            return world_lib.connect()
    return None


def _all_there() -> bool:
    """Whether all ranks of this process's world are about to start Horovod; it waits for them.

    A rank that does not come would end the others' processes: Gloo aborts them after 30 s. They ask
    twice, for one of them may be lost while it waits for the last. Who waits in vain says so, for
    one that comes later would wait as long for this one, which asks for a place by then.
    """
    size, end = os.environ["HOROVOD_SIZE"], time.monotonic() + _PATIENCE
    for call in ("there", "ready"):
        _request("PUT", f"/{call}/{os.environ['HOROVOD_RANK']}", size)
        for rank in range(int(size)):
            # Who was started for another world, of another size, is none of this one.
            while (said := _request("GET", f"/{call}/{rank}")) != size:
                if said == _GAVE_UP or time.monotonic() > end:
                    _request("PUT", f"/{call}/{os.environ['HOROVOD_RANK']}", _GAVE_UP)
                    return False
                time.sleep(0.05)
    return True


def _ask_for_place() -> dict[str, str]:
    """Horovod's variables for this process, once every rank of the last world asked or ended."""
    slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    answer = _request("GET", f"/rank_and_size/{slot}")
    return dict(zip(_PLACE, answer.split(","), strict=True))


def _request(method: str, path: str, body: str | None = None) -> str:
    """What horovodrun's store answers, "" where it has nothing; ends the process if it is gone."""
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    link = http.client.HTTPConnection(address, int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    try:
        link.connect()
        # The answer may take minutes; a driver whose host is gone gives none.
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("IDLE", 20), ("INTVL", 5), ("CNT", 5)):
            link.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
        link.request(method, path, body)
        return link.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        complain(f"horovodrun does not answer at {address} ({error}): this rank ends")
        sys.exit(BUG)
