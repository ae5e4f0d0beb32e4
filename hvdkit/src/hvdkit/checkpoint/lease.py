"""Who trains in a run's folder: one start of one job. Imports no TensorFlow.

Rank 0 holds a lock on RUN_DIR/.lock until its process ends. RUN_DIR/.lease says who that is, and
its time is renewed every few seconds. A new start of the same job (LAUNCH_JOB, which `hvdkit
supervise` sets) writes itself into it: the old start sees that, and ends at its next step.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import IO

from hvdkit import whole_files
from hvdkit.stop import NotNow

_BEAT = 2.0  # seconds between two signs of life
_FENCING = 30.0  # seconds that the old start of a job has to end
_held: dict[Path, Lease] = {}  # until the process ends


def take(run_dir: Path) -> None:
    """Keeps other runs out of the folder as long as this process lives; does nothing without one.

    Called before a run looks for its checkpoint: another run that is about to end may still save
    one, and delete the one that would be found.

    Raises:
      OSError: its files cannot be written. NotNow: another run is in it.
    """
    folder = run_dir.resolve()
    if run_dir.is_dir() and folder not in _held:
        _held[folder] = Lease(folder)


def lost(run_dir: Path) -> str:
    """Who has taken over the folder that this process trains in, as a sentence; "" for nobody."""
    lease = _held.get(run_dir.resolve())
    return lease.lost if lease else ""


def holder(run_dir: Path) -> dict[str, str]:
    """What the folder's lease says: job, start, by (the supervisor), host; empty without one."""
    try:
        found = json.loads(whole_files.read(run_dir / ".lease", whole_files.JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Lease:
    """Rank 0's, on a folder; `lost`: who has taken it over, as a sentence."""

    def __init__(self, folder: Path) -> None:
        start = secrets.token_hex(8)
        names = {"job": os.environ.get("LAUNCH_JOB", start), "by": os.environ.get("LAUNCH_BY", "")}
        self._own = {**names, "start": start, "host": os.uname().nodename}
        self._folder, self.lost = folder, ""
        self._lock = self._wait_for_lock(time.monotonic() + _FENCING)
        self._write()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def _write(self) -> None:
        whole_files.write_json(self._folder / ".lease", self._own)

    def _wait_for_lock(self, end: float) -> IO[str] | None:
        while True:
            with contextlib.suppress(BlockingIOError):
                try:
                    return whole_files.lock(self._folder / ".lock")
                except whole_files.NoLocks:
                    if not self._beats():
                        return None
            there = holder(self._folder)
            who = f"{self._folder} is in use by another run, on {there.get('host', 'some host')}"
            if there.get("job") != self._own["job"]:
                raise NotNow(f"{who}: wait for its end or choose another --run_dir")
            if time.monotonic() > end:
                raise NotNow(f"{who}: an earlier start of this job, which has not ended yet")
            if there != self._own:
                self._write()
            time.sleep(0.5)

    def _beats(self) -> bool:
        """Whether the folder's holder shows signs of life, where the file system has no locks."""
        times = set()
        for _ in range(4):
            with contextlib.suppress(OSError):
                times.add((self._folder / ".lease").stat().st_mtime_ns)
            time.sleep(_BEAT)
        return len(times) > 1

    def _keep(self) -> None:
        while not self.lost:
            time.sleep(_BEAT)
            there = holder(self._folder)
            if there.get("start", self._own["start"]) != self._own["start"]:
                where = f"a later start of this job, on {there.get('host')}"
                self.lost = f"{where}, has taken over {self._folder}: this one ends, unsaved"
            else:
                with contextlib.suppress(OSError):
                    os.utime(self._folder / ".lease", follow_symlinks=False)
