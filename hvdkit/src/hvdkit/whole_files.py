"""Files and folders: whole, or as before, whenever a process or machine dies; hashed; locked.

A folder may belong to somebody hostile: no link in it is followed, unless the caller says so.
"""

import contextlib
import csv
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, TextIO, overload

# The most bytes that are read of one file of each kind.
JSON_BYTES = 2**24
TABLE_BYTES = 2**26
LINES_BYTES = 2**26
METRICS_BYTES = (
    2**32
)  # They are read line by line: a step logged may be a thousand bytes.

# `replaced` lets files be made in a hidden folder with this ending.
_UNFINISHED = ".unfinished"
_OLD = ".old"  # What had a name before gets this ending.
_LOCK = ".lock"
# The file that lists path, size and time of what `replaced` has put there.
_RECORD = ".written-by-hvdkit.json"
_RECORD_BYTES = 2**30
_SIGN_BYTES = 2**10  # A file's sign stands in so many bytes of its beginning.
# Arguments of the system's renameat2.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@overload
def opened(path: Path, *, append: Literal[True], mode: int = ...) -> TextIO: ...
@overload
def opened(path: Path, *, most: float = ..., links: bool = ...) -> BufferedReader: ...
def opened(
    path: Path,
    *,
    append: bool = False,
    most: float = math.inf,
    links: bool = False,
    mode: int = 0o666,
) -> IO:
    """Opens a regular file, to read its bytes or, as text, to append to it.

    `mode`: the permissions of a new file, less the process's umask.

    Raises OSError: it is a link, no regular file, or has more than `most` bytes.
    """
    flags = os.O_NONBLOCK  # Without it, opening a pipe would wait.
    if append:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT
    if not links:
        flags |= os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link, which is not followed"
        raise
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return os.fdopen(handle, "a" if append else "rb")
    os.close(handle)
    reason = "it is no regular file"
    if most < math.inf:
        reason += f" of at most {most:,} bytes"
    raise OSError(errno.EFBIG, reason, str(path))


def read(path: Path, most: int, *, links: bool = False) -> bytes:
    """The bytes of a whole file; it takes and raises what `opened` does."""
    with opened(path, most=most, links=links) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def from_json(text: str | bytes, where: object) -> Any:
    """What a text of JSON holds, whoever wrote it; `where` names it in the error.

    Raises ValueError: it is no JSON, or is nested too deep to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON that can be read: {error}") from None


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yields a path to write to; the file then replaces `path` and is flushed to disk.

    Raises OSError: it cannot be written. After any exception the old file is unchanged.
    """
    # The path may be that of /dev/null.
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):
        raise OSError(
            errno.EINVAL, "it is no regular file, which alone is replaced", str(path)
        )
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        # This path leads to this very file, whatever has its name by then.
        yield Path(f"/proc/self/fd/{handle}")
        os.fsync(handle)
        partial.replace(path)
    except BaseException as error:
        # The error of a full disk names no file.
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(path)
        with contextlib.suppress(OSError):  # The first error says more.
            partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    flush(path.parent)


@contextlib.contextmanager
def replaced(
    folder: Path, names: Sequence[str], *, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yields a folder to write in; what has these names in it then takes its place in `folder`.

    Of `names`, what was not written is removed from `folder`, so that all of them are of one call.
    They are put there one after the other, each at once. After any exception, or a kill before
    that, `folder` is as it was. What killed processes left is removed first. A hidden record in
    `folder` says which files are of such a call: a person's own, or changed ones, stay.

    `inputs`: files and folders that are read meanwhile.

    Raises ValueError: another process writes there; what has these names is a person's, or an
    input. OSError: something cannot be written.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_inputs(folder, names, inputs)
    _recover(folder)
    _refuse_foreign(folder, names)
    unfinished = folder / f".{secrets.token_hex(8)}{_UNFINISHED}"
    try:
        # With wider permissions, other users could hold the lock.
        unfinished.mkdir(mode=0o700)
        # The lock is closed before the folder is removed: on NFS a file that is open stays.
        with contextlib.ExitStack() as locks:
            with contextlib.suppress(NoLocks):
                locks.enter_context(lock(unfinished / _LOCK))
            yield unfinished
            _flush_all(unfinished)
            # Somebody may have put files there meanwhile.
            _refuse_foreign(folder, names)
            _write_record(folder, names, unfinished)
            for name in names:
                put(unfinished / name, folder / name)
            flush(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_new:
            # The folder is not empty where files were written.
            with contextlib.suppress(OSError):
                folder.rmdir()


def refuse_other(path: Path, sign: str) -> None:
    """Raises ValueError where a file has this path that does not begin with a text of `sign`.

    Raises OSError: it is no regular file, or cannot be read.
    """
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        beginning = file.read(_SIGN_BYTES)
    if beginning and sign.encode() not in beginning:
        raise ValueError(
            f"{path} is a file that this command did not write, so it is not replaced: give "
            "another name, or move it"
        )


def _refuse_inputs(folder: Path, names: Sequence[str], inputs: Iterable[Path]) -> None:
    outputs = [os.path.realpath(folder / name) for name in names]
    for path in inputs:
        real = Path(os.path.realpath(path))
        for output in outputs:
            if real.is_relative_to(output):
                raise ValueError(
                    f"{path} is read, and {output} would be replaced: write into another folder"
                )


def _refuse_foreign(folder: Path, names: Sequence[str]) -> None:
    """Raises ValueError where a file of these names is not as `replaced` put it there."""
    for entry in sorted(_entries(folder, names) - _recorded(folder)):
        path = Path(os.path.realpath(folder), entry[0])
        raise ValueError(
            f"{path} was put there or changed by somebody else, so it is not replaced: move it, "
            "or write into another folder"
        )


def _write_record(folder: Path, names: Sequence[str], unfinished: Path) -> None:
    """Records the files that have these names and the new ones: a kill may leave either."""
    others = {
        entry for entry in _recorded(folder) if entry[0].split("/")[0] not in names
    }
    files = others | _entries(folder, names) | _entries(unfinished, names)
    write_json(unfinished / _RECORD, sorted(files))
    (unfinished / _RECORD).replace(folder / _RECORD)


def _recorded(folder: Path) -> set[tuple[str, int, int]]:
    """The files that `replaced` put into the folder, as `_entries`; none where it did not."""
    try:
        record = from_json(read(folder / _RECORD, _RECORD_BYTES), _RECORD)
        return {(str(path), int(size), int(time)) for path, size, time in record}
    except (OSError, ValueError, TypeError):
        return set()


def _entries(folder: Path, names: Sequence[str]) -> set[tuple[str, int, int]]:
    """Path, size and time of each file that has one of these names, or is in a folder that has."""
    entries = set()
    paths = [folder / name for name in names]
    while paths:
        path = paths.pop()
        if path.is_dir() and not path.is_symlink():
            paths += path.iterdir()
        elif os.path.lexists(path):
            status = path.lstat()
            entries.add(
                (str(path.relative_to(folder)), status.st_size, status.st_mtime_ns)
            )
    return entries


def put(new: Path, path: Path) -> None:
    """Gives a file or folder the name `path`, at once; what had the name is removed."""
    old = new.with_name(f"{new.name}{_OLD}")
    if not os.path.lexists(new):
        if os.path.lexists(path):
            path.rename(old)
    elif not os.path.lexists(path):
        new.rename(path)
    elif _exchanged(new, path):
        new.rename(old)
    else:
        path.rename(old)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise
    _remove(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Swaps what has two names, at once; False where the file system, such as NFS, cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    number = ctypes.get_errno()
    if code and number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(other))
    return not code


def _recover(folder: Path) -> None:
    """Removes what killed processes left; what they had only moved aside gets its name again.

    Raises ValueError: one of them is alive.
    """
    for left in folder.glob(f".*{_UNFINISHED}"):
        try:
            lock(left / _LOCK).close()
        except BlockingIOError:
            raise ValueError(
                f"{folder} is being written by another process: wait, or name another folder"
            ) from None
        except NoLocks:
            continue
        for old in left.glob(f"*{_OLD}"):
            path = folder / old.name.removesuffix(_OLD)
            if not os.path.lexists(path):
                old.rename(path)
        _remove(left)


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush_all(folder: Path) -> None:
    """Waits until all files in a folder are on disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            flush(Path(root, name))
        flush(Path(root))


def copy(path: Path, to: Path) -> None:
    """Copies a file with its permissions, or a folder's content. Links are left out; what becomes
    a link meanwhile is refused."""
    if path.is_dir() and not path.is_symlink():
        to.mkdir()
        with held(path) as inside:
            for name in os.listdir(inside):
                copy(inside / name, to / name)
    elif path.is_file() and not path.is_symlink():
        with opened(path) as old, open(to, "xb") as new:
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            shutil.copyfileobj(old, new)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Yields another path, which leads to this very folder whatever takes its place meanwhile.

    Raises OSError: it is a link, or no folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    path = f"/proc/self/fd/{handle}"
    try:
        yield Path(path)
    except OSError as error:
        if error.filename:
            error.filename = str(error.filename).replace(path, str(folder))
        raise
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Writes the content as JSON; NaN and infinity become null."""
    with written(path) as partial:
        partial.write_text(json.dumps(without_nan(content), indent=1) + "\n")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows as CSV; names of files in them may be any bytes."""
    with (
        written(path) as partial,
        partial.open(
            "w", newline="", encoding="utf-8", errors="surrogateescape"
        ) as file,
    ):
        csv.writer(file).writerows(rows)


def flush(path: Path) -> None:
    """Waits until the file's content, or the folder's list of names, is on disk.

    Some file systems, as vboxsf and CIFS of old kernels, cannot flush a folder, and need not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        is_lacking = error.errno in (errno.EINVAL, errno.ENOTSUP)
        if not (is_lacking and path.is_dir()):
            raise
    finally:
        os.close(handle)


def sha256(path: Path, *, links: bool = True) -> str:
    """The SHA-256 of the whole file, in hex digits."""
    with opened(path, links=links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class NoLocks(OSError):
    """The file system has no locks."""


def lock(path: Path) -> IO[str]:
    """Locks the file, which it makes if needed, until the result is closed or the process ends.

    Raises BlockingIOError: another process has it. NoLocks, OSError: it cannot be locked, or made.
    """
    # Whoever may read the file may lock it, so only its owner may. It is opened to append because
    # NFS locks only what may be written.
    file = opened(path, append=True, mode=0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise
        raise NoLocks(*error.args) from None
    return file


def without_nan(value: Any) -> Any:
    """The same for JSON, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_private(folder: Path, flag: str) -> None:
    """Makes a folder of this user alone, in the one that `flag` names, which may be others' too.

    Raises ValueError where another user could put links or files in place of this one's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    fault = _why_not_safe(folder.parent)
    if fault:
        raise ValueError(f"{flag}={folder.parent} {fault}: name a folder of your own")
    if not is_of_this_user(folder):
        raise ValueError(
            f"{flag}={folder.parent}: {folder} is a link, or of another user: remove it, or name a "
            "folder of your own"
        )
    # Another user who may open a file here may also lock it.
    folder.chmod(0o700)


def is_of_this_user(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that only this user may write in."""
    status = folder.lstat()
    is_writable_by_others = bool(status.st_mode & 0o022)
    is_own = status.st_uid == os.geteuid() and not is_writable_by_others
    return is_own and stat.S_ISDIR(status.st_mode)


def _why_not_safe(folder: Path) -> str:
    """Why others may replace what this user makes in a folder, or ""."""
    user = os.geteuid()
    status = folder.stat()
    # Both owners count: a link has one of its own.
    for owner in (folder.lstat().st_uid, status.st_uid):
        if owner not in (user, 0):
            return f"is of another user (number {owner})"
    others = 0o002 if status.st_uid == user else 0o022
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        return f"may be changed by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return ""
