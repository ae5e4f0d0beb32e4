"""An elastic run on this machine, whose hosts are names of it in a file that tests change."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hosts import PORT, Host
from legs import END, ROOT, START, Leg, send, variables_of

# horovodrun leaves out the whole host of a rank that was lost, so each rank has one of its own.
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1")


class Elastic(Leg):
    """For `with`: at its end nothing is left."""

    def __init__(
        self, folder: Path, hosts: Sequence[str], flags: Sequence[str], launcher: Host | None = None
    ) -> None:
        """`launcher`: the host, of hosts.py, that horovodrun runs on and reaches others from."""
        self._file = folder.with_suffix(".hosts")
        self.offer(hosts)
        words = ["--discover", f"{ROOT}/launch/discover.sh {self._file}", "--interface"]
        words += ["eth0", "-p", PORT] if launcher else ["lo"]
        self.start(folder, words, [*flags, "--elastic"], launcher)

    def about(self) -> str:
        return "an elastic run"

    def __enter__(self) -> Elastic:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        self.process.wait(END)

    def offer(self, hosts: Sequence[str]) -> None:
        """The hosts that there are from now on, a rank each."""
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(f"{host} slots=1\n" for host in hosts))
        partial.replace(self._file)

    def rank_of(self, host: str) -> psutil.Process:
        return next(
            process
            for process in self._mine()
            if variables_of(process).get("HOROVOD_HOSTNAME") == host
            and "train.py" in " ".join(process.cmdline()[:3])
        )

    def lose(self, host: str, number: int = signal.SIGKILL) -> float:
        """Sends the signal to the host's rank; returns seconds to the next world's first step."""
        rank = self.rank_of(host)
        return self.until_next_world(lambda: send(rank, number))

    def change(self, hosts: Sequence[str]) -> float:
        """Other hosts from now on; returns seconds to the next world's first step."""
        return self.until_next_world(lambda: self.offer(hosts))

    def until_next_world(self, how: Callable[[], object]) -> float:
        worlds, start = self._worlds(), time.monotonic()
        how()
        self.wait_for("another world", lambda: self._worlds() > worlds, START)
        made = len(self.steps)
        self.wait_for("a step in it", lambda: len(self.steps) > made, START)
        return self.steps[made][1] - start

    def _worlds(self) -> int:
        return sum("going on from step" in line for line in self.lines)

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def logged(self) -> list[int]:
        """Steps in metrics.jsonl, as they stand there."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]
