"""A run that is interrupted again and again ends with the bits of one that never was.

    python tests/chaos.py [--seed=1] [--events=20] [--folder=FOLDER] [KIND ...]      make chaos

Trains the demo with --virtual_ranks=6: once on 2 ranks, then anew in another folder, where at
random moments something happens to it (EVENTS), and each time it goes on, by the same command, on
1, 2, 3, 4 or 6 ranks; before a host is cut off the network, on three hosts in network namespaces
(as root; else that event is left out). The run to which nothing happens is over Gloo, the other
over MPI (hosts.sh). KINDs are names of EVENTS; by default each happens in turn, in random order.
It prints each event, how soon all of the run had ended and with which exit
code, how many steps were made again, and the seconds from the event to the next new step.

Exit code: 0 the same weights, metrics and figures; 1 not, or something hung or was left behind.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))
from hosts import Hosts
from legs import ROOT, Failed, Leg, send

STEPS_AN_EVENT = 7  # of the whole run
RANKS = (1, 2, 3, 4, 6)
USUAL = [
    *("--flagfile=configs/demo.cfg", "--virtual_ranks=6", "--global_batch_size=12"),
    *("--warmup_steps=0", "--log_every=1", "--eval_every=40", "--checkpoint_every=3", "--keep=3"),
]


class Context(NamedTuple):
    leg: Leg
    rng: random.Random


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


# What may happen. Each ends the run and returns the exit codes that it may have then; none: any but
# 0, 2, 3 and 75.


def kill_one(it: Context) -> tuple[int, ...]:
    send(it.rng.choice(it.leg.pids()), signal.SIGKILL)
    return ()


def kill_all(it: Context) -> tuple[int, ...]:
    it.leg.kill_all()
    return ()


def terminate(it: Context) -> tuple[int, ...]:
    it.leg.process.terminate()
    return (75,)


def tell_one(it: Context) -> tuple[int, ...]:
    """As a scheduler, before a time limit."""
    send(it.rng.choice(it.leg.pids()), signal.SIGUSR1)
    return (75,)


def freeze_one(it: Context) -> tuple[int, ...]:
    """A rank whose process is stopped is as one whose disk hangs."""
    ranks = it.leg.pids()
    if len(ranks) == 1:  # nobody else is there to see it
        return kill_one(it)
    send(it.rng.choice(ranks), signal.SIGSTOP)
    return ()


def kill_in_save(it: Context) -> tuple[int, ...]:
    folder = it.leg.folder / "checkpoints"
    it.leg.wait_for("a save", lambda: list(folder.glob(".step-*.partial")))
    return kill_all(it)


def truncate(it: Context) -> tuple[int, ...]:
    kill_all(it)
    state = _checkpoints(it.leg.folder)[-1] / "state.npz"
    os.truncate(state, it.rng.randrange(state.stat().st_size))
    return ()


def flip_a_bit(it: Context) -> tuple[int, ...]:
    kill_all(it)
    state = _checkpoints(it.leg.folder)[-1] / "state.npz"
    content = bytearray(state.read_bytes())
    content[it.rng.randrange(len(content))] ^= 1 << it.rng.randrange(8)
    state.write_bytes(content)
    return ()


def empty_the_manifest(it: Context) -> tuple[int, ...]:
    kill_all(it)
    (_checkpoints(it.leg.folder)[-1] / "manifest.json").write_text("")
    return ()


def fill_the_disk(it: Context) -> tuple[int, ...]:
    """For files of a checkpoint's size, until a save has failed; then the run is stopped."""
    writer, enough = it.leg.pids()[0], psutil.RLIM_INFINITY
    writer.rlimit(psutil.RLIMIT_FSIZE, (2**18, enough))

    def failed() -> bool:
        return any("was not written" in line for line in it.leg.lines)

    it.leg.wait_for("a save that fails", failed)
    writer.rlimit(psutil.RLIMIT_FSIZE, (enough, enough))
    before = set(_checkpoints(it.leg.folder))
    it.leg.wait_for("a save", lambda: set(_checkpoints(it.leg.folder)) - before)
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
    folder: Path, flags: list[str], kinds: list[str], *, rng: random.Random, hosts: Hosts | None
) -> list[Outcome]:
    """The run, with all that happens to it, to its end."""
    outcomes, newest, since = [], 0, 0.0
    pending: tuple[str, float] | None = None
    for kind in [*kinds, ""]:
        there = (3, "mpi", hosts) if kind == "cut_a_host" else (rng.choice(RANKS), "mpi")
        leg = Leg(folder, flags, *there)
        try:
            leg.after(1)
            begun = leg.steps[0][0]
            repeated = newest + 1 - begun
            if pending:
                # The checkpoint of a step that is logged may be damaged, or not yet written.
                leg.after(repeated + 1)
                lost = leg.steps[-1][1] - since
                outcomes.append(Outcome(*pending, repeated, lost))
                print(f"    {repeated} steps again, {lost:.1f} s to the next new one", flush=True)
            if kind:
                leg.after(len(leg.steps) + rng.randint(1, 5))
                if not _checkpoints(folder):  # what is damaged must be there
                    leg.wait_for("the first checkpoint", lambda: _checkpoints(folder))
                since = time.monotonic()
                allowed = EVENTS[kind](Context(leg, rng))
                code = leg.ended()
                pending = kind, time.monotonic() - since
                newest = max(newest, leg.steps[-1][0])
                judge(kind, code, allowed, leg)
                where = f"{leg.ranks} rank(s), {leg.via}, at step {leg.steps[-1][0]}"
                ended = f"all ended after {pending[1]:.1f} s, code {code}"
                print(f"{kind}: {where}: {ended}", flush=True)
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
    order = order[: args.events]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    flags = [*USUAL, f"--num_steps={STEPS_AN_EVENT * args.events + 10}"]
    try:
        whole = Leg(folder / "whole", flags, 2, "gloo")
        try:
            if code := whole.process.wait(1200):
                raise Failed(f"without any event: exit code {code}{whole.tail()}")
        finally:
            whole.kill_all()
        with contextlib.ExitStack() as stack:
            hosts = None
            if "cut_a_host" in order:
                (folder / "hosts").mkdir()
                hosts = Hosts(folder / "hosts", 3)
                stack.callback(hosts.end)
            outcomes = interrupted(folder / "chaos", flags, order, rng=rng, hosts=hosts)
    except Failed as failed:
        print(f"error: {failed}\nseed {args.seed}; what is left: {folder}", file=sys.stderr)
        return 1
    table(outcomes)
    words = [sys.executable, "-m", "hvdkit", "compare", folder / "whole", folder / "chaos"]
    code = subprocess.run(words, cwd=ROOT / "template", check=False).returncode
    if not args.folder and not code:
        shutil.rmtree(folder)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
