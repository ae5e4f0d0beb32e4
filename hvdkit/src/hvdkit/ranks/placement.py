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
from typing import Any, NamedTuple

from hvdkit.logs import in_columns

_ROOT = Path("/")  # /sys and /proc lie there, but in tests.

# This variable, 1, lets NCCL use parts of one GPU.
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

# UUID (a MIG instance has its own) and PCI address; "" where it is not known.
Gpu = tuple[str, str]


class Place(NamedTuple):
    """The GPU and the cores of one rank.

    `gpu`: its number in the order in which this rank sees them, -1: none; `address`: the GPU's on
    the PCI bus; `node`: the GPU's NUMA node, -1: not known. `cpus`: those that the rank is bound
    to, hyperthreads counted; empty: it is not bound. `threads`: for work on CPUs.
    """

    gpu: int
    address: str
    node: int
    cpus: list[int]
    threads: int


def granted() -> int:
    """GPUs that the driver shows; 0 where CUDA_VISIBLE_DEVICES hides them all.

    Raises OSError or subprocess.SubprocessError where nvidia-smi fails.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in (
        "",
        "-1",
        "NoDevFiles",
    ):
        return 0
    if not shutil.which("nvidia-smi"):
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    listing = subprocess.run(
        ["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, timeout=60
    )
    if listing.returncode == 6:  # Its manual says that nothing was found.
        return 0
    listing.check_returncode()
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def gpus_of_driver(count: int) -> list[Gpu]:
    """The `count` GPUs that CUDA shows this process, in CUDA's order; numbers if it fails."""
    gpus = []
    numbers = [(str(number), "") for number in range(count)]
    if not count:  # A host without GPUs may have no driver.
        return []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        for number in range(count):
            device = ctypes.c_int()
            address = ctypes.create_string_buffer(32)
            uuid = ctypes.create_string_buffer(16)
            has_failed = (
                cuda.cuInit(0)
                or cuda.cuDeviceGet(ctypes.byref(device), number)
                or cuda.cuDeviceGetPCIBusId(address, 32, device)
                or cuda.cuDeviceGetUuid_v2(uuid, device)
            )
            if has_failed:
                return numbers
            gpus.append((uuid.raw.hex(), address.value.decode().lower()))
    except (OSError, AttributeError):  # There is no driver, or one of before CUDA 11.4.
        return numbers
    return gpus


def see(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """What this rank may use, for `place` on all ranks of its host."""
    quota, group = _quota()
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "cpus": cpus,
        "quota": quota,
        "group": group,
        "gpus": [list(gpu) for gpu in gpus],
    }


def place(seen: Sequence[dict[str, Any]], rank: int, *, nccl: bool = False) -> Place:
    """The place of the `rank`-th of a host's ranks; `seen`: what `see` gave on each of them.

    `nccl`: whether it carries the gradients.

    Raises ValueError where a rank sees GPUs, all of which others take; where two ranks have parts
    of one GPU (MIG), which NCCL refuses.
    """
    allowed = [frozenset(view["cpus"]) for view in seen]
    gpus = choose_gpus([view["gpus"] for view in seen], allowed)
    if -1 in gpus and any(view["gpus"] for view in seen):
        uuids: set[str] = set()
        for view in seen:
            uuids.update(uuid for uuid, _ in view["gpus"])
        raise ValueError(
            f"{os.uname().nodename} has {len(uuids)} visible GPU(s) and {len(seen)} ranks: "
            "start at most one rank a GPU, or see CUDA_VISIBLE_DEVICES; over Gloo each rank must "
            "see all GPUs of its host"
        )
    addresses = []
    for view, gpu in zip(seen, gpus):
        addresses.append(view["gpus"][gpu][1] if gpu >= 0 else "")
    if nccl and os.environ.get(_SHARING) != "1":
        _refuse_shared(addresses)
    nodes = [_node_of(address) for address in addresses]
    # Cores near a rank's GPU are used, where it may use any.
    usable = [(cpus & _cpus_of(node)) or cpus for cpus, node in zip(allowed, nodes)]
    cpus = _share_out(usable)[rank]
    sharing = sum(not others.isdisjoint(allowed[rank]) for others in allowed)
    threads = len(cpus) or len(allowed[rank]) // sharing
    if not cpus and len(seen) > 1 and usable[rank] < allowed[rank]:
        # The rank shares the cores near its GPU with others.
        cpus = sorted(usable[rank])
    quota = seen[rank]["quota"]
    in_group = sum(view["group"] == seen[rank]["group"] for view in seen)
    threads = max(1, math.floor(min(quota / in_group, threads)))
    return Place(gpus[rank], addresses[rank], nodes[rank], cpus, threads)


def _refuse_shared(addresses: Sequence[str]) -> None:
    """Raises ValueError where two ranks of this host have the same known PCI address."""
    for address in filter(None, addresses):
        if addresses.count(address) > 1:
            raise ValueError(
                f"{addresses.count(address)} ranks of {os.uname().nodename} have parts (MIG) of "
                f"the GPU at {address}, which NCCL refuses: start one rank a GPU, or, with NCCL "
                f"2.30 and later, set {_SHARING}=1"
            )


def choose_gpus(
    gpus: Sequence[Sequence[Gpu]], allowed: Sequence[frozenset[int]] = ()
) -> list[int]:
    """For each rank of a host the first GPU, of those it sees, that no other rank takes; else -1.

    A rank that was bound (`allowed`) to one NUMA node comes first to the GPUs of that node: Slurm's
    cyclic layouts put every second rank on the other socket.
    """
    chosen = [-1 for _ in gpus]
    taken = set()
    for near_only in (True, False):
        # Who sees fewer GPUs comes first.
        for rank in sorted(range(len(gpus)), key=lambda rank: len(gpus[rank])):
            for number, (uuid, address) in enumerate(gpus[rank]):
                if chosen[rank] >= 0 or uuid in taken:
                    continue
                if not near_only or (allowed and _is_near(allowed[rank], address)):
                    chosen[rank] = number
                    taken.add(uuid)
    return chosen


def _is_near(cpus: frozenset[int], address: str) -> bool:
    """Whether all these CPUs are of the NUMA node of the GPU at a PCI address."""
    node = _node_of(address)
    return node >= 0 and cpus <= _cpus_of(node)


def bind(place: Place) -> None:
    """Binds this process, whose place that is, to its cores.

    Each thread is bound by itself; one that has other cores than this one's stays there, as it
    has bound itself.
    """
    if not place.cpus:
        return
    allowed = os.sched_getaffinity(0)
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        try:
            if os.sched_getaffinity(thread) == allowed:
                os.sched_setaffinity(thread, place.cpus)
        except OSError:  # The thread has ended, or a sandbox forbids it.
            continue


def row(place: Place) -> list[str]:
    """A rank's line of `table`, but for its number."""
    cores = place.cpus
    allowed = os.sched_getaffinity(0)
    if not cores and len(allowed) == 1:
        cores = [*allowed]
    node = str(place.node) if place.node >= 0 else "-"
    return [
        os.uname().nodename,
        place.address or "-",
        f"{node}, far" if is_far(place) else node,
        _ranges(cores) or f"not bound, {place.threads} thread(s)",
    ]


def is_far(place: Place) -> bool:
    """Whether a rank may use none of the cores near its GPU."""
    return place.node >= 0 and not _cpus_of(place.node) & os.sched_getaffinity(0)


def table(rows: Sequence[Sequence[str]]) -> str:
    """All ranks' places, a line each."""
    cells_of = [["rank", "host", "GPU", "NUMA node", "cores"]]
    for rank, cells in enumerate(rows):
        cells_of.append([str(rank), *cells])
    return in_columns(cells_of)


def _share_out(usable: Sequence[frozenset[int]]) -> list[list[int]]:
    """CPUs of each rank: whole physical cores, as many for each that may use the same ones.

    None where it is alone, or would get one CPU: Horovod's thread would wait for the step's.
    """
    shares: list[list[int]] = [[] for _ in usable]
    if len(usable) == 1:
        return shares
    # A physical core is named by the lowest of its hyperthreads.
    core_of = {cpu: _core_of(cpu) for cpu in frozenset().union(*usable)}
    taken: set[int] = set()
    for rank in sorted(range(len(usable)), key=lambda rank: len(usable[rank])):
        cores = sorted({core_of[cpu] for cpu in usable[rank]})
        sharing = sum(not others.isdisjoint(usable[rank]) for others in usable)
        free = [core for core in cores if core not in taken]
        # Cores that few ranks may use come first.
        free.sort(key=lambda core: sum(core in others for others in usable))
        cores_of_rank = free[: len(cores) // sharing]
        taken.update(cores_of_rank)
        cpus = sorted(cpu for cpu in usable[rank] if core_of[cpu] in cores_of_rank)
        if len(cpus) > 1:
            shares[rank] = cpus
    return shares


def _core_of(cpu: int) -> int:
    hyperthreads = _expand(
        _read(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    )
    return min(hyperthreads, default=cpu)


def _quota() -> tuple[float, str]:
    """CPUs' worth of time that cgroups (v1, v2) grant, and which group says so; inf: no limit."""
    least = (math.inf, "")
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_v1 = controllers != ""
        if is_v1 and "cpu" not in controllers.split(","):
            continue
        root = _ROOT / "sys/fs/cgroup"
        if is_v1:
            root /= "cpu"
        group = root / path.lstrip("/")
        while True:
            if is_v1:
                limit = _read(group / "cpu.cfs_quota_us").strip()
                period = _read(group / "cpu.cfs_period_us").strip()
            else:
                limit, _, period = _read(group / "cpu.max").strip().partition(" ")
            if limit.isdigit() and period.isdigit():
                least = min(least, (int(limit) / int(period), str(group)))
            if group == root or group == group.parent:
                break
            group = group.parent
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
    """The numbers of 0-3,8."""
    cpus: list[int] = []
    for part in ranges.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def _ranges(cpus: Iterable[int]) -> str:
    """Numbers as 0-3,8."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(
        f"{first}-{last}" if first < last else f"{first}" for first, last in ranges
    )
