"""What it costs to list a folder of classes on two ranks, with as many made-up names as are told.

    python benchmarks/listing.py [--names=1300000,20000000] [--project=template]

The 1,000 class folders are real and empty; what the system would list of them is made up (20
characters a name, as ImageNet's), and files have no size to be asked for. So it shows what the
project does with the names, not what a disk or a file server takes. Prints seconds until all ranks
have the set open, and by how much a rank's memory grew: held, and at most on the way.
Another checkout's folder as --project shows what that takes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="1300000,20000000", help="with commas between them")
    parser.add_argument("--project", type=Path, default=ROOT / "template")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # a rank's own call
    args = parser.parse_args()
    sys.path[:0] = [str(args.project.resolve()), str(ROOT / "template" / "tests")]
    if args.rank:
        return measure(args.rank, int(args.names))
    print("| names | rank | seconds | MB held | MB at most |\n| --- | --- | --- | --- | --- |")
    for count in map(int, args.names.split(",")):
        for rank, (seconds, held, most) in enumerate(on_two_ranks(count, args.project.resolve())):
            print(f"| {count:,} | {rank} | {seconds:.1f} | {held:.0f} | {most:.0f} |", flush=True)


def on_two_ranks(count: int, project: Path) -> list[list[float]]:
    from ranks import last_lines, launch

    with tempfile.TemporaryDirectory() as folder:
        for number in range(CLASSES):
            Path(folder, "train", f"n{number:08d}").mkdir(parents=True)
        flags = [f"--names={count}", f"--project={project}", f"--rank={folder}"]
        ended = launch(2, [__file__, *flags], "mpirun", timeout=3600)
    found = re.findall(r"measured (\d) (\[.*?\])", ended.output)
    if ended.code or len(found) != 2:
        raise SystemExit(last_lines(ended.output))
    return [json.loads(figures) for _, figures in sorted(found)]


def measure(root: Path, count: int) -> None:
    """On each rank: opens the set and prints what it took."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import tensorflow as tf
    from hvdkit.data.arrays import Arrays
    from hvdkit.data.readers.class_folders import ClassFolders
    from hvdkit.ranks import world as world_lib
    from hvdkit.settings import Settings

    world = world_lib.connect()
    world_lib.set_up(world, Settings())
    make_up(root / "train", count // CLASSES)

    class Task:
        def sources(self):
            return ClassFolders(root, "train"), Arrays(label=[0])

    def each_for_itself(world, task):
        sources = task.sources()
        world.check_same("".join(source.fingerprint() for source in sources), "the data files")
        return sources

    tf.constant(["x"])
    world.gather_objects(None, "begin")
    before, start = held(), time.perf_counter()
    sources = getattr(assemble, "open_sources", each_for_itself)(world, Task())
    world.gather_objects(None, "opened")
    seconds = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before
    assert len(sources[0]) == count // CLASSES * CLASSES
    print(f"measured {world.rank} {[seconds, held() - before, most]}", flush=True)


def held() -> float:
    """MB of this process that are in memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


class Entry:
    """A file as os.scandir tells of it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def is_file(self, follow_symlinks: bool = True) -> bool:
        return True


class Entries(list):
    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def make_up(folder: Path, each: int) -> None:
    """Lets the system tell of `each` pictures in every folder of `folder`."""
    scandir, listdir = os.scandir, os.listdir

    def names(path: str | Path) -> list[str]:
        return [f"{os.path.basename(path)}_{i:05d}.JPEG" for i in range(each)]

    def scan(path: str | Path = "."):
        if os.path.dirname(path) == str(folder):
            return Entries(map(Entry, names(path)))
        return scandir(path)

    os.scandir = scan
    os.listdir = lambda path=".": (
        names(path) if os.path.dirname(path) == str(folder) else listdir(path)
    )
    os.path.getsize = lambda path: 1


if __name__ == "__main__":
    main()
