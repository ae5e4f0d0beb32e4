"""doctor.py: it finds nothing on sound hosts and names each fault with its host."""

import contextlib
import errno
import itertools
import os
import re
import socket
import sys
import time
import types
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, Launch, require, run

sys.path.insert(0, str(ROOT / "launch"))
import doctor
from preflight import facts, findings, ranks

DOCTOR = str(ROOT / "launch" / "doctor.py")
# A rank as on a host of its own name, with mounts of its own; $SETUP is run there first.
AS_HOSTS = """
name=node$((OMPI_COMM_WORLD_RANK + 1))
export OMPI_COMM_WORLD_LOCAL_RANK=0
exec unshare --uts --mount sh -ec "hostname $name; $SETUP
exec \\"\\$@\\"" -- "$@"
"""
# As nvidia-ml-py shows it: eight GPUs, or a driver that does not answer.
NVML = """
import os
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
def nvmlInit():
    if "BROKEN" in os.environ: raise NVMLError("Driver/library version mismatch")
nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 8
nvmlDeviceGetHandleByIndex = lambda number: number
nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"
nvmlSystemGetDriverVersion = lambda: "550.54.15"
"""


def wrong(output: str) -> list[str]:
    """Place and fault of the things that are wrong."""
    found = []
    for line in output.splitlines():
        text = line.split(">:")[-1]  # horovodrun writes [0]<stdout>: before it
        if text.startswith("WRONG"):
            found.append(text.removeprefix("WRONG  "))
    return found


def three(tmp_path: Path, setup: str, *words: str, **env: str) -> Launch:
    require("unshare")
    (tmp_path / "as_hosts.sh").write_text(AS_HOSTS)
    command = ["mpirun", "-np", "3", "bash", tmp_path / "as_hosts.sh", *words]
    return run(command, timeout=280, env={"SETUP": setup} | env)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    for name in ("data", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "a").write_text("a")
    return [f"--data_dir={tmp_path / 'data'}", f"--run_dir={tmp_path / 'run'}"]


@pytest.mark.timeout(300)
def test_each_fault_is_named_with_its_host(tmp_path: Path, folders: list[str]):
    other = tmp_path / "other" / "absl_py-9.9.dist-info" / "METADATA"
    other.parent.mkdir(parents=True)
    other.write_text("Metadata-Version: 2.1\nName: absl-py\nVersion: 9.9\n")
    data = tmp_path / "data"
    run_dir = tmp_path / "run"
    setup = f"""case $(hostname) in
    node1) mount -t tmpfs -o size=512k tmpfs {run_dir} ;;
    node2) export PYTHONPATH={tmp_path}/other; mount -t tmpfs tmpfs {data}; echo bb >{data}/b ;;
    node3) mount -t tmpfs tmpfs {data} ;;
    esac"""
    ended = three(
        tmp_path,
        setup,
        sys.executable,
        DOCTOR,
        "--mb=1",
        *folders,
        LAUNCH_HOSTS="localhost:1,127.0.0.1:1,no-such-host:1",
    )
    assert ended.code == 1
    found = wrong(ended.output)
    for parts in (
        (
            "node1 (rank 0): the run folder cannot be written to",
            "No space left on device",
        ),
        ("node2 (rank 1): absl-py is 9.9, elsewhere ",),
        (
            f"node2 (rank 1): the data folder {data} is 1 files of 3 bytes",
            "elsewhere 1 files of 1",
        ),
        (f"node3 (rank 2): the data folder {data}: it is empty",),
        ("node1 (rank 0); node2 (rank 1): the name no-such-host does not resolve",),
        ("the name localhost resolves to", "no address of node1 (rank 0)"),
        ("the name 127.0.0.1 resolves to 127.0.0.1, no address of node2 (rank 1)",),
    ):
        lines = [line for line in found if all(part in line for part in parts)]
        assert len(lines) == 1, f"{parts}: {ended.output}"
    assert len(found) == 7 and "7 thing(s) wrong" in ended.output
    note = f"NOTE  node2 (rank 1); node3 (rank 2): the run folder {run_dir} is not the one that rank 0"
    assert note in ended.output
    # None of them keeps Horovod from starting: all ranks, and each two hosts.
    timed = [
        line
        for line in ended.output.splitlines()
        if line.startswith("allreduce of 1 MB, ")
    ]
    assert len(timed) == 4 and timed[0].startswith("allreduce of 1 MB, all ranks: ")
    assert timed[3].startswith("allreduce of 1 MB, node2 (rank 1); node3 (rank 2): ")
    assert not list(run_dir.iterdir()), "it cleans up after itself"


@pytest.mark.timeout(300)
def test_a_rank_that_never_reports_is_named_with_its_host(tmp_path: Path):
    """It hangs before it can say anything, as on a disk that does not answer."""
    (tmp_path / "tensorflow.py").touch()  # so that the other ranks are there soon
    ended = three(
        tmp_path,
        f"export PYTHONPATH={tmp_path}\n[ $(hostname) != node3 ] || exec sleep 300",
        sys.executable,
        DOCTOR,
        "--timeout=12",
        LAUNCH_HOSTS="localhost:2,node3:1",
        LAUNCH_ID=tmp_path.name + str(os.getpid()),
    )
    assert ended.code == 1
    [line] = wrong(ended.output)
    assert line.startswith("node3 (rank 2): no report in 12 s"), ended.output
    assert (
        "rank 0 on node1 hung for 12 s while waiting for all ranks to start MPI"
        in ended.output
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpus_that_tensorflow_does_not_see_over_gloo_on_one_host(
    tmp_path: Path, folders
):
    (tmp_path / "pynvml.py").write_text(NVML)
    words = [
        "horovodrun",
        "--gloo",
        "-np",
        "2",
        sys.executable,
        DOCTOR,
        "--mb=1",
        *folders,
    ]
    env = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    ended = run(words, timeout=280, env=env)
    [line] = wrong(ended.output)
    assert line == (
        f"{os.uname().nodename} (rank 0, 1): "
        "TensorFlow sees no GPU, the driver shows 8: it is the CPU build."
    )
    assert ended.code != 0 and "2 rank(s) on 1 host(s), by Gloo" in ended.output
    assert "allreduce of 1 MB, all ranks: " in ended.output


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_gpu_driver_that_fails_is_named_where_gpus_are_wanted(
    monkeypatch, device: str
):
    nvml = types.ModuleType("pynvml")
    exec(NVML, nvml.__dict__)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("BROKEN", "1")
    monkeypatch.setattr(facts, "import_faults", list)
    found = [what for what, _, _ in facts.collect("", "", device)["faults"]]
    if device == "auto":
        assert found == ["the GPU driver fails: Driver/library version mismatch"]
    else:
        assert found == []


@pytest.mark.timeout(200)
def test_a_name_without_an_address_is_named_where_gloo_needs_one():
    require("unshare")
    words = f"hostname nowhere; horovodrun --gloo -np 2 {sys.executable} {DOCTOR}"
    ended = run(["unshare", "--uts", "sh", "-c", words], timeout=120)
    found = wrong(ended.output)
    assert ended.code == 1 and "Traceback" not in ended.output, ended.output
    assert found[0].startswith(
        "nowhere (rank 0): its own name nowhere does not resolve"
    )
    assert "add the line '127.0.0.1 nowhere' to /etc/hosts" in ended.output


def test_a_host_that_gives_nothing(tmp_path: Path):
    """No launcher, HOME or PATH, a run folder of bytes, no data folder; a name that would end
    Gloo."""
    require("unshare")
    run_dir = os.fsdecode(bytes(tmp_path) + b"/r\xff")
    script = f'hostname nowhere; exec env -i {sys.executable} {DOCTOR} "$@"'
    words = ["unshare", "--uts", "sh", "-c", script, "sh", f"--run_dir={run_dir}"]
    ended = run([*words, f"--data_dir={tmp_path}/none"], timeout=180)
    found = wrong(ended.output)
    assert len(found) == 1, ended.output
    assert found[0].startswith(
        f"nowhere (rank 0): the data folder {tmp_path}/none: No such file"
    )
    assert ended.code == 1 and "Traceback" not in ended.output


@pytest.mark.timeout(400)
def test_hosts_with_networks_of_their_own(hosts: Hosts, tmp_path: Path, folders):
    """Sound, by hosts.sh; then with a way that is closed, which a collective would wait for."""
    command = hosts[1].words(
        ROOT / "launch/hosts.sh",
        "-H",
        "node1:1,node2:1,node3:1",
        "-p",
        "2222",
        "--interface",
        "eth0",
        sys.executable,
        DOCTOR,
        "--mb=1",
        *folders,
    )
    card = tmp_path / "card"
    (card / "device").mkdir(parents=True)
    (card / "speed").write_text("10000\n")
    for host in hosts:  # whose network is slowed down to 400 Mbit/s
        host.sh(f"mount --bind {card} /sys/class/net/eth0")
    try:
        ended = run(command, timeout=190)
    finally:
        for host in hosts:
            host.sh("umount /sys/class/net/eth0")
    assert ended.code == 0, ended.output
    assert "3 rank(s) on 3 host(s), by MPI" in ended.output
    assert re.search(
        r"allreduce between them .*, their link has 1,250\.0 MB/s", ended.output
    )
    # Of speed: busy cores slow a pair of hosts.
    notes = re.findall("NOTE  .*", ended.output)
    assert all("allreduce" in note for note in notes), ended.output
    assert "nothing is wrong\n" in ended.output, ended.output
    hosts[3].sh("ip route add unreachable 10.77.0.2/32")
    try:
        ended = run(command, timeout=190)
    finally:
        hosts[3].sh("ip route del unreachable 10.77.0.2/32")
    assert ended.code == 1
    there, back = sorted(wrong(ended.output))
    assert there.startswith(
        "node2 (rank 1) to node3 (rank 2): no connection to 10.77.0.3 port "
    )
    assert back.startswith(
        "node3 (rank 2) to node2 (rank 1): no connection to 10.77.0.2 port "
    )
    assert "allreduce" not in ended.output, "Horovod would hang"


@pytest.mark.parametrize("launcher", ["", "12.0;tcp4://127.0.0.1:1"])
def test_variables_that_another_run_has_left_are_named(launcher: str):
    """Without those that name the launcher, or with its port, which is closed by now."""
    left = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    if launcher:
        left["PMIX_SERVER_URI41"] = launcher
    ended = run([sys.executable, DOCTOR], timeout=60, env=left)
    assert ended.code == 1 and ended.output.count("\n") == 1, ended.output
    assert (
        "error: OMPI_COMM_WORLD_RANK=0 says that this process is one of" in ended.output
    )


def test_a_door_answers_who_has_its_token_and_nobody_else():
    door = ranks.open_door()
    own = ranks.open_door()
    place = ("127.0.0.1", door["port"])
    both = [own | {"addresses": ["127.0.0.1"]}, door | {"addresses": ["127.0.0.1"]}]
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection(place))
        start = time.monotonic()
        assert ranks.closed(0, both) == []
        assert time.monotonic() - start < 2, "a silent connection keeps nobody waiting"
    assert ranks.closed(0, [own, door | {"addresses": ["::1", "127.0.0.1"]}]) == []
    strange = [own, door | {"addresses": ["127.0.0.1"], "token": "00" * 16}]
    reason = f"127.0.0.1 port {door['port']}: something else is there"
    assert ranks.closed(0, strange) == [(1, reason)]
    for sent in (b"\0", b"GET / HTTP/1.1\r\n\r\n" * 100):
        with (
            socket.create_connection(place) as link,
            contextlib.suppress(ConnectionResetError),
        ):
            link.sendall(sent)
            assert link.recv(1) == b""


@pytest.fixture
def every() -> list[dict]:
    """Two ranks on each of three hosts, sound, with two GPUs each."""
    facts_of_ranks = []
    for rank in range(6):
        number = 1 + rank // 2
        facts_of_ranks.append(
            {
                "host": f"node{number}",
                "every_address": [f"10.0.0.{number}"],
                "local_rank": rank % 2,
                "link": 0.0,
                "cards": {},
                "gpus": {
                    "shown": 2,
                    "seen": 2,
                    "cuda": True,
                    "nccl": True,
                    "each": [["a", ""], ["b", ""]],
                },
                "alike": {"keras": "3.15", "GPU driver": "550"},
                "faults": [],
            }
        )
    return facts_of_ranks


def judged(every: list[dict], device: str = "auto") -> list[str]:
    return [f"{f.level} {f.where}: {f.what}" for f in findings.of_facts(every, device)]


BOTH = "node2 (rank 2, 3)"


@pytest.mark.parametrize(
    "name, changed, text",
    [
        ("alike", {"keras": "3.9"}, f"wrong {BOTH}: keras is 3.9, elsewhere 3.15"),
        (
            "alike",
            {"GPU driver": "470"},
            f"note {BOTH}: GPU driver is 470, elsewhere 550",
        ),
        ("faults", [["it burns", "water", "fatal"]], f"fatal {BOTH}: it burns"),
        (
            "gpus",
            {"seen": 0},
            f"wrong {BOTH}: TensorFlow sees no GPU, the driver shows 2",
        ),
        ("gpus", {"nccl": False}, f"note {BOTH}: Horovod is built without NCCL"),
        (
            "gpus",
            {"seen": 1, "each": [["a", ""]]},
            "fatal node2 (rank 3): other ranks there take all of the 1 visible GPU(s)",
        ),
    ],
)
def test_one_odd_host(every, name: str, changed, text: str):
    assert judged(every) == []
    for rank in (2, 3):
        every[rank][name] = changed if name == "faults" else every[rank][name] | changed
    [found] = judged(every)
    assert found.startswith(text)


def test_one_gpu_a_task_is_sound(every):
    for rank, one in enumerate(every):
        one["gpus"] = one["gpus"] | {"seen": 1, "each": [[f"{rank}", ""]]}
    assert judged(every) == []


def test_hosts_without_gpus_may_train_on_cpus_unless_gpus_are_demanded(every):
    for one in every:
        one["gpus"] = {"shown": 0, "seen": 0, "cuda": False, "nccl": False}
    assert judged(every) == []
    [found] = judged(every, "gpu")
    assert "TensorFlow sees no GPU, the driver shows 0: it is the CPU build" in found


@pytest.mark.parametrize(
    "slow, texts",
    [
        ([], []),
        (
            [(0, 2), (2, 4)],
            ["node2 (rank 2): allreduce with any other host reaches 10.0 MB/s"],
        ),
        (
            [(0, 4)],
            [
                "node1 (rank 0); node3 (rank 4): allreduce between them reaches 10.0 MB/s"
            ],
        ),
    ],
)
def test_slow_hosts_and_pairs_are_noted(every, slow, texts: list[str]):
    seen = {(): [{"rank": 0, "right": True, "rate": 1e6}]}
    for pair in ((0, 2), (0, 4), (2, 4)):
        rate = 1e7 if pair in slow else 1e9
        seen[pair] = [{"rank": rank, "right": True, "rate": rate} for rank in pair]
    hosts_of_ranks = [one["host"] for one in every]
    found = findings.of_times(hosts_of_ranks, seen)
    assert [f"{f.where}: {f.what}" for f in found] == [
        f"{t}, others 1,000.0 MB/s" for t in texts
    ]
    assert all(f.level == "note" for f in found)
    seen[0, 4][1]["right"] = False
    [*_, sums] = sorted(findings.of_times(hosts_of_ranks, seen), key=lambda f: f.level)
    assert (sums.level, sums.where) == ("wrong", "node3 (rank 4)")


@pytest.mark.parametrize(
    ("link", "cards", "network", "seconds", "text"),
    [
        (1.25e9, {}, "", 0.3, "reaches 55.9 MB/s, their link has 1,250.0 MB/s"),
        (1.25e9, {}, "", 0.02, ""),
        # What only latency costs, and what one rank's TCP reaches without NCCL, on a faster link.
        (25e9, {}, "", 0.03, ""),
        (
            25e9,
            {},
            "Socket ([0]eth0:10.0.0.1<0>)",
            0.03,
            "reaches 559.2 MB/s, their link has 25,000",
        ),
        (
            1.25e9,
            {"mlx5_0:1": 50e9},
            "IB ([0]mlx5_0:1/IB)",
            0.02,
            "their link has 50,000.0 MB/s",
        ),
        (1.25e9, {"mlx5_0:1": 50e9}, "IB ([0]mlx5_0:1/IB)", 0.003, ""),
        (0.0, {}, "", 9.0, ""),
    ],
)
def test_speeds_are_held_against_what_the_link_has(
    every, link, cards, network, seconds, text: str
):
    """Also where all are alike, and of two ranks, which are all."""
    every = [one | {"link": link, "cards": cards} for one in every]
    every[2]["link"] = every[2]["link"] and max(link, 99e9)  # the slowest end counts
    sent = 16 << 20
    timed = {"rank": 0, "seconds": seconds, "rate": sent / seconds, "right": True}
    for pair in ((), (0, 2)):
        found = findings.of_links(every, {pair: [timed | {"network": network}]})
        assert len(found) == bool(text) and all(text in one.what for one in found), (
            found
        )
        assert all(one.level == "note" for one in found)
    assert not findings.of_links(every[:2], {(): [timed | {"network": network}]}), (
        "of one host"
    )


def test_hosts_that_do_not_reach_each_other_are_reported_without_times(every, capsys):
    everyone = types.SimpleNamespace(rank=0, size=len(every), name="MPI")
    options = types.SimpleNamespace(mb=1)
    examination = doctor.Examination(everyone, every[0], options)
    examination.facts = every
    examination.hosts = [one["host"] for one in every]
    examination.found.append(
        findings.Finding("node1 to node2", "no connection", "open it", "fatal")
    )
    examination.report([])
    assert "WRONG  node1 to node2: no connection" in capsys.readouterr().out


NCCL_LOG = """node1:7:9 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:7:9 [0] NCCL INFO NET/IB : No device found.
node1:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
"""


@pytest.mark.parametrize(
    ("last", "network"),
    [
        ("NCCL INFO Using network Socket", "Socket ([0]eth0:10.0.0.1<0>)"),
        (
            "NCCL INFO Assigned NET plugin Socket to comm",
            "Socket ([0]eth0:10.0.0.1<0>)",
        ),
        ("NCCL INFO Using network AWS Libfabric", "AWS Libfabric"),
        ("", ""),
    ],
)
def test_what_nccl_has_chosen_is_read_and_named(every, last: str, network: str):
    assert facts.network_of_nccl(f"{NCCL_LOG}node1:7:9 [0] {last}\n") == network
    every[0]["cards"] = {"mlx5_0:1": 50e9}
    timed = [{"rank": 0, "network": network}, {"rank": 2, "network": network}]
    found = findings.of_nccl(every, timed)
    if network.startswith("Socket"):
        [note] = found
        assert note.where == "node1 (rank 0)"
        assert (
            note.what
            == f"NCCL sends by {network}, though InfiniBand is there: mlx5_0:1"
        )
    else:
        assert found == []


@pytest.fixture
def card(monkeypatch, tmp_path: Path) -> Path:
    """A host with an InfiniBand card; its /dev/infiniband."""
    port = tmp_path / "class" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    down = tmp_path / "class" / "mlx5_1" / "ports" / "1"
    down.mkdir(parents=True)
    (down / "state").write_text("1: DOWN\n")
    (down / "rate").write_text("10 Gb/sec (4X)\n")
    monkeypatch.setattr(facts, "_CARDS", tmp_path / "class")
    monkeypatch.setattr(facts, "_CARD_FILES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    return tmp_path / "dev"


def test_what_keeps_nccl_from_infiniband(monkeypatch, card: Path):
    monkeypatch.setattr(facts, "_CAP_IPC_LOCK", 0)
    limits = [(65536, 65536)]
    monkeypatch.setattr(facts.resource, "getrlimit", lambda _: limits[0])
    assert facts.cards() == {"mlx5_0:1": 50e9}
    [(what, todo, level)] = facts.card_faults(facts.cards())
    assert what == "64 KiB of memory may be locked; InfiniBand (mlx5_0:1) locks more"
    assert "ulimit -l unlimited" in todo and level == "wrong"
    limits[0] = (facts.resource.RLIM_INFINITY, facts.resource.RLIM_INFINITY)
    assert facts.card_faults(facts.cards()) == []
    (card / "uverbs0").unlink()
    [(what, _, level)] = facts.card_faults(facts.cards())
    assert what.endswith("is not: NCCL takes Socket") and level == "note"
    assert facts.card_faults({}) == []


def test_a_run_folder_without_locks_is_noted(monkeypatch, tmp_path: Path):
    assert facts.run_folder_faults(str(tmp_path)) == []

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(facts.fcntl, "flock", flock)
    [(what, todo, level)] = facts.run_folder_faults(str(tmp_path))
    assert (
        what
        == f"the file system of {tmp_path} has no locks (flock: Function not implemented)"
    )
    assert "-o flock" in todo and level == "note"


@pytest.mark.parametrize("count", [2, 7, 16, 33, 1000])
def test_each_pair_is_timed_once_and_no_host_is_in_two_pairs_of_a_round(count: int):
    table = doctor.rounds(count)
    assert table == doctor.rounds(count), "drawn alike on every host"
    all_pairs = []
    for pairs in table:
        all_pairs += pairs
        seats = list(itertools.chain(*pairs))
        assert len(seats) == len(set(seats)) >= count - 1
    assert len(set(all_pairs)) == len(all_pairs)
    if count > 32:
        assert len(table) == 6
    else:
        assert len(all_pairs) == count * (count - 1) // 2


@pytest.mark.parametrize(
    "setting, taken, fault",
    [
        ("", ["10.0.0.1", "fd00::1", "172.17.0.1"], []),
        ("eth0", ["10.0.0.1", "fd00::1"], []),
        ("10.0.0.0/24", ["10.0.0.1"], []),
        ("lo", [], []),
        ("127.0.0.0/8", [], []),
        ("eth9", [], ["OMPI_MCA_btl_tcp_if_include=eth9 names no network there"]),
        ("10.0/16", [], ["OMPI_MCA_btl_tcp_if_include=10.0/16 names no network there"]),
    ],
)
def test_addresses_of_the_network_that_mpi_takes(
    monkeypatch, setting: str, taken, fault
):
    there = [("eth0", "10.0.0.1"), ("eth0", "fd00::1"), ("docker0", "172.17.0.1")]
    monkeypatch.setattr(facts, "ways", lambda: there)
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", setting)
    found, faults = facts.addresses()
    assert found == taken
    assert [what for what, _, _ in faults] == fault
    for _, todo, level in faults:
        assert "there: eth0 (10.0.0.1)" in todo and level == "fatal"


def test_gloo_listens_at_the_address_that_debian_gives_to_a_name():
    assert facts.unheard("127.0.1.1") == facts.unheard("127.0.0.1") == ""
    assert facts.unheard("192.0.2.7") == "resolves to 192.0.2.7, no address of it"


def test_a_log_of_nccl_s_that_a_user_wants_stays(tmp_path, monkeypatch):
    log = tmp_path / "doctor-reports" / "nccl.log"
    log.parent.mkdir()
    log.touch()
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(log))
    assert doctor.network_of_nccl() == ""
    assert log.exists()


def test_little_shared_memory_is_noted_where_gpus_share_it(monkeypatch):
    size = types.SimpleNamespace(f_blocks=64 << 8, f_frsize=4096)
    monkeypatch.setattr(facts.os, "statvfs", lambda _: size)
    [(what, todo, level)] = facts.shared_memory_faults(2)
    assert "/dev/shm holds 64 MiB" in what and "--shm-size" in todo and level == "note"
    assert facts.shared_memory_faults(1) == []
