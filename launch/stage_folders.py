"""What is in the two folders of a staging, and what of it forbids to copy; stage.py copies."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

WORK = ".staging"  # in the target: what is being copied
# What systems put into a folder by themselves, in small letters: no part of a set.
_SYSTEMS = {"lost+found", "system volume information", "thumbs.db", "desktop.ini", ".ds_store"}
_SYSTEMS |= {"__macosx", "@eadir", ".snapshot"}
_SYSTEMS_BEGIN = (".nfs", ".fuse_hidden", ".trash", "._")


class Listing(NamedTuple):
    """All that is below a folder; names are relative to it."""

    files: dict[str, tuple[int, int]]  # of each: bytes, time of change in nanoseconds
    folders: dict[str, tuple[int, int]]  # of each: device, inode; itself is "", parents come first


def listing(folder: Path, target: Path | None = None) -> Listing:
    """Every file and folder below `folder`, links followed, but what systems put there.

    Raises:
      OSError: a folder or file cannot be looked at.
      ValueError: a link leads nowhere, back to a folder that it is in, or to `target`; something
        is neither file nor folder; or `folder` is the target of a staging that did not end.
    """
    own = _identity(os.stat(folder))
    found = Listing({}, {"": own})
    copy = _identity(os.stat(target)) if target else None
    wrong: list[str] = []
    waiting = [("", (own,))]  # folders, with those that they are in
    while waiting:
        inside, above = waiting.pop()
        for entry in sorted(os.scandir(folder / inside), key=lambda entry: entry.name):
            name = f"{inside}{entry.name}"
            if _is_a_systems(entry.name):  # a disk's lost+found cannot even be listed
                continue
            try:
                about = entry.stat()
            except OSError:
                if not entry.is_symlink():
                    raise
                wrong.append(f"{name} is a link to {os.readlink(entry.path)}, which is not there")
                continue
            if stat.S_ISREG(about.st_mode):
                found.files[name] = (about.st_size, about.st_mtime_ns)
            elif not stat.S_ISDIR(about.st_mode):
                wrong.append(f"{name} is neither a file nor a folder")
            elif _identity(about) in above:
                wrong.append(f"{name} leads back to a folder that it is in: a loop of links")
            elif _identity(about) == copy:
                wrong.append(f"{name} leads to {target}, the place of the copy")
            elif name == WORK:
                wrong.append(f"{name} is there: a staging into this folder runs or was cut off")
            else:
                found.folders[name] = _identity(about)
                waiting.append((f"{name}/", (*above, _identity(about))))
    if wrong:
        more = f" (and {len(wrong) - 3} more like it)" if len(wrong) > 3 else ""
        raise ValueError(f"{folder}: {'; '.join(wrong[:3])}{more}; mend or remove that first")
    return found


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def check_places(source: Path, target: Path) -> None:
    """Raises ValueError where one of the two lies in the other.

    By what the folders are, not by their names: a disk may be mounted at two places.
    """
    if not stat.S_ISDIR(os.stat(source).st_mode):
        raise ValueError(f"{source} is not a folder; give the one that holds the data")
    for inner, outer in ((source, target), (target, source)):
        for parent in (inner, *inner.parents):
            if outer.exists() and parent.exists() and parent.samefile(outer):
                what = "is" if parent == inner else "lies in"
                raise ValueError(f"{inner} {what} {outer}: stage into a folder beside the source")


def check_ways(source: Path, target: Path, wanted: Listing) -> None:
    """Raises ValueError where a file below `target` would be written somewhere else."""
    of_source = set(wanted.folders.values())
    for name in (WORK, *filter(None, wanted.folders)):
        path = target / name
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(about.st_mode):
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}: what is copied would be written there; "
                "remove the link"
            )
        if not stat.S_ISDIR(about.st_mode):
            raise ValueError(f"{path} is no folder, and has to be one: remove it")
        if _identity(about) in of_source:
            raise ValueError(f"{path} leads into {source}: it is no copy, remove it")


def check_leftovers(source: Path, target: Path, wanted: Listing) -> None:
    """Raises ValueError where `target` holds what the source does not: it is another set then.

    Only names are asked for.
    """
    left, waiting = [], [""]
    while waiting:
        inside = waiting.pop()
        for entry in os.scandir(target / inside):
            name = f"{inside}{entry.name}"
            is_folder = entry.is_dir(follow_symlinks=False)
            if name == WORK or _is_a_systems(entry.name):
                continue
            if name not in wanted.files and name not in wanted.folders:
                left.append(name)
            if is_folder:
                waiting.append(f"{name}/")
    if left:
        raise ValueError(
            f"{target} holds {len(left):,} files and folders that {source} does not (the first: "
            f"{min(left)}): with them it is another set; remove them, or stage into an empty folder"
        )


def _is_a_systems(name: str) -> bool:
    return name.lower() in _SYSTEMS or name.lower().startswith(_SYSTEMS_BEGIN)
