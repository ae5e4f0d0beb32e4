"""Which GPU and which cores each rank takes: cores near its GPU, one physical core for one rank.

The ranks of a host tell each other what they may use, and each computes all places alike. What
mpirun, Slurm or a cgroup allows is never left: ranks that may use the same cores share them out.
Imports no TensorFlow: doctor.py chooses GPUs by it.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdkit import logs

if TYPE_CHECKING:
    from hvdkit.ranks.world import World

_ROOT = Path("/")  # of /sys and /proc
_MOST_ROWS = 32

Gpu = tuple[str, str]  # UUID (of a MIG instance its own), PCI address; "" where it is not known


class Place(NamedTuple):
    """Of one rank."""

    gpu: int  # in the order in which this rank sees them; -1: none
    address: str  # the GPU's on the PCI bus
    node: int  # the GPU's NUMA node; -1: not known
    cpus: list[int]  # that the rank is bound to, hyperthreads counted; empty: it is not bound
    threads: int  # for work on CPUs


def granted() -> int:
    """GPUs that the driver shows; 0 where CUDA_VISIBLE_DEVICES hides them all.

    Raises OSError or subprocess.SubprocessError where nvidia-smi fails.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return 0
    if not shutil.which("nvidia-smi"):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, timeout=60)
    if listed.returncode == 6:  # its manual: nothing was found
        return 0
    listed.check_returncode()
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def gpus_of_driver(count: int) -> list[Gpu]:
    """The `count` GPUs that CUDA shows this process, in CUDA's order; numbers if it fails."""
    found = []
    numbers = [(str(number), "") for number in range(count)]
    try:
        cuda = ctypes.CDLL("libcuda.so.1") if count else None
        for number in range(count):
            device = ctypes.c_int()
            address = ctypes.create_string_buffer(32)
            uuid = ctypes.create_string_buffer(16)
            failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number)
            failed = failed or cuda.cuDeviceGetPCIBusId(address, 32, device)
            if failed or cuda.cuDeviceGetUuid_v2(uuid, device):
                return numbers
            found.append((uuid.raw.hex(), address.value.decode().lower()))
    except (OSError, AttributeError):  # no driver, or one of before CUDA 11.4
        return numbers
    return found


def see(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """What this rank may use, for `place` on all ranks of its host."""
    quota, group = _quota()
    cpus = sorted(os.sched_getaffinity(0))
    return {"cpus": cpus, "quota": quota, "group": group, "gpus": [list(gpu) for gpu in gpus]}


def place(seen: Sequence[dict[str, Any]], rank: int) -> Place:
    """Of the `rank`-th of a host's ranks; `seen`: `see` of all of them.

    Raises ValueError where a rank sees GPUs, all of which others take.
    """
    allowed = [frozenset(one["cpus"]) for one in seen]
    gpus = choose_gpus([one["gpus"] for one in seen], allowed)
    if -1 in gpus and any(one["gpus"] for one in seen):
        all_gpus = {uuid for one in seen for uuid, _ in one["gpus"]}
        raise ValueError(
            f"{os.uname().nodename} has {len(all_gpus)} visible GPU(s) and {len(seen)} ranks: "
            "start at most one rank a GPU, or see CUDA_VISIBLE_DEVICES"
        )
    addresses = [one["gpus"][gpu][1] if gpu >= 0 else "" for one, gpu in zip(seen, gpus)]
    nodes = [_node_of(address) for address in addresses]
    usable = [(may & _cpus_of(node)) or may for may, node in zip(allowed, nodes)]
    cpus = _share_out(usable)[rank]
    own = seen[rank]
    beside = sum(bool(may & allowed[rank]) for may in allowed)
    threads = len(cpus) or len(allowed[rank]) // beside
    if not cpus and len(seen) > 1 and usable[rank] < allowed[rank]:
        cpus = sorted(usable[rank])  # near its GPU, with others
    in_group = sum(one["group"] == own["group"] for one in seen)
    threads = max(1, min(threads, math.floor(min(own["quota"] / in_group, threads))))
    return Place(gpus[rank], addresses[rank], nodes[rank], cpus, threads)


def choose_gpus(gpus: Sequence[Sequence[Gpu]], allowed: Sequence[frozenset[int]] = ()) -> list[int]:
    """For each rank of a host the first GPU, of those it sees, that no other rank takes; else -1.

    A rank that was bound (`allowed`) to one NUMA node comes first to the GPUs of that node: Slurm's
    cyclic layouts put every second rank on the other socket.
    """
    chosen = [-1] * len(gpus)
    taken = set()
    nodes = {address: _node_of(address) for sees in gpus for _, address in sees}
    near = {node: _cpus_of(node) for node in {*nodes.values()} - {-1}}
    for near_only in (True, False):
        for rank, sees in enumerate(gpus):
            for number, (uuid, address) in enumerate(sees):
                close = allowed and allowed[rank] <= near.get(nodes[address], set())
                fits = close or not near_only
                if chosen[rank] < 0 and uuid not in taken and fits:
                    chosen[rank] = number
                    taken.add(uuid)
    return chosen


def bind(own: Place) -> None:
    """All threads of this process, but those that bound themselves, run on its cores."""
    before = os.sched_getaffinity(0)
    for thread in map(int, os.listdir("/proc/self/task") if own.cpus else []):
        try:
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, own.cpus)
        except OSError:  # it has ended, or a sandbox forbids it
            continue


def report(world: World, own: Place) -> None:
    """Rank 0 prints all places as a table, or, of many, a line; every rank must call it."""
    far = own.node >= 0 and not _cpus_of(own.node) & os.sched_getaffinity(0)
    if world.size <= _MOST_ROWS:
        node = f"{own.node}, far" if far else str(own.node) if own.node >= 0 else "-"
        here = os.sched_getaffinity(0)
        cores = _ranges(own.cpus or (here if len(here) == 1 else ()))
        cores = cores or f"not bound, {own.threads} thread(s)"
        row = [os.uname().nodename, own.address or "-", node, cores]
        rows = world.gather_objects(row, "places")
        table = [["rank", "host", "GPU", "NUMA node", "cores"]]
        table += [[str(rank), *row] for rank, row in enumerate(rows)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    else:
        least, most = world.barrier_max("places.threads", -own.threads, own.threads)
        some_far, some_free = world.barrier_max("places", far, not own.cpus)
        lines = [f"placement: {-least} to {most} cores a rank"]
        lines[0] += ", some far from their GPU" * some_far + ", some not bound" * some_free
    if world.is_chief and world.size > 1:
        logs.say("\n".join(lines))


def _share_out(usable: Sequence[frozenset[int]]) -> list[list[int]]:
    """CPUs of each rank: whole physical cores, as many for each that may use the same ones.

    None where it is alone, or would get one CPU: Horovod's thread would wait for the step's.
    """
    # By CPU, the hyperthreads of its physical core, itself included.
    file = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    every = sorted(frozenset().union(*usable))
    siblings = {cpu: _expand(_read(file.format(cpu))) or [cpu] for cpu in every}
    taken: set[int] = set()
    found: list[list[int]] = [[] for _ in usable]
    for rank in sorted(range(len(usable) if len(usable) > 1 else 0), key=lambda r: len(usable[r])):
        cores = sorted({min(siblings[cpu]) for cpu in usable[rank]})
        share = len(cores) // sum(bool(other & usable[rank]) for other in usable)
        free = [core for core in cores if core not in taken]
        own = sorted(free, key=lambda core: sum(core in other for other in usable))[:share]
        taken.update(own)
        cpus = sorted(cpu for cpu in usable[rank] if min(siblings[cpu]) in own)
        found[rank] = cpus if len(cpus) > 1 else []
    return found


def _quota() -> tuple[float, str]:
    """CPUs' worth of time that cgroups (v1, v2) grant, and which group says so; inf: no limit."""
    least = math.inf, ""
    for line in _read("proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        root = _ROOT / "sys/fs/cgroup" / (kinds and "cpu")
        here = root / path.lstrip("/")
        for group in [here, *here.parents] if here != root else [root]:
            limit, period, *_ = [*_read(group / "cpu.max").split(), "max", "100000"]
            if kinds:
                limit = _read(group / "cpu.cfs_quota_us").strip()
                period = _read(group / "cpu.cfs_period_us").strip()
            if limit.isdigit() and period.isdigit():
                least = min(least, (int(limit) / int(period), str(group)))
            if group == root:
                break
    return least


def _node_of(address: str) -> int:
    text = _read(f"sys/bus/pci/devices/{address}/numa_node").strip() if address else ""
    return int(text or -1)


def _cpus_of(node: int) -> frozenset[int]:
    return frozenset(_expand(_read(f"sys/devices/system/node/node{node}/cpulist")))


def _read(name: str | Path) -> str:
    try:
        return (_ROOT / name).read_text(errors="surrogateescape")
    except OSError:
        return ""


def _expand(ranges: str) -> list[int]:
    """Of 0-3,8."""
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return [cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)]


def _ranges(cpus: Iterable[int]) -> str:
    """As 0-3,8."""
    found: list[list[int]] = []
    for cpu in cpus:
        if found and cpu == found[-1][1] + 1:
            found[-1][1] = cpu
        else:
            found.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in found)
