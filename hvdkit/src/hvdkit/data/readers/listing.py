"""Folders, lists of names, and the files they name; errors say what is missing and where."""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import numpy as np

from hvdkit.data import shared_listing
from hvdkit.words import some

THREADS = 16  # they wait for a file server
# What systems put beside pictures, in small letters; hidden names are passed over anyway.
_SYSTEMS = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "lost+found"}
_SYSTEMS |= {"system volume information"}
_LOOKED_AT = 1_000  # most files of a listing whose sizes are asked for: each asks the server


def check_folder(folder: Path, content: str) -> None:
    """Raises ValueError when the folder is missing or empty; `content` is what it is for."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; put the {content} there")
    with os.scandir(folder) as entries:
        if not any(entries):
            raise ValueError(f"{folder} is empty; put the {content} there")


def read_names(path: Path) -> dict[str, int]:
    """Names of a split in the order of its list, each with the line it stands on.

    Raises ValueError when there is no such list, it lists nothing, or a name twice.
    """
    if not path.is_file():
        there = sorted(found.stem for found in path.parent.glob("*.txt"))
        raise ValueError(
            f"{path} is missing; write the split's names there, one a line, or choose "
            f"another split (there are: {some(there) or 'none'})"
        )
    names: dict[str, int] = {}
    known: dict[str, int] = {}
    for number, name in enumerate(map(str.strip, read_lines(path)), start=1):
        if name:
            check_new(known, name, number, path)
            names[name] = number
    if not names:
        raise ValueError(f"{path} lists no name; write one a line")
    return names


def check_new(known: dict[str, int], name: str, line: int, where: Path) -> None:
    """Adds a name and its line to those `known`; ValueError where it is one, however spelled."""
    first = known.setdefault(os.path.normpath(name), line)
    if first != line:
        raise ValueError(
            f"{where}, line {line}: {name} stands on line {first} already; take one of the two out"
        )


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; ValueError where it is not UTF-8.

    They end with LF or CR LF only: `str.splitlines` knows more ends, which a name may hold.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return text.replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error}); save it as UTF-8, and give files that it names "
            "names in UTF-8"
        ) from None


def find(folder: Path, names: dict[str, int], suffixes: tuple[str, ...]) -> list[str]:
    """Paths relative to the folder's parent, in the order of the names.

    Folders are listed, not files looked up one by one: on a network file system that is one
    answer for thousands of files. Raises ValueError for names with no file, or with two.
    """
    found: dict[str, str] = {}
    for parent in sorted({os.path.dirname(name) for name in names}):
        if not (folder / parent).is_dir():
            continue
        for entry in _entries(folder / parent):
            stem, suffix = os.path.splitext(os.path.join(parent, entry.name))
            if suffix.lower() not in suffixes or stem not in names:
                continue
            _check_file(entry)
            if stem in found:
                raise ValueError(
                    f"{folder}: {found[stem]} and {stem + suffix} have one name; keep one of them"
                )
            found[stem] = stem + suffix
    missing = [name for name in names if name not in found]
    if missing:
        endings = " or ".join(suffixes)
        raise ValueError(
            f"{folder} has no file {endings} for {some(missing)} (the first is on line "
            f"{names[missing[0]]} of the split's list; names there have no ending); add the "
            "files, or take the names out of the list"
        )
    return [f"{folder.name}/{found[name]}" for name in names]


def check_there(root: Path, paths: Sequence[str], lines: Sequence[int], where: Path) -> None:
    """Raises ValueError for paths relative to root that are no file.

    Args:
      lines, where: the line of each path in the list that names them, and that list.
    """
    parents = {os.path.dirname(path) for path in paths}
    there = {p: {e.name: e for e in _entries(root / p)} for p in parents if (root / p).is_dir()}
    for path, line in zip(paths, lines, strict=True):
        parent, name = os.path.split(path)
        entry = there.get(parent, {}).get(name)
        if entry is None:
            raise ValueError(
                f"{where}, line {line}: {root / path} is missing; add the file, or take the line "
                "out"
            )
        _check_file(entry)


def contents(folder: Path, endings: tuple[str, ...]) -> tuple[list[str], list[os.DirEntry]]:
    """Names of the folder's files that end so, in capitals too, and the rest, from one look.

    Both are sorted, without what is hidden or a system's own. Links that end so count as files and
    are not followed. Raises ValueError for a folder that is named as such a file.
    """
    files, rest = [], []
    for entry in _entries(folder):
        if entry.name.startswith("."):
            continue
        if entry.name.lower().endswith(endings):
            _check_file(entry)
            files.append(entry.name)
        elif entry.name.lower() not in _SYSTEMS:
            rest.append(entry)
    return files, rest


def file_names(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """The files of `contents`."""
    return contents(folder, endings)[0]


def folder_names(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, links to folders too; none that is hidden or a
    system's.

    Raises ValueError for a link that leads nowhere: it may be a class that is missing.
    """
    found = []
    for entry in _entries(folder):
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise ValueError(_dead_link(entry.path))
        theirs = entry.name.startswith(".") or entry.name.lower() in _SYSTEMS
        if entry.is_dir() and not theirs:
            found.append(entry.name)
    return found


def sampled(count: int) -> range:
    """Indices spread over 0 .. count - 1, a thousand at most: whose sizes are asked for."""
    return range(0, count, max(1, -(-count // _LOOKED_AT)))


def sizes(key: Hashable, files: Callable[[], Sequence[Path]]) -> np.ndarray:
    """Bytes of some files as rank 0 sees them, int64 [n].

    One rank of each other host compares them with its own disk, which may be a stale copy. Other
    ranks do not look. Raises ValueError for a file that is missing, or has another size.

    Args:
      key: of what the files are, the same on all ranks.
    """

    def compare(expected: np.ndarray) -> None:
        paths = files()
        for path, size, other in zip(paths, _ask(paths), expected, strict=True):
            if size != other:
                raise ValueError(
                    f"{path} has {size} bytes on {os.uname().nodename} and {other} on rank 0's "
                    "host: copy the data to every host again"
                )

    return shared_listing.found(("sizes", key), lambda: _ask(files()), compare)


def _ask(paths: Sequence[Path]) -> np.ndarray:
    with ThreadPoolExecutor(THREADS) as pool:
        return np.fromiter(pool.map(_size, paths), np.int64, len(paths))


def _size(path: Path) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        if os.path.islink(path):
            raise ValueError(_dead_link(path)) from None
        raise ValueError(f"{path}: {error.strerror}, though its folder lists it") from None


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=attrgetter("name"))


def _check_file(entry: os.DirEntry) -> None:
    """What kind of file it is came with the listing: nothing is asked again, no link followed."""
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return
    kind = "a folder" if entry.is_dir(follow_symlinks=False) else "no regular file"
    raise ValueError(f"{entry.path} is {kind}, not a picture; rename it or take it away")


def _dead_link(path: str | Path) -> str:
    return (
        f"{path} is a link to {os.readlink(path)}, where nothing can be reached; mend the link or "
        "remove it"
    )
