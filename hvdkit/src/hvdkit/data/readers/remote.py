"""Packed sets on a server: shards are fetched whole, compared, and kept in a folder of the host.

CACHE/packed-KEY/NAME           a file of a set; KEY: a hash of its URL and its pack.json's checksum
CACHE/packed-KEY/.NAME.partial  the same while it is fetched, with all its bytes from the start on
CACHE/packed-KEY/.NAME.lock     locked by who fetches it

A process that uses a file has it open and locked (flock, shared). Where a new file would exceed the
bound, files that nobody uses are deleted, those not used for the longest time first. Ranks of a
host, and several runs, share the cache.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeGuard

from hvdkit import whole_files
from hvdkit.data.source import Source
from hvdkit.logs import one_line
from hvdkit.ranks.messages import heartbeat
from hvdkit.stop import passes

_PREFIX = "packed-"
# Folders with other names are never touched.
_OF_SETS = re.compile(_PREFIX + "[0-9a-f]{32}")
_CHUNK = 2**23  # bytes of a request
_AHEAD = 2  # threads fetch ahead: while one tries again, the other goes on
_PAUSE = 0.2  # seconds between polls for shards to fetch
_OPEN = 8  # files are open at a time where not all fit: an open file cannot be deleted
_LOCKED = 150  # seconds that a process which fetches a file may make no progress
_WAIT = 60  # seconds that others have to close files where there is no space
_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "https": "aiohttp",
    "http": "aiohttp",
    "file": "",
    "memory": "",
}
_CLIENTS = (
    "aiohttp",
    "aiobotocore",
    "botocore",
    "urllib3",
    "requests",
    "gcsfs",
    "google",
)
File: TypeAlias = BufferedReader | BufferedRandom
_folder = ""
_bound = 100e9


def limit(folder: str, gigabytes: float) -> None:
    """Where files are kept, and how much of them; for all sets that are opened later."""
    global _folder, _bound
    _folder = folder
    _bound = gigabytes * 1e9


def url_of(root: object) -> str:
    """The URL, also one that was made a Path, which takes a slash from it; "" for a folder."""
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9+]+):/(/?)(.+)", str(root))
    if not match or (not match[2] and Path(str(root)).exists()):
        return ""
    return f"{match[1]}://{match[3].rstrip('/')}"


class RemoteSource(Source, Protocol):
    """A packed set on a server: bytes of its index, bytes and samples of each shard."""

    index_bytes: int
    shard_bytes: list[int]
    shard_sizes: list[int]

    def keep_open(self, files: int) -> None: ...

    def fetch_shard(self, shard: int) -> None: ...


def is_remote(source: Source) -> TypeGuard[RemoteSource]:
    return getattr(source, "is_remote", False)


class Server:
    """The files below a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        """Raises ValueError: the protocol is unknown, or its package is missing."""
        self.url = url
        protocol = url.partition(":")[0]
        # Whether access was allowed once: credentials that end in mid-run spoil no sample.
        self.allowed = False
        if protocol not in _PACKAGES:
            raise ValueError(
                f"--data_dir={url}: a URL begins with s3://, gs:// or https://"
            )
        if "@" in url.split("/")[2] or (
            protocol.startswith("http") and set("?@") & set(url)
        ):
            raise ValueError(
                "--data_dir: a URL is kept in files of the run: leave out ? and @"
            )
        try:
            import fsspec

            files = partial(
                fsspec.filesystem,
                protocol,
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            if protocol.startswith("http"):
                import aiohttp

                client = {
                    # By default a file has 5 minutes in all.
                    "timeout": aiohttp.ClientTimeout(
                        total=None, sock_connect=20, sock_read=15
                    ),
                    # A compressed file has no ranges.
                    "headers": {"Accept-Encoding": "identity"},
                    "trust_env": True,
                    "auto_decompress": False,  # it grows what a server sends
                }
                self._files = files(client_kwargs=client)
            else:
                self._files = files()
        except ImportError as error:
            packages = " ".join(["fsspec", _PACKAGES[protocol]]).strip()
            raise ValueError(
                f"{url} is read by fsspec: pip install {packages} ({error})"
            ) from None

    def read(self, name: str, first: int, last: int) -> bytes:
        """Bytes from `first` to before `last`, or to the file's end.

        A server that sends more than it is asked for is cut off after one byte more.

        Raises OSError where the network fails, in words that `stop.passes` knows; ValueError for
        what will not pass.
        """
        url = self.url + "/" + name
        try:
            if url.startswith("http"):
                from fsspec.asyn import sync

                data = sync(self._files.loop, self._part, url, first, last)
            else:
                data = self._files.cat_file(url, start=first, end=last)
            self.allowed = True
            return data
        except FileNotFoundError:
            raise ValueError(
                f"{url} is missing: is that what hvdkit pack wrote, and --data_dir its folder "
                "above the splits?"
            ) from None
        except Exception as error:  # each client has its own errors
            text = one_line(f"{type(error).__name__}: {error}")
            # A redirect's query may be a signature.
            text = re.sub(r"\?[^\s'\"]+", "?...", text)
            refused = (
                isinstance(error, PermissionError)
                or "Credential" in type(error).__name__
            )
            refused |= _status(error) in (401, 403)
            if passes(error) or _of_network(error) or (self.allowed and refused):
                raise OSError(
                    f"{os.strerror(errno.EREMOTEIO)}: {url}: {text}"
                ) from None
            raise ValueError(f"{url} cannot be read: {text}") from None

    async def _part(self, url: str, first: int, last: int) -> bytes:
        """As `read`; fsspec would take all that a server sends before it looks at its length."""
        if first >= last:
            return b""
        session = await self._files.set_session()
        headers = {"Range": f"bytes={first}-{last - 1}"}
        data = bytearray()
        async with session.get(
            self._files.encode_url(url), headers=headers
        ) as response:
            if response.status == 404:
                raise FileNotFoundError(url)
            response.raise_for_status()
            while len(data) <= last - first:
                part = await response.content.read(last - first + 1 - len(data))
                if not part:
                    break
                data += part
        return bytes(data)


def _status(error: Exception) -> Any:
    return getattr(error, "status", None) or getattr(error, "code", None)


def _of_network(error: Exception) -> bool:
    """Whether a server or the way to it failed, not the request."""
    status = _status(error)
    if isinstance(status, int):
        return status >= 500 or status in (408, 429)
    if isinstance(error, PermissionError):
        return False
    if re.search("Credential|InvalidU|Validation|ProfileNot", type(error).__name__):
        return False
    return type(error).__module__.startswith(_CLIENTS) or isinstance(
        error, OSError | EOFError
    )


class Cache:
    """Files of one set on this host's disk, fetched when they are first opened."""

    def __init__(self, server: Server, checksum: str) -> None:
        key = hashlib.sha256(f"{server.url}\0{checksum}".encode()).hexdigest()[:32]
        self.server = server
        self._bound = _bound
        self._all = Path(_folder or "~/.cache/hvdkit").expanduser()
        self._folder = self._all / (_PREFIX + key)
        try:
            self._make_folders()
            with contextlib.suppress(BlockingIOError):  # another process holds the lock
                whole_files.lock(self._all / ".lock").close()
        except whole_files.NoLocks as error:
            raise ValueError(
                f"--cache_dir={self._all}: its file system has no locks (flock: {error.strerror}), "
                "by which ranks share it: name a folder on a disk of this host"
            ) from None
        except PermissionError as error:
            raise ValueError(
                f"--cache_dir={self._all}: {error.strerror}: {error.filename} is another user's? "
                "Each user needs a --cache_dir of their own"
            ) from None
        except OSError as error:
            raise ValueError(f"--cache_dir={self._all}: {error.strerror}") from None
        # By the names of files: what is wrong, which were fetched again, when and why it failed.
        self._damaged: dict[str, str] = {}
        self._again: set[str] = set()
        self._failed: dict[str, tuple[float, str]] = {}

    def _make_folders(self) -> None:
        """Raises ValueError where another user could put links or files in place of this one's."""
        whole_files.make_private(self._folder, "--cache_dir")

    def open(self, name: str, size: int, check: Callable[[File], str]) -> File:
        """A file, which stays on the disk until it is closed; `check`: what is wrong, or "".

        Raises ValueError: the server's file is damaged, twice. OSError: the network, or the disk.
        """
        entered = time.monotonic()
        self._make_folders()  # somebody may have removed them
        with _locked(self._folder / f".{name}.lock"):
            if name in self._damaged:
                raise ValueError(self._damaged[name])
            file = self._cached(name, size)
            if file:
                return file
            # A thread that waited for one which failed would else wait as long again.
            failed_at, reason = self._failed.get(name, (0, ""))
            if failed_at > entered:
                raise OSError(reason)
            try:
                return self._fetched(name, size, check)
            except OSError as error:
                self._failed[name] = (time.monotonic(), str(error))
                raise

    def fetch_again(self, name: str, spoiled: File) -> bool:
        """Deletes a file that the disk spoiled, unless another took its place since it was opened;
        False where one was deleted before."""
        path = self._folder / name
        with (
            _locked(self._folder / f".{name}.lock"),
            contextlib.suppress(FileNotFoundError),
        ):
            if os.path.samestat(os.fstat(spoiled.fileno()), path.stat()):
                if name in self._again:
                    return False
                self._again.add(name)
                path.unlink()
        return True

    def _cached(self, name: str, size: int) -> File | None:
        try:
            file = (self._folder / name).open("rb")
        except FileNotFoundError:
            return None
        _wait_for_lock(file, fcntl.LOCK_SH, self._folder / name)
        status = os.fstat(file.fileno())
        if status.st_nlink and status.st_size == size:
            os.utime(self._folder / name)
            return file
        return None  # it was deleted, or cut, meanwhile

    def _fetched(self, name: str, size: int, check: Callable[[File], str]) -> File:
        """Tries twice, as the network may damage a file too."""
        for _ in range(2):
            file, partial = self._reserved(name, size)
            with contextlib.ExitStack() as undo:
                undo.callback(file.close)
                undo.callback(partial.unlink, missing_ok=True)
                fault = self._copy(name, size, file) or check(file)
                if not fault:
                    os.fsync(file)  # else a power cut may leave zeros under its name
                    partial.rename(self._folder / name)
                    undo.pop_all()
                    return file
        self._damaged[name] = (
            f"{self.server.url}/{name} {fault}; copy it again, or pack again; start again, if "
            "this was done meanwhile"
        )
        raise ValueError(self._damaged[name])

    def _copy(self, name: str, size: int, file: File) -> str:
        """Writes the first `size` bytes of the server's file into `file`, by requests of a chunk.

        Returns what is wrong with an answer, words that follow the file's URL; "" if nothing is.
        Raises OSError: the network fails, or the disk is full.
        """
        for first in range(0, size, _CHUNK):
            length = min(_CHUNK, size - first)
            data = self.server.read(name, first, first + length)
            if len(data) > length:
                return f"sends {len(data)} bytes, not the {length} asked for (it must know Range)"
            if len(data) < length:
                return f"sends {len(data)} bytes, not the {length} asked for"
            # A disk that gets full takes the first part of a write.
            if os.pwrite(file.fileno(), data, first) < length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
            heartbeat.beat()  # a server that is slow is not one that hangs
        return ""

    def _reserved(self, name: str, size: int) -> tuple[File, Path]:
        """An empty file of this size, within the bound."""
        if size > self._bound:
            raise ValueError(
                f"--cache_gb={self._bound / 1e9:g} is less than {name}, {size} bytes"
            )
        partial = self._folder / f".{name}.partial"
        until = time.monotonic() + _WAIT
        while True:
            with _locked(self._all / ".lock"):
                partial.unlink(missing_ok=True)
                if self._free(size):
                    file = partial.open("x+b")
                    _wait_for_lock(file, fcntl.LOCK_SH, partial)
                    try:
                        if size:
                            os.posix_fallocate(file.fileno(), 0, size)
                        return file, partial
                    except OSError:
                        partial.unlink()
                        raise
            if time.monotonic() > until:
                raise OSError(
                    f"{os.strerror(errno.ENOSPC)}: all of --cache_gb={self._bound / 1e9:g} in "
                    f"{self._all}, or of its disk, is in use: raise it"
                )
            heartbeat.beat()
            time.sleep(0.2)

    def _free(self, size: int) -> bool:
        """Deletes what is not in use until so many bytes are free; returns whether they are.

        They must be free within the bound, and on the disk.
        """
        files = []
        for path in self._files_of_sets():
            # A file that was renamed meanwhile is in use.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, status.st_size, path))
        excess = sum(bytes_used for _, bytes_used, _ in files) + size - self._bound
        excess = max(excess, size - shutil.disk_usage(self._all).free)
        for _, bytes_used, path in sorted(files):
            if excess > 0 and bytes_used and _deleted(path):
                excess -= bytes_used
        return excess <= 0

    def _files_of_sets(self) -> Iterator[Path]:
        for folder in self._all.iterdir():
            if _OF_SETS.fullmatch(folder.name):
                # Somebody removed the folder.
                with contextlib.suppress(FileNotFoundError):
                    if whole_files.is_of_this_user(folder):
                        yield from folder.iterdir()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, this process holds the lock. Raises OSError as `_wait_for_lock`."""
    # 0600: another user who may read the file may also lock it.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "ab") as file:
        _wait_for_lock(file, fcntl.LOCK_EX, path)
        yield


def _wait_for_lock(file: BinaryIO, kind: int, path: Path) -> None:
    """Locks an open file; `kind`: fcntl.LOCK_EX or LOCK_SH.

    Raises OSError where the holder of the lock makes no progress for long: it may be suspended.
    """
    since = time.monotonic()
    partial = path.with_suffix(".partial")
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - since
        heartbeat.beat()  # this wait has a limit of its own
        with contextlib.suppress(FileNotFoundError):
            waited = min(waited, time.time() - partial.stat().st_mtime)
        if waited > _LOCKED:
            raise OSError(
                f"{os.strerror(errno.EBUSY)}: who has {path} locked, a process or thread, made no "
                f"progress for {_LOCKED} s"
            )
        time.sleep(min(0.5, (time.monotonic() - since) / 8 + 0.01))


def _deleted(path: Path) -> bool:
    """Deletes a file that nobody has open; returns whether it did."""
    try:
        with path.open("r+b") as file:  # NFS locks only what may be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        return True
    except OSError:
        return False


def check_fits(shuffled: int, train: Source, val: Source) -> None:
    """Raises ValueError where --cache_gb is too small for two remote sets, or their windows.

    `shuffled`: --shuffle_shards. Where the windows fit and the sets do not, each set has few files
    open from then on.
    """
    sources = [source for source in (train, val) if is_remote(source)]
    if (
        sum(sum(source.shard_bytes) + source.index_bytes for source in sources)
        <= _bound
    ):
        return
    if not shuffled:
        raise ValueError(
            f"--cache_gb={_bound / 1e9:g} is less than the remote sets: give --shuffle_shards, "
            "which reads few shards at a time, or raise --cache_gb"
        )
    needed = 0
    for source in sources:
        # Validation reads a few at a time: two end while a third begins.
        shards = 2 * shuffled if source is train else 3
        needed += sum(sorted(source.shard_bytes)[-shards:]) + source.index_bytes
    if needed > _bound:
        raise ValueError(
            f"--cache_gb={_bound / 1e9:g} is less than the remote sets: two windows of "
            f"--shuffle_shards={shuffled} and some shards of validation take "
            f"{needed / 1e9:.3g} GB: lower it, or raise --cache_gb"
        )
    for source in sources:
        source.keep_open(min(_OPEN, shuffled if source is train else 1))


@contextlib.contextmanager
def fetched_ahead(
    source: RemoteSource, coming: Callable[[], Sequence[int]]
) -> Iterator[None]:
    """Inside, threads fetch the shards that `coming()` lists, the first ones first; []: all.

    Listed shards are marked as used each time, so that others are deleted before them.
    """
    ended = threading.Event()

    def fetch(first: int) -> None:
        while not ended.wait(_PAUSE):
            failed = False
            listed = coming()
            shards = listed or range(len(source.shard_sizes))
            for shard in shards[first::_AHEAD]:
                if ended.is_set():
                    return
                try:
                    source.fetch_shard(shard)
                except (ValueError, OSError):  # who reads the shard reports it
                    failed = True
            if failed:
                ended.wait(2)
            elif not listed:
                return  # all are there

    threads = [
        threading.Thread(target=fetch, args=(n,), daemon=True) for n in range(_AHEAD)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        until = time.monotonic() + 5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
