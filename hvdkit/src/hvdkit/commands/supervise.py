"""`hvdkit supervise`: starts a run again until it is done, over ssh, under Slurm, on Kubernetes.

RULES says what follows each exit code. Restarts are counted by progress: the newest step in the
run's folder, which COMMAND's own flags name. Imports no TensorFlow.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdkit import logs, whole_files
from hvdkit.commands.supervised_hosts import Hosts
from hvdkit.logs import complain, refuse
from hvdkit.settings import of_command
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, DIVERGED, DONE, NOT_NOW, PREEMPTED, WRONG_USE

_ENDS, _CRASH = "ends", "starts again at once, then after 5 s; ends at crash 3 at one step"
_STOPPED = "starts again after 5 s; ends after 3 restarts without a new step"
_LATER = "starts again after 5, 10, ... 300 s; ends after a day without a new step"
RULES = (  # exit codes, what they mean, what follows
    ((DONE,), "done", _ENDS),
    ((WRONG_USE,), "wrong use", _ENDS),
    ((DIVERGED,), "diverged", _ENDS),
    ((126, 127), "there is no such command", _ENDS),
    ((PREEMPTED, 138, 143), "stopped by a signal; with 75 it has saved", _STOPPED),
    ((NOT_NOW,), "not now: disk, space, network, a host away, folder in use", _LATER),
    ((132, 134, 135, 136, 139), "native crash: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV", _CRASH),
    ((137,), "a rank was killed: out of memory, or its host was lost", _CRASH),
    ((), "any other: a crash", _CRASH),
)
# How srun names the first rank that ends; it then kills the others, and returns 137.
_SIGNALS = {signal.strsignal(n): 128 + n for n in (4, 6, 7, 8, 9, 11)}
_ENDED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (Exited with exit code (\d+)|[\w ]+)")
_AGAIN = 5.0  # seconds between two signals to a run that has not made a step
_STARTING = 120.0  # seconds in which srun starts ranks
_PR_SET_PDEATHSIG = 1
# For preexec_fn. A command that is killed itself leaves no run that nobody watches.
end_with_parent = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
_NO_STEP = (ValueError, KeyError, TypeError, OverflowError)
_OF_A_RUN = ("config.cfg", "metrics.jsonl", "checkpoints")


def hear(handler: Callable[[int, object], None]) -> None:
    """Of signals that end a run."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, handler)


def tell(child: subprocess.Popen, number: int) -> None:
    """Signals a launcher, also past the shell that horovodrun becomes: that would end alone."""
    there = Path(f"/proc/{child.pid}")
    if "horovodrun" in {Path(word).name for word in child.args}:
        with contextlib.suppress(OSError):
            inner = (there / f"task/{child.pid}/children").read_text().split()
            if inner and (there / "comm").read_text() == "sh\n":
                # Two of SIGINT end it at once; after SIGTERM mpirun kills in a second.
                return os.kill(int(inner[0]), number if number == signal.SIGINT else signal.SIGUSR1)
    return child.send_signal(number)


def table() -> str:
    """RULES in Markdown."""
    rows = [(", ".join(map(str, codes)) or "other", *row) for codes, *row in RULES]
    rows = [("exit code", "what it means", "`hvdkit supervise`"), ("---",) * 3, *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def newest_step(folder: Path) -> int:
    """The newest step that the run has saved or logged; 0 where there is none."""
    steps = [0]
    with contextlib.suppress(OSError):  # a disk that is gone
        for path in (folder / "checkpoints").glob("step-*"):
            with contextlib.suppress(ValueError):
                steps.append(int(path.name.removeprefix("step-")))
    return max(steps + _logged(folder / "metrics.jsonl"))


def _logged(path: Path) -> list[int]:
    """The steps in the last lines of a run's record."""
    steps = []
    with contextlib.suppress(OSError), whole_files.opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**16))
        for line in file:
            with contextlib.suppress(*_NO_STEP):
                steps.append(int(whole_files.from_json(line, path)["step"]))
    return steps


def reached_step(folder: Path) -> int:
    """The last step that the newest start of a run logged after the one that it began at; or 0.

    A start drops the records of steps after its own first one, so what is logged is its own.
    """
    begun = _logged(folder / "starts.jsonl")[-1:]
    logged = _logged(folder / "metrics.jsonl")
    return max(logged) if begun and logged and max(logged) > begun[0] else 0


class Supervisor:
    """One job: its starts one after another, until `run` returns the exit code."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self._options, self._command = options, command
        self._told, self._starting, self._child, self._died = 0, False, None, None
        self._files = [*filter(os.path.exists, command)]
        given = of_command(command)
        if given and given.resume != "auto":
            again = "anew" if given.resume == "never" else "there"
            why = f"--resume={given.resume} would begin {again} at each start"
            refuse(f"{why}: leave it out, or start it once")
        if given and given.virtual_ranks:
            options.max_np = min(options.max_np or given.virtual_ranks, given.virtual_ranks)
        folder = options.run_dir or (given and Path(given.run_dir))
        self._folder = folder.absolute() if folder else None
        where = self._folder or "no folder: a minute without a crash counts as a step (--run-dir)"
        _say(f"looks for new steps in {where}")
        self._newest = self._first = newest_step(self._folder) if self._folder else 0
        self._seen = self._newest  # while a start runs: its disk may be gone when it has ended
        self._restarts = self._crashes = self._tries = 0  # since the newest step
        self._begun = self._passed = 0.0  # the newest start, the last signal to it
        self._may_be_lost = False
        self._reached = 0  # the step at which the last start without a new one ended
        self._ended = self._since = time.monotonic()  # the last end, the newest step
        self._hosts = Hosts(options.hosts_from, options.max_np, command)
        self._used, self._rejoins = {}, False  # ranks by host
        own = f"{time.time_ns()} {os.uname().nodename}"  # see hvdkit/checkpoint/lease.py
        slurm = os.environ.get("SLURM_JOB_ID")
        if not os.environ.setdefault("LAUNCH_JOB", f"slurm {slurm}" if slurm else own):
            refuse("LAUNCH_JOB is empty: it names the job, so that no other one is taken for it")
        os.environ |= {"LAUNCH_BY": own, "LAUNCH_HOSTFILE": str(options.live)}
        if not options.hosts_from:
            del os.environ["LAUNCH_HOSTFILE"]
        hear(self._hear)

    def run(self) -> int:
        """Starts the command until a rule ends it; returns the exit code."""
        while True:
            if self._options.hosts_from:
                self._wait_for_hosts()
            begun, self._rejoins = time.monotonic(), False
            code = NOT_NOW if self._is_empty() else self._start()
            self._ended = time.monotonic()
            if self._is_away(code):
                code = NOT_NOW
            what, then = next(row for codes, *row in RULES if code in codes or not codes)
            self._count(then, self._ended - begun)
            ends = self._options.stop_ends and not self._rejoins
            if self._told or (ends and then == _STOPPED):
                return self._after_stop(code)
            if then == _ENDS:
                return self._end(code)
            if why := self._enough(then):
                _say(f"error: exit code {code} ({what}), {why}: no further start")
                return self._end(BUG if then == _STOPPED else code)
            pause = min(300.0, self._options.pause * 2 ** min(9, max(0, self._tries - 1)))
            if self._rejoins or (then == _CRASH and self._crashes == 1):
                pause = 0.0
            _say(f"exit code {code} ({what}): starting again in {pause:g} s")
            time.sleep(pause)

    def _is_empty(self) -> bool:
        """The run would begin anew where its disk is not mounted."""
        if not self._newest or not self._folder:
            return False
        why = "no run"
        try:
            if any((self._folder / name).exists() for name in _OF_A_RUN):
                return False
        except OSError as error:
            why = error.strerror
        _say(f"{why} in {self._folder}, which had step {self._newest}: is its disk mounted?")
        return True

    def _is_away(self, code: int) -> bool:
        """The command is refused that was right before: a GPU, a disk or a mount is away."""
        if code not in (WRONG_USE, 126, 127):
            return False
        if max(self._newest, self._seen) > self._first:
            return True
        # Python ends so without its program.
        return code == WRONG_USE and not all(map(os.path.exists, self._files))

    def _start(self) -> int:
        """One start of the command; its exit code, as a shell has it."""
        self._starting, self._died = True, None
        self._begun = time.monotonic()
        try:
            how = {"stderr": subprocess.PIPE, "preexec_fn": end_with_parent}
            self._child = child = subprocess.Popen(self._command, **how)
        except OSError as error:
            complain(f"{self._command[0]}: {error.strerror}")
            return 127
        finally:
            self._starting = False
        reader = threading.Thread(target=self._show, daemon=True)
        reader.start()
        threading.Thread(target=self._see, args=(child,), daemon=True).start()
        if self._told:  # before there was one to tell
            self._pass_on()
        asked, every = time.monotonic(), self._options.rejoin
        while (code := child.poll()) is None:
            time.sleep(0.05)
            if self._may_be_lost and time.monotonic() - self._passed >= _AGAIN:
                self._pass_on()
            if every and time.monotonic() - asked >= every:
                self._rejoin()
                asked = time.monotonic()
        reader.join(2)
        self._child = None
        if code == 137 and self._died:
            host, rank, how, own = self._died.groups()
            _say(f"rank {rank} on {host} ended first: {how}")
            return int(own or _SIGNALS.get(how.strip(), code))
        return code if code >= 0 else 128 - code

    def _show(self) -> None:
        for line in self._child.stderr:
            text = line.decode(errors="replace")
            self._died = self._died or _ENDED.search(text)
            self._hosts.hear(text)
            with contextlib.suppress(OSError):
                os.write(2, line)

    def _see(self, child: subprocess.Popen) -> None:
        """Not in the main thread, which must hear signals while a disk hangs."""
        while self._folder and child.poll() is None:
            self._seen = max(self._seen, newest_step(self._folder))
            time.sleep(5)

    def _hear(self, number: int, frame: object) -> None:
        first, self._told = not self._told, self._told or number
        if not (self._child or self._starting):
            sys.exit(self._after_stop(PREEMPTED))  # between two starts: nothing to save
        if first and self._child:
            self._pass_on()

    def _pass_on(self) -> None:
        """SIGTERM would make srun kill the ranks."""
        self._passed = time.monotonic()
        # srun loses what comes before it has started them, so that is sent again.
        early = self._passed - self._begun < _STARTING and self._seen <= self._newest
        self._may_be_lost = self._options.stop_ends and early
        usr1 = self._options.stop_ends or self._told == signal.SIGUSR1
        tell(self._child, signal.SIGUSR1 if usr1 else signal.SIGTERM)

    # ---- hosts --------------------------------------------------------------------------------

    def _wait_for_hosts(self) -> None:
        """Until they answer; writes those to start on into LAUNCH_HOSTFILE."""
        options, said = self._options, ""
        while True:
            try:
                listed, lack = self._hosts.listed()
            except ValueError as error:
                if not self._used:  # it may be the command's mistake
                    refuse(str(error))
                listed, lack = {}, str(error)
            there = self._hosts.answering(listed)
            words = self._hosts.silent
            away = [
                f"{name} ({words.get(name, 'no words')})" for name in listed if name not in there
            ]
            missing = logs.printable(logs.join(away, 8))
            waited = time.monotonic() - self._ended
            if not (lack or missing) and len(there) < options.min_hosts:
                lack = f"of --min-hosts={options.min_hosts} hosts there are {len(there)}"
            if not (lack or missing):
                break
            enough = len(there) >= (options.min_hosts or len(listed) + 1)
            if not options.min_hosts and options.max_np:  # without some spares
                enough = sum(there.values()) >= options.max_np
            if waited >= options.pause and enough:
                _say(f"going on without {missing}, on {len(there)} host(s)")
                break
            lack = lack or f"no answer to ssh from {missing}"
            if waited >= options.patience:
                complain(f"{lack} for {waited:.0f} s; start the job again to resume")
                sys.exit(self._end(NOT_NOW))
            if said != lack:
                _say(f"waiting for hosts: {lack}")
            said = lack
            time.sleep(2)
        self._used = self._hosts.capped(there)
        options.live.parent.mkdir(exist_ok=True)  # /tmp may have been cleaned since
        with whole_files.written(options.live) as partial:
            partial.write_text("".join(f"{host}:{n}\n" for host, n in self._used.items()))

    def _rejoin(self) -> None:
        """Where hosts answer that the run lacks, it saves, and starts again on all."""
        try:
            there = self._hosts.capped(self._hosts.answering(self._hosts.listed()[0]))
        except ValueError as error:
            _say(f"hosts are not asked: {error}")
            return
        if self._folder and self._folder.exists() and self._seen <= self._newest:
            return  # without a step in each start it would go on for ever
        more = [name for name, count in there.items() if count > self._used.get(name, 0)]
        if sum(there.values()) > sum(self._used.values()) and not (self._told or self._rejoins):
            _say(f"{', '.join(more)} answers: starting again on all hosts")
            self._rejoins = True
            tell(self._child, signal.SIGUSR1)

    # ---- what follows an end ------------------------------------------------------------------

    def _count(self, then: str, seconds: float) -> None:
        """Without a run's folder, a minute that does not end in a crash counts as a new step."""
        lasted = seconds >= 60 and then != _CRASH
        # A folder that is never there has another name in a container.
        known = self._folder and (self._newest or self._folder.exists())
        now = newest_step(self._folder) if known else self._newest + lasted
        newest = max(now, self._seen)
        if newest > self._newest:
            self._newest, self._since = newest, time.monotonic()
            self._restarts = self._crashes = self._tries = 0
        reached = reached_step(self._folder) if known else 0
        if reached and reached != self._reached:
            # It made steps of its own, and ended elsewhere than before: no fault of the program.
            self._restarts = self._crashes = self._tries = 0
        self._reached = reached
        if not self._rejoins:
            self._restarts += then in (_STOPPED, _CRASH)
            self._crashes += then == _CRASH
            self._tries += then == _LATER

    def _enough(self, then: str) -> str:
        """Why there is no further start; "" while there is."""
        waited = time.monotonic() - self._since
        if then == _LATER and waited >= self._options.patience:
            return f"for {waited:.0f} s without a new step"
        if then == _CRASH and self._crashes >= 3:
            return f"crash {self._crashes} at step {self._newest}, whose trace is above"
        return "after 3 restarts without a new step" if self._restarts > 3 else ""

    def _after_stop(self, code: int) -> int:
        """What to return when this process, or with --stop-ends a rank, was told to stop."""
        if code in (DONE, WRONG_USE, DIVERGED):
            return self._end(code)
        if self._told == signal.SIGUSR1 and self._newest <= self._first and self._options.stop_ends:
            why = "its time limit is near, and no step was made in this start"
            _say(f"error: {why}: is --time longer than the warning before it (--signal, 300 s)?")
            return BUG
        # 129, ...: by the signal itself, which came before there was a handler.
        return PREEMPTED if code in (129, 138, 143) or self._options.stop_ends else code

    def _end(self, code: int) -> int:
        """For good, also for a new pod, which knows nothing else of this job."""
        if self._options.ended:
            try:
                whole_files.write_json(self._options.ended, code)
            except OSError as error:
                _say(f"cannot write {self._options.ended}: {error.strerror}")
        return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a run goes on without its log
        os.write(2, f"supervise: {text}\n".encode(errors="backslashreplace"))


def main(argv: Sequence[str]) -> int:
    """Runs the command after `--`; returns its last exit code."""
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    options, command = _options(words[:cut]), words[cut + 1 :]
    if not command:
        refuse("no command to run: hvdkit supervise [OPTIONS] -- COMMAND")
    if options.ended and options.ended.exists():
        try:
            code = int(options.ended.read_text())
        except ValueError:
            refuse(f"{options.ended} does not hold an exit code: remove it")
        _say(f"this run has ended for good, with exit code {code}, as {options.ended} says")
        return code
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        options.live = Path(work, "hosts")
        return Supervisor(options, command).run()


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = logs.parser("Starts COMMAND again until it is done. On a signal the ranks save.")
    parser.usage, parser.epilog = "hvdkit supervise [OPTIONS] -- COMMAND", table()
    add, count = parser.add_argument, {"type": int, "default": 0, "metavar": "N"}
    add("--hostfile", help="wait until these hosts answer ssh; hosts.sh starts on them")
    add("--hosts-from", help="the same with the hosts, node1:8 a line, that this command prints")
    add("--min-hosts", help="start on so many hosts, where the others do not answer", **count)
    add("--max-np", help="start at most so many ranks; hosts beyond them are spares", **count)
    often = "ask so often (60 s) for hosts that the run lacks: it saves, and starts again on all"
    add("--rejoin", nargs="?", type=float, const=60.0, metavar="SECONDS", help=often)
    add("--pause", type=float, default=5.0, help="seconds before a second start (5)")
    add("--patience", type=float, default=86400.0, help="seconds to wait for what is away (a day)")
    add(
        "--ended",
        type=path_argument,
        help="keep the final exit code here; a later start returns it",
    )
    add("--run-dir", type=path_argument, help="the run's folder, where COMMAND does not say it")
    add("--stop-ends", action="store_true", help="for schedulers: a stopped run ends this too")
    options = parser.parse_args(words)
    if min(options.pause, options.min_hosts, options.max_np, options.rejoin or 0) < 0:
        parser.error("--pause, --min-hosts, --max-np, --rejoin: 0 or more")
    if options.hostfile and options.hosts_from:
        parser.error("--hostfile and --hosts-from: choose one")
    if options.hostfile:
        options.hosts_from = f"cat {shlex.quote(options.hostfile)}"
    elif (options.min_hosts or options.max_np or options.rejoin) and not options.hosts_from:
        parser.error("--min-hosts, --max-np and --rejoin need --hostfile or --hosts-from")
    return options
