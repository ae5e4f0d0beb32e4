"""Prints how many compilers may run at once: cores and memory of this process, not of the machine.

A container or a job often has less than /proc/meminfo tells: control groups (version 1 and 2) and
the affinity mask limit it. Each group above the process's own may limit it further. An argument
takes the place of `/`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

COMPILER = 2_000_000_000  # bytes that TensorFlow's headers take


def groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, its own first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:  # version 2
            bases = [mounts, mounts / "unified"]
        elif controller in names.split(","):
            bases = [mounts / names, mounts / controller]
        else:
            continue
        inner = PurePosixPath(path)
        for folder in (inner, *inner.parents):
            # In a container the path may be the host's and its own group the root of the mount.
            yield from (base / folder.relative_to("/") for base in bases)


def number(folder: Path, name: str) -> float:
    """The first word of a file; infinity where there is none, or no limit."""
    try:
        value = float((folder / name).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf
    return value if value >= 0 else math.inf


def cores(root: Path) -> float:
    least = float(len(os.sched_getaffinity(0)))
    for folder in groups(root, "cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        except (OSError, ValueError):
            quota = str(number(folder, "cpu.cfs_quota_us"))
            period = str(number(folder, "cpu.cfs_period_us"))
        if quota not in ("max", "inf") and period != "inf":
            least = min(least, float(quota) / float(period))
    return least


def reclaimable(folder: Path) -> float:
    """Bytes of files that were read and can be dropped; they count as used."""
    try:
        words = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return float(words.get("total_inactive_file", words.get("inactive_file", 0)))


def memory(root: Path) -> float:
    """Bytes that are free for this process."""
    least = math.inf
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            least = float(line.split()[1]) * 1024
    files = {"memory.max": "memory.current", "memory.high": "memory.current"}
    files["memory.limit_in_bytes"] = "memory.usage_in_bytes"
    for folder in groups(root, "memory"):
        for limit, usage in files.items():
            used = number(folder, usage)
            if used < math.inf:
                least = min(least, number(folder, limit) - used + reclaimable(folder))
    return least


if __name__ == "__main__":
    top = Path(sys.argv[1] if len(sys.argv) > 1 else "/")
    print(max(1, int(min(math.ceil(cores(top)), memory(top) // COMPILER))))
