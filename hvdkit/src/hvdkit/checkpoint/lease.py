"""Who trains in a run's folder: one start of one job. Imports no TensorFlow.

Rank 0 holds a lock on RUN_DIR/.lock until its process ends. RUN_DIR/.lease says who that is; its
time is renewed every few seconds, for disks that have no locks. A new start of the same job
(LAUNCH_JOB, which `hvdkit supervise` sets) writes itself there: the old one ends at its next step.
"""

import contextlib
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
_held: dict[Path, IO[str] | None] = {}  # until the process ends
_lost: dict[Path, str] = {}


def take(run_dir: Path) -> None:
    """Keeps other runs out of the folder as long as this process lives; does nothing without one.

    Called before a run looks for its checkpoint: another run that is about to end may still save
    one, and delete the one that would be found.

    Raises OSError: its files cannot be written. NotNow: another run is in it.
    """
    folder = run_dir.resolve()
    start = secrets.token_hex(8)
    if not run_dir.is_dir() or folder in _held:
        return
    own = {
        "job": os.environ.get("LAUNCH_JOB", start),
        "by": os.environ.get("LAUNCH_BY", ""),
        "start": start,
        "host": os.uname().nodename,
    }
    end = time.monotonic() + _FENCING
    while not (lock := _lock(folder)):
        there = _read(folder)
        older = there.get("job") == own["job"] and str(there.get("by")) <= own["by"]
        if not older or time.monotonic() > end:
            whose = "a later start of this job" if there.get("job") == own["job"] else "another run"
            raise NotNow(
                f"{folder} is in use by {whose}, on {there.get('host', 'some host')}: wait for "
                "its end or choose another --run_dir"
            )
        if there != own:
            whole_files.write_json(folder / ".lease", own)
        time.sleep(0.5)
    whole_files.write_json(folder / ".lease", own)
    _held[folder] = lock[0]
    threading.Thread(target=_keep, args=(folder, start), name="lease", daemon=True).start()


def lost(run_dir: Path) -> str:
    """Who has taken over the folder that this process trains in, as a sentence; "" for nobody."""
    return _lost.get(run_dir.resolve(), "") if _lost else ""  # asked in each step


def _lock(folder: Path) -> tuple[IO[str] | None] | None:
    """None while another process has it."""
    try:
        return (whole_files.lock(folder / ".lock"),)
    except BlockingIOError:
        return None
    except whole_files.NoLocks:
        times = set()
        for _ in range(4):
            with contextlib.suppress(FileNotFoundError):
                times.add((folder / ".lease").stat().st_mtime_ns)
            time.sleep(_BEAT)
        return None if len(times) > 1 else (None,)


def _read(folder: Path) -> dict[str, str]:
    try:
        text = whole_files.read(folder / ".lease", whole_files.JSON_BYTES)
        found = whole_files.from_json(text, folder)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(folder: Path, start: str) -> None:
    while (there := _read(folder)).get("start", start) == start:
        with contextlib.suppress(OSError):
            os.utime(folder / ".lease", follow_symlinks=False)
        time.sleep(_BEAT)
    _lost[folder] = (
        f"a later start of this job, on {there.get('host')}, has taken over {folder}: this one "
        "ends, unsaved"
    )
