"""Packed sets on a server: shards are fetched whole, compared, and kept in a folder of the host.

CACHE/packed-KEY/NAME           a file of a set; KEY: of its URL and the checksum in its pack.json
CACHE/packed-KEY/.NAME.partial  the same while it is fetched, with all its bytes from the start on
CACHE/packed-KEY/.NAME.lock     locked by who fetches it

Who uses a file has it open and locked (flock, shared). Of the others those not used for the longest
time go where the bound would be exceeded. Ranks of a host, and several runs, share the cache.
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
from pathlib import Path
from typing import Any, BinaryIO

from hvdkit import whole_files
from hvdkit.data.source import Source
from hvdkit.ranks.messages import heartbeat
from hvdkit.stop import passes

_PREFIX = "packed-"
_OF_SETS = re.compile(_PREFIX + "[0-9a-f]{32}")  # other folders beside these are never touched
_CHUNK = 2**23  # bytes of a request
_AHEAD = 2  # threads that fetch ahead: one may be trying again
_PAUSE = 0.2  # seconds between their looks
_OPEN = 8  # files at a time where not all fit: what is open cannot go
_LOCKED = 150  # seconds, at most, for another who fetches a file and makes no progress
_WAIT = 60  # seconds, at most, for others to close files where there is no space
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}
_PACKAGES |= {"file": "", "memory": ""}
_CLIENTS = ("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "gcsfs", "google")
_folder, _bound = "", 100e9


def limit(folder: str, gigabytes: float) -> None:
    """Where files are kept, and how much of them; for all sets that are opened later."""
    global _folder, _bound
    _folder, _bound = folder, gigabytes * 1e9


def url_of(root: object) -> str:
    """The URL, also one that was made a Path, which takes a slash from it; "" for a folder."""
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9+]+):/(/?)(.+)", str(root))
    if not found or (not found[2] and Path(root).exists()):
        return ""
    return f"{found[1]}://{found[3].rstrip('/')}"


class Server:
    """The files below a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        """Raises ValueError: the protocol is unknown, or its package is missing."""
        self.url, protocol = url, url.partition(":")[0]
        self.allowed = False  # once: credentials that end in mid-run spoil no sample
        if protocol not in _PACKAGES:
            raise ValueError(f"--data_dir={url}: a URL begins with s3://, gs:// or https://")
        if "@" in url.split("/")[2] or (protocol.startswith("http") and set("?@") & set(url)):
            raise ValueError("--data_dir: a URL is kept in files of the run: leave out ? and @")
        try:
            import fsspec

            how: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
            if protocol in ("http", "https"):
                import aiohttp  # its limit of 5 minutes a file would hold for large ones too

                timeout = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=15)
                headers = {"Accept-Encoding": "identity"}  # what is packed anew has no ranges
                how["client_kwargs"] = {
                    "timeout": timeout,
                    "headers": headers,
                    "trust_env": True,
                    "auto_decompress": False,  # it grows what a server sends
                }
            self._files = fsspec.filesystem(protocol, **how)
        except ImportError as error:
            needs = f"fsspec {_PACKAGES[protocol]}".strip()
            raise ValueError(f"{url} is read by fsspec: pip install {needs} ({error})") from None

    def read(self, name: str, first: int, last: int) -> bytes:
        """Bytes from `first` to before `last`, or to the file's end.

        A server that sends more than it is asked for is cut off after one byte more.

        Raises OSError where the network fails, in words that `stop.passes` knows; ValueError for
        what will not pass.
        """
        where = f"{self.url}/{name}"
        try:
            if where.startswith("http"):
                from fsspec.asyn import sync

                data = sync(self._files.loop, self._part, where, first, last)
            else:
                data = self._files.cat_file(where, start=first, end=last)
            self.allowed = True
            return data
        except FileNotFoundError:
            asks = "is that what hvdkit pack wrote, and --data_dir its folder above the splits?"
            raise ValueError(f"{where} is missing: {asks}") from None
        except Exception as error:  # each client has its own
            text = " ".join(f"{type(error).__name__}: {error}".split())
            text = re.sub(r"\?[^\s'\"]+", "?...", text)  # a redirect's may be a signature
            refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
            refused |= _status(error) in (401, 403)
            if passes(error) or _of_network(error) or (self.allowed and refused):
                raise OSError(f"{os.strerror(errno.EREMOTEIO)}: {where}: {text}") from None
            raise ValueError(f"{where} cannot be read: {text}") from None

    async def _part(self, where: str, first: int, last: int) -> bytes:
        """As `read`; fsspec would take all that a server sends before it looks at its length."""
        if first >= last:
            return b""
        session = await self._files.set_session()
        headers = {"Range": f"bytes={first}-{last - 1}"}
        data = bytearray()
        async with session.get(self._files.encode_url(where), headers=headers) as response:
            if response.status == 404:
                raise FileNotFoundError(where)
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
    if isinstance(status := _status(error), int):
        return status >= 500 or status in (408, 429)
    wrong = re.search("Credential|InvalidU|Validation|ProfileNot", type(error).__name__)
    refused = isinstance(error, PermissionError) or wrong
    ours = type(error).__module__.startswith(_CLIENTS) or isinstance(error, OSError | EOFError)
    return ours and not refused


class Cache:
    """Files of one set on this host's disk, fetched when they are first opened."""

    def __init__(self, server: Server, checksum: str) -> None:
        key = hashlib.sha256(f"{server.url}\0{checksum}".encode()).hexdigest()[:32]
        self._server, self._bound = server, _bound
        self._all = Path(_folder or "~/.cache/hvdkit").expanduser()
        self._own = self._all / f"{_PREFIX}{key}"
        try:
            self._make_folders()
            with contextlib.suppress(BlockingIOError):  # another has it
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
        self._damaged: dict[str, str] = {}  # what is wrong with a file, by name
        self._again: set[str] = set()
        self._failed: dict[str, tuple[float, str]] = {}  # when, and why, by name

    def _make_folders(self) -> None:
        """Raises ValueError where another user could put links or files in place of this one's."""
        self._all.mkdir(parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        why = _why_not_safe(self._all)
        if why:
            raise ValueError(f"--cache_dir={self._all} {why}: name a folder of your own")
        if not _is_of_this_user(self._own):
            raise ValueError(
                f"--cache_dir={self._all}: {self._own} is a link, or of another user: remove it, "
                "or name a folder of your own"
            )
        # Another user who may open a file here may also lock it.
        self._own.chmod(0o700)

    def open(self, name: str, size: int, check: Callable[[BinaryIO], str]) -> BinaryIO:
        """A file, which stays on the disk until it is closed; `check`: what is wrong, or "".

        Raises ValueError: the server's file is damaged, twice. OSError: the network, or the disk.
        """
        asked = time.monotonic()
        self._make_folders()  # anew, if somebody cleaned up
        with _locked(self._own / f".{name}.lock"):
            if name in self._damaged:
                raise ValueError(self._damaged[name])
            if file := self._there(name, size):
                return file
            failed, why = self._failed.get(name, (0, ""))
            if failed > asked:  # else each that waits here would wait as long again
                raise OSError(why)
            try:
                return self._fetched(name, size, check)
            except OSError as error:
                self._failed[name] = time.monotonic(), str(error)
                raise

    def fetch_again(self, name: str, spoiled: BinaryIO) -> bool:
        """Deletes a file that the disk spoiled, unless another took its place since it was opened;
        False where one was deleted before."""
        path = self._own / name
        with _locked(self._own / f".{name}.lock"), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(spoiled.fileno()), path.stat()):
                if name in self._again:
                    return False
                self._again.add(name)
                path.unlink()
        return True

    def _there(self, name: str, size: int) -> BinaryIO | None:
        try:
            file = (self._own / name).open("rb")
        except FileNotFoundError:
            return None
        _wait_for_lock(file, fcntl.LOCK_SH, self._own / name)
        about = os.fstat(file.fileno())
        if about.st_nlink and about.st_size == size:
            os.utime(self._own / name)
            return file
        return None  # deleted, or cut, meanwhile

    def _fetched(self, name: str, size: int, check: Callable[[BinaryIO], str]) -> BinaryIO:
        for _ in range(2):
            file, partial = self._reserved(name, size)
            try:
                for first in range(0, size, _CHUNK):
                    last = min(first + _CHUNK, size)
                    data = self._server.read(name, first, last)
                    if len(data) != last - first:
                        fault = f"sends {len(data)} bytes, not the {last - first} asked for"
                        fault += " (it must know Range)" * (len(data) > last - first)
                        break
                    if os.pwrite(file.fileno(), data, first) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
                    heartbeat.beat()  # a server that is slow is not one that hangs
                else:
                    if not (fault := check(file)):
                        os.fsync(file)  # else a power cut may leave zeros under its name
                        partial.rename(self._own / name)
                        return file
            except BaseException:
                partial.unlink(missing_ok=True)
                file.close()
                raise
            partial.unlink(missing_ok=True)
            file.close()
        again = "copy it again, or pack again; start again, if this was done meanwhile"
        self._damaged[name] = f"{self._server.url}/{name} {fault}; {again}"
        raise ValueError(self._damaged[name])

    def _reserved(self, name: str, size: int) -> tuple[BinaryIO, Path]:
        """An empty file of this size, within the bound."""
        if size > self._bound:
            raise ValueError(f"--cache_gb={self._bound / 1e9:g} is less than {name}, {size} bytes")
        partial, until = self._own / f".{name}.partial", time.monotonic() + _WAIT
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
                full = f"{os.strerror(errno.ENOSPC)}: all of --cache_gb={self._bound / 1e9:g} in "
                raise OSError(f"{full}{self._all}, or of its disk, is in use: raise it")
            heartbeat.beat()
            time.sleep(0.2)

    def _free(self, size: int) -> bool:
        """Deletes what is not in use until so many bytes are free, on the disk too; whether they
        are."""
        found = []
        for path in self._files_of_sets():
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile: it is in use
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime, about.st_size, path))
        excess = sum(each for _, each, _ in found) + size - self._bound
        excess = max(excess, size - shutil.disk_usage(self._all).free)
        for _, each, path in sorted(found):
            if excess > 0 and each and _deleted(path):
                excess -= each
        return excess <= 0

    def _files_of_sets(self) -> Iterator[Path]:
        for folder in self._all.iterdir():
            if _OF_SETS.fullmatch(folder.name):
                with contextlib.suppress(FileNotFoundError):  # somebody cleaned up
                    if _is_of_this_user(folder):
                        yield from folder.iterdir()


def _is_of_this_user(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that only this user may write in."""
    about = folder.lstat()
    is_own = about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return is_own and stat.S_ISDIR(about.st_mode)


def _why_not_safe(folder: Path) -> str:
    """Why others may replace what this user makes in a folder, or ""."""
    own = os.geteuid()
    for about in (folder.lstat(), folder.stat()):  # of a link to it too
        if about.st_uid not in (own, 0):
            return f"is of another user (number {about.st_uid})"
    others = 0o002 if about.st_uid == own else 0o022
    if about.st_mode & others and not about.st_mode & stat.S_ISVTX:
        return f"may be changed by other users (mode {stat.S_IMODE(about.st_mode):o})"
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError where who has it makes no progress for long, as a suspended process."""
    # 0600: another user who may read the file may also lock it.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "ab") as file:
        _wait_for_lock(file, fcntl.LOCK_EX, path)
        yield


def _wait_for_lock(file: BinaryIO, kind: int, path: Path) -> None:
    """Locks an open file; `kind`: fcntl.LOCK_EX or LOCK_SH.

    Raises OSError where who has it makes no progress for long, as a suspended process.
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
    """Deletes a file that nobody has open; whether it did."""
    try:
        with path.open("r+b") as file:  # NFS locks only what may be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        return True
    except OSError:
        return False


def check_fits(shuffled: int, train: Source, val: Source) -> None:
    """Raises ValueError where --cache_gb is too small for two remote sets, or their windows.

    `shuffled`: --shuffle_shards. Else, where not all fit, each has few files open from then on.
    """
    sources = [source for source in (train, val) if getattr(source, "is_remote", False)]
    if sum(sum(source.shard_bytes) + source.index_bytes for source in sources) <= _bound:
        return
    at_once = {id(train): 2 * shuffled}  # of validation the ends of two shards may be read at once
    needed = sum(
        sum(sorted(source.shard_bytes)[-at_once.get(id(source), 3) :]) + source.index_bytes
        for source in sources
    )
    if not shuffled or needed > _bound:
        why = "give --shuffle_shards, which reads few shards at a time, or raise --cache_gb"
        if shuffled:
            why = f"two windows of --shuffle_shards={shuffled} and some shards of validation take "
            why += f"{needed / 1e9:.3g} GB: lower it, or raise --cache_gb"
        raise ValueError(f"--cache_gb={_bound / 1e9:g} is less than the remote sets: {why}")
    for source in sources:
        source.keep_open(min(_OPEN, shuffled if source is train else 1))


@contextlib.contextmanager
def fetched_ahead(source: Source, coming: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Inside, threads fetch the shards that `coming()` lists, the first ones first; []: all.

    Listed shards are used anew time and again, so that others go before them.
    """
    ended = threading.Event()

    def fetch(first: int) -> None:
        while not ended.wait(_PAUSE):
            listed, failed = coming(), False
            for shard in (listed or range(len(source.shard_sizes)))[first::_AHEAD]:
                if ended.is_set():
                    return
                try:
                    source.fetch_shard(shard)
                except (ValueError, OSError):  # who reads it tells; this tries again
                    failed = True
            if not listed and not failed:
                return  # all are there
            ended.wait(2 * failed)

    threads = [threading.Thread(target=fetch, args=(n,), daemon=True) for n in range(_AHEAD)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        until = time.monotonic() + 5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
