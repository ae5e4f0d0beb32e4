"""The preflight on three hosts: nothing found when all is well, each fault named where it is."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import ROOT, Hosts, hosts, require  # noqa: F401

DOCTOR = str(ROOT / "launch" / "doctor.py")
_FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")


def examine(hosts: Hosts, folder: Path, *flags: str, via: str = "gloo", env=None):  # noqa: F811
    """Runs doctor.py on all three; returns how it ended and its JSON."""
    result = folder / "doctor.json"
    result.unlink(missing_ok=True)
    words = ["-H", "node1:1,node2:1,node3:1", f"--{via}", "-p", "2222", "--interface", "eth0"]
    command = [sys.executable, DOCTOR, f"--json={result}", "--max_mb=1", *flags]
    ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=200, env=env)
    assert result.exists(), ended.output
    return ended, json.loads(result.read_text())


def found(record: dict) -> list[tuple[str, str]]:
    """Where and what, of the things that are wrong."""
    return [(f["where"], f["what"]) for f in record["findings"] if f["level"] == "wrong"]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Flags that name a data folder and a run folder, which all hosts see."""
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / name).write_text(name)
    (tmp_path / "run").mkdir()
    return [f"--data_dir={tmp_path / 'data'}", f"--run_dir={tmp_path / 'run'}"]


@pytest.mark.timeout(400)
def test_sound_hosts_and_a_clock_that_is_ahead(hosts: Hosts, tmp_path, folders):  # noqa: F811
    """Two in one, as each launch takes a while: the clock is the only thing found."""
    if not _FAKETIME:
        require("libfaketime")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$(hostname)" = node3 ]; then export LD_PRELOAD={_FAKETIME} FAKETIME=+5s '
        "DONT_FAKE_MONOTONIC=1; fi\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    result = tmp_path / "doctor.json"
    words = ["-H", "node1:1,node2:1,node3:1", "--mpi", "-p", "2222", "--interface", "eth0"]
    command = [str(python), DOCTOR, f"--json={result}", "--max_mb=1", *folders]
    ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=200)

    assert ended.code == 1, ended.output
    record = json.loads(result.read_text())
    [(where, what)] = found(record)
    assert where == "node3 (rank 2)"
    assert "clock is 5.0 s ahead" in what
    assert "3 rank(s) on 3 host(s), by MPI" in ended.output
    assert record["wrong"] == [[], [], []]  # every collective, every type
    assert len(record["pairs"]) == 3
    assert {row["bytes"] for row in record["speeds"]} == {4**n << 10 for n in range(6)}
    for row in record["speeds"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)  # 2 (n - 1) / n for n = 3
    assert not list((tmp_path / "run").iterdir()), "it cleans up after itself"


@pytest.mark.timeout(400)
def test_each_fault_is_named_with_its_host(hosts: Hosts, tmp_path, folders):  # noqa: F811
    """Seven faults at once, on different hosts; and not a second finding for any of them."""
    one, two, three = hosts
    # node1: its disk is full.
    one.sh(
        f"mount -t tmpfs -o size=2m tmpfs {tmp_path}/run\n"
        f"head -c 3M /dev/zero >{tmp_path}/run/x || true"
    )
    # node2: Debian's line for a name, and a slow link.
    two.hosts_file.write_text(
        two.hosts_file.read_text().replace("10.77.0.2 node2", "127.0.1.1 node2")
    )
    two.shape(40, hosts.switch)
    # node3: no data, another version of a package, and more ranks than GPUs.
    three.sh(f"mount -t tmpfs tmpfs {tmp_path}/data")
    metadata = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    metadata = next(metadata.glob("absl_py-*.dist-info/METADATA"))
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 0."))
    three.sh(f"mount --bind {other} {metadata}")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-0a1b, NVIDIA H100 80GB HBM3, 550.54.15'\n")
    smi.chmod(0o755)
    for host in hosts:  # a driver that shows one GPU
        host.sh(f"touch /usr/local/bin/nvidia-smi && mount --bind {smi} /usr/local/bin/nvidia-smi")

    words = ["-H", "node1:1,node2:1,node3:2", "--gloo", "-p", "2222", "--interface", "eth0"]
    result = tmp_path / "doctor.json"
    command = [sys.executable, DOCTOR, f"--json={result}", *folders]
    try:
        ended = one.run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=200)
    finally:
        _undo(hosts, tmp_path, metadata)
    assert ended.code == 1, ended.output
    wrong = found(json.loads(result.read_text()))

    def one_at(host: str, *parts: str) -> None:
        its = [what for where, what in wrong if where.startswith(host) and parts[0] in what]
        assert len(its) == 1, f"{host}, {parts}: {wrong}"
        assert all(part in its[0] for part in parts), its

    one_at("node1 (rank 0)", "the run folder", "cannot be written to: No space left")
    one_at("node2 (rank 1)", "own name node2 resolves to 127.0.1.1")
    one_at("node2 (rank 1)", "sends at")
    one_at("node2 (rank 1)", "receives at")
    one_at("node3 (rank 2)", "data folder", "is empty")
    one_at("node3 (rank 2, 3)", "absl-py is 0.", "elsewhere 2.")
    one_at("node3 (rank 2, 3)", "2 ranks but 1 visible GPU(s)")
    idle = "nvidia-smi shows 1 GPU(s)", "TensorFlow sees none: it is the CPU build"
    one_at("node1 (rank 0); node2 (rank 1); node3 (rank 2, 3)", *idle)
    assert len(wrong) == 8, wrong
    # Horovod was not started: under Gloo it would have crashed.
    assert json.loads(result.read_text())["speeds"] == []
    assert "10.77.0.2" in ended.output and "/etc/hosts" in ended.output  # what to do


def _undo(hosts: Hosts, tmp_path: Path, metadata: Path) -> None:  # noqa: F811
    one, two, three = hosts
    one.sh(f"umount {tmp_path}/run")
    text = two.hosts_file.read_text()
    two.hosts_file.write_text(text.replace("127.0.1.1 node2", "10.77.0.2 node2"))
    three.sh(f"umount {tmp_path}/data {metadata}")
    for host in hosts:
        host.sh("umount /usr/local/bin/nvidia-smi")
    two.shape(400, hosts.switch)
    Path("/usr/local/bin/nvidia-smi").unlink()


@pytest.mark.timeout(400)
def test_two_hosts_that_cannot_reach_each_other(hosts: Hosts, tmp_path):  # noqa: F811
    """Both reach rank 0, so the launcher starts them; a collective would wait for ever."""
    hosts[3].sh("ip route add unreachable 10.77.0.2/32")
    try:
        ended, record = examine(hosts, tmp_path)
    finally:
        hosts[3].sh("ip route del unreachable 10.77.0.2/32")
    assert ended.code == 1
    there, back = sorted(found(record))
    assert there[0] == "node2 (rank 1) to node3 (rank 2)"
    assert "no connection to 10.77.0.3" in there[1]
    assert back[0] == "node3 (rank 2) to node2 (rank 1)"
    assert "no connection to 10.77.0.2" in back[1]
    assert {tuple(p["pair"]) for p in record["pairs"]} == {(0, 1), (0, 2)}


@pytest.mark.timeout(300)
def test_a_rank_that_never_reports_is_named_with_its_host(hosts: Hosts, tmp_path):  # noqa: F811
    """It hangs before it can say anything, as on a disk that does not answer."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" != node3 ] || exec sleep 300\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    words = ["-H", "node1:1,node2:1,node3:1", "--gloo", "-p", "2222", "--interface", "eth0"]
    command = [str(python), DOCTOR, "--timeout=25", f"--json={tmp_path / 'doctor.json'}"]
    ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, *command, timeout=200)
    assert ended.code == 1, ended.output
    [(where, what)] = found(json.loads((tmp_path / "doctor.json").read_text()))
    assert where == "node3 (rank 2)"
    assert "nothing came from there in 25 s to the launcher's server at 10.77.0.1 port" in what
    assert "hung" not in ended.output, "all other ranks ended by themselves"


@pytest.mark.timeout(400)
def test_an_interface_with_the_same_address_everywhere(hosts: Hosts, tmp_path):  # noqa: F811
    """docker0 as Docker makes it on every host, with no container on it: Open MPI might take it."""
    for host in hosts:
        host.sh(
            "ip link add docker0 type bridge && ip link set docker0 up\n"
            "ip address add 172.17.0.1/16 dev docker0"
        )
    try:
        words = ["-H", "node1:1,node2:1,node3:1", "--mpi", "-p", "2222"]
        words += [sys.executable, DOCTOR, "--timeout=25"]
        ended = hosts[1].run(str(ROOT / "launch/hosts.sh"), *words, timeout=200)
        assert ended.code == 1, ended.output
        assert "on node2 hung for 25 s while telling rank 0 what it saw: " in ended.output
        assert "--interface: docker0 on this host most likely leads to no other" in ended.output
        # With the interface named nothing is left to say.
        ended, record = examine(hosts, tmp_path, "--no_collectives", via="mpi")
        assert (ended.code, record["findings"]) == (0, []), ended.output
        tried = [[own, other, "172.17.0.1"] for own in range(3) for other in range(3)]
        assert sorted(record["unreached"]) == [way for way in tried if way[0] != way[1]]
    finally:
        for host in hosts:
            host.sh("ip link del docker0")


def test_alone_without_a_launcher(tmp_path: Path):
    words = [sys.executable, DOCTOR, "--json=-", f"--data_dir={tmp_path}/none"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    record = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert not record["ok"]
    assert record["wrong"] == [[]], "collectives run, without MPI's daemon"
    assert [what for _, what in found(record)] == [
        f"the data folder {tmp_path}/none: there is no such folder"
    ]


def test_a_host_that_gives_nothing(tmp_path: Path):
    """No HOME, no PATH, a folder for temporary files that is not there, a run folder of bytes."""
    run_dir = os.fsdecode(bytes(tmp_path) + b"/r\xff")
    words = [sys.executable, DOCTOR, "--json=-", "--no_collectives", f"--run_dir={run_dir}"]
    env = {"TMPDIR": f"{tmp_path}/gone", "TF_X": os.fsdecode(b"\xff")}
    ended = subprocess.run(words, capture_output=True, timeout=100, env=env, umask=0o077)
    record = json.loads(ended.stdout)
    assert [what for _, what in found(record)] == [
        f"{tmp_path}/gone (temporary files) cannot be written to: there is no such folder"
    ], ended.stderr
    assert record["facts"][0]["environment"]["TF_X"] == "\udcff"
