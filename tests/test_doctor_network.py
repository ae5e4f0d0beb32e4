"""The network in the preflight: NCCL's log, InfiniBand and EFA, interfaces that lead nowhere."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from doctor_facts import OPTIONS, fact
from hosts import ROOT

sys.path.insert(0, str(ROOT / "launch"))
from preflight import links, nccl, network, verdict_network

HEAD = "node1:4711:4800 [0] NCCL INFO "
# Lines as NCCL 2.18 to 2.28 and aws-ofi-nccl 1.5 to 1.18 write them.
BOOTSTRAP = "Bootstrap : Using eth0:10.0.0.1<0>"
NO_IB = "NET/IB : No device found."
IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
SOCKET = "NET/Socket : Using [0]eth0:10.0.0.1<0>"
THREADS = "NET/Socket: Using 4 threads and 1 sockets per thread"
NEW_OFI = "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"
OLD_OFI = "NET/OFI Selected Provider is efa (found 4 nics)"
TCP_OFI = "NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 1 nics)"


@pytest.mark.parametrize(
    "lines, took, plain",
    [
        ([BOOTSTRAP, IB, "Using network IB"], "IB", False),
        ([BOOTSTRAP, NO_IB, SOCKET, "Using network Socket", THREADS], "Socket", True),
        # Both are there; NCCL_NET=Socket made it take the slow one.
        ([IB, SOCKET, "Using network Socket"], "Socket", True),
        (["Using network IBext_v11"], "IBext_v11", False),
        ([NEW_OFI, "Using network Libfabric"], "Libfabric over efa", False),
        ([OLD_OFI, "Using network AWS Libfabric"], "AWS Libfabric over efa", False),
        ([TCP_OFI, "Using network AWS Libfabric"], "AWS Libfabric over tcp;ofi_rxm", True),
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"], "IB", False),
        (["Channel 00/0 : 17[1] -> 0[0] [receive] via NET/Socket/0"], "Socket", True),
        (["Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM"], "", False),
        ([SOCKET], "Socket", True),
        ([NO_IB, THREADS], "", False),
        ([], "", False),
    ],
)
def test_the_network_that_nccl_took(lines: list[str], took: str, plain: bool):
    found = nccl.network("\n".join(HEAD + line for line in lines))
    assert (found, nccl.is_plain(found)) == (took, plain)


@pytest.fixture
def quiet(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_log_is_read_and_removed(quiet):
    with nccl.listening() as log:
        path = Path(os.environ["NCCL_DEBUG_FILE"])
        assert os.environ["NCCL_DEBUG"] == "INFO"
        path.write_text(HEAD + "Using network IB\n")
        assert log.network() == "IB"
    assert not path.parent.exists()
    assert "NCCL_DEBUG" not in os.environ and "NCCL_DEBUG_FILE" not in os.environ


def test_what_the_user_set_stays(quiet, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with nccl.listening() as log:
        assert "NCCL_DEBUG_FILE" not in os.environ
        assert log.network() == "" and "NCCL_DEBUG" in log.excuse
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/%h.%p.100%%")
    path = tmp_path / f"{os.uname().nodename.split('.')[0]}.{os.getpid()}.100%"
    path.write_text(HEAD + "Using network Socket\n")
    with nccl.listening() as log:
        assert log.network() == "Socket"
    assert path.exists()


INTERFACES = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.1"]}


@pytest.mark.parametrize(
    "setting, more, taken",
    [
        ("", {}, ["eth0"]),
        ("", {"ib0": ["10.1.0.1"]}, ["ib0"]),
        ("", {"cni0": ["10.88.0.1"]}, ["eth0", "cni0"]),
        ("eth", {"eth1": ["10.1.0.1"]}, ["eth0", "eth1"]),
        ("=eth0", {"eth01": ["10.1.0.1"]}, ["eth0"]),
        ("^eth", {}, ["lo", "docker0"]),
        ("ib0,eth1", {}, []),
    ],
)
def test_the_interfaces_that_nccl_would_take(setting, more, taken):
    assert nccl.would_take(setting, INTERFACES | more) == taken


def test_nccl_takes_no_interface_with_nothing_behind_it():
    bridge = {"cni0": ["10.88.0.1"]}
    assert nccl.would_take("", INTERFACES | bridge, ["cni0"]) == ["eth0"]


def port(root: Path, device: str, layer: str, state: str, driver: str) -> None:
    folder = root / "class" / device / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "link_layer").write_text(layer + "\n")
    (folder / "state").write_text(state + "\n")
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (root / "class" / device / "device").mkdir()
    (root / "class" / device / "device" / "driver").symlink_to(root / "drivers" / driver)


def test_kinds_of_fast_networks(tmp_path: Path):
    port(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE", "mlx5_core")
    port(tmp_path, "mlx5_1", "InfiniBand", "1: DOWN", "mlx5_core")
    port(tmp_path, "mlx5_2", "Ethernet", "4: ACTIVE", "mlx5_core")
    port(tmp_path, "rdmap16s27", "Unknown", "4: ACTIVE", "efa")
    assert network.fabric(tmp_path / "class") == [
        {"port": "mlx5_0:1", "kind": "InfiniBand", "state": "ACTIVE"},
        {"port": "mlx5_1:1", "kind": "InfiniBand", "state": "DOWN"},
        {"port": "mlx5_2:1", "kind": "RoCE", "state": "ACTIVE"},
        {"port": "rdmap16s27:1", "kind": "EFA", "state": "ACTIVE"},
    ]
    assert network.fabric(tmp_path / "none") == []
    assert not network.verbs(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert network.verbs(tmp_path)


@pytest.fixture
def three() -> list[dict]:
    return [fact(f"node{n}", n) for n in (1, 2, 3)]


def fabric(facts: list[dict], *networks: str, excuse: str = "") -> list[tuple[str, str, str, str]]:
    taken = [{"network": name, "excuse": excuse} for name in networks]
    found = verdict_network.fabric(facts, taken, OPTIONS)
    return [(f.level, f.where, f.what, f.todo) for f in found]


def test_tcp_where_there_is_infiniband_is_wrong(three):
    assert fabric(three, "IB", "IB", "IB") == []
    [(level, where, what, todo)] = fabric(three, "IB", "Socket", "Socket")
    assert (level, where) == ("wrong", "node2 (rank 1); node3 (rank 2)")
    assert what == "InfiniBand is there, but NCCL took TCP (Socket)"
    assert "libibverbs" in todo


def test_what_may_be_why_is_named(three):
    three[0]["verbs"] = False
    three[1]["environment"]["NCCL_IB_DISABLE"] = "1"
    three[2]["fabric"] = [{"port": "rdmap1:1", "kind": "EFA", "state": "ACTIVE"}]
    todos = [todo for *_, todo in fabric(three, "Socket", "Socket", "AWS Libfabric over tcp")]
    assert "/dev/infiniband" in todos[0]
    assert "NCCL_IB_DISABLE=1" in todos[1]
    assert "aws-ofi-nccl" in todos[2]


def test_tcp_is_no_fault_where_there_is_nothing_faster(three):
    for one in three:
        one["fabric"] = [{"port": "mlx5_0:1", "kind": "InfiniBand", "state": "DOWN"}]
    assert fabric(three, "Socket", "Socket", "Socket") == []
    assert fabric(three[:1], "Socket") == []


def test_roce_that_is_not_used_is_noted(three):
    three[0]["fabric"] = [{"port": "mlx5_0:1", "kind": "RoCE", "state": "ACTIVE"}]
    [(level, *_)] = fabric(three, "Socket", "IB", "IB")
    assert level == "note"


def test_a_network_that_is_not_known_is_said_with_the_reason(three):
    [(level, where, what, _)] = fabric(three, "IB", "", "IB", excuse="NCCL_DEBUG is set")
    assert (level, where) == ("note", "node2 (rank 1)")
    assert what == "it is not known which network NCCL took: NCCL_DEBUG is set"


def test_bus_bandwidth_is_judged_by_the_largest_allreduce():
    rows = [
        {"op": op, "bytes": size << 20, "busbw": rate * 1e9}
        for op, size, rate in (("allreduce", 1, 3), ("allreduce", 16, 40.5), ("allgather", 16, 1))
    ]
    assert verdict_network.bandwidth(rows, 0) == []
    assert verdict_network.bandwidth(rows, 40) == []
    [found] = verdict_network.bandwidth(rows, 200)
    assert found.level == "wrong"
    assert found.what == (
        "an allreduce of 16 MB has a bus bandwidth of 40.5 GB/s, less than --min_busbw=200"
    )
    [alone] = verdict_network.bandwidth([], 200)
    assert alone.level == "note"


def options(**changed) -> types.SimpleNamespace:
    return types.SimpleNamespace(**vars(OPTIONS) | changed)


@pytest.mark.parametrize("via, setting", [("Gloo", "HOROVOD_GLOO_IFACE"), ("MPI", "--interface")])
def test_an_interface_that_a_host_lacks(three, via: str, setting: str):
    three[1]["interfaces"] = {"lo": ["127.0.0.1"], "eth7": ["10.0.0.2"]}
    three[2]["interfaces"] = {"lo": ["127.0.0.1"], "eno1": ["10.0.0.3"]}
    three[2]["down"] = ["eth0"]
    for one in three:
        one["environment"] = {"HOROVOD_GLOO_IFACE": "eth0"} if via == "Gloo" else {}
    asked = options(interface="" if via == "Gloo" else "eth0")
    gone, down = verdict_network.named(three, via, asked)
    assert gone.fatal and gone.where == "node2 (rank 1)"
    assert gone.what == f"the interface eth0 ({setting}) is not there, or has no address"
    assert gone.todo.endswith("there: eth7 (10.0.0.2), lo (127.0.0.1)")
    assert down.what == f"the interface eth0 ({setting}) is down"


def test_an_interface_of_nccl_that_no_host_has(three):
    for one in three:
        one["environment"]["NCCL_SOCKET_IFNAME"] = "ib"
    assert len(verdict_network.named(three, "MPI", OPTIONS)) == 3
    assert verdict_network.named(three, "MPI", options(device="cpu")) == []


@pytest.fixture
def bridged(three) -> list[dict]:
    """All have cni0 with one and the same address."""
    for one in three:
        one["interfaces"]["cni0"] = ["10.88.0.1"]
    return three


def inner(facts: list[dict], via: str, **changed) -> list[tuple[str, str]]:
    assert verdict_network.others_addresses(facts[0]) == ["10.88.0.1"]
    every = [[own, n, "10.88.0.1"] for own in range(3) for n in links.asked_by(own, 3)]
    found = verdict_network.interfaces(facts, [0, 1, 2], every, via, options(**changed))
    return [(f.level, f"{f.where}: {f.what}: {f.todo}") for f in found]


def test_nccl_may_choose_an_interface_that_leads_nowhere(bridged):
    [(level, text)] = inner(bridged, "Gloo")
    assert level == "wrong"
    assert text.startswith("node1 (rank 0); node2 (rank 1); node3 (rank 2): NCCL may choose cni0")
    assert "(10.88.0.1), by which no other host can reach it (all have the same address)" in text
    assert "--interface eth0" in text


def test_open_mpi_may_choose_an_interface_that_leads_nowhere(bridged):
    [(level, text)] = inner(bridged, "MPI", device="cpu")
    assert level == "note" and "Open MPI may choose cni0" in text


def test_what_nobody_chooses_is_no_fault(bridged):
    for one in bridged:
        one["environment"] |= {"NCCL_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}
        one["environment"]["OMPI_MCA_btl_tcp_if_include"] = "eth0"
    assert inner(bridged, "Gloo") == inner(bridged, "MPI") == []


def test_an_interface_that_one_host_reaches_is_no_fault(bridged):
    some = [[1, 0, "10.88.0.1"]]  # 2 asked as well, and got an answer
    assert verdict_network.interfaces(bridged, [0, 1, 2], some, "MPI", OPTIONS) == []


@pytest.mark.parametrize("hosts", [1, 2, 3, 16])
def test_every_host_is_asked_by_few(hosts: int):
    asked = [other for own in range(hosts) for other in links.asked_by(own, hosts)]
    assert all(asked.count(host) == min(2, hosts - 1) for host in range(hosts))


def test_addresses_that_are_for_others():
    for address in ("10.0.0.1", "172.17.0.1", "2001:db8::1", "fd00::2"):
        assert network.is_for_others(address)
    for address in ("127.0.1.1", "::1", "fe80::1%eth0", "169.254.3.1", "0.0.0.0"):
        assert not network.is_for_others(address)
