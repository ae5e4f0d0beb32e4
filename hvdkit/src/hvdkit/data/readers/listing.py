"""Lists folders and finds the files of a split; errors say what is missing and where."""

import contextlib
import hashlib
import itertools
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.data import shared_listing
from hvdkit.data.spelling import composed
from hvdkit.logs import join

_LIST_BYTES = 2**30  # the largest list of a split that is read
THREADS = 16  # they wait for a file server
_NO_INODES = (0, 2**32 - 1)  # FUSE lists these where it does not know a file's inode
# What operating systems and file servers put beside pictures, in lower case.
_SYSTEMS = {
    "thumbs.db", "ehthumbs.db", "desktop.ini", "system volume information", "lost+found",
    "$recycle.bin", "recycler", "recycled", "__macosx", "network trash folder", "temporary items",
    "@eadir", "@tmp", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "~snapshot",
}  # fmt: skip


def is_of_system(name: str) -> bool:
    """Whether a file or folder is hidden, or one that is no part of a data set."""
    return name.startswith(".") or name.lower() in _SYSTEMS


def read_names(path: Path) -> dict[str, int]:
    """Names of a split in the order of its list, each with its line number.

    Raises ValueError when there is no such list, it is not UTF-8, lists nothing, or a name twice.
    """
    if not path.is_file():
        splits = sorted(file.stem for file in path.parent.glob("*.txt"))
        raise ValueError(
            f"{path} is missing: give the folder that holds it, write the split's names there, one "
            f"a line, or choose another split (there are: {join(splits) or 'none'})"
        )
    try:
        text = whole_files.read(path, _LIST_BYTES, links=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error}); save it as UTF-8, and give files that it names "
            "names in UTF-8"
        ) from None
    names: dict[str, int] = {}
    line_of: dict[str, int] = {}
    # str.splitlines would split at characters that a name may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if name := line.strip():
            first = line_of.setdefault(composed(os.path.normpath(name)), number)
            if first != number:
                raise ValueError(
                    f"{path}, line {number}: {name} is on line {first} already"
                )
            if ".." in name.split("/"):
                raise ValueError(
                    f"{path}, line {number}: {name!r} leads out of the data set"
                )
            names[name] = number
    if not names:
        raise ValueError(f"{path} lists no name; write one a line")
    return names


def find(folder: Path, names: dict[str, int], suffixes: tuple[str, ...]) -> list[str]:
    """Paths relative to the folder's parent, in the order of the names.

    Lists folders instead of looking up files one by one: on a network file system that is one
    request for thousands of files. Raises ValueError for names with no file, or with two.
    """
    paths: dict[str, str] = {}
    listed_name = {composed(name): name for name in names}
    for parent in sorted({os.path.dirname(name) for name in names}):
        if not (folder / parent).is_dir():
            continue
        for entry in _all_entries(folder / parent):
            path = os.path.join(parent, entry.name)
            stem, suffix = os.path.splitext(path)
            name = listed_name.get(composed(stem))
            if suffix.lower() not in suffixes or name is None:
                continue
            _check_file(entry)
            if name in paths:
                raise ValueError(
                    f"{folder}: {paths[name]} and {path} have one name; remove one of them"
                )
            paths[name] = path
    missing = [name for name in names if name not in paths]
    if missing:
        raise ValueError(
            f"{folder} has no file {' or '.join(suffixes)} for {join(missing)} (the first is on "
            f"line {names[missing[0]]} of the split's list; names there have no ending); add the "
            "files, or remove the names from the list"
        )
    return [f"{folder.name}/{paths[name]}" for name in names]


def entries(folder: Path) -> list[os.DirEntry]:
    """What the folder itself holds, sorted by name, without hidden and system files."""
    return [entry for entry in _all_entries(folder) if not is_of_system(entry.name)]


def names_and_rest(
    folder: Path, endings: tuple[str, ...]
) -> tuple[list[str], list[os.DirEntry]]:
    """Of `entries`, the names of files with one of these endings, in any case, and the rest.

    Links with such an ending count as files and are not followed. Raises ValueError for a folder
    with such an ending.
    """
    names = []
    rest = []
    for entry in entries(folder):
        if entry.name.lower().endswith(endings):
            _check_file(entry)
            names.append(entry.name)
        else:
            rest.append(entry)
    return names, rest


def files(folder: Path) -> Iterator[Path]:
    """All files of a folder and of those below, without links to folders."""
    for entry in entries(folder):
        if not entry.is_dir():
            yield Path(entry.path)
        elif not entry.is_symlink():
            yield from files(Path(entry.path))


def folder_names(folder: Path) -> list[str]:
    """Names of folders in it, sorted, and of links to folders, without hidden and system ones.

    Raises ValueError for a dead link: it may be a missing class.
    """
    names = []
    for entry in entries(folder):
        check_link(entry)
        if entry.is_dir():
            names.append(entry.name)
    return names


def check_link(entry: os.DirEntry) -> None:
    """Raises ValueError for a link that leads nowhere."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise ValueError(f"{entry.path} is a link that leads nowhere; fix or remove it")


def sizes(key: Hashable, files: Callable[[], Sequence[Path]]) -> np.ndarray:
    """Sizes of some files as rank 0 sees them, in bytes, int64 [n].

    One rank of each other host compares them with its own disk, which may be a stale copy. Other
    ranks do not look. Raises ValueError for a file that is missing, or has another size.

    `key`: names the lookup, the same on all ranks.
    """

    def compare(expected: np.ndarray) -> None:
        paths = files()
        for path, size, other in zip(paths, _sizes(paths), expected, strict=True):
            if size != other:
                raise ValueError(
                    f"{path} has {size} bytes on {os.uname().nodename} and {other} on rank 0's "
                    "host: copy the data to every host again"
                )

    return shared_listing.found(("sizes", key), lambda: _sizes(files()), compare)


def check_once(paths: Iterable[bytes]) -> None:
    """Raises ValueError, naming both, where two paths lead to one file, or are spelled alike.

    Folders are listed, and only links are asked for one by one. A path that comes again counts
    once; a dead link is reported where it is read.
    """
    names_in: dict[bytes, dict[bytes, None]] = defaultdict(dict)
    for path in paths:
        folder, _, name = path.rpartition(b"/")
        names_in[folder][name] = None
    first: dict[object, bytes] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        all_identities = pool.map(_identities, names_in, names_in.values())
        for (folder, names), identities in zip(names_in.items(), all_identities):
            for name, identity in zip(names, identities):
                path = folder + b"/" + name
                other = first.setdefault(identity, path)
                if other != path and os.path.samefile(path, other):
                    _refuse_two(path, other)
                if not name.isascii():
                    other = first.setdefault(composed(os.fsdecode(path)), path)
                    if other != path:
                        _refuse_two(path, other)


def _refuse_two(path: bytes, other: bytes) -> None:
    raise ValueError(
        f"{os.fsdecode(other)} and {os.fsdecode(path)} are one picture under two names: remove one"
    )


def _identities(folder: bytes, names: Iterable[bytes]) -> list[object]:
    """Of each file device and inode as one number; its path where they are not known."""
    device = os.stat(folder).st_dev
    with os.scandir(folder) as scanned:
        entry_of = {entry.name: entry for entry in scanned}
    identities: list[object] = []
    for name in names:
        path = folder + b"/" + name
        entry = entry_of.get(name)
        identity: object = path
        if entry and not entry.is_symlink():
            if entry.inode() not in _NO_INODES:
                identity = (device << 64) + entry.inode()
        else:
            with contextlib.suppress(OSError):  # a dead link
                target = os.stat(path)
                identity = (target.st_dev << 64) + target.st_ino
        identities.append(identity)
    return identities


def unreadable(paths: Sequence[Path], most: int) -> dict[int, str]:
    """What is wrong with files that are not to be read, by their place in `paths`.

    They are missing, are no regular files, or have more bytes than `most`.
    """

    def fault_of(path: Path) -> str:
        try:
            size = _size(path)
        except ValueError as error:
            return str(error)
        return (
            f"{path} has {size:,} bytes, more than {most:,}; remove it"
            if size > most
            else ""
        )

    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(fault_of, paths)
        return {place: fault for place, fault in enumerate(faults) if fault}


def _sizes(paths: Sequence[Path]) -> np.ndarray:
    with ThreadPoolExecutor(THREADS) as pool:
        return np.fromiter(pool.map(_size, paths), np.int64, len(paths))


def _size(path: Path) -> int:
    """In bytes; ValueError where a link leads nowhere, or to what has no end, as a device."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}, though its folder lists it"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} leads to what is no regular file; remove it")
    return status.st_size


def _all_entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as scanned:
        return sorted(scanned, key=attrgetter("name"))


def _check_file(entry: os.DirEntry) -> None:
    """Uses the file type from the listing: no further request, no link followed."""
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return
    raise ValueError(
        f"{entry.path} is a folder or no regular file; rename or remove it"
    )


_NARROW = 2**32  # 32-bit places reach so many bytes of text
# The bytes of all names, uint8, and the length of each name, uint16.
Packed = tuple[np.ndarray, np.ndarray]


class Names:
    """File names or paths, in order; any bytes that a file system accepts.

    A name takes its bytes and 4 more (8 from 4 GiB of text on), in TensorFlow's memory, where both
    graphs and Python read them. In a list of Python strings it takes about 100 bytes more.
    """

    def __init__(self, text: np.ndarray, lengths: np.ndarray):
        """Of names that are `packed`: ranks send each other those."""
        starts = np.zeros(
            len(lengths) + 1, np.uint32 if len(text) < _NARROW else np.int64
        )
        np.cumsum(lengths, dtype=starts.dtype, out=starts[1:])
        with tf.device("CPU:0"):  # files are read there
            self._text = tf.constant(text.tobytes())
            self._starts = tf.constant(starts)

    def __len__(self) -> int:
        return int(self._starts.shape[0]) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.at(tf.constant(index, tf.int64)).numpy())

    def pick(self, indices: Iterable[int]) -> list[str]:
        """Many names at once, which is faster than one by one."""
        text = self._text.numpy()
        starts = self._starts.numpy()
        return [os.fsdecode(text[starts[i] : starts[i + 1]]) for i in indices]

    def at(self, index: tf.Tensor) -> tf.Tensor:
        """`names[index]` in a graph: string scalar from int64 scalar; only this name is copied."""
        places = tf.gather(self._starts, tf.stack([index, index + 1]))
        start, end = tf.unstack(tf.cast(places, tf.int64))
        return tf.strings.substr(self._text, start, end - start)

    def __iter__(self) -> Iterator[bytes]:
        text = self._text.numpy()
        starts = self._starts.numpy().tolist()
        return (text[start:end] for start, end in itertools.pairwise(starts))

    def digest(self) -> str:
        """SHA-256 (64 hex digits) over the names in order."""
        sha = hashlib.sha256(self._text.numpy())
        sha.update(self._starts.numpy().tobytes())
        return sha.hexdigest()


def packed(names: Iterable[str]) -> Packed:
    """The names' bytes as in the file system, concatenated, and the length of each."""
    as_bytes = [os.fsencode(name) for name in names]
    lengths = np.array([len(name) for name in as_bytes], np.uint16)
    return np.frombuffer(b"".join(as_bytes), np.uint8), lengths


def unpacked(names: Packed) -> list[str]:
    """The names that are `packed`."""
    text, lengths = names
    ends = np.cumsum(lengths, dtype=np.int64)
    return [
        os.fsdecode(text[end - size : end].tobytes())
        for end, size in zip(ends, lengths)
    ]
