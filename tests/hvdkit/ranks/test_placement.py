"""Places of ranks on hosts that are not here: their /sys and /proc are written into a folder."""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdkit.ranks import placement
from hvdkit.ranks.placement import _ranges

BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
H100S = [(f"GPU-{i}", f"0000:{bus}:00.0") for i, bus in enumerate(BUSES)]


class Machine:
    """`nodes` NUMA nodes of `cores` each; CPU i's other hyperthread is i + nodes * cores."""

    def __init__(self, root: Path, monkeypatch, size: tuple[int, int, int]) -> None:
        nodes, cores, threads = size
        all_cores = nodes * cores
        self.root = root
        self.nodes = []
        self.cpus = range(all_cores * threads)
        monkeypatch.setattr(placement, "_ROOT", root)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*self.cpus})
        for cpu in self.cpus:
            siblings = [
                str(n) for n in range(cpu % all_cores, len(self.cpus), all_cores)
            ]
            file = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            self.write(file, ",".join(siblings))
        for node in range(nodes):
            cpus = [cpu for cpu in self.cpus if cpu % all_cores // cores == node]
            self.nodes.append(frozenset(cpus))
            self.write(f"sys/devices/system/node/node{node}/cpulist", _ranges(cpus))
        for number, (_, address) in enumerate(H100S):
            node = number * nodes // len(H100S)
            self.write(
                f"sys/bus/pci/devices/{address}/numa_node",
                str(node if nodes > 1 else -1),
            )

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"{text}\n")

    def places(self, ranks: int, gpus=(), cpus=None) -> list[placement.Place]:
        """Each sees `gpus`, or its own of a list of lists; and may use `cpus`, one set for each."""
        seen = []
        for rank in range(ranks):
            if cpus:
                self.cpus = cpus[rank]
            if gpus and isinstance(gpus[0], list):
                seen.append(placement.see(gpus[rank]))
            else:
                seen.append(placement.see(gpus))
        return [placement.place(seen, rank) for rank in range(ranks)]


def cores_of_dgx(places: list[placement.Place]) -> set[int]:
    """Hyperthreads i and i + 112 are one core."""
    cores = set()
    for place in places:
        cores.update(cpu % 112 for cpu in place.cpus)
    return cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return lambda *size: Machine(tmp_path, monkeypatch, size)


def test_dgx_h100(machine):
    """Two sockets of 56 cores; hyperthreads of a core are i and i + 112; four GPUs a socket."""
    places = machine(2, 56, 2).places(8, H100S)
    assert [(p.gpu, p.node, p.threads) for p in places] == [
        (i, i // 4, 28) for i in range(8)
    ]
    assert _ranges(places[0].cpus) == "0-13,112-125"
    assert _ranges(places[5].cpus) == "70-83,182-195"
    assert len(cores_of_dgx(places)) == 112  # no core is used twice


@pytest.mark.parametrize(
    ("size", "ranks", "shown", "threads"),
    [
        ((2, 4, 2), 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"], 4),
        ((1, 7, 1), 3, ["0-1", "2-3", "4-5"], 2),
        # On one CPU Horovod's thread would wait for the step's.
        ((1, 4, 1), 3, ["", "", ""], 1),
        ((1, 1, 1), 1, [""], 1),
        # Hyperthreads are as many as ranks, cores are fewer.
        ((1, 1, 2), 2, ["", ""], 1),
        ((2, 4, 1), 1, [""], 8),  # alone, it keeps all cores
    ],
)
def test_ranks_share_physical_cores_evenly(machine, size, ranks, shown, threads):
    places = machine(*size).places(ranks)
    assert [_ranges(place.cpus) for place in places] == shown
    assert {place.threads for place in places} == {threads}


# Sockets and GPUs of eight tasks: one after another on the sockets, or by turns.
@pytest.mark.parametrize(
    ("sockets", "gpus"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 1, 0, 1, 0, 1, 0, 1], [0, 4, 1, 5, 2, 6, 3, 7]),
    ],
    ids=["block", "cyclic"],
)
def test_what_slurm_has_bound_is_kept_and_its_gpu_is_near(machine, sockets, gpus):
    dgx = machine(2, 56, 2)
    bound = []
    for task, socket in enumerate(sockets):
        first = 56 * socket + 14 * sockets[:task].count(socket)
        bound.append({*range(first, first + 14), *range(first + 112, first + 126)})
    places = dgx.places(8, H100S, bound)
    assert [p.gpu for p in places] == gpus
    assert [{*p.cpus} for p in places] == bound

    whole_sockets = [dgx.nodes[socket] for socket in sockets]
    # Ranks are bound to a socket, which four share.
    places = dgx.places(8, H100S, whole_sockets)
    assert [p.gpu for p in places] == gpus
    for place, cpus in zip(places, whole_sockets):
        assert len(place.cpus) == 28 and {*place.cpus} <= cpus
    assert len(cores_of_dgx(places)) == 112


def test_ranks_on_the_hyperthreads_of_one_core_have_a_thread_each(machine):
    places = machine(1, 2, 2).places(2, cpus=[{0}, {2}])
    assert [p.cpus for p in places] == [[], []] and [p.threads for p in places] == [
        1,
        1,
    ]


def test_one_gpu_a_task(machine):
    """--gpus-per-task, CUDA_VISIBLE_DEVICES of one; the same one for two ranks is refused."""
    dgx = machine(2, 56, 2)
    assert [(p.gpu, p.node) for p in dgx.places(2, [[H100S[0]], [H100S[5]]])] == [
        (0, 0),
        (0, 1),
    ]
    mig = [[("MIG-1", H100S[0][1])], [("MIG-2", H100S[0][1])]]
    assert [p.gpu for p in dgx.places(2, mig)] == [0, 0]
    with pytest.raises(
        ValueError, match=r"has 1 visible GPU\(s\) and 2 ranks: start at most one"
    ):
        dgx.places(2, [[H100S[0]], [H100S[0]]])


def test_parts_of_one_gpu_are_refused_where_nccl_refuses_them(machine, monkeypatch):
    machine(2, 56, 2)
    address = H100S[0][1]
    mig = [placement.see([(f"MIG-{number}", address)]) for number in range(2)]
    with pytest.raises(
        ValueError,
        match=rf"2 ranks of \S+ have parts .* at {address}, .*NCCL_MULTI_RANK",
    ):
        placement.place(mig, 0, nccl=True)
    assert placement.place(mig, 0).gpu == 0
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert placement.place(mig, 1, nccl=True).gpu == 0
    unknown = [placement.see([(str(number), "")]) for number in range(2)]
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    assert placement.place(unknown, 1, nccl=True).gpu == 0


@pytest.mark.parametrize(
    ("group", "files", "threads"),
    [
        ("0::/pod/one", {"pod/cpu.max": "600000 100000", "pod/one/cpu.max": "max 100000"}, 3),
        # In a container the process's group is the root.
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("4:cpuacct,cpu:/docker/1\n3:cpuset:/a", {"cpu/cpu.cfs_quota_us": "400000",
         "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)  # fmt: skip
def test_ranks_share_the_quota_of_their_cgroup(machine, group, files, threads):
    one = machine(2, 8, 1)
    one.write("proc/self/cgroup", group)
    for name, text in files.items():
        one.write(f"sys/fs/cgroup/{name}", text)
    assert [p.threads for p in one.places(2)] == [threads] * 2


def test_gpus_as_cuda_shows_them(monkeypatch):
    def ordinal(device, number):
        device._obj.value = number
        return number == 2

    def uuid(to, device):
        to.raw = bytes([device.value] * 16)
        return 0

    def address(to, size, device):
        to.value = f"0000:{device.value + 9:02X}:00.0".encode()
        return 0

    cuda = SimpleNamespace(
        cuInit=lambda _: 0,
        cuDeviceGet=ordinal,
        cuDeviceGetUuid_v2=uuid,
        cuDeviceGetPCIBusId=address,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    assert placement.gpus_of_driver(2) == [
        ("00" * 16, "0000:09:00.0"),
        ("01" * 16, "0000:0a:00.0"),
    ]
    assert placement.gpus_of_driver(3) == [("0", ""), ("1", ""), ("2", "")]


def test_who_sees_fewer_gpus_comes_first():
    first, second = H100S[:2]
    assert placement.choose_gpus([[first, second], [first]]) == [1, 0]
