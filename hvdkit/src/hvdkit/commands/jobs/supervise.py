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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from hvdkit import logs, whole_files
from hvdkit.commands.jobs.process_tree import reap_orphans, tell
from hvdkit.commands.jobs.supervised_hosts import Hosts
from hvdkit.logs import complain, refuse
from hvdkit.settings import Settings, flagfiles, of_command
from hvdkit.settings.runs import CONFIG
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, DIVERGED, DONE, NOT_NOW, PREEMPTED, WRONG_USE, passes

_ENDS = "ends"
_CRASH = (
    "starts again at once, then after 5 s; ends at crash 3 at one step, or the tenth without a new "
    "step"
)
_STOPPED = "starts again after 5 s; ends with 1 after 3 restarts without a new step"
_LATER = "starts again after 5, 10, ... 300 s; ends after a day without a new step"


class Rule(NamedTuple):
    """What follows the exit codes of a command."""

    codes: tuple[int, ...]  # (): all codes that no other rule has
    meaning: str
    sequel: str


RULES = (
    Rule((DONE,), "done", _ENDS),
    Rule((WRONG_USE,), "wrong use", _ENDS),
    Rule((DIVERGED,), "diverged", _ENDS),
    Rule((126, 127), "there is no such command", _ENDS),
    Rule((PREEMPTED, 138, 143), "stopped by a signal; with 75 it has saved", _STOPPED),
    Rule(
        (NOT_NOW,), "not now: disk, space, network, a host away, folder in use", _LATER
    ),
    Rule(
        (132, 134, 135, 136, 139),
        "native crash: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV",
        _CRASH,
    ),
    Rule((137,), "a rank was killed: out of memory, or its host was lost", _CRASH),
    Rule((), "any other: a crash", _CRASH),
)
# srun names the first rank that ends so; it then kills the others, and returns 137.
_SRUN_END = re.compile(
    r"srun: error: (\S+): tasks? ([\d,-]+): (Exited with exit code (\d+)|[\w ]+)"
)
# The exit code that each of srun's words for a signal stands for.
_SIGNALS = {signal.strsignal(n): 128 + n for n in (4, 6, 7, 8, 9, 11)}
AGAIN = 5.0  # seconds between two signals to a run that has not made a step
_MOST_LOSSES = 10  # starts that lose what they trained, without a new step
STARTING = 120.0  # seconds in which srun starts ranks
_PR_SET_PDEATHSIG = 1
# A Popen's preexec_fn: where this process is killed, its command is told to stop.
end_with_parent = functools.partial(
    ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM
)
_NO_STEP = (ValueError, KeyError, TypeError, OverflowError)
_RUN_FILES = ("config.cfg", "metrics.jsonl", "checkpoints")


def hear(handler: Callable[[int, object], None]) -> None:
    """Installs the handler of signals that end a run: SIGTERM, SIGINT, SIGHUP and SIGUSR1."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, handler)


def table() -> str:
    """RULES in Markdown."""
    lines = [
        "| exit code | what it means | `hvdkit supervise` |",
        "| --- | --- | --- |",
    ]
    for rule in RULES:
        codes = ", ".join(str(code) for code in rule.codes) or "other"
        lines.append(f"| {codes} | {rule.meaning} | {rule.sequel} |")
    return "\n".join(lines)


def newest_step(folder: Path) -> int:
    """The newest step that the run has saved or logged; 0 where there is none."""
    logged = _logged_steps(folder / "metrics.jsonl")
    return max([_saved_step(folder), *logged])


def _saved_step(folder: Path) -> int:
    steps = [0]
    with contextlib.suppress(OSError):  # the disk may be away
        for path in (folder / "checkpoints").glob("step-*"):
            with contextlib.suppress(ValueError):
                steps.append(int(path.name.removeprefix("step-")))
    return max(steps)


def _last_step(folder: Path) -> int:
    """--num_steps as the run has counted it; 0 where it is not known."""
    try:
        text = flagfiles.recorded(folder / CONFIG).get("num_steps") or ""
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def _logged_steps(path: Path) -> list[int]:
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
    starts = _logged_steps(folder / "starts.jsonl")
    logged = _logged_steps(folder / "metrics.jsonl")
    if not starts or not logged or max(logged) <= starts[-1]:
        return 0
    return max(logged)


class Supervisor:
    """One job: its starts one after another, until `run` returns the exit code."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str]) -> None:
        self._options = options
        self._command = command
        self._command_files = [word for word in command if os.path.exists(word)]
        settings = of_command(command)
        if settings:
            _adapt(options, settings)
        folder = options.run_dir or (settings and Path(settings.run_dir))
        self._folder = folder.absolute() if folder else None
        place = (
            self._folder
            or "no folder: a minute without a crash counts as a step (--run-dir)"
        )
        _say(f"looks for new steps in {place}")

        # State of the newest start.
        self._child: subprocess.Popen | None = None
        self._starting = False
        self._srun_end: re.Match | None = None
        self._started_at = 0.0
        self._ended_at = time.monotonic()

        # The signal that this process was sent first, and when it was last passed on.
        self._signal = 0
        self._passed_on_at = 0.0
        self._may_be_lost = False

        # Progress. `_seen_step` is read while a start runs: its disk may be gone at the end.
        self._first_step = newest_step(self._folder) if self._folder else 0
        self._newest_step = self._first_step
        self._seen_step = self._first_step
        self._newest_step_at = time.monotonic()
        # The step that training had reached when the last start ended.
        self._reached_step = 0
        # Since the newest step: how many starts ended, by what followed (`rule.sequel`).
        self._counts: Counter[str] = Counter()
        # And how many of them lost what they had trained, wherever they ended.
        self._losses = 0

        self._hosts = Hosts(options.hosts_from, options.max_np, command)
        self._used: dict[str, int] = {}  # number of ranks by host, in the newest start
        self._rejoins = False
        self._set_environment()
        hear(self._hear)

    def _set_environment(self) -> None:
        """Names the job, for hvdkit/checkpoint/lease.py, and the file of hosts."""
        supervisor = f"{time.time_ns()} {os.uname().nodename}"
        slurm_job = os.environ.get("SLURM_JOB_ID")
        job = f"slurm {slurm_job}" if slurm_job else supervisor
        if not os.environ.setdefault("LAUNCH_JOB", job):
            refuse(
                "LAUNCH_JOB is empty: it names the job, so that no other one is taken for it"
            )
        os.environ["LAUNCH_BY"] = supervisor
        os.environ.pop("LAUNCH_HOSTFILE", None)
        if self._options.hosts_from:
            os.environ["LAUNCH_HOSTFILE"] = str(self._options.live)

    def run(self) -> int:
        """Starts the command until a rule ends it; returns the exit code."""
        while True:
            if self._options.hosts_from:
                self._wait_for_hosts()
            began_at = time.monotonic()
            self._rejoins = False
            starts = self._record_of_starts()
            code = NOT_NOW if self._is_empty() else self._start()
            self._ended_at = time.monotonic()
            if code == DONE and self._record_of_starts() not in ((), starts):
                code = self._own_code()
            if self._is_away(code):
                code = NOT_NOW
            rule = _rule_of(code)
            self._count(rule, self._ended_at - began_at)

            stop_ends = self._options.stop_ends and not self._rejoins
            if self._signal or (stop_ends and rule.sequel == _STOPPED):
                return self._after_stop(code)
            if rule.sequel == _ENDS:
                return self._end(code)
            reason = self._enough(rule)
            if reason:
                _say(
                    f"error: exit code {code} ({rule.meaning}), {reason}: no further start"
                )
                return self._end(BUG if rule.sequel == _STOPPED else code)
            pause = self._pause(rule)
            _say(f"exit code {code} ({rule.meaning}): starting again in {pause:g} s")
            time.sleep(pause)

    def _pause(self, rule: Rule) -> float:
        """Seconds before the next start: none to start on more hosts, or after a first crash."""
        if self._rejoins or (rule.sequel == _CRASH and self._counts[_CRASH] == 1):
            return 0.0
        doublings = min(9, max(0, self._counts[_LATER] - 1))
        return min(300.0, self._options.pause * 2**doublings)

    def _is_empty(self) -> bool:
        """Whether the run would begin anew: its disk may not be mounted."""
        # A minute that counted as a step was not seen there.
        if not self._seen_step or not self._folder:
            return False
        reason = _why_empty(self._folder)
        if reason:
            _say(
                f"{reason} in {self._folder}, which had step {self._seen_step}: is its disk "
                "mounted?"
            )
        return bool(reason)

    def _record_of_starts(self) -> tuple[int, ...]:
        """What changes with each start of the run; () where its folder is not seen."""
        if not self._folder:
            return ()
        try:
            record = (self._folder / "starts.jsonl").stat()
        except OSError:
            return ()
        return record.st_ino, record.st_size, record.st_mtime_ns

    def _own_code(self) -> int:
        """The exit code in the run's summary.json: a script or a pipe may have lost it."""
        if not self._folder:
            return DONE
        file = self._folder / "summary.json"
        try:
            content = whole_files.read(file, whole_files.JSON_BYTES)
            code = whole_files.from_json(content, file)["exit_code"]
        except FileNotFoundError:
            # A run that has ended well may have found no room for it.
            if 0 < _last_step(self._folder) <= _saved_step(self._folder):
                return DONE
            _say("the command returned 0, but its run wrote no summary.json: a crash")
            return BUG
        except (OSError, *_NO_STEP):
            return DONE
        if code == DONE or not isinstance(code, int):
            return DONE
        _say(f"the command returned 0, but its run ended with {code}, as {file} says")
        return code

    def _is_away(self, code: int) -> bool:
        """Whether a command is refused that was right before: a GPU, a disk or a mount is away."""
        if code not in (WRONG_USE, 126, 127):
            return False
        if max(self._newest_step, self._seen_step) > self._first_step:
            return True
        # A shell returns 127 where a program is not there, and Python the code of wrong use.
        return not all(os.path.exists(file) for file in self._command_files)

    def _start(self) -> int:
        """Starts the command once; returns its exit code, as a shell has it."""
        self._starting = True
        self._srun_end = None
        self._started_at = time.monotonic()
        try:
            self._child = subprocess.Popen(
                self._command, stderr=subprocess.PIPE, preexec_fn=end_with_parent
            )
        except OSError as error:
            complain(f"{self._command[0]}: {error.strerror}")
            return NOT_NOW if passes(error) else 127
        finally:
            self._starting = False
        child = self._child
        reader = threading.Thread(target=self._show, args=(child.stderr,), daemon=True)
        reader.start()
        threading.Thread(target=self._see, args=(child,), daemon=True).start()
        if self._signal:  # it came before there was a child to tell
            self._pass_on(child)
        self._watch(child)
        reader.join(2)
        self._child = None
        if child.returncode == 137 and self._srun_end:
            host, rank, words, code = self._srun_end.groups()
            _say(f"rank {rank} on {host} ended first: {words}")
            return int(code or _SIGNALS.get(words.strip(), 137))
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _watch(self, child: subprocess.Popen) -> None:
        """Waits for the child's end; repeats a signal that may be lost, looks for more hosts."""
        rejoin_every = self._options.rejoin
        asked_at = time.monotonic()
        while child.poll() is None:
            time.sleep(0.05)
            reap_orphans(child)
            now = time.monotonic()
            if self._may_be_lost and now - self._passed_on_at >= AGAIN:
                self._pass_on(child)
            if rejoin_every and now - asked_at >= rejoin_every:
                self._rejoin(child)
                asked_at = time.monotonic()

    def _show(self, errors: IO[bytes]) -> None:
        """Passes the child's errors on, and looks for what they say of ranks and hosts."""
        for line in errors:
            text = line.decode(errors="replace")
            self._srun_end = self._srun_end or _SRUN_END.search(text)
            self._hosts.hear(text)
            with contextlib.suppress(OSError):
                os.write(2, line)

    def _see(self, child: subprocess.Popen) -> None:
        """Reads the newest step; the main thread must hear signals while a disk hangs."""
        while self._folder and child.poll() is None:
            self._seen_step = max(self._seen_step, newest_step(self._folder))
            time.sleep(5)

    def _hear(self, number: int, frame: object) -> None:
        is_first = not self._signal
        if is_first:
            self._signal = number
        if not (self._child or self._starting):
            sys.exit(self._after_stop(PREEMPTED))  # between two starts: nothing to save
        if is_first and self._child:
            self._pass_on(self._child)

    def _pass_on(self, child: subprocess.Popen) -> None:
        """Signals the child: under a scheduler SIGUSR1, as SIGTERM makes srun kill the ranks."""
        self._passed_on_at = time.monotonic()
        stop_ends = self._options.stop_ends
        # srun loses a signal that comes before it has started the ranks, so it is sent again.
        is_young = self._passed_on_at - self._started_at < STARTING
        self._may_be_lost = (
            stop_ends and is_young and self._seen_step <= self._newest_step
        )
        usr1 = stop_ends or self._signal == signal.SIGUSR1
        tell(child, signal.SIGUSR1 if usr1 else signal.SIGTERM)

    # ---- hosts --------------------------------------------------------------------------------

    def _wait_for_hosts(self) -> None:
        """Returns once they answer; writes those to start on into LAUNCH_HOSTFILE."""
        options = self._options
        said = ""
        while True:
            try:
                listed, lack = self._hosts.listed()
            except ValueError as error:
                if not self._used:  # the command may be wrong
                    refuse(str(error))
                listed = {}
                lack = str(error)
            there = self._hosts.answering(listed)
            missing = self._missing(listed, there)
            lack = lack or self._lack(missing, len(there))
            if not lack:
                lack = self._write_hosts(there)
            if not lack:
                break
            waited = time.monotonic() - self._ended_at
            if waited >= options.pause and self._is_enough(there):
                lack = self._write_hosts(there)
                if not lack:
                    _say(f"going on without {missing}, on {len(there)} host(s)")
                    break
            if waited >= options.patience:
                complain(f"{lack} for {waited:.0f} s; start the job again to resume")
                sys.exit(self._end(NOT_NOW))
            if lack != said:
                _say(f"waiting for hosts: {lack}")
            said = lack
            time.sleep(2)

    def _write_hosts(self, there: dict[str, int]) -> str:
        """Writes the hosts to start on into LAUNCH_HOSTFILE; returns why it cannot, or ""."""
        self._used = self._hosts.capped(there)
        live = self._options.live
        lines = [f"{host}:{count}\n" for host, count in self._used.items()]
        try:
            live.parent.mkdir(exist_ok=True)  # /tmp may have been cleaned since
            with whole_files.written(live) as partial:
                partial.write_text("".join(lines))
        except OSError as error:
            return f"cannot write {live} ({error.strerror})"
        return ""

    def _missing(self, listed: dict[str, int], there: dict[str, int]) -> str:
        """The listed hosts that do not answer, each with ssh's words."""
        hosts = []
        for name in listed:
            if name not in there:
                hosts.append(f"{name} ({self._hosts.silent.get(name, 'no words')})")
        return logs.printable(logs.join(hosts, 8))

    def _lack(self, missing: str, count: int) -> str:
        """Why `count` hosts are too few to start on; "" where they are all."""
        if missing:
            return f"no answer to ssh from {missing}"
        if count < self._options.min_hosts:
            return f"of --min-hosts={self._options.min_hosts} hosts there are {count}"
        return ""

    def _is_enough(self, there: dict[str, int]) -> bool:
        """Whether a run may start without the hosts that do not answer."""
        if self._options.min_hosts:
            return len(there) >= self._options.min_hosts
        if self._options.max_np:  # hosts beyond --max-np are spares
            return sum(there.values()) >= self._options.max_np
        return False

    def _rejoin(self, child: subprocess.Popen) -> None:
        """Where hosts answer that the run lacks, it saves, and starts again on all."""
        try:
            listed, _ = self._hosts.listed()
        except ValueError as error:
            _say(f"hosts are not asked: {error}")
            return
        there = self._hosts.capped(self._hosts.answering(listed))
        is_there = self._folder and os.path.exists(self._folder)
        if is_there and self._seen_step <= self._newest_step:
            return  # a start that makes no step would be followed by others for ever
        is_more = sum(there.values()) > sum(self._used.values())
        if is_more and not (self._signal or self._rejoins):
            more = [
                name for name, count in there.items() if count > self._used.get(name, 0)
            ]
            _say(f"{', '.join(more)} answers: starting again on all hosts")
            self._rejoins = True
            tell(child, signal.SIGUSR1)

    # ---- what follows an end ------------------------------------------------------------------

    def _count(self, rule: Rule, seconds: float) -> None:
        """Counts a start of so many seconds; progress sets the counts back."""
        reached = 0
        if self._folder:
            self._seen_step = max(self._seen_step, newest_step(self._folder))
            reached = reached_step(self._folder)
        # In a container, a folder that is never there has another name.
        is_there = self._folder and (self._seen_step or os.path.exists(self._folder))
        is_progress = self._seen_step > self._newest_step
        if is_progress:
            self._newest_step = self._seen_step
        elif not is_there and seconds >= 60 and rule.sequel != _CRASH:
            self._newest_step += 1  # a minute without a crash counts as a new step
            is_progress = True
        if is_progress:
            self._newest_step_at = time.monotonic()
            self._losses = 0
        # It made steps of its own, and ended elsewhere than before: no fault of the program.
        if is_progress or (reached and reached != self._reached_step):
            self._counts.clear()
        self._reached_step = reached
        if not self._rejoins:
            self._counts[rule.sequel] += 1
            self._losses += rule.sequel in (_CRASH, _STOPPED)

    def _enough(self, rule: Rule) -> str:
        """Why there is no further start; "" while there is."""
        waited = time.monotonic() - self._newest_step_at
        if rule.sequel == _LATER and waited >= self._options.patience:
            return f"for {waited:.0f} s without a new step"
        crashes = self._counts[_CRASH]
        if rule.sequel == _CRASH and crashes >= 3:
            return f"crash {crashes} at step {self._newest_step}, whose trace is above"
        if self._losses >= _MOST_LOSSES and rule.sequel != _LATER:
            return f"{self._losses} times without a step beyond {self._newest_step}"
        restarts = self._counts[_STOPPED] + crashes
        return "after 3 restarts without a new step" if restarts > 3 else ""

    def _after_stop(self, code: int) -> int:
        """What to return when this process, or with --stop-ends a rank, was told to stop."""
        if code in (DONE, WRONG_USE, DIVERGED):
            return self._end(code)
        stop_ends = self._options.stop_ends
        has_no_step = self._newest_step <= self._first_step
        if stop_ends and self._signal == signal.SIGUSR1 and has_no_step:
            _say(
                "error: its time limit is near, and no step was made in this start: is --time "
                "longer than the warning before it (--signal, 300 s)?"
            )
            return BUG
        # 129, 138 and 143: a signal ended the process before it had a handler.
        return PREEMPTED if stop_ends or code in (129, 138, 143) else code

    def _end(self, code: int) -> int:
        """Keeps the final exit code for a new pod, which knows nothing else of this job."""
        if self._options.ended:
            try:
                whole_files.write_json(self._options.ended, code)
            except OSError as error:
                _say(f"cannot write {self._options.ended}: {error.strerror}")
        return code


def _adapt(options: argparse.Namespace, settings: Settings) -> None:
    """Refuses settings by which a start would not resume; caps ranks at --virtual_ranks."""
    if settings.resume != "auto":
        place = "anew" if settings.resume == "never" else "there"
        refuse(
            f"--resume={settings.resume} would begin {place} at each start: leave it out, "
            "or start it once"
        )
    if settings.virtual_ranks:
        options.max_np = min(
            options.max_np or settings.virtual_ranks, settings.virtual_ranks
        )


def _why_empty(folder: Path) -> str:
    """Why no run is seen in a folder; "" where one is."""
    try:
        has_files = any((folder / name).exists() for name in _RUN_FILES)
    except OSError as error:
        return error.strerror or str(error)
    return "" if has_files else "no run"


def _rule_of(code: int) -> Rule:
    for rule in RULES:
        if code in rule.codes:
            return rule
    return RULES[-1]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a run goes on without its log
        os.write(2, f"supervise: {text}\n".encode(errors="backslashreplace"))


def main(argv: Sequence[str]) -> int:
    """Runs the command after `--`; returns its last exit code."""
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    options = _options(words[:cut])
    command = words[cut + 1 :]
    if not command:
        refuse("no command to run: hvdkit supervise [OPTIONS] -- COMMAND")
    if options.ended and options.ended.exists():
        try:
            code = int(options.ended.read_text())
        except (ValueError, OSError):
            refuse(
                f"{options.ended} does not hold an exit code: remove it, or name a file"
            )
        _say(
            f"this run has ended for good, with exit code {code}, as {options.ended} says"
        )
        return code
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        options.live = Path(work, "hosts")
        return Supervisor(options, command).run()


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = logs.parser(
        "Starts COMMAND again until it is done. On a signal the ranks save."
    )
    parser.usage = "hvdkit supervise [OPTIONS] -- COMMAND"
    parser.epilog = table()
    add = parser.add_argument
    add("--hostfile", help="wait until these hosts answer ssh; hosts.sh starts on them")
    add(
        "--hosts-from",
        help="the same with the hosts, node1:8 a line, that this command prints",
    )
    add(
        "--min-hosts",
        type=int,
        default=0,
        metavar="N",
        help="start on so many hosts, where the others do not answer ssh; one that answers and "
        "cannot train is left out by --max-np alone",
    )
    add(
        "--max-np",
        type=int,
        default=0,
        metavar="N",
        help="start at most so many ranks; hosts beyond them are spares",
    )
    add(
        "--rejoin",
        nargs="?",
        type=float,
        const=60.0,
        metavar="SECONDS",
        help="ask so often (60 s) for hosts that the run lacks: it saves, and starts again on all",
    )
    add("--pause", type=float, default=5.0, help="seconds before a second start (5)")
    add(
        "--patience",
        type=float,
        default=86400.0,
        help="seconds to wait for what is away (a day)",
    )
    add(
        "--ended",
        type=path_argument,
        help="keep the final exit code here; a later start returns it",
    )
    add(
        "--run-dir",
        type=path_argument,
        help="the run's folder, where COMMAND does not say it",
    )
    add(
        "--stop-ends",
        action="store_true",
        help="for schedulers: a stopped run ends this too",
    )
    options = parser.parse_args(words)
    if min(options.pause, options.min_hosts, options.max_np, options.rejoin or 0) < 0:
        parser.error("--pause, --min-hosts, --max-np, --rejoin: 0 or more")
    if options.hostfile and options.hosts_from:
        parser.error("--hostfile and --hosts-from: choose one")
    if options.hostfile:
        options.hosts_from = f"cat {shlex.quote(options.hostfile)}"
    needs_hosts = options.min_hosts or options.max_np or options.rejoin
    if needs_hosts and not options.hosts_from:
        parser.error(
            "--min-hosts, --max-np and --rejoin need --hostfile or --hosts-from"
        )
    return options
