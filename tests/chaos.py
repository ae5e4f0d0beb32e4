"""A run that is interrupted again and again ends with the bits of one that never was.

    python tests/chaos.py [--seed=1] [--events=20] [--folder=FOLDER] [KIND ...]      make chaos

Trains the demo with --virtual_ranks=6: once on 2 ranks, then anew in another folder, where at
random moments something happens to it (EVENTS), and each time it goes on, by the same command, on
1, 2, 3, 4 or 6 ranks over Gloo or MPI, with checkpoints of 1, 2 or 3 files; before a host is cut
off the network, on three hosts in network namespaces (as root; else that event is left out). KINDs
are names of EVENTS; by default each happens in turn, in random order. Printed are each event, how
soon all of the run had ended and with which exit code, how many steps were made again, and the
seconds from the event to the next step that is new.

Exit code: 0 the same weights, metrics and figures; 1 not, or something hung or was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from hosts import PORT, Host, Hosts

ROOT = Path(__file__).resolve().parent.parent
STEPS_AN_EVENT = 7  # of the whole run
START, END = 180, 90  # seconds that a start, an end may take; the ranks share two cores
RANKS = (1, 2, 3, 4, 6)
PARTS = (1, 2, 3)
USUAL = [
    *("--flagfile=configs/demo.cfg", "--virtual_ranks=6", "--global_batch_size=12"),
    *("--warmup_steps=0", "--log_every=1", "--eval_every=40", "--checkpoint_every=3", "--keep=3"),
]
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class Failed(Exception):
    """What was promised did not come; the message ends with the run's last lines."""


class Leg:
    """The run, from one start to its next end."""

    number = 0

    def __init__(
        self,
        folder: Path,
        steps: int,
        ranks: int,
        via: str,
        parts: int = 1,
        hosts: Hosts | None = None,
    ) -> None:
        """`hosts`: where the ranks run, one on each; None: all here."""
        self.ranks, self.via, self.parts, self.hosts = ranks, via, parts, hosts
        launcher = [f"--{via}", "-np", ranks]
        if hosts:
            names = ",".join(f"{host.name}:1" for host in list(hosts)[:ranks])
            launcher += ["-p", PORT, "-H", names]
        flags = [*USUAL, f"--num_steps={steps}", f"--checkpoint_parts={parts}"]
        self.start(folder, launcher, flags, hosts[1] if hosts else None)

    def start(
        self, folder: Path, launcher: list, flags: list[str], host: Host | None = None
    ) -> None:
        """`host`: which it is started on, if not this machine itself."""
        Leg.number += 1
        self.folder, self._id = folder, f"chaos-{os.getpid()}-{Leg.number}"
        words = [ROOT / "launch/hosts.sh", *launcher, sys.executable, "train.py"]
        words += [*flags, f"--run_dir={folder}"]
        words = list(map(str, words))
        self.process = subprocess.Popen(
            host.words(*words) if host else words,
            cwd=ROOT / "template",
            env=os.environ | ENVIRONMENT | {"LAUNCH_ID": self._id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.after_end = lambda: None
        self.lines: list[str] = []
        self.steps: list[tuple[int, float]] = []  # as they were logged, and when
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            # Over MPI two ranks' words may stand in one line.
            for step in re.findall(r"step (\d+)/\d+  loss", line):
                self.steps.append((int(step), time.monotonic()))

    def has_said(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def wait_for(self, what: str, there: Callable[[], object], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() > end:
                raise Failed(f"{what}: not within {seconds} s{self.tail()}")
            if self.process.poll() is not None and not there():
                raise Failed(f"{what}: ended before, with {self.process.returncode}{self.tail()}")
            time.sleep(0.01)

    def after(self, steps: int) -> None:
        """Until so many steps were made in this leg."""
        self.wait_for(f"{steps} steps", lambda: len(self.steps) >= steps, START)

    def until(self, step: int) -> None:
        """Until this step was made."""
        self.wait_for(f"step {step}", lambda: self.steps and self.steps[-1][0] >= step, START)

    def pids(self) -> list[psutil.Process]:
        """Ranks, by rank."""
        found = []
        for process in self._mine():
            variables = _variables(process)
            rank = variables.get("HOROVOD_RANK", variables.get("OMPI_COMM_WORLD_RANK"))
            if rank is not None and "train.py" in " ".join(process.cmdline()[:3]):
                found.append((int(rank), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def _mine(self) -> Iterable[psutil.Process]:
        for process in psutil.process_iter():
            if _variables(process).get("LAUNCH_ID") == self._id:
                yield process

    def kill_all(self) -> None:
        for process in list(self._mine()):
            _send(process, signal.SIGKILL)

    def ended(self) -> int:
        """The exit code, when all of it has ended."""
        try:
            code = self.process.wait(END)
        except subprocess.TimeoutExpired:
            raise Failed(f"still there {END} s later{self.tail()}") from None
        self.after_end()
        self._reader.join(10)
        left = [p for p in self._mine() if p.is_running()]
        if left:
            time.sleep(2)  # a process that was killed may take its time
            left = [p for p in self._mine() if p.is_running()]
        if left:
            names = [" ".join(p.cmdline())[:80] for p in left]
            raise Failed(f"left behind: {names}{self.tail()}")
        return code

    def tail(self) -> str:
        return "\n" + "".join(self.lines[-25:])


class Context(NamedTuple):
    leg: Leg
    rng: random.Random


def _variables(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        process.send_signal(number)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


def _state(it: Context) -> Path:
    """One of the newest checkpoint's files of variables."""
    return it.rng.choice(sorted(_checkpoints(it.leg.folder)[-1].glob("state*.npz")))


# What may happen. Each ends the run, one way or the other, and returns the exit codes that it may
# have then; none: any but 0, 2, 3 and 75.


def kill_one(it: Context) -> tuple[int, ...]:
    _send(it.rng.choice(it.leg.pids()), signal.SIGKILL)
    return ()


def kill_all(it: Context) -> tuple[int, ...]:
    it.leg.kill_all()
    return ()


def terminate(it: Context) -> tuple[int, ...]:
    it.leg.process.terminate()
    return (75,)


def tell_one(it: Context) -> tuple[int, ...]:
    """As a scheduler, before a time limit."""
    _send(it.rng.choice(it.leg.pids()), signal.SIGUSR1)
    return (75,)


def freeze_one(it: Context) -> tuple[int, ...]:
    """A rank whose process is stopped is as one whose disk hangs."""
    ranks = it.leg.pids()
    if len(ranks) == 1:  # nobody else is there to see it
        return kill_one(it)
    _send(it.rng.choice(ranks), signal.SIGSTOP)
    return ()


def kill_in_save(it: Context) -> tuple[int, ...]:
    folder = it.leg.folder / "checkpoints"
    it.leg.wait_for("a save", lambda: list(folder.glob(".step-*.partial")), START)
    it.leg.kill_all()
    return ()


def truncate(it: Context) -> tuple[int, ...]:
    it.leg.kill_all()
    state = _state(it)
    os.truncate(state, it.rng.randrange(state.stat().st_size))
    return ()


def flip_a_bit(it: Context) -> tuple[int, ...]:
    it.leg.kill_all()
    state = _state(it)
    with state.open("r+b") as file:
        place = it.rng.randrange(state.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0] ^ 1 << it.rng.randrange(8)
        file.seek(place)
        file.write(bytes([byte]))
    return ()


def empty_the_manifest(it: Context) -> tuple[int, ...]:
    it.leg.kill_all()
    (_checkpoints(it.leg.folder)[-1] / "manifest.json").write_text("")
    return ()


def fill_the_disk(it: Context) -> tuple[int, ...]:
    """For files of a checkpoint's size, until two saves have failed; then the run is stopped."""
    writer, enough = it.rng.choice(it.leg.pids()[: it.leg.parts]), psutil.RLIM_INFINITY
    writer.rlimit(psutil.RLIMIT_FSIZE, (2**18, enough))

    def failed() -> bool:
        return sum("was not written" in line for line in it.leg.lines) >= 2

    it.leg.wait_for("a save that fails, twice", failed, START)
    writer.rlimit(psutil.RLIMIT_FSIZE, (enough, enough))
    before = set(_checkpoints(it.leg.folder))
    it.leg.wait_for("a save", lambda: set(_checkpoints(it.leg.folder)) - before, START)
    return terminate(it)


def cut_a_host(it: Context) -> tuple[int, ...]:
    """Until all has ended. Its own rank ends by itself, as nobody reaches it."""
    host = it.leg.hosts[it.rng.randint(2, it.leg.ranks)]
    it.leg.hosts.cut(host)
    it.leg.after_end = lambda: it.leg.hosts.cut(host, back=True)
    return ()


EVENTS = {
    event.__name__: event
    for event in (
        *(kill_one, kill_all, terminate, tell_one, freeze_one, kill_in_save),
        *(truncate, flip_a_bit, empty_the_manifest, fill_the_disk, cut_a_host),
    )
}


class Outcome(NamedTuple):
    kind: str
    ended: float  # seconds from the event until all of the run had ended
    repeated: int  # steps
    lost: float  # seconds from the event to the next step that is new


def interrupted(
    folder: Path, steps: int, kinds: list[str], rng: random.Random, hosts: Hosts | None
) -> list[Outcome]:
    """The run, with all that happens to it, to its end."""
    outcomes, newest, since = [], 0, 0.0
    pending: tuple[str, float] | None = None
    for kind in [*kinds, ""]:
        how = (rng.choice(RANKS), rng.choice(("gloo", "mpi")), rng.choice(PARTS))
        leg = Leg(folder, steps, *(how if kind != "cut_a_host" else (3, "gloo", how[2], hosts)))
        try:
            leg.after(1)
            begun = leg.steps[0][0]
            repeated = newest + 1 - begun
            if pending:
                # Of a step that is logged the checkpoint may be damaged, or not yet written.
                leg.until(newest + 1)
                lost = leg.steps[-1][1] - since
                outcomes.append(Outcome(*pending, repeated, lost))
                print(f"    {repeated} steps again, {lost:.1f} s to the next new one", flush=True)
            if kind:
                leg.after(len(leg.steps) + rng.randint(1, 5))
                if not _checkpoints(folder):  # what is damaged must be there
                    leg.wait_for("the first checkpoint", lambda: _checkpoints(folder), START)
                since = time.monotonic()
                allowed = EVENTS[kind](Context(leg, rng))
                code = leg.ended()
                pending = kind, time.monotonic() - since
                newest = max(newest, leg.steps[-1][0])
                judge(kind, code, allowed, leg)
                where = f"{leg.ranks} rank(s), {leg.via}, {leg.parts} file(s) asked for, at step "
                where += f"{leg.steps[-1][0]}"
                print(
                    f"{kind}: {where}: all ended after {pending[1]:.1f} s, code {code}", flush=True
                )
            elif code := leg.process.wait(600):
                raise Failed(f"the last leg ended with {code}{leg.tail()}")
        finally:
            leg.kill_all()
    return outcomes


def judge(kind: str, code: int, allowed: tuple[int, ...], leg: Leg) -> None:
    if code not in allowed if allowed else code in (0, 2, 3, 75):
        raise Failed(f"{kind}: exit code {code}{leg.tail()}")
    if kind != "kill_all" and any("Traceback" in line for line in leg.lines):
        raise Failed(f"{kind}: a trace{leg.tail()}")


def table(outcomes: list[Outcome]) -> None:
    print("| what happened | times | all ended after, s | steps again | s to the next new step |")
    print("| --- | --- | --- | --- | --- |")
    for kind in sorted({o.kind for o in outcomes}):
        of_it = [o for o in outcomes if o.kind == kind]
        cells = [f"{max(o.ended for o in of_it):.1f}", f"{max(o.repeated for o in of_it)}"]
        cells.append(f"{statistics.median(o.lost for o in of_it):.1f}")
        print(f"| {kind} | {len(of_it)} | {cells[0]} at most | {cells[1]} at most | {cells[2]} |")


@contextlib.contextmanager
def three_hosts(folder: Path) -> Iterator[Hosts]:
    (folder / "hosts").mkdir()
    hosts = Hosts(folder / "hosts", 3)
    try:
        yield hosts
    finally:
        hosts.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="is left as it was at the end")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(EVENTS))
    args = parser.parse_args()
    if unknown := {*args.kinds} - {*EVENTS}:
        parser.error(f"no kind {sorted(unknown)}; there are {list(EVENTS)}")
    rng = random.Random(args.seed)
    order: list[str] = []
    again = args.kinds or [kind for kind in EVENTS if kind != "cut_a_host" or os.geteuid() == 0]
    while len(order) < args.events:
        order += rng.sample(again, len(again))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    steps = STEPS_AN_EVENT * args.events + 10
    try:
        whole = Leg(folder / "whole", steps, 2, "gloo")
        try:
            if code := whole.process.wait(1200):
                raise Failed(f"without any event: exit code {code}{whole.tail()}")
        finally:
            whole.kill_all()
        order = order[: args.events]
        with three_hosts(folder) if "cut_a_host" in order else contextlib.nullcontext() as hosts:
            outcomes = interrupted(folder / "chaos", steps, order, rng, hosts)
    except Failed as failed:
        print(f"error: {failed}\nseed {args.seed}; what is left: {folder}", file=sys.stderr)
        return 1
    table(outcomes)
    words = [sys.executable, "compare.py", str(folder / "whole"), str(folder / "chaos")]
    code = subprocess.run(words, cwd=ROOT / "template", check=False).returncode
    if not args.folder and not code:
        shutil.rmtree(folder)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
