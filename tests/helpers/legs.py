"""A run started by launch/hosts.sh in a process of its own, watched step by step."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from hosts import PORT, Hosts

from hvdkit.testing import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
START, END = 180, 90  # seconds that a start, an end may take; the ranks share two cores


class Failed(Exception):
    """What was promised did not come; the message ends with the run's last lines."""


class Leg:
    """From one start to its next end: on some ranks of this machine, or of others."""

    number = 0

    def __init__(
        self, folder: Path, flags: list[str], ranks: int, via: str, hosts: Hosts | None = None
    ) -> None:
        """`via`: mpi (hosts.sh), or gloo (horovodrun); `hosts`: one rank on each, None: all here."""
        Leg.number += 1
        self.folder, self._id = folder, f"chaos-{os.getpid()}-{Leg.number}"
        self.ranks, self.via, self.hosts = ranks, via, hosts
        launcher = [ROOT / "launch/hosts.sh", "-np", ranks]
        if via == "gloo":
            tool = Path(sys.executable).with_name("horovodrun")
            launcher = [tool, "--gloo", "--disable-cache", "-np", ranks]
        if hosts:
            names = ",".join(f"{host.name}:1" for host in list(hosts)[:ranks])
            launcher += ["-p", PORT, "-H", names]
        words = [*launcher, sys.executable, "train.py"]
        words = list(map(str, [*words, *flags, f"--run_dir={folder}"]))
        self.process = subprocess.Popen(
            hosts[1].words(*words) if hosts else words,
            cwd=ROOT / "template",
            env=os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "LAUNCH_ID": self._id},
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

    def wait_for(self, what: str, there: Callable[[], object], seconds: float = START) -> None:
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() > end:
                raise Failed(f"{what}: not within {seconds} s{self.tail()}")
            if self.process.poll() is not None and not there():
                raise Failed(f"{what}: ended before, with {self.process.returncode}{self.tail()}")
            time.sleep(0.01)

    def after(self, steps: int) -> None:
        """Waits until so many steps were made in this leg."""
        self.wait_for(f"{steps} steps", lambda: len(self.steps) >= steps)

    def pids(self) -> list[psutil.Process]:
        """Ranks, by rank."""
        found = []
        for process in self._mine():
            variables = variables_of(process)
            rank = variables.get("HOROVOD_RANK", variables.get("OMPI_COMM_WORLD_RANK"))
            if rank is not None and "train.py" in " ".join(process.cmdline()[:3]):
                found.append((int(rank), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def _mine(self) -> Iterable[psutil.Process]:
        for process in psutil.process_iter():
            if variables_of(process).get("LAUNCH_ID") == self._id:
                yield process

    def kill_all(self) -> None:
        for process in list(self._mine()):
            send(process, signal.SIGKILL)

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


def variables_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        process.send_signal(number)
