"""A checkpoint in several files, each written by one rank with its part of the variables.

Every writer puts its file into the folder of the unfinished save, on a disk that all share, and
beside it, once it is flushed, a note with its hash. No collective is called for that: threads
write while the steps go on. Rank 0's thread waits for the notes and makes the checkpoint of them.
The folder's name is of this run and this save alone, so what an earlier attempt left, or still
writes, is never taken for part of this one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit.checkpoint.files import part_names
from hvdkit.checkpoint.writing import Written, install, nothing_left, write_arrays, write_json
from hvdkit.ranks.world import World, hostname, raw
from hvdkit.stop import Stop

Variables = Mapping[str, "keras.Variable | tf.Variable"]

SEEN_WITHIN = 60.0  # seconds in which a network disk shows a file to other hosts
_PROBED_FOR = 10.0  # seconds, where it is only asked whether it does
_BETWEEN_LOOKS = 0.1


class Writers(NamedTuple):
    """The ranks that write, one a part, rank 0 the first; and the host of each."""

    ranks: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ("",)

    @property
    def parts(self) -> int:
        return len(self.ranks)

    def part_of(self, rank: int) -> int | None:
        """From 0; None where the rank writes none."""
        return self.ranks.index(rank) if rank in self.ranks else None


class Heard:
    """What rank 0's main thread knows of the other writers, for its thread that waits for them."""

    failed = ""  # who could not write, and why
    until = math.inf  # when the files of all must be seen, by time.monotonic


def choose(world: World, parts: int) -> Writers:
    """One rank of each host before a second one of any; all ranks where they are fewer."""
    if min(parts, world.size) == 1:
        return Writers()
    places = world.gather_objects((world.local_rank, hostname()), "checkpoint.writers")
    order = sorted(range(world.size), key=lambda rank: (rank != 0, places[rank][0], rank))
    ranks = tuple(order[:parts])
    return Writers(ranks, tuple(places[rank][1] for rank in ranks))


def part(variables: Variables, parts: int, number: int) -> Variables:
    """The variables of part `number`, from 0: whole ones, dealt so that all parts are as large.

    The largest comes first, each to the part that has least: it depends on names and shapes alone.
    Moving statistics are rank 0's, for with --bn_sync=none each rank has others.
    """
    if parts == 1:
        return variables
    sizes = {n: raw(v).shape.num_elements() * raw(v).dtype.size for n, v in variables.items()}
    filled, of = [0] * parts, {}
    for name in sorted(sizes, key=lambda name: (not _is_moving(name), -sizes[name], name)):
        of[name] = 0 if _is_moving(name) else filled.index(min(filled))
        filled[of[name]] += sizes[name]
    return {name: v for name, v in variables.items() if of[name] == number}


def check_shared(world: World, writers: Writers, run_dir: Path) -> None:
    """Raises Stop on all ranks unless all writers see each other's files in the run folder.

    It leaves nothing there; where it raises, no folder either that was not there before.
    """
    if writers.parts == 1:
        return
    made = [f for f in (run_dir, *run_dir.parents) if world.is_chief and not f.exists()]
    try:
        _probe(world, writers, run_dir)
    except Stop:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _probe(world: World, writers: Writers, run_dir: Path) -> None:
    """Rank 0 makes a folder, the other writers put a file each into it, rank 0 looks for these."""
    folder = run_dir / world.broadcast_object(f".shared-{secrets.token_hex(4)}", "parts.probe")
    others, what = writers.ranks[1:], f"writing checkpoints in {writers.parts} parts"
    try:
        with world.fail_together(what):
            if world.is_chief:
                folder.mkdir(parents=True)
        with world.fail_together(what):
            if world.rank in others:
                _look_for(folder, writers, 0)
                (folder / str(world.rank)).touch()
        with world.fail_together(what):
            for number, rank in enumerate(others, 1) if world.is_chief else ():
                _look_for(folder / str(rank), writers, number)
    finally:
        if world.is_chief:
            shutil.rmtree(folder, ignore_errors=True)


def _look_for(path: Path, writers: Writers, number: int) -> None:
    """Raises ValueError where what the writer of this number made is not seen here."""
    end = time.monotonic() + _PROBED_FOR
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > end:
            raise ValueError(
                f"{hostname()} does not see {path}, which {_who(writers, number)} made: give a "
                "--run_dir on a disk that all hosts share, or leave out --checkpoint_parts"
            )
        time.sleep(_BETWEEN_LOOKS)


def unfinished(folder: Path, step: int, save: str) -> Path:
    """The folder that the save of this name is written in."""
    return folder / f".step-{step:08d}.{save}.partial"


def write_part(partial: Path, arrays: Mapping[str, np.ndarray], parts: int, number: int) -> None:
    """Writes part `number` into the folder of the save, then the note that it is there.

    Raises:
      OSError, ValueError: it cannot be written; nothing is left of it.
    """
    partial.mkdir(parents=True, exist_ok=True)
    file = partial / part_names(parts)[number]
    try:
        write_json(_note(file), write_arrays(file, arrays)._asdict())
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise


def write_all(
    partial: Path,
    arrays: Mapping[str, np.ndarray],
    writers: Writers,
    heard: Heard,
    about: tuple[Any, ...],
) -> Path:
    """Writes rank 0's part, waits for the others', and makes the checkpoint of them all.

    Args:
      about: what checkpoint_writing.install says of it.
    Raises:
      OSError, ValueError: a part was not written, or is not seen here; nothing is left of it.
    """
    _clear(partial.parent, but=partial)
    with nothing_left(partial):
        write_part(partial, arrays, writers.parts, 0)
        return install(partial, _all_written(partial, writers, heard), *about)


def _all_written(partial: Path, writers: Writers, heard: Heard) -> list[Written]:
    """Waits for the notes of all parts, and removes them."""
    found: dict[str, Written] = {}
    names = part_names(writers.parts)
    while True:
        # Listed, not asked for by name: a network disk may remember that there was no such file.
        there = set(os.listdir(partial))
        for file in names:
            if file not in found and file in there and _note(partial / file).name in there:
                told = Written(**json.loads(_note(partial / file).read_text()))
                if (partial / file).stat().st_size == told.size:
                    found[file] = told
        missing = [n for n, file in enumerate(names) if file not in found]
        if not missing:
            break
        if heard.failed:
            raise ValueError(heard.failed)
        if time.monotonic() > heard.until:
            raise ValueError(
                f"{hostname()} does not see {partial / names[missing[0]]}, which "
                f"{_who(writers, missing[0])} wrote: is --run_dir still on a disk that all share?"
            )
        time.sleep(_BETWEEN_LOOKS)
    for file in names:
        _note(partial / file).unlink()
    return [found[file] for file in names]


def _clear(folder: Path, but: Path) -> None:
    """Removes what earlier saves in parts left unfinished, so that there is room for the next."""
    for path in folder.glob(".step-*.*.partial"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _is_moving(name: str) -> bool:
    return name.endswith(("/moving_mean", "/moving_variance"))


def _note(file: Path) -> Path:
    return file.with_suffix(".json")


def _who(writers: Writers, number: int) -> str:
    return f"rank {writers.ranks[number]} on {writers.hosts[number]}"
