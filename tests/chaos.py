"""A supervised run on three hosts ends with the bits of one to which nothing happened.

    python tests/chaos.py [--seed=1] [--events=N] [--every=SECONDS] [--minutes=M]
        [--folder=FOLDER] [KIND ...]

`make chaos`: each kind once, in random order; `make soak`: one a minute, or as soon as the last one
is mended, for two hours. As root, with sshfs, fish, tcsh and a
compiler. KINDs are names of EVENTS, or begin one.

Hosts are network namespaces: node1 has the supervisor, ranks run on node1 to node3, and two more
hold the shared disks, the data (node4) and the run's folder (node5), mounted by sshfs. The run is a
fork's that pauses for a second after each step. `hvdkit supervise` starts it again, nobody else.
At last a file names its last step, and it is compared with a run that was trained to there without
pauses, on this machine, by horovodrun on two ranks. No process of it may be left on any host, and
neither the supervisor's memory nor its open files may have grown.

Exit code: 0 the same weights, metrics and figures; 1 not, or something hung or was left behind.
"""

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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))
from hosts import ROOT, Host, Hosts, executable, require, run, start

from hvdkit.data.prepare import scenes

# Seconds to the next new step: the longest fault, and what TCP waits after it.
SLOWEST = 900
CLOCK = """
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += 3600;
    return failed;
}
time_t time(time_t *now) { struct timespec t; clock_gettime(0, &t); return now ? *now = t.tv_sec : t.tv_sec; }
int gettimeofday(struct timeval *now, void *zone) {
    long failed = syscall(SYS_gettimeofday, now, zone);
    now->tv_sec += 3600;
    return failed;
}
"""  # a process's own, an hour ahead
EVERYWHERE = "node1:1\nnode2:1\nnode3:1\n"
WITH_A_SPARE = "node1:3\nnode2:3\nnode3:3\n"  # a run has six ranks at most
LISTED_TWICE = "node1:1\nnode3:1\nnode1:1\n"
OTHERS = (
    "node1:2\nnode3:1\n",
    "node1:1\n",
    "node1:1\nnode2:1\n",
    "node1:2\nnode2:2\nnode3:2\n",
)
USUAL = [
    f"--flagfile={ROOT}/template/configs/demo.cfg",
    "--virtual_ranks=6",
    "--keep=3",
    "--global_batch_size=12",
    "--warmup_steps=0",
    "--log_every=1",
    "--eval_every=40",
    "--checkpoint_every=3",
    "--num_steps=100000",  # a file ends it before that
    "--start_limit_s=150",  # a start waits so long for a mount that hangs
]


class Failed(Exception):
    """A promise was not kept; the message ends with the run's last lines."""


class Job:
    """`hvdkit supervise` on node1, watched step by step; started again by `start` alone."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.steps: list[int] = []  # numbers of the steps that were logged
        (folder / "hosts").mkdir()
        self.hosts = Hosts(folder / "hosts", 5, ssh_port=22)
        self._store = folder / "store"
        self._mounts = {"data": self.hosts[4], "runs": self.hosts[5]}
        self.last = folder / "last"  # holds the number of the last step
        self.late = folder / "late"  # holds a host's name
        self.without_gpu = folder / "without_gpu"  # holds a host's name
        self._programs = self._stand_in(folder / "programs" / "nvidia-smi").parent
        self.listed = folder / "listed"
        self.listed.write_text(EVERYWHERE)
        fork = _fork(folder, self.last)
        self._words = [
            sys.executable,
            "-m",
            "hvdkit",
            "supervise",
            "--hosts-from",
            f"cat {self.listed}",
            "--min-hosts",
            "1",
            "--rejoin",
            "20",
            "--",
            fork / "launch/hosts.sh",
            self._python(folder),
            fork / "train.py",
            *USUAL,
            f"--data_dir={folder}/data",
            f"--run_dir={folder}/runs/run",
        ]
        self.folder = folder
        self._log = folder / "chaos.log"

    def prepare(self) -> None:
        """Mounts the disks, and makes the first start."""
        for name, host in self._mounts.items():
            (self.folder / name).mkdir()
            (self._store / name).mkdir(parents=True)
            size = "64m" if name == "runs" else "1g"
            host.sh(f"mount -t tmpfs -o size={size} none {self._store / name}")
        demo = ROOT / "template/datasets/demo"
        scenes.ensure_demo(demo)
        self.hosts[4].sh(f"cp -r {demo}/. {self._store}/data")
        for host in self.workers:
            for name in self._mounts:
                self.mount(host, name)
        self.idle = self.inside()
        self.start()

    @property
    def workers(self) -> list[Host]:
        return list(self.hosts)[:3]

    def mount(self, host: Host, name: str) -> None:
        """Mounts it like a disk that all hosts share."""
        # sshd here knows no sftp server.
        host.sh(
            f"sshfs {self._mounts[name].name}:{self._store / name} {self.folder / name} "
            "-o StrictHostKeyChecking=accept-new,dcache_timeout=1,"
            "sftp_server=/usr/lib/openssh/sftp-server </dev/null >/dev/null 2>&1"
        )

    def _python(self, folder: Path) -> Path:
        """Python, an hour ahead on the host whose name is in `late`."""
        words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "clock.so"]
        subprocess.run(words, input=CLOCK.encode(), check=True)
        return executable(
            folder / "python",
            f'[ "$(cat {self.late} 2>/dev/null)" != "$(hostname)" ] ||\n'
            f'    export LD_PRELOAD={folder}/clock.so\nexec {sys.executable} "$@"',
        )

    def _stand_in(self, path: Path) -> Path:
        """The driver's program, which fails on the host whose name is in `without_gpu`."""
        return executable(
            path, f'[ "$(cat {self.without_gpu} 2>/dev/null)" != "$(hostname)" ]'
        )

    def start(self) -> None:
        env = {"CUDA_VISIBLE_DEVICES": "", "LAUNCH_JOB": "chaos"}
        env["PATH"] = f"{self._programs}:{os.environ['PATH']}"
        self.process = start(self.hosts[1].words(*self._words), env)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        with open(self._log, "a", buffering=1) as log:
            for line in process.stdout:
                log.write(line)
                self.lines.append(line)
                # Two ranks' words may stand in one line.
                self.steps += [
                    int(step) for step in re.findall(r"step (\d+)/\d+  loss", line)
                ]

    def wait_for(
        self, what: str, there: Callable[[], object], seconds: float = SLOWEST
    ) -> None:
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() > end:
                raise Failed(f"{what}: not within {seconds} s{self.tail()}")
            if self.process.poll() is not None and not there():
                raise Failed(
                    f"{what}: ended before, with {self.process.returncode}{self.tail()}"
                )
            time.sleep(0.01)

    def wait_for_line(self, text: str, since: int) -> None:
        self.wait_for(text, lambda: any(text in line for line in self.lines[since:]))

    def inside(self, *hosts: Host) -> set[psutil.Process]:
        """All processes of these hosts, by default of those that train."""
        spaces = {
            os.readlink(f"/proc/{host.pid}/ns/pid") for host in hosts or self.workers
        }
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") in spaces:
                    found.add(process)
        return found

    def left(self) -> list[psutil.Process]:
        """What is no host's own: neither its sshd nor a mount."""
        return [p for p in self.inside() - self.idle if not _has(p, ("sftp",))]

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.inside():
            with contextlib.suppress(psutil.Error):
                rank = process.environ().get("OMPI_COMM_WORLD_RANK")
                if rank is not None and "train.py" in " ".join(process.cmdline()[:3]):
                    found[int(rank)] = process
        return found

    def named(self, *words: str) -> list[psutil.Process]:
        """Processes whose command has all these words, the oldest first."""
        found = [(p.create_time(), p.pid, p) for p in self.inside() if _has(p, words)]
        return [process for *_, process in sorted(found)]

    def send(self, number: int, *ranks: int) -> None:
        there = self.ranks()
        for rank in ranks or there:
            send(there[sorted(there)[rank % len(there)]], number)

    def tail(self) -> str:
        return "\n" + "".join(self.lines[-40:])

    def run(self) -> Path:
        """Its folder on the disk itself, whatever is mounted."""
        return Path(f"/proc/{self.hosts[5].pid}/root{self._store}/runs/run")

    def checkpoints(self) -> list[Path]:
        return sorted((self.run() / "checkpoints").glob("step-*"))

    def saving(self) -> bool:
        return bool(list(self.checkpoints()[-1].parent.glob(".step-*.partial")))


def _fork(folder: Path, last: Path) -> Path:
    """A fork that pauses for a second after each step, until a file says which one is the last."""
    fork = folder / "fork"
    ignore = shutil.ignore_patterns("datasets", "runs")
    shutil.copytree(ROOT / "template", fork, symlinks=True, ignore=ignore)
    (fork / "launch").unlink()  # a link, which leads nowhere from here
    shutil.copytree(ROOT / "launch", fork / "launch")
    code = (fork / "train.py").read_text()
    ends = f"""
        import pathlib, time
        if not (last := pathlib.Path({str(last)!r})).exists():
            time.sleep(1)
        elif run.step >= int(last.read_text()):
            break"""
    code, changed = re.subn(
        r"\n +run\.after_step\(.*", lambda line: line[0] + ends, code
    )
    assert changed == 1
    (fork / "train.py").write_text(code)
    return fork


def _has(process: psutil.Process, words: tuple[str, ...]) -> bool:
    with contextlib.suppress(psutil.Error):
        return all(word in " ".join(process.cmdline()) for word in words)
    return False


def send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        process.send_signal(number)


# Events: each function makes a fault, and mends it where that has to be done.


def crash(number: int, rank: int, when: str) -> Callable[[Job], None]:
    """A native crash of that rank, in a start of its own unless it saves."""

    def event(job: Job) -> None:
        before = job.ranks()
        since = len(job.lines)
        if when == "in a save":
            job.wait_for("a save", job.saving)
        else:
            job.send(signal.SIGKILL)
            which = rank % len(before)
            job.wait_for(
                "a start",
                lambda: job.ranks().get(which, before[which]) != before[which],
            )
        if when == "in the first step":
            job.wait_for_line("resuming from", since)
        job.send(number, rank)

    return event


def signalled(number: int) -> Callable[[Job], None]:
    return lambda job: job.send(number, job.rng.randrange(6))


def killed(number: int, *words: str) -> Callable[[Job], None]:
    """What helps the ranks: the oldest process with these words."""
    return lambda job: send(job.named(*words)[0], number)


def lost_supervisor(job: Job) -> None:
    """And all that it started on its host, but the ranks; a new one comes at once, as a pod
    would."""
    supervisor = job.process
    for process in [*job.named("launch/hosts.sh"), *job.named("hvdkit", "supervise")]:
        send(process, signal.SIGKILL)
    supervisor.wait(30)
    job.start()


def cut(which: int, seconds: float) -> Callable[[Job], None]:
    """A host is off the network; who reads or writes on its disk waits."""

    def event(job: Job) -> None:
        job.hosts.cut(job.hosts[which])
        time.sleep(seconds)
        job.hosts.cut(job.hosts[which], back=True)

    return event


def unmounted(what: str) -> Callable[[Job], None]:
    """For half a minute in which the run starts: an empty folder is where the disk was."""

    def event(job: Job) -> None:
        since = len(job.lines)
        for host in job.workers:
            host.sh(f"fusermount3 -uz {job.folder / what}")
        job.send(signal.SIGKILL)
        job.wait_for_line("supervise: exit code", since)
        time.sleep(30)
        for host in job.workers:
            job.mount(host, what)

    return event


def full_disk(job: Job) -> None:
    """The disk is full until a save has failed."""
    since = len(job.lines)
    fill = job.run().with_name("fill")
    with contextlib.suppress(OSError):
        fill.write_bytes(bytes(2**27))
    job.wait_for_line("was not written", since)
    fill.unlink()


def docker0(job: Job) -> None:
    for host in job.workers:
        host.sh(
            "PATH=$PATH:/sbin; ip link set docker0 down; sleep 0.5; ip link set docker0 up"
        )


def other_hosts(job: Job) -> None:
    """More hosts are seen within 20 s; with fewer the run goes on at its next start."""
    job.listed.write_text(job.rng.choice(OTHERS))
    signalled(signal.SIGKILL)(job)


def _used_hosts(job: Job, since: int) -> list[str]:
    """Names of the two hosts, of three, on which the run has begun again."""
    said = "".join(job.lines[since:])
    return re.findall(r"6 ranks on 2 host\(s\) \((node\d), (node\d)\)", said)[-1]


def _go_on_with_a_spare(job: Job) -> list[str]:
    """Names of the hosts that the next start, too, takes first."""
    since = len(job.lines)
    job.listed.write_text(WITH_A_SPARE)
    # After a kill, the host that mpirun names would be left out.
    job.send(signal.SIGTERM)
    job.wait_for_line("resuming from", since)
    return _used_hosts(job, since)


def lost_on_a_host(
    lose: Callable, mend: Callable, message: str
) -> Callable[[Job], None]:
    """One of two hosts lacks something at the next start: the run goes on with the spare."""

    def event(job: Job) -> None:
        name = max(_go_on_with_a_spare(job))  # not node1, which has the launcher
        host = job.hosts[int(name[-1])]
        lose(job, host)
        since = len(job.lines)
        job.send(signal.SIGTERM)
        job.wait_for_line(message.format(name=name), since)
        job.wait_for_line("supervise: exit code 76", since)
        job.wait_for_line("resuming from", since)
        mend(job, host)
        if name in _used_hosts(job, since):
            raise Failed(f"{name} was not left out{job.tail()}")

    return event


def hide_folder(folder: str) -> Callable[[Job, Host], None]:
    return lambda job, host: host.sh(f"mount -t tmpfs none {job.folder / folder}")


def show_folder(folder: str) -> Callable[[Job, Host], None]:
    return lambda job, host: host.sh(f"umount {job.folder / folder}")


def host_twice(job: Job) -> None:
    since = len(job.lines)
    job.listed.write_text(LISTED_TWICE)
    job.send(signal.SIGKILL)
    job.wait_for_line("3 ranks on 2 host(s)", since)


def login(shell: str) -> Callable[[Job], None]:
    """A user's own shell on one host, until the run has begun again."""

    def event(job: Job) -> None:
        since = len(job.lines)
        with job.hosts[3].login(f"/usr/bin/{shell}"):
            job.send(signal.SIGKILL)
            job.wait_for_line("resuming from", since)

    return event


def hard_mount(job: Job) -> None:
    """A start reads the data, which on one host never come, as with a hard NFS mount."""
    since = len(job.lines)
    words = ("sshfs", f"{job.folder}/data")
    (mount,) = [process for process in job.inside(job.hosts[2]) if _has(process, words)]
    send(mount, signal.SIGSTOP)
    job.send(signal.SIGKILL)
    job.wait_for_line("supervise: exit code 76", since)
    send(mount, signal.SIGCONT)


def three_losses(job: Job) -> None:
    """Between two checkpoints, which come every three steps: each start makes a step or two."""
    for steps in (2, 1, 2):
        since = len(job.lines)
        seen = len(job.steps)

        def is_there(steps: int = steps, seen: int = seen) -> bool:
            return any(step % 3 == steps for step in job.steps[seen:])

        job.wait_for(f"a step {steps} after a checkpoint", is_there)
        job.send(signal.SIGKILL)
        job.wait_for_line("supervise: exit code", since)


def late_clock(which: int) -> Callable[[Job], None]:
    return lambda job: job.late.write_text(f"node{which}") and job.send(signal.SIGKILL)


def damage(spoil: Callable[[Job, Path], None]) -> Callable[[Job], None]:
    """Damages the newest checkpoint before the next start."""

    def event(job: Job) -> None:
        supervisor = job.named("hvdkit", "supervise")[0]
        send(supervisor, signal.SIGSTOP)
        job.send(signal.SIGKILL)
        job.wait_for("the ranks' end", lambda: not job.ranks(), 60)
        spoil(job, job.checkpoints()[-1])
        send(supervisor, signal.SIGCONT)
        # Nsenter, which stops with what it has started.
        job.process.send_signal(signal.SIGCONT)

    return event


def cut_short(job: Job, checkpoint: Path) -> None:
    state = checkpoint / "state.npz"
    os.truncate(state, job.rng.randrange(state.stat().st_size))


def flip_a_bit(job: Job, checkpoint: Path) -> None:
    content = bytearray((checkpoint / "state.npz").read_bytes())
    content[job.rng.randrange(len(content))] ^= 1 << job.rng.randrange(8)
    (checkpoint / "state.npz").write_bytes(content)


def crashes() -> dict[str, Callable[[Job], None]]:
    events = {}
    for number in (signal.SIGABRT, signal.SIGSEGV):
        for rank in range(3):
            for when in ("at its start", "in the first step", "in a save"):
                events[f"{number.name} of rank {rank} {when}"] = crash(
                    number, rank, when
                )
    return events


EVENTS = crashes() | {
    "a rank killed": signalled(signal.SIGKILL),
    "all ranks killed": lambda job: job.send(signal.SIGKILL),
    "all ranks killed in a save": lambda job: (
        job.wait_for("a save", job.saving) or job.send(signal.SIGKILL)
    ),
    "SIGTERM to a rank": signalled(signal.SIGTERM),
    "SIGUSR1 to a rank": signalled(signal.SIGUSR1),
    "a rank frozen": signalled(signal.SIGSTOP),
    "hosts.sh killed": killed(signal.SIGKILL, "bash", "launch/hosts.sh"),
    "mpirun killed": killed(signal.SIGKILL, "mpirun", "--tag-output"),
    "Open MPI's daemon killed": killed(signal.SIGKILL, "orted", "-mca ess"),
    "the supervisor lost": lost_supervisor,
    "data away for 3 s": cut(4, 3),
    "data away for 30 s": cut(4, 30),
    "data away for 300 s": cut(4, 300),
    "run folder away for 3 s": cut(5, 3),
    "run folder away for 30 s": cut(5, 30),
    "data not mounted": unmounted("data"),
    "run folder not mounted": unmounted("runs"),
    "disk full, then free": full_disk,
    "a host away for 60 s": cut(3, 60),
    "the launcher's host away for 60 s": cut(1, 60),
    "docker0 down and up": docker0,
    "other hosts": other_hosts,
    "GPU lost on a host": lost_on_a_host(
        lambda job, host: job.without_gpu.write_text(host.name),
        lambda job, host: job.without_gpu.unlink(),
        "nvidia-smi fails on {name} ",
    ),
    "project not there on a host": lost_on_a_host(
        hide_folder("fork"), show_folder("fork"), "cannot start on {name}: "
    ),
    "data not there on a host": lost_on_a_host(
        hide_folder("data"), show_folder("data"), "/data (rank "
    ),
    "a host listed twice": host_twice,
    "a host where users log in to fish": login("fish"),
    "a host where users log in to tcsh": login("tcsh"),
    "a mount of data that hangs": hard_mount,
    "three losses between two checkpoints": three_losses,
    "rank 0's clock an hour ahead": late_clock(1),
    "another host's clock an hour ahead": late_clock(2),
    "the newest checkpoint cut short": damage(cut_short),
    "a bit of the newest checkpoint flipped": damage(flip_a_bit),
    "the newest manifest empty": damage(
        lambda _, at: (at / "manifest.json").write_text("")
    ),
}
# What a run need not end for.
GOES_ON = {
    kind for kind in EVENTS if re.match("docker0|disk|(data|run folder) away", kind)
}


class Outcome(NamedTuple):
    kind: str
    codes: str
    repeated: int  # steps that were made again
    lost: float  # seconds from the event to the next step that is new
    # Processes of the hosts, the supervisor's open files and MB.
    held: tuple[int, int, int]


def interrupted(
    job: Job, kinds: list[str], every: float, minutes: float
) -> list[Outcome]:
    """Makes all events, one after the other, for so many minutes."""
    outcomes = []
    start_time = time.monotonic()
    for number, kind in enumerate(kinds):
        if time.monotonic() > start_time + 60 * minutes:
            break
        seen = len(job.steps)
        more = job.rng.randint(6, 9)  # the supervisor looks for new steps every 5 s
        job.wait_for(
            "steps", lambda seen=seen, more=more: len(job.steps) >= seen + more
        )
        # For events that damage one.
        job.wait_for("the first checkpoint", job.checkpoints)
        job.late.unlink(missing_ok=True)  # from the next start on
        since = time.monotonic()
        line = len(job.lines)
        seen = len(job.steps)
        EVENTS[kind](job)
        if kind not in GOES_ON:
            job.wait_for_line("resuming from", line)
        newest = max(job.steps)
        job.wait_for(
            f"{kind}: a new step", lambda newest=newest: max(job.steps) > newest
        )
        lost = time.monotonic() - since
        lines = job.lines[line:]
        codes = re.findall(r"supervise: exit code (\d+)", "".join(lines))
        repeated = sum(step <= newest for step in job.steps[seen:])
        outcomes.append(
            Outcome(kind, ", ".join(codes) or "-", repeated, lost, _held(job))
        )
        print(
            f"{kind}: codes {outcomes[-1].codes}; {repeated} steps again, {lost:.1f} s to a new"
        )
        pattern = "error: |Fatal Python error|Trace"
        errors = [text.strip() for text in lines if re.search(pattern, text)]
        for text in errors[:4]:
            print(f"    {text[:180]}")
        sys.stdout.flush()
        if kind != "other hosts":
            job.listed.write_text(EVERYWHERE)
        time.sleep(max(0.0, start_time + every * (number + 1) - time.monotonic()))
    return outcomes


def _held(job: Job) -> tuple[int, int, int]:
    supervisor = job.named("hvdkit", "supervise")[0]
    memory = supervisor.memory_info().rss // 2**20
    return len(job.inside()) - len(job.ranks()), supervisor.num_fds(), memory


def run_out(job: Job, outcomes: list[Outcome]) -> None:
    """Ends the run in a few steps; raises Failed if it leaves something behind."""
    soon = job.last.with_suffix(".partial")
    # Ranks are at the same step, or at the next.
    soon.write_text(str(max(job.steps) + 10))
    soon.rename(job.last)
    try:
        code = job.process.wait(3600)
    except subprocess.TimeoutExpired:
        raise Failed(f"the run did not end{job.tail()}") from None
    if code:
        raise Failed(f"the run ended with {code}{job.tail()}")
    end = time.monotonic() + 30
    left = job.left()
    while left and time.monotonic() < end:
        time.sleep(0.5)
        left = job.left()
    if left:
        commands = [" ".join(process.cmdline())[:80] for process in left]
        raise Failed(f"left behind: {commands}{job.tail()}")
    names = ("hosts' processes", "supervisor's open files", "supervisor's MB")
    for name, first, last in zip(names, outcomes[0].held, outcomes[-1].held):
        print(f"the {name}: {first} after the first event, {last} after the last")
        if last > first + 8:
            raise Failed(f"the {name} grew{job.tail()}")


def table(outcomes: list[Outcome]) -> None:
    print(
        "\n| what happened | times | exit codes | steps again, at most | s to a new step |"
    )
    print("| --- | --- | --- | --- | --- |")
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes):
        by_kind.setdefault(outcome.kind, []).append(outcome)
    for kind, of_kind in by_kind.items():
        codes = " / ".join(sorted({outcome.codes for outcome in of_kind}))
        repeated = max(outcome.repeated for outcome in of_kind)
        lost = statistics.median(outcome.lost for outcome in of_kind)
        print(f"| {kind} | {len(of_kind)} | {codes} | {repeated} | {lost:.0f} |")


def _order(args: argparse.Namespace, rng: random.Random) -> list[str]:
    kinds = [
        kind for kind in EVENTS if not args.kinds or kind.startswith(tuple(args.kinds))
    ]
    if not kinds:
        raise SystemExit(f"no kind begins with {args.kinds}; there are {list(EVENTS)}")
    order: list[str] = []
    while len(order) < (args.events or len(kinds)):
        order += rng.sample(kinds, len(kinds))
    return order[: args.events or len(kinds)]


def _undisturbed(folder: Path) -> None:
    """Trains the run to which nothing happens."""
    horovodrun = Path(sys.executable).with_name("horovodrun")
    words = [horovodrun, "--gloo", "--disable-cache", "-np", "2", sys.executable]
    words += [folder / "fork" / "train.py", *USUAL, f"--run_dir={folder}/whole"]
    words += [f"--data_dir={ROOT}/template/datasets/demo"]
    ended = run(words, 3600, cwd=ROOT / "template")
    if ended.code:
        raise Failed(
            f"without any event: exit code {ended.code}\n{ended.output[-2000:]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--events", type=int, default=0, help="how many; 0: each kind once"
    )
    parser.add_argument(
        "--every", type=float, default=0, help="seconds from one to the next"
    )
    parser.add_argument(
        "--minutes", type=float, default=600, help="no new one after so many"
    )
    parser.add_argument("--folder", type=Path, help="is left as it was at the end")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="by default all")
    args = parser.parse_args()
    require("sshd", "ssh", "ip", "tc", "unshare", "nsenter", "sshfs", "fish", "tcsh")
    rng = random.Random(args.seed)
    order = _order(args, rng)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(exist_ok=True)
    try:
        job = Job(folder, rng)
        try:
            job.prepare()
            outcomes = interrupted(job, order, args.every, args.minutes)
            table(outcomes)
            run_out(job, outcomes)
            shutil.copytree(job.run(), folder / "chaos")
        finally:
            job.hosts.end()
        _undisturbed(folder)
    except Failed as failed:
        print(
            f"error: {failed}\nseed {args.seed}; what is left: {folder}",
            file=sys.stderr,
        )
        return 1
    words = [
        sys.executable,
        "-m",
        "hvdkit",
        "compare",
        folder / "whole",
        folder / "chaos",
    ]
    code = subprocess.run(words, cwd=ROOT / "template", check=False).returncode
    if not args.folder and not code:
        shutil.rmtree(folder)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
