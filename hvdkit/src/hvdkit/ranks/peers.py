"""Names the rank that hangs, and its host, when ranks wait for each other in vain.

Horovod says that it was shut down, whether another rank has ended, was stopped or hangs elsewhere.
So each rank has a thread that reports where its main thread is, and the ranks that are left ask all
others. While the run goes on each rank asks its neighbour, because MPI waits for a stopped process
for ever; and rank 0 all others when nothing moves, as Horovod 0.28.1's own check ended no run.

A rank listens on loopback where all ranks share a host, else on the run's network. Who connects
gets a nonce, and an answer only to a question that is signed, see questions.py. Nobody is called
silent whose port still closes connections: no stopped process does that.
"""

import concurrent.futures
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import tensorflow as tf

from hvdkit.logs import complain, join
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.questions import Answers, Link
from hvdkit.ranks.start import ways
from hvdkit.ranks.world import World, hostname
from hvdkit.settings import project
from hvdkit.stop import BUG, NOT_NOW

_CONNECT = 5.0  # A process that runs answers within so many seconds.
_SILENT = (
    # After so many seconds without an answer, a process was stopped or its host is gone.
    45.0
)
# Ranks that are left notice within so many seconds that Horovod was shut down.
_SETTLE = 10.0
# Later ranks leave so many seconds to earlier ones, at most, a second each.
_LATEST = 30
# A rank that has named others stays for so many seconds: who asks it at this moment would else find
# it gone, and name it.
_SPOKEN = 3.0
_TOLD = 20.0  # The neighbour of a rank that ends learns of it within so many seconds.
_ASKED_AT_ONCE = 64
# Errors of a rank that others left alone: of Horovod, and of exchange.cc.
_LEFT_ALONE = re.compile(
    r"Horovod has been shut down|(a rank|rank \d+) [^:\n]* waited in exchange \d+ \([^)]*\)"
    # In the middle of a sum it says what Gloo or NCCL says.
    r"|gloo/transport/[^\n]*(?:Connection closed|Read error|Write error|Timed out|timeout)[^\n]*"
    r"|NCCL (?:async )?error[^\n]*"
)
# How many lower ranks each rank that is left asks at once, where there are thousands.
_LOWER_ASKED = 8


class _Place(NamedTuple):
    """A rank's host, and the addresses and ports at which it answers."""

    host: str
    doors: list[tuple[str, int]]


class _Answer(NamedTuple):
    """What a rank said, or why it did not.

    `how`: "gone", "silent", or "busy" (it closes connections); "" where it has answered. `at`: the
    place in the code that it is at, or "asking" or "without data". `still`: the seconds for which
    it has not moved, `left`: those for which it may stay there. `parts`, `reads`: see `Heartbeat`.
    """

    how: str
    at: str
    still: float
    left: float = 0.0
    parts: int = 0
    reads: bool = False


class Peers:
    """This rank's answering thread; every rank makes one, at the same place.

    For `with`: where the block ends because others left this rank alone, the lowest rank that is
    left names those that ended or hang, and the process exits with BUG.
    """

    def __init__(
        self, world: World, stall_seconds: int, start_seconds: int = 0
    ) -> None:
        """Opens this rank's port and starts to watch the neighbour.

        `stall_seconds`: how long a rank may stay at one place before this process ends, and a
        neighbour be silent, if that is less than _SILENT; 0: for ever. In a step that is less, see
        `Heartbeat.patience`; before the first one `start_seconds`, and the exit code is NOT_NOW.
        """
        self._rank = world.rank
        self._asking = False
        self._without_data = False  # A rank without data has said so, and ends.
        self._limits = (start_seconds or math.inf, stall_seconds)
        # The connection to the neighbour: strangers who fill its port do not end it.
        self._kept: Link | None = None
        self._main = threading.main_thread().ident or 0
        self._places = [_Place(hostname(), [])]
        if world.size > 1:
            self._open(world)
        # A rank that is alone may be a debugger's or a notebook's; not under hvdkit supervise.
        if stall_seconds and (world.size > 1 or "LAUNCH_BY" in os.environ):
            threading.Thread(
                target=self._watch, args=(stall_seconds,), daemon=True
            ).start()

    def _open(self, world: World) -> None:
        """Ports that answer other ranks, and where theirs are."""
        self._key = world.key
        addresses = [address for _, address in ways()]
        if world.local_size == world.size:
            addresses = ["127.0.0.1"]
        servers = [
            socket.create_server((address, 0), backlog=1024) for address in addresses
        ]
        place = (hostname(), [server.getsockname() for server in servers])
        self._places = [
            _Place(*fields) for fields in world.gather_objects(place, "peers.places")
        ]
        answers = Answers(servers, self._key, self._rank)
        threading.Thread(
            target=answers.serve,
            args=(self._state,),
            name="peers",
            daemon=True,
        ).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if reason := left_alone(error):
            self._explain(reason)
            # Not Python's own way out: MPI would wait there for the missing rank.
            os._exit(BUG)
        if (
            isinstance(error, SystemExit)
            and isinstance(error.code, int)
            and self._places[1:]
        ):
            # This rank has said why it ends. In MPI's finalize it would wait for the others, which
            # would say that it does not answer.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.code)

    def _explain(self, reason: str) -> None:
        self._asking = True
        sys.stdout.flush()
        end = time.monotonic() + _SETTLE
        while not self._left_to_another():
            missing = {}
            for rank, answer in self._ask_all().items():
                if answer.at != "asking":
                    missing[rank] = answer.at or answer.how
            # Others that are left may still wait for the transport to give up.
            over = time.monotonic() > end or all(
                how == "gone" for how in missing.values()
            )
            if over and self._rank == min(set(range(len(self._places))) - set(missing)):
                shown = "" if reason.startswith("Horovod has been") else f" ({reason})"
                complain(self._sentence(missing) + shown)
                if len(missing) < len(self._places) - 1:
                    time.sleep(_SPOKEN)
                return
            time.sleep(0.5)
        # A launcher ends all ranks, who asks as well, when the first one ends.
        time.sleep(2 * _SETTLE)

    def _left_to_another(self) -> bool:
        """Whether a lower rank asks already: thousands that ask all others would take too long."""
        lower = range(self._rank)
        groups = [
            lower[start : start + _LOWER_ASKED] for start in lower[::_LOWER_ASKED]
        ]
        first = self._first_of_host()
        if first < self._rank:
            groups.insert(0, range(first, first + 1))
        for ranks in groups:
            if any(answer.at == "asking" for answer in self._ask_these(ranks).values()):
                return True
        return False

    def _first_of_host(self) -> int:
        hosts = [place.host for place in self._places]
        return hosts.index(hosts[self._rank])  # Not hostname(): it may have changed.

    def _stuck(self) -> str:
        """Where all ranks stand, if all have been where they are for too long; else ""."""
        by_rank = {self._rank: _Answer("", *self._state())} | self._ask_all()
        answers = by_rank.values()
        if any(answer.left > 0 for answer in answers):
            return ""
        # A rank that waits for data reports that itself.
        if any(answer.reads for answer in answers):
            return ""
        # Such a rank may move; where a firewall is between, a silent one too. One that was stopped
        # is found by its neighbour.
        if any(answer.how in ("busy", "silent") for answer in answers):
            return ""
        has_ended = any(answer.how == "gone" for answer in answers)
        # Ranks that have ended are the launcher's business.
        if has_ended and -by_rank[self._rank].left < _SILENT:
            return ""
        seconds = round(min(answer.still for answer in answers))
        ranks_at: dict[str, list[int]] = {}
        most = max(answer.parts for answer in answers)
        for rank, answer in sorted(by_rank.items()):
            ranks_at.setdefault(_place_of(answer, most), []).append(rank)
        texts = []
        for place, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1]))[:4]:
            texts.append(f"{place}: {join([self._who(rank) for rank in ranks], 1)}")
        return f"the run ends: no rank has moved for {seconds} s: {'; '.join(texts)}"

    def _state(self) -> tuple[str, float, float, int, bool]:
        """What this rank answers: the fields of an _Answer but the first."""
        still = heartbeat.still()
        left = heartbeat.patience(*self._limits) - still
        at = "asking" if self._asking else self._main_thread()
        if self._without_data:
            at = "without data"
        return at, still, left, heartbeat.parts, heartbeat.reads

    def _end_without_data(self, still: float) -> None:
        """Ends the run: this rank's neighbour ends too, with the same exit code.

        A process of which a thread waits for a mount without its server stays after its end, and
        no launcher sees that. The watch of another rank would later take it for one that hangs.
        """
        earlier = self._ask_these(range(min(self._rank, _LATEST))).values()
        if all(answer.at != "without data" for answer in earlier):
            complain(
                f"the run ends: {self._who(self._rank)} has waited {still:.0f} s for a batch of "
                "data: its disk, mount or file server hangs"
            )
        self._without_data = True
        if len(self._places) > 1:
            time.sleep(_TOLD)
        os._exit(NOT_NOW)

    def _sentence(self, missing: dict[int, str]) -> str:
        if not missing:
            return "the run ends: a sum over ranks failed though all ranks are there"
        # A rank may have ended because another hangs.
        hangs = {rank: how for rank, how in missing.items() if how != "gone"} or missing
        parts = [
            f"{self._who(rank)} {_in_words(how)}"
            for rank, how in list(hangs.items())[:4]
        ]
        sentence = "the run ends: " + "; ".join(parts)
        if len(hangs) > 4:
            sentence += f", and {len(hangs) - 4} more ranks"
        return sentence

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._places[rank].host}"

    def _main_thread(self) -> str:
        """The innermost line of the project's own that the main thread is at."""
        frame = sys._current_frames().get(self._main)
        while frame and not project.may_be_own(frame.f_code.co_filename):
            frame = frame.f_back
        if not frame:
            return "not in the project's code"
        file = project.name_of(frame.f_code.co_filename)
        return f"{file}, line {frame.f_lineno} ({frame.f_code.co_name})"

    def _ask_all(self) -> dict[int, _Answer]:
        return self._ask_these(
            [rank for rank in range(len(self._places)) if rank != self._rank]
        )

    def _ask_these(self, ranks: Sequence[int]) -> dict[int, _Answer]:
        try:
            with concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
                return dict(zip(ranks, pool.map(self._ask, ranks)))
        except RuntimeError:
            # No thread can be made: the container has too many processes.
            return {rank: self._ask(rank) for rank in ranks}

    def _ask(self, rank: int) -> _Answer:
        answer, link = self._ask_anew(rank)
        if link:
            link.close()
        return answer

    def _ask_neighbour(self, rank: int) -> _Answer:
        """Asks on the connection that is kept, and on a new one if nothing comes there."""
        if self._kept:
            try:
                return _Answer("", *self._kept.ask())
            except (OSError, ValueError, TypeError):
                pass
        answer, link = self._ask_anew(rank)
        # A connection that was only slow is kept: strangers may fill the port, and leave no place
        # for a new one.
        if link:
            if self._kept:
                self._kept.close()
            self._kept = link
        return answer

    def _ask_anew(self, rank: int) -> tuple[_Answer, Link | None]:
        """The answer, and the connection on which it came."""
        place = self._places[rank]
        doors = place.doors
        if place.host != self._places[self._rank].host:
            # An address such as docker0's is that of every host, and would lead to this one.
            addresses = {address for address, _ in self._places[self._rank].doors}
            doors = [door for door in doors if door[0] not in addresses] or doors
        states = {"silent"}
        for door in doors:
            end = time.monotonic() + _CONNECT
            while time.monotonic() < end:
                link = None
                try:
                    link = Link(door, self._key, rank, seconds=_CONNECT)
                    return _Answer("", *link.ask()), link
                except ConnectionRefusedError:
                    states.add("gone")
                    end = 0.0
                except ConnectionError:
                    states.add("busy")
                    time.sleep(0.02)
                except (OSError, ValueError, TypeError):
                    end = 0.0
                if link:
                    link.close()
        how = next(how for how in ("gone", "busy", "silent") if how in states)
        return _Answer(how, "", math.inf), None

    def _watch(self, seconds: int) -> None:
        neighbour = (self._rank + 1) % len(self._places)
        patience = min(seconds, _SILENT)
        # The neighbour answered at this time; never, where a firewall is between.
        heard = 0.0
        clock = time.pthread_getcpuclockid(self._main)
        first = self._first_of_host()
        stuck = ""
        computed = 0.0
        while not self._asking:
            before = time.monotonic()
            nap = min(patience / 8, 30, heartbeat.patience(*self._limits) / 8)
            time.sleep(nap)
            if time.monotonic() - before > 2 * nap + 1:  # The whole run was suspended.
                heard = time.monotonic() if heard else 0.0
                heartbeat.beat()
            # A rank that computes does not hang.
            used = time.clock_gettime(clock)
            if used - computed > 0.05 * nap:
                heartbeat.beat()
            computed = used
            was_stuck = stuck != ""
            stuck = ""
            # Later ranks leave time to the earlier ones.
            _, still, left, parts, reads = self._state()
            if reads and -left > min(self._rank, _LATEST):
                self._end_without_data(still)
            # One rank of each host watches; a rank that is alone waits for nobody.
            if (
                self._rank == first
                and -left > min(first, _LATEST)
                and len(self._places) > 1
            ):
                stuck = self._stuck()
            if stuck and was_stuck:
                complain(stuck)
                os._exit(BUG if parts else NOT_NOW)
            answer = self._ask_neighbour(neighbour)
            how = answer.how
            if answer.at == "without data":
                os._exit(NOT_NOW)
            if not how or (how == "busy" and heard):
                heard = time.monotonic()
            elif how == "gone":
                heard = 0.0  # The neighbour has ended: launchers see to that.
            elif heard and time.monotonic() - heard > patience:
                complain(
                    f"the run ends: {self._who(neighbour)} has not answered for {patience:g} s: "
                    "its process was stopped, or its host or network hangs"
                )
                os._exit(BUG)


def left_alone(error: BaseException | None) -> str:
    """What an operation says that waits in vain for other ranks; "" for other errors."""
    if not isinstance(error, tf.errors.OpError):
        return ""
    found = _LEFT_ALONE.search(str(error))
    return found[0].strip() if found else ""


def _place_of(answer: _Answer, most: int) -> str:
    """Where a rank stands; `most`: the most parts of steps that a rank has done."""
    if not answer.at:
        return "ended" if answer.how == "gone" else "no answer"
    if answer.parts < most:
        return f"at {answer.at}, its own part of the step not done: its GPU, driver or code hangs"
    return f"at {answer.at}"


def _in_words(how: str) -> str:
    if how == "gone":
        return "ended before the others; its own words say why"
    if how == "busy":
        return "could not be asked: it closes connections, of which strangers may open too many"
    if how == "silent":
        return "does not answer: its process was stopped, or its host or network hangs"
    return f"did not come to where the others waited for it: it is at {how}"
