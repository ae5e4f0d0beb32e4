#!/usr/bin/env python3
"""Copies a data set to every host's own disk with rsync; one rank per host copies, others wait.

    launch/hosts.sh -H node1:8,node2:8 python launch/stage.py /shared/data /local/data
    launch/hosts.sh -H node1:8,node2:8 python train.py --data_dir=/local/data ...

TARGET then holds exactly what SOURCE holds, with the same modes and times: what SOURCE does not
have is deleted. A second call copies what is missing or differs in size or time. Copies are read
again and compared. Links inside SOURCE stay links; one that leads out is refused.
"""

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# Not owners, which only root can set, nor devices. A disk's own lost+found is no part of a set.
_RSYNC = ["rsync", "--recursive", "--links", "--perms", "--times", "--omit-dir-times", "--delete"]
_RSYNC += ["--itemize-changes", "--exclude=/lost+found"]


def stage(source: str, target: str) -> str:
    """Makes `target` hold what `source` holds; returns a sentence on what was done.

    Raises:
      OSError: a folder cannot be read or made, or rsync is missing or failed.
      ValueError: one folder is in the other, `source` has no files or a link that leads out of it,
        `target` holds another set, or the copy differs from `source`.
    """
    if not shutil.which("rsync"):
        raise OSError("rsync is not installed here: install it (apt-get install rsync)")
    whole, copy = Path(os.path.realpath(source, strict=True)), Path(os.path.realpath(target))
    for inner, outer in ((whole, copy), (copy, whole)):
        up = (folder for folder in (inner, *inner.parents) if folder.exists() and outer.exists())
        if any(folder.samefile(outer) for folder in up):
            raise ValueError(f"{inner} is in {outer}: name a target beside the source")
    if not _has_files(whole):
        raise ValueError(f"{whole} holds no files")
    copy.mkdir(parents=True, exist_ok=True)
    lock = os.open(copy, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another staging
        return _copy(whole, copy)
    finally:
        os.close(lock)


def _has_files(folder: Path) -> bool:
    """Raises ValueError for a link that leads out of the folder."""
    found = False
    for place, folders, files in os.walk(folder):
        found = found or bool(files)
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path):
                to, inside = os.readlink(path), os.path.relpath(place, folder)
                # By its text, which is resolved in the copy, and by its target.
                first = os.path.normpath(os.path.join(inside, to)).split("/")[0]
                if first in ("", "..") or not Path(os.path.realpath(path)).is_relative_to(folder):
                    raise ValueError(f"{path} leads out of {folder}, to {to}: put a copy there")
    return found


def _copy(source: Path, target: Path) -> str:
    # A wrong target must not delete files: an earlier copy has something of the source.
    there = {name for name in os.listdir(target) if name[0] != "." and name != "lost+found"}
    if there and not there & {*os.listdir(source)}:
        raise ValueError(f"{target} holds another set ({min(there)}): name an empty folder")
    done = _rsync(source, target, "--fsync")
    # Sizes and times are compared; all bytes where something was copied.
    wrong = _rsync(source, target, "--dry-run", *["--checksum"] * bool(done))
    if wrong:
        raise ValueError(
            f"{target} is not the same as {source} after the copy ({wrong[0]}): stage again when "
            "nobody writes to them; pipes and devices are not copied"
        )
    copied = sum(line.startswith(">f") for line in done)  # deletions are lines too
    return f"{target}: {copied:,} files copied" if done else f"{target} is up to date"


def _rsync(source: Path, target: Path, *flags: str) -> list[str]:
    """A line for each change, made or with --dry-run."""
    ended = subprocess.run([*_RSYNC, *flags, f"{source}/", f"{target}/"], capture_output=True)
    if ended.returncode:
        lines = ended.stderr.decode(errors="backslashreplace").splitlines()
        raise OSError(f"rsync failed with exit code {ended.returncode}: {' '.join(lines[:1])}")
    return ended.stdout.decode(errors="backslashreplace").splitlines()


def main() -> int:
    """Exit code 0: this host has the data; 1: not, and the last line says why."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    options = parser.parse_args()
    if not options.source or not options.target:  # a variable that is not set
        parser.error("a name is empty: name two folders")
    ranks, failed = None, bytearray(1)
    if {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & os.environ.keys():
        from mpi4py import MPI  # without it each rank copies in turn, and the first has copied all

        ranks = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if ranks is None or ranks.rank == 0:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends rsync too
        try:
            print(f"{os.uname().nodename}: {stage(options.source, options.target)}", flush=True)
        except Exception as error:  # of any kind: the other ranks wait for it
            print(f"error: {os.uname().nodename}: {error}", file=sys.stderr, flush=True)
            failed[0] = 1
    if ranks is not None:
        ranks.Bcast(failed)
    return failed[0]


if __name__ == "__main__":
    sys.exit(main())
