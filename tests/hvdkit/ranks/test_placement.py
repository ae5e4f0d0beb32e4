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
        self.root, self.all, self.nodes = root, nodes * cores, []
        monkeypatch.setattr(placement, "_ROOT", root)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*self.cpus})
        self.cpus = range(self.all * threads)
        for cpu in self.cpus:
            both = range(cpu % self.all, len(self.cpus), self.all)
            name = f"cpu/cpu{cpu}/topology/thread_siblings_list"
            self.write(f"sys/devices/system/{name}", ",".join(map(str, both)))
        for node in range(nodes):
            its = [c for c in self.cpus if c % self.all // cores == node]
            self.nodes.append(frozenset(its))
            self.write(f"sys/devices/system/node/node{node}/cpulist", _ranges(its))
        for number, (_, address) in enumerate(H100S):
            node = number * nodes // len(H100S)
            self.write(f"sys/bus/pci/devices/{address}/numa_node", str(node if nodes > 1 else -1))

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"{text}\n")

    def places(self, ranks: int, gpus=(), cpus=None) -> list[placement.Place]:
        """Each sees `gpus`, or its own of a list of lists; and may use `cpus`, one set for each."""
        seen = []
        for rank in range(ranks):
            self.cpus = cpus[rank] if cpus else self.cpus
            seen.append(placement.see(gpus[rank] if gpus and isinstance(gpus[0], list) else gpus))
        return [placement.place(seen, rank) for rank in range(ranks)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return lambda *size: Machine(tmp_path, monkeypatch, size)


def test_dgx_h100(machine):
    """Two sockets of 56 cores; hyperthreads of a core are i and i + 112; four GPUs a socket."""
    found = machine(2, 56, 2).places(8, H100S)
    assert [(p.gpu, p.node, p.threads) for p in found] == [(i, i // 4, 28) for i in range(8)]
    assert [_ranges(p.cpus) for p in found[::5]] == ["0-13,112-125", "70-83,182-195"]
    assert len({cpu % 112 for p in found for cpu in p.cpus}) == 112  # no core is there twice


@pytest.mark.parametrize(
    ("size", "ranks", "shown", "threads"),
    [
        ((2, 4, 2), 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"], 4),  # no GPU
        ((1, 7, 1), 3, ["0-1", "2-3", "4-5"], 2),
        ((1, 4, 1), 3, ["", "", ""], 1),  # on one CPU Horovod's thread would wait for the step's
        ((1, 1, 1), 1, [""], 1),
        ((1, 1, 2), 2, ["", ""], 1),  # as many hyperthreads as ranks, not as many cores
        ((2, 4, 1), 1, [""], 8),  # alone, it keeps all cores
    ],
)
def test_ranks_share_physical_cores_evenly(machine, size, ranks, shown, threads):
    found = machine(*size).places(ranks)
    assert [_ranges(p.cpus) for p in found] == shown and {p.threads for p in found} == {threads}


@pytest.mark.parametrize("layout", ["block", "cyclic"])
def test_what_slurm_has_bound_is_kept_and_its_gpu_is_near(machine, layout):
    """Tasks one after another on the sockets, or by turns: then it is the GPUs that change."""
    dgx = machine(2, 56, 2)
    firsts = [14 * i if layout == "block" else 14 * (i // 2) + 56 * (i % 2) for i in range(8)]
    bound = [{c + s for c in range(first, first + 14) for s in (0, 112)} for first in firsts]
    found = dgx.places(8, H100S, bound)
    gpus = {"block": [0, 1, 2, 3, 4, 5, 6, 7], "cyclic": [0, 4, 1, 5, 2, 6, 3, 7]}
    assert [p.gpu for p in found] == gpus[layout] and [{*p.cpus} for p in found] == bound
    sockets = [dgx.nodes[i // 4 if layout == "block" else i % 2] for i in range(8)]
    found = dgx.places(8, H100S, sockets)  # bound to a socket, which four share out
    assert [p.gpu for p in found] == gpus[layout]
    assert all(len(p.cpus) == 28 and {*p.cpus} <= socket for p, socket in zip(found, sockets))
    assert len({cpu % 112 for p in found for cpu in p.cpus}) == 112


def test_ranks_on_the_hyperthreads_of_one_core_have_a_thread_each(machine):
    found = machine(1, 2, 2).places(2, cpus=[{0}, {2}])
    assert [p.cpus for p in found] == [[], []] and [p.threads for p in found] == [1, 1]


def test_one_gpu_a_task(machine):
    """--gpus-per-task, CUDA_VISIBLE_DEVICES of one; the same one for two ranks is refused."""
    dgx = machine(2, 56, 2)
    assert [(p.gpu, p.node) for p in dgx.places(2, [[H100S[0]], [H100S[5]]])] == [(0, 0), (0, 1)]
    mig = [[("MIG-1", H100S[0][1])], [("MIG-2", H100S[0][1])]]
    assert [p.gpu for p in dgx.places(2, mig)] == [0, 0]
    with pytest.raises(ValueError, match=r"has 1 visible GPU\(s\) and 2 ranks: start at most one"):
        dgx.places(2, [[H100S[0]], [H100S[0]]])


@pytest.mark.parametrize(
    ("group", "files", "threads"),
    [
        ("0::/pod/one", {"pod/cpu.max": "600000 100000", "pod/one/cpu.max": "max 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),  # in a container: its own group is the root
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

    names = {"Get": ordinal, "GetUuid_v2": uuid, "GetPCIBusId": address}
    cuda = SimpleNamespace(cuInit=lambda _: 0, **{f"cuDevice{n}": f for n, f in names.items()})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    assert placement.gpus_of_driver(2) == [("00" * 16, "0000:09:00.0"), ("01" * 16, "0000:0a:00.0")]
    assert placement.gpus_of_driver(3) == [("0", ""), ("1", ""), ("2", "")]
