#!/usr/bin/env python3
"""Copies a data set to every host's local disk; one rank a host copies, the others wait.

    launch/hosts.sh -H node1:8,node2:8 python launch/stage.py /shared/data /local/data
    launch/hosts.sh -H node1:8,node2:8 python train.py --data_dir=/local/data ...

Each file is copied under another name, read back and compared (SHA-256) before it gets its own,
so one that has its name is whole. Typed again after an interruption it copies what is missing;
when nothing has changed since the last time it only looks at names, sizes and times. Files that
are no longer in the source are left alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

_RECORD = ".staged.json"
_PART = ".part"
_BLOCK = 1 << 22

# relative name -> (bytes, time of change in nanoseconds)
Listing = dict[str, tuple[int, int]]


def stage(source: Path, target: Path, workers: int) -> str:
    """Makes `target` hold what `source` holds; returns what was done, in words.

    Raises:
      OSError: no space, or a file cannot be read or written; what is whole stays.
      ValueError: `source` has no files, or one came out different twice.
    """
    wanted = listing(source)
    if not wanted:
        raise ValueError(f"{source} holds no files")
    record = _read_record(target)
    if record == _record(wanted) and all((target / name).exists() for name in _some(wanted)):
        return f"{target} is up to date: {len(wanted):,} files"
    missing = {name: about for name, about in wanted.items() if not _is_there(target / name, about)}
    need = sum(size for size, _ in missing.values())
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if need > free:
        raise OSError(
            f"{target} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are to be copied"
        )
    (target / _RECORD).unlink(missing_ok=True)
    _remove_what_was_cut_off(target)
    for folder in {(target / name).parent for name in missing}:
        folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda name: _copy(source / name, target / name), missing))
    partial = target / f"{_RECORD}.{os.uname().nodename}.{os.getpid()}{_PART}"
    partial.write_text(json.dumps(_record(wanted)))
    partial.rename(target / _RECORD)
    return f"{target}: {len(missing):,} of {len(wanted):,} files copied, {need / 1e6:,.0f} MB"


def listing(folder: Path) -> Listing:
    """Every file below `folder`; what stage keeps for itself does not count."""
    found: Listing = {}
    for root, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        for name in names:
            if name != _RECORD and not name.endswith(_PART):
                path = Path(root, name)
                about = path.stat()
                found[str(path.relative_to(folder))] = (about.st_size, about.st_mtime_ns)
    return found


def _raise(error: OSError) -> None:
    raise error


def _record(wanted: Listing) -> dict[str, object]:
    text = json.dumps(sorted(wanted.items())).encode()
    return {"files": len(wanted), "sha256": hashlib.sha256(text).hexdigest()}


def _read_record(target: Path) -> object:
    try:
        return json.loads((target / _RECORD).read_text())
    except (OSError, ValueError):
        return None


def _some(wanted: Listing, count: int = 100) -> list[str]:
    """Names spread over the whole list: a target that was emptied by hand shows."""
    names = sorted(wanted)
    return names[:: max(1, len(names) // count)]


def _is_there(path: Path, about: tuple[int, int]) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == about


def _copy(source: Path, target: Path) -> None:
    # Of this process alone: "local" may be a disk that hosts share.
    partial = target.with_name(f"{target.name}.{os.uname().nodename}.{os.getpid()}{_PART}")
    for _ in range(2):
        if _copy_once(source, partial) == _sha256(partial):
            partial.rename(target)
            return
    raise ValueError(f"{target} does not hold what was written to it: is that disk sound?")


def _copy_once(source: Path, partial: Path) -> str:
    """Returns the SHA-256 of what was read."""
    digest, before = hashlib.sha256(), source.stat()
    with open(source, "rb") as reading, open(partial, "wb") as writing:
        while block := reading.read(_BLOCK):
            digest.update(block)
            writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
        # Out of memory, so that the comparison reads what the disk has.
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
    return digest.hexdigest()


def _remove_what_was_cut_off(target: Path) -> None:
    """Partial copies of processes of this host that have ended."""
    for path in target.rglob(f"*.{os.uname().nodename}.*{_PART}"):
        process = path.name.removesuffix(_PART).rpartition(".")[2]
        if process.isdecimal() and not Path("/proc", process).exists():
            path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: this host has the data; 1: not, the reason is in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--workers", type=int, default=8, help="files copied at a time")
    options = parser.parse_args(argv)
    ranks = _ranks_of_this_host()
    error = None
    if _is_first(ranks):
        try:
            done = stage(options.source, options.target, options.workers)
            print(f"{os.uname().nodename}: {done}", flush=True)
        except (OSError, ValueError) as caught:
            error = str(caught)
            print(f"error: {os.uname().nodename}: {error}", file=sys.stderr, flush=True)
    failed = bytearray([error is not None])
    if ranks is not None:  # all ranks of the host end alike, when the copy is there
        ranks.Bcast(failed)
    return failed[0]


def _ranks_of_this_host():
    """Their MPI communicator; None where there is no MPI world."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ and "PMIX_RANK" not in os.environ:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)


def _is_first(ranks) -> bool:
    if ranks is not None:
        return ranks.rank == 0
    names = ("HOROVOD_LOCAL_RANK", "SLURM_LOCALID")
    return int(next((os.environ[name] for name in names if name in os.environ), "0")) == 0


if __name__ == "__main__":
    sys.exit(main())
