"""Who trains in a run's folder: one start of one job. Imports no TensorFlow.

Rank 0 holds a lock on RUN_DIR/.lock until its process ends, or a notebook's run. RUN_DIR/.lease
says who that is; its time is renewed every few seconds, for disks that have no locks. A new start
of the same job (LAUNCH_JOB, which `hvdkit supervise` sets) writes itself there: the old one ends at
its next step.
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

_BEAT = 2.0  # A run renews its lease every so many seconds.
_FENCING = 30.0  # The old start of a job has so many seconds to end.
# By folder the lock, if its disk has locks, what ends the thread that renews its lease, and what
# the lease says.
_held: dict[Path, tuple[IO[str] | None, threading.Event, dict[str, str]]] = {}
_lost: dict[Path, str] = {}


def take(run_dir: Path) -> None:
    """Keeps other runs out until `release` or this process's end; does nothing without a folder.

    Called before a run looks for its checkpoint: another run that is about to end may still save
    one, and delete the one that would be found.

    Raises OSError: its files cannot be written. NotNow: another run is in it.
    """
    folder = run_dir.resolve()
    start = secrets.token_hex(8)
    if not run_dir.is_dir() or folder in _held:
        return
    record = {
        "job": os.environ.get("LAUNCH_JOB", start),
        "by": os.environ.get("LAUNCH_BY", ""),
        "start": start,
        "host": os.uname().nodename,
    }
    end = time.monotonic() + _FENCING
    # Some disks have locks that only their own host sees.
    before = _read(folder)
    is_elsewhere = before.get("host", record["host"]) != record["host"]
    is_elsewhere = is_elsewhere and "ended" not in before
    while True:
        try:
            lock = _lock(folder, is_elsewhere)
            break
        except BlockingIOError:
            _ask_to_end(folder, record, is_late=time.monotonic() > end)
            time.sleep(0.5)
    whole_files.write_json(folder / ".lease", record)
    is_released = threading.Event()
    _held[folder] = (lock, is_released, record)
    threading.Thread(
        target=_keep, args=(folder, record, is_released), name="lease", daemon=True
    ).start()


def release() -> None:
    """Lets other runs into the folders, in a process that goes on after its run."""
    for folder, (lock, is_released, record) in _held.items():
        is_released.set()
        # The next start, on another host, need not watch whether this one is there.
        with contextlib.suppress(OSError):
            if _read(folder).get("start") == record["start"]:
                whole_files.write_json(folder / ".lease", {**record, "ended": "yes"})
        if lock:
            lock.close()
    _held.clear()
    _lost.clear()


def _ask_to_end(folder: Path, record: dict[str, str], is_late: bool) -> None:
    """Writes this start's record, at which an older start of this job ends.

    Raises NotNow: another run is in the folder, a later start, or one that has not ended.
    """
    holder = _read(folder)
    is_same_job = holder.get("job") == record["job"]
    is_older = is_same_job and str(holder.get("by")) <= record["by"]
    if not is_older or is_late:
        owner = "a later start of this job" if is_same_job else "another run"
        raise NotNow(
            f"{folder} is in use by {owner}, on {holder.get('host', 'some host')}: wait for "
            "its end or choose another --run_dir"
        )
    if holder != record:
        whole_files.write_json(folder / ".lease", record)


def lost(run_dir: Path) -> str:
    """Who has taken over the folder that this process trains in, as a sentence; "" for nobody."""
    if not _lost:  # Each step asks, so this is quick.
        return ""
    return _lost.get(run_dir.resolve(), "")


def _lock(folder: Path, is_elsewhere: bool) -> IO[str] | None:
    """The folder's lock; None on a disk without locks.

    `is_elsewhere`: the lease is of another host, which may not see this one's lock.

    Raises BlockingIOError: another process has the lock, or renews the lease where a lock does not
    say enough.
    """
    lock = None
    with contextlib.suppress(whole_files.NoLocks):
        lock = whole_files.lock(folder / ".lock")
    if lock and not is_elsewhere:
        return lock
    times = set()
    for _ in range(4):
        # NFS keeps a file's time for up to a minute, and asks for it when the file is opened.
        with (
            contextlib.suppress(FileNotFoundError),
            whole_files.opened(folder / ".lease") as file,
        ):
            times.add(os.fstat(file.fileno()).st_mtime_ns)
        time.sleep(_BEAT)
    if len(times) > 1:
        if lock:
            lock.close()
        raise BlockingIOError
    return lock


def _read(folder: Path) -> dict[str, str]:
    try:
        text = whole_files.read(folder / ".lease", whole_files.JSON_BYTES)
        record = whole_files.from_json(text, folder)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _keep(folder: Path, record: dict[str, str], is_released: threading.Event) -> None:
    """Renews the lease until it is released, or another start has written itself there."""
    start = record["start"]
    holder = _read(folder)
    while holder.get("start", start) == start:
        with contextlib.suppress(OSError):
            os.utime(folder / ".lease", follow_symlinks=False)
        if is_released.wait(_BEAT):
            return
        holder = _read(folder)
    is_same_job = holder.get("job") == record["job"]
    owner = "a later start of this job" if is_same_job else "another run"
    _lost[folder] = (
        f"{owner}, on {holder.get('host')}, has taken over {folder}: this one ends, unsaved"
    )
