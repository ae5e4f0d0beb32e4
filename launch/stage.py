#!/usr/bin/env python3
"""Copies a data set to every host's local disk; one rank per host copies, the others wait.

    launch/hosts.sh -H node1:8,node2:8 python launch/stage.py /shared/data /local/data
    launch/hosts.sh -H node1:8,node2:8 python train.py --data_dir=/local/data ...

Each file is copied under a temporary name, read back and compared (SHA-256), then renamed. So a
file with its final name is complete. Run again, it compares every file's size and time, and copies
what is missing or different. Links in the source are followed; in the target they are refused, and
so is everything that the source does not have. Files being copied are in TARGET/.staging, which is
removed at the end; after a kill, that user's next start removes it. A second staging into the same
target waits for the first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from stage_folders import WORK, Listing, check_leftovers, check_places, check_ways, listing

_BLOCK = 1 << 22
# Seconds after which a work folder of another machine that nobody writes to is a dead one's.
_SILENCE = 120


def stage(source: Path, target: Path, workers: int = 8) -> str:
    """Makes `target` hold what `source` holds; returns what was done, in words.

    Raises:
      OSError: no space, or a file cannot be read or written; what is whole stays.
      ValueError: one of the two folders lies in the other, `source` has no files, or something
        that cannot be copied (`listing` tells what), `target` holds links to folders or what the
        source does not hold, or a file came out different twice.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    check_places(source, target)
    target.mkdir(parents=True, exist_ok=True)
    wanted = listing(source, target)
    files = wanted.files
    if not files:
        raise ValueError(f"{source} holds no files")
    with _alone(target) as locked:
        check_ways(source, target, wanted)
        check_leftovers(source, target, wanted)
        missing = [name for name, about in files.items() if not _is_there(target / name, about)]
        work = target / WORK
        if work.is_dir():
            _remove_what_was_cut_off(work, locked)
        need = sum(files[name][0] for name in missing)
        _check_space(target, need, len(missing))
        _make_folders(target, wanted, missing)
        if not missing:
            return f"{target} is up to date: {len(files):,} files"
        work.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=f"{_machine()}.", dir=work))
        try:
            _copy_all(source, target, {name: files[name] for name in missing}, own, workers)
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with contextlib.suppress(OSError):  # another host's may be in it
                work.rmdir()
    return f"{target}: {len(missing):,} of {len(files):,} files copied, {_words(need)}"


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[bool]:
    """Waits until no other process stages into `target`; False: its file system has no locks.

    The lock is on the folder itself: it leaves nothing behind, and ends with the process.
    """
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{os.uname().nodename}: waiting for another staging into {target}", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _is_there(path: Path, about: tuple[int, int]) -> bool:
    """A link is no copy, whatever it leads to."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path} is a folder, and a file in the source: remove it")
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == about


def _remove_what_was_cut_off(work: Path, locked: bool) -> None:
    """Work folders of processes that have ended.

    A name begins with the machine's: with the lock, those of this machine are dead ones'. Another
    machine, or this one before it was started again, may not share the lock where the disk is
    shared: what it writes to is young.
    """
    with contextlib.suppress(OSError):  # another user's stay: they are in nobody's way
        os.utime(work)
        now = work.stat().st_mtime  # by the clock of the disk's host
        for folder in work.iterdir():
            with contextlib.suppress(OSError):
                own = folder.name.startswith(f"{_machine()}.")
                dead = (own and locked) or now - folder.stat().st_mtime > _SILENCE
                if dead and all(map(str.isdecimal, os.listdir(folder))):  # a file for each worker
                    for partial in folder.iterdir():
                        partial.unlink()
                    folder.rmdir()
        work.rmdir()


def _machine() -> str:
    """The running kernel's name: the same in all of its containers, another after a start anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _check_space(target: Path, size: int, files: int) -> None:
    disk = os.statvfs(target)
    free = disk.f_bavail * disk.f_frsize
    if size > free:
        raise OSError(
            f"{target} has {_words(free)} free, {_words(size)} are to come: {_words(size - free)} "
            "too little"
        )
    if disk.f_files and files > disk.f_favail:  # some file systems have no number of files: 0
        raise OSError(f"{target} has room for {disk.f_favail:,} files, {files:,} are to come")


def _words(size: int) -> str:
    """Bytes, for a person."""
    power = min((len(str(size)) - 1) // 3, 4)
    return f"{size / 1000**power:,.{min(power, 1)}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _make_folders(target: Path, wanted: Listing, missing: list[str]) -> None:
    """All of them: readers refuse a class's folder that is empty, and so they do in the copy.

    A file gets its name by a rename, which does not lead to another disk.
    """
    for folder in wanted.folders:
        (target / folder).mkdir(exist_ok=True)
    disk = target.stat().st_dev
    for folder in {os.path.dirname(name) for name in missing}:
        if (target / folder).stat().st_dev != disk:
            raise ValueError(f"{target / folder} is on another disk than {target}: stage it alone")


def _copy_all(
    source: Path, target: Path, wanted: dict[str, tuple[int, int]], own: Path, workers: int
) -> None:
    """`workers` files at a time; when one fails, or a signal comes, the others are left as well."""
    names, stopped = iter(wanted), threading.Event()

    def alive() -> None:
        if stopped.is_set():
            raise InterruptedError("another file could not be copied")
        os.utime(own)  # for `_remove_what_was_cut_off`

    def copy_some(number: int) -> None:
        try:
            for name in names:  # shared: each name comes to one thread
                _copy(source / name, target / name, wanted[name], own / str(number), alive)
        except BaseException:
            stopped.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:  # a signal may come anywhere in it
            copies = [pool.submit(copy_some, number) for number in range(workers)]
            concurrent.futures.wait(copies)
        finally:
            stopped.set()
    errors = [error for copy in copies if (error := copy.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, InterruptedError)):
        raise error


def _copy(
    source: Path,
    target: Path,
    about: tuple[int, int],
    partial: Path,
    alive: Callable[[], None],
) -> None:
    try:
        for _ in range(2):
            digest = _copy_once(source, partial, alive)
            found = source.stat()
            if (found.st_size, found.st_mtime_ns) != about or partial.stat().st_size != about[0]:
                raise ValueError(f"{source} changed meanwhile: stage again when it is complete")
            if digest == _sha256(partial, alive):
                os.utime(partial, ns=(found.st_atime_ns, found.st_mtime_ns))
                partial.rename(target)
                return
    except OSError as error:
        if error.filename is None:  # of a read or a write, as on a full disk
            error.filename, error.filename2 = str(source), str(target)
        raise
    raise ValueError(f"{target} does not hold what was written to it: is that disk sound?")


def _copy_once(source: Path, partial: Path, alive: Callable[[], None]) -> str:
    """Returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    with open(source, "rb") as reading, open(partial, "wb") as writing:
        while block := reading.read(_BLOCK):
            alive()
            digest.update(block)
            writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
        # Out of memory, so that the comparison reads what the disk has.
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def _sha256(path: Path, alive: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            alive()
            digest.update(block)
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: this host has the data; 1: not, the reason is in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=_folder)
    parser.add_argument("target", type=_folder)
    parser.add_argument("--workers", type=_count, default=8, help="files to copy at a time")
    options = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    ranks = _ranks_of_this_host()
    failed = bytearray(1)
    if _is_first(ranks):
        for number in (signal.SIGINT, signal.SIGTERM):  # so that what is half copied goes
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            done = stage(options.source, options.target, options.workers)
            print(f"{os.uname().nodename}: {done}", flush=True)
        except Exception as error:  # of any kind: the others wait to hear of it
            kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
            print(f"error: {os.uname().nodename}: {kind}{error}", file=sys.stderr, flush=True)
            failed[0] = 1
    if ranks is not None:  # all ranks of the host end alike, when the copy is there
        ranks.Bcast(failed)
    return failed[0]


def _folder(text: str) -> Path:
    if not text:  # a variable that is not set; it would be the working folder
        raise argparse.ArgumentTypeError("it is empty: name a folder")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


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
