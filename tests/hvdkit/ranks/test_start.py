"""Before the ranks know each other: who waits says for what and for whom, and ends by itself."""

import json
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import ROOT, Hosts, require, run

from hvdkit.launcher import launch_fault
from hvdkit.ranks import start

# What rank 1 of three leaves out: MPI's start, the meeting after it, or nothing.
SCRIPT = """
import os, sys, time
from hvdkit.ranks import start
from hvdkit.launcher import launch_rank
start._SAY_AFTER, start._ROLL_CALL = int(sys.argv[2]), 2
if launch_rank() == 1 and sys.argv[1] == "start": time.sleep(60)
if launch_rank() == 1 and sys.argv[1] == "meeting": start._meet = lambda *_: time.sleep(60)
start.tell_networks()
start.start_mpi(60 if sys.argv[1] == "nothing" else 6)
from mpi4py import MPI
told = [os.environ.get(name) for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")]
os.write(1, f"NCCL {told[0]} {told[1]}\\n".encode())
print(f"met {sum(MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank))}")
"""


@pytest.mark.parametrize(
    ("left_out", "say_after", "words"),
    [
        ("start", 3, "has waited 3 s for all ranks to start MPI, on h1:3 (this"),
        (
            "meeting",
            3,
            "3 s for all ranks to exchange messages: no message yet from rank 1, on h1",
        ),
        # Never later than the limit.
        (
            "meeting",
            30,
            "6 s for all ranks to exchange messages: no message yet from rank 1, on",
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_the_start_tried_again(
    left_out, say_after, words
):
    command = [
        "mpirun",
        "-np",
        "3",
        sys.executable,
        "-c",
        SCRIPT,
        left_out,
        str(say_after),
    ]
    ended = run(command, timeout=50, env={"LAUNCH_HOSTS": "h1:3"})
    assert ended.code == 76 and words in ended.output, ended.output
    assert f"rank 0 on {os.uname().nodename} has waited" in ended.output
    assert (
        "has waited 6 s for all ranks to" in ended.output
        and "(--start_limit_s)" in ended.output
    )


TOLD = """
import os
from hvdkit.ranks import start
start.tell_networks()
print(*sorted({name for name, _ in start.ways()}), sep=",")
for name in ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude", "NCCL_SOCKET_IFNAME"):
    print(os.environ.get(name))
"""


@pytest.fixture(scope="module")
def network() -> str:
    """One that leads elsewhere."""
    names = [name for name, _ in start.ways()]
    if not names:
        pytest.skip("this machine has loopback alone")
    return names[0]


@pytest.mark.parametrize("given", ["", "include", "exclude"])
@pytest.mark.parametrize("by_launcher", [False, True])
def test_what_files_of_open_mpi_say_of_networks_stays(
    tmp_path, network, given, by_launcher
):
    """Of an include and an exclude together Open MPI uses no network at all."""
    folder = tmp_path / ".openmpi"
    folder.mkdir()
    values = {"include": network, "exclude": f"lo,not-ours0,{network}"}
    if given:
        if not by_launcher:
            values["exclude"] = "lo,not-ours0"
        line = f"  btl_tcp_if_{given} = {values[given]}\n"
        (folder / "mca-params.conf").write_text(line)
    env = {"HOME": str(tmp_path)}
    if by_launcher:
        env["OMPI_MCA_btl_tcp_if_include"] = network
    ended = run([sys.executable, "-c", TOLD], timeout=30, env=env)
    names, include, exclude, nccl = ended.output.splitlines()
    assert not by_launcher or names == network
    assert nccl == f"={network}" or not by_launcher
    if given == "exclude":
        assert include == "None" and "not-ours0" in exclude, ended.output
        assert network not in exclude.split(","), ended.output
    elif by_launcher:
        assert (include, exclude) == (network, "None"), ended.output
    elif given == "include":
        assert (include, exclude) == ("None", "None"), ended.output
    else:
        assert include == "None" and "lo" in exclude.split(","), ended.output
    # Ranks that have nothing but this network, as on two hosts.
    words = ["mpirun", "-np", "2", "-mca", "btl", "tcp,self", sys.executable]
    met = run([*words, "-c", SCRIPT, "nothing", "3"], timeout=60, env=env)
    assert met.code == 0 and met.output.count("met 1") == 2, met.output


def test_a_network_that_nccl_s_file_names_stays(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib7\n")
    ended = run([sys.executable, "-c", TOLD], timeout=30, env={"HOME": str(tmp_path)})
    assert ended.output.splitlines()[-1] == "None"


@pytest.mark.timeout(200)
def test_an_idle_docker0_hangs_no_start(hosts: Hosts):
    """Every host has one, with the same address; plain mpirun is told of no network.

    Nor does NCCL take it, or what else leads to no other host, whatever it is called.
    """
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    mpirun = ["mpirun", "--prefix", prefix, "-x", f"OPAL_PREFIX={prefix}"]
    mpirun += ["-H", "node1:1,node2:1,node3:1"]
    mpirun += ["-mca", "plm_rsh_args", "-p 2222 -o StrictHostKeyChecking=accept-new"]
    mpirun += ["-mca", "oob_tcp_if_include", "eth0"]
    env = {"OPAL_PREFIX": prefix, "PYTHONPATH": str(ROOT / "hvdkit/src")}
    hosts[2].sh(
        "ip link add br-1f3 type bridge; ip link add usb0 type veth peer name veth7\n"
        "ip address add 172.18.0.1/16 dev br-1f3; ip address add 169.254.3.1/16 dev usb0\n"
        "for name in br-1f3 usb0 veth7; do ip link set $name up; done"
    )
    try:
        ended = hosts[1].run(*mpirun, *MEETS, timeout=90, env=env)
    finally:
        hosts[2].sh("ip link del br-1f3; ip link del usb0")
    assert ended.code == 0 and ended.output.count("met 3") == 3, ended.output
    assert ended.output.count("NCCL =eth0 None") == 3, ended.output


MEETS = [sys.executable, "-c", SCRIPT, "nothing", "3"]


@pytest.mark.timeout(200)
def test_nccl_is_told_the_network_that_mpi_is_told(hosts: Hosts):
    """By the name that it has on each host; another network is there too, on all of them."""

    def run_on_all(**names: str):
        env = {"PYTHONPATH": str(ROOT / "hvdkit/src"), "NCCL_IB_HCA": "=mlx5_0"}
        hosts_sh = [
            str(ROOT / "launch/hosts.sh"),
            "-H",
            "node1:1,node2:1,node3:1",
            "-p",
            "2222",
        ]
        return hosts[1].run(*hosts_sh, *MEETS, timeout=90, env=env | names)

    rename = "ip link set {} down; ip link set {} name {}; ip link set {} up"
    for number, host in enumerate(hosts):
        host.sh("ip link add ib0 type veth peer name ib1; ip link set ib0 up")
        host.sh(f"ip address add 10.88.0.{number}/24 dev ib0")
    hosts[3].sh(rename.format("eth0", "eth0", "ens5", "ens5"))
    try:
        ended = run_on_all()
        with_name = run_on_all(NCCL_SOCKET_IFNAME="eth")
    finally:
        hosts[3].sh(rename.format("ens5", "ens5", "eth0", "eth0"))
        for host in hosts:
            host.sh("ip link del ib0")
    assert ended.code == 0, ended.output
    assert ended.output.count("NCCL =eth0 =mlx5_0") == 2, ended.output
    assert ended.output.count("NCCL =ens5 =mlx5_0") == 1, ended.output
    assert with_name.output.count("NCCL eth =mlx5_0") == 3, with_name.output


@pytest.mark.parametrize(
    ("set_by_user", "cycle"),
    [
        ({}, "0.1"),
        ({"HOROVOD_CYCLE_TIME": "2"}, "2"),
        ({"HOROVOD_AUTOTUNE": "1"}, None),
    ],
)
def test_a_cycle_that_is_set_is_not_shortened(monkeypatch, set_by_user, cycle):
    environment = dict(set_by_user)
    monkeypatch.setattr(start, "os", SimpleNamespace(environ=environment))
    start.shorten_cycle()
    assert environment.get("HOROVOD_CYCLE_TIME") == cycle


# Prints Horovod's cycle as it is when ranks connect.
CYCLES = """
import os
import hvdkit.ranks.quiet
import horovod.tensorflow as hvd
from hvdkit.ranks import world
from hvdkit.run import main
from hvdkit.settings import Settings
from hvdkit.stop import DONE, Stop

def connect(limit):
    raise Stop(DONE, "cycle " + os.environ.pop("HOROVOD_CYCLE_TIME", "is Horovod's"))

world.connect = connect
for bn_sync, carrier in (("mean", "horovod"), ("full", "horovod"), ("full", "")):
    os.environ["HVDKIT_EXCHANGE"] = carrier
    main.with_ranks(Settings(bn_sync=bn_sync), None)
print("with NCCL" if hvd.nccl_built() else "without NCCL")
"""


def test_horovod_looks_more_often_only_where_it_sums_for_batch_norms():
    ended = run([sys.executable, "-c", CYCLES], timeout=120)
    cycles = re.findall("cycle (.*)", ended.output)
    # On GPUs Horovod sums for batch norms too.
    last = "0.1" if "with NCCL" in ended.output else "is Horovod's"
    assert cycles == ["is Horovod's", "0.1", last], ended.output


# Adds up over the world that it gets, or says why there is none.
CONNECT = """
import hvdkit.ranks.quiet
import horovod.tensorflow as hvd
import tensorflow as tf
from hvdkit.ranks import world
from hvdkit.stop import Stop
try:
    ranks = world.connect(30)
    total = hvd.allreduce(tf.constant(2.0), op=hvd.Sum, name="total")
    total = ranks.broadcast_object({"sum": float(total)}, "total")
    print(f"connected {ranks.size} {total}")
    world.finish(ranks)
except Stop as stop:
    print("stopped", stop.code, stop)
"""


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ("", "connected 1 {'sum': 2.0}"),
        ("horovodrun --mpi -np 2", "connected 2 {'sum': 4.0}"),
        (
            "horovodrun --gloo -np 2",
            "stopped 2 the name of this host, nowhere, leads to no address of it, and Gloo needs "
            "one: add the line '127.0.0.1 nowhere' to /etc/hosts, or use MPI (horovodrun --mpi)",
        ),
        (
            "env HOROVOD_CONTROLLER=gloo mpirun --allow-run-as-root --bind-to none -np 2",
            "stopped 2 HOROVOD_CONTROLLER=gloo, but MPI started the ranks",
        ),
    ],
)
def test_a_host_name_without_an_address(launcher: str, text: str):
    require("unshare")
    script = f'hostname nowhere; exec {launcher} "$0" "$@"'
    words = ["unshare", "--uts", "sh", "-c", script, sys.executable, "-c", CONNECT]
    ended = run(words, timeout=120)
    assert ended.code == 0 and text in ended.output, ended.output
    assert "Traceback" not in ended.output


def test_one_rank_needs_not_even_loopback():
    require("unshare")
    ended = run(["unshare", "--net", sys.executable, "-c", CONNECT], timeout=120)
    assert ended.code == 0 and "connected 1 {'sum': 2.0}" in ended.output, ended.output


def test_a_host_name_whose_address_is_anothers_is_none(monkeypatch):
    """As after a move to another network: the name still resolves."""
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")
    assert "192.0.2.7, leads to no address of it" in start.gloo_fault()
    for own in ("127.0.0.1", "127.0.1.1"):  # Debian's for a name
        monkeypatch.setattr(socket, "gethostname", lambda own=own: own)
        assert not start.gloo_fault()


def test_variables_that_another_run_has_left_are_named(tmp_path: Path):
    """Also by who would be rank 1: no rank 0 is there to say it."""
    words = [
        sys.executable,
        "train.py",
        "--flagfile=configs/blank.cfg",
        f"--run_dir={tmp_path}",
    ]
    left = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = run(words, timeout=120, env=left, cwd=ROOT / "template")
    assert ended.code == 2 and ended.output.startswith(
        "error: OMPI_COMM_WORLD_RANK=1 says "
    )
    assert "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE. " in ended.output, (
        ended.output
    )
    assert ended.output.count("\n") == 1, ended.output


def test_variables_of_a_rank_are_none_where_its_launcher_is(monkeypatch):
    assert not launch_fault()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert "unset HOROVOD_SIZE. " in launch_fault()
    for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "PMIX_SERVER_URI41", "PMI_FD"):
        with monkeypatch.context() as launched:
            launched.setenv(name, "there")
            assert not launch_fault()
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        monkeypatch.setenv("PMIX_SERVER_URI41", f"12.0;tcp4://127.0.0.1:{port}")
        assert not launch_fault()
    assert "unset HOROVOD_SIZE. " in launch_fault()  # the launcher has ended


def test_processes_of_another_frameworks_launcher_do_not_train_apart(tmp_path):
    """Each would train alone; in a pod of its own nothing but this message tells."""
    cluster = {"worker": ["node1:2222", "node2:2222"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    ended = run(
        [sys.executable, "train.py", "--task=blank", f"--run_dir={tmp_path}/run"],
        cwd=ROOT / "template",
        timeout=120,
        env={"TF_CONFIG": json.dumps(config)},
    )
    assert ended.code == 2, ended.output
    (error,) = ended.errors()
    assert "TF_CONFIG says that 2 processes or hosts belong together" in error
    assert not (tmp_path / "run").exists()
