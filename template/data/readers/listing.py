"""Folders, lists of names, and the files they name; errors say what is missing and where."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data import source
from engine.words import some


def check_folder(folder: Path, content: str) -> None:
    """Raises ValueError when the folder is missing or empty; `content` is what it is for."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; put the {content} there")
    if not any(os.scandir(folder)):
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
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    names: dict[str, int] = {}
    for number, name in enumerate(map(str.strip, lines), start=1):
        if name in names:
            raise ValueError(
                f"{path}, line {number}: {name} stands on line {names[name]} already; "
                "take one of the two out"
            )
        if name:
            names[name] = number
    if not names:
        raise ValueError(f"{path} lists no name; write one a line")
    return names


def find(folder: Path, names: dict[str, int], suffixes: tuple[str, ...]) -> list[str]:
    """Paths relative to the folder's parent, in the order of the names.

    Folders are listed, not files looked up one by one: on a network file system that is one
    answer for thousands of files. Raises ValueError for names with no file, or with two.
    """
    found: dict[str, str] = {}
    for parent in sorted({os.path.dirname(name) for name in names}):
        if not (folder / parent).is_dir():
            continue
        for entry in sorted(os.listdir(folder / parent)):
            stem, suffix = os.path.splitext(os.path.join(parent, entry))
            if suffix.lower() not in suffixes or stem not in names:
                continue
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


def fingerprint(root: Path, paths: list[str]) -> str:
    """SHA-256 over names and sizes of files under root, the same on every host.

    It asks for each file's size, so it takes a while on a network file system.
    Raises OSError when a file has gone since the folder was listed.
    """
    with ThreadPoolExecutor(16) as pool:  # waiting for a file server, not computing
        sizes = pool.map(os.path.getsize, [root / path for path in paths])
        return source.digest(zip(paths, sizes, strict=True))
