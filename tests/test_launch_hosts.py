"""hosts.sh, bind.sh and stop.sh: on three hosts with their own sshd, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hosts import ENVIRONMENT, ROOT, Hosts, hosts, run  # noqa: F401
from terminal import CTRL_C, Terminal

HOSTS_SH = str(ROOT / "launch" / "hosts.sh")
OVER_SSH = ["-H", "node2:1,node1:1,node3:1", "-p", "2222", "--interface", "eth0"]
# Seconds of work at most; the graph is built in most of the time.
TRAINING = [
    *(sys.executable, "train.py", "--flagfile=configs/demo.cfg", "--image_size=32"),
    *("--global_batch_size=6", "--warmup_steps=0", "--log_every=1", "--eval_every=0"),
    *("--checkpoint_every=0", "--eval_batch_size=8"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few demo scenes."""
    from data.demo import scenes

    root = tmp_path_factory.mktemp("scenes") / "data"
    scenes.make(root, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3)))
    return root


def stop_at(words: list[str], line: str, numbers: list[int], timeout: float) -> tuple[int, str]:
    """Runs `words` and sends the signals to hosts.sh when `line` is printed, a second apart."""
    env = os.environ | ENVIRONMENT
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(words, env=env, text=True, start_new_session=True, **pipes)
    timer = threading.Timer(timeout, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    lines, told = [], False
    try:
        for text in process.stdout:
            lines.append(text)
            if not told and line in text:
                told = True
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                for number in numbers:
                    os.kill(int(children.split()[0]), number)
                    time.sleep(1)
        code = process.wait()
    finally:
        timer.cancel()
    assert timer.is_alive() or code != -9, f"hung\n{''.join(lines[-40:])}"
    assert told, "".join(lines[-40:])
    return code, "".join(lines)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "via, number, then",
    [("gloo", signal.SIGTERM, "mpi"), ("mpi", signal.SIGUSR1, "gloo")],
)
def test_three_hosts_train_stop_and_go_on(hosts: Hosts, data, tmp_path, via, number, then):  # noqa: F811
    """A stop request to the launcher, then the same command again, over the other transport."""
    flags = [f"--data_dir={data}", f"--run_dir={tmp_path}"]
    long = [HOSTS_SH, f"--{via}", *OVER_SSH, *TRAINING, *flags, "--num_steps=20000"]
    code, output = stop_at(hosts[1].words(*long), "step 2/", [number], timeout=240)
    assert code == 75, output
    assert "3 ranks on 3 host(s) (node1, node2, node3)" in output
    assert {"gloo": ", Gloo", "mpi": ", MPI"}[via] in output
    assert "stop signal received: saved at step" in output
    assert "Traceback" not in output
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert (stopped["exit_reason"], stopped["ranks"]) == ("preempted", 3)

    last = stopped["step"] + 2
    rest = [HOSTS_SH, f"--{then}", *OVER_SSH, *TRAINING, *flags, f"--num_steps={last}"]
    ended = hosts[1].run(*rest, timeout=200)
    assert ended.code == 0, ended.output
    assert re.search(f"resuming from .* at step {stopped['step']}", ended.output)
    assert {"gloo": ", Gloo", "mpi": ", MPI"}[then] in ended.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("done", last)
    for host in hosts:
        assert "train.py" not in host.sh("ps ax"), f"left behind on {host.name}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("via", ["gloo", "mpi"])
def test_a_second_ctrl_c_ends_all_ranks_on_all_hosts(hosts: Hosts, data, tmp_path, via):  # noqa: F811
    """Both come while the ranks build their model: they are not heard there."""
    flags = [f"--data_dir={data}", f"--run_dir={tmp_path}", "--num_steps=20000"]
    words = hosts[1].words(HOSTS_SH, f"--{via}", *OVER_SSH, *TRAINING, *flags)
    code, output = stop_at(words, "3 ranks on", [signal.SIGINT] * 2, timeout=240)
    assert code == 130, output
    assert output.count("stopping after this step") == 1 and "Traceback" not in output
    for host in hosts:
        assert "train.py" not in host.sh("ps ax"), f"left behind on {host.name}"


SAYS = "stopping after this step: saving, then ending; Ctrl-C again ends at once"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["hosts.sh --gloo", "hosts.sh --mpi", "make train"])
def test_ctrl_c_in_a_terminal(data: Path, tmp_path: Path, how: str):
    """Once while it trains: saved, 75, which make turns into its own; twice: ended at once.

    Twice over MPI: test_a_second_ctrl_c_ends_all_ranks_on_all_hosts.
    """
    flags = [f"--data_dir={data}", f"--run_dir={tmp_path}", "--num_steps=20000"]
    if how == "make train":
        flags = TRAINING[3:] + flags
        words = ["make", "-C", "..", "-o", "setup", "train", f"ARGS={' '.join(flags)}"]
    else:
        words = [HOSTS_SH, how.split()[1], "-np", "2", *TRAINING, *flags]
    with Terminal(words, ROOT / "template", ENVIRONMENT) as terminal:
        terminal.wait_for("step 2/", 200)
        terminal.press(CTRL_C)
        assert terminal.wait(60) == (130 if how == "make train" else 75), terminal.shown
        assert terminal.shown.count(SAYS) == terminal.shown.count("stopping after") == 1
        saved = re.search(r"saved at step (\d+)", terminal.shown)
        assert saved, terminal.shown
        assert not terminal.left_after(10)
        assert how != "make train" or not re.search(r"\[0\]<\w+>:", terminal.shown)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{int(saved[1]):08}"]

    if "--gloo" not in how:
        return
    with Terminal(words, ROOT / "template", ENVIRONMENT) as terminal:
        terminal.wait_for("2 ranks on", 200)
        terminal.press(CTRL_C)
        terminal.wait_for(SAYS, 5)
        time.sleep(0.7)
        terminal.press(CTRL_C)
        assert terminal.wait(8) == 130, terminal.shown
        assert "saved at" not in terminal.shown and "Traceback" not in terminal.shown
        assert not terminal.left_after(5)


@pytest.mark.parametrize("via", ["gloo", "mpi"])
@pytest.mark.parametrize("code", [0, 75])
def test_the_exit_code_is_the_ranks(via: str, code: int):
    command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    ended = run([HOSTS_SH, f"--{via}", "-np", "2", *command], timeout=60)
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output


def test_ranks_keep_the_fast_kernels_and_what_the_caller_set():
    show = "import os; print('kernels', os.environ.get('TF_ENABLE_ONEDNN_OPTS'))"
    words = [HOSTS_SH, "-np", "1", sys.executable, "-c", show]
    ended = run(words, timeout=60)
    assert "kernels None" in ended.output
    assert "oneDNN" not in ended.output  # no noise of the launcher's own TensorFlow
    assert "kernels 0" in run(words, timeout=60, env={"TF_ENABLE_ONEDNN_OPTS": "0"}).output


def dry(*words: str) -> str:
    ended = run([HOSTS_SH, *words, "--dry-run", "python", "train.py"], timeout=20)
    assert ended.code == 0, ended.output
    return ended.output


def test_hostfile_in_both_spellings(tmp_path: Path):
    file = tmp_path / "hosts.txt"
    file.write_text(
        "# two racks\nnode1 slots=8\n\nnode2:4  # half of it\nnode3 slots = 2 max_slots=4\nnode4\n"
    )
    words = dry("--hostfile", str(file))
    assert r"-np 15 -H node1:8\,node2:4\,node3:2\,node4:1 " in words


@pytest.mark.parametrize("count", [63, 64])
def test_from_64_hosts_all_are_reached_from_here(count: int):
    names = ",".join(f"n{i}:8" for i in range(count))
    words = dry("--mpi", "-H", names)
    assert (f"plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent {count} " in words) == (
        count == 64
    )


def test_interface_port_and_key():
    flags = ["-H", "a:1,b:1", "-p", "2222", "-i", "/k", "--interface", "ib0"]
    gloo, mpi = dry(*flags), dry("--mpi", *flags)
    assert "-p 2222 -i /k --network-interfaces ib0" in gloo
    assert r"-mca plm_rsh_args \ -p\ 2222\ -i\ /k" in mpi
    assert "btl_tcp_if_include ib0" in mpi and "NCCL_SOCKET_IFNAME=ib0" in mpi


@pytest.mark.parametrize(
    "words, message",
    [
        (["-H", "node1"], "'node1' is not HOST:RANKS"),
        (["-H", "node1:x"], "'node1:x' is not HOST:RANKS"),
        (["-H", "node1:2", "-np", "3"], "-np 3 is more than the 2 slots"),
        (["--hostfile", "/nowhere"], "cannot read the hostfile /nowhere"),
        ([], "how many ranks? Give -H, --hostfile or -np"),
        (["--fast", "-np", "2"], "unknown option --fast"),
    ],
)
def test_wrong_use_is_explained(words: list[str], message: str):
    ended = run([HOSTS_SH, *words, "python", "train.py"], timeout=20)
    assert ended.code == 2
    assert message in ended.output


def test_check_comes_first_and_stops_what_would_fail(tmp_path: Path):
    train = [sys.executable, "-c", "print('trained')", f"--data_dir={tmp_path}/none"]
    ended = run([HOSTS_SH, "-np", "1", "--check", *train], timeout=100)
    assert ended.code == 1
    assert "there is no such folder" in ended.output
    assert "trained" not in ended.output


def bound(rank: int, ranks: int, **env: str) -> str:
    words = [str(ROOT / "launch/bind.sh"), sys.executable, "-c"]
    words += ["import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('RANK_BOUND'))"]
    env |= {"HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": str(ranks)}
    return run(words, timeout=20, env=env).output.strip()


def test_ranks_share_the_cores_without_overlap():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    half = len(cores) // 2
    for rank in range(2):
        own = cores[rank * half : (rank + 1) * half]
        assert bound(rank, 2) == f"{own} {','.join(map(str, own))}"


def test_bound_ranks_and_too_many_ranks_run_as_they_are():
    cores = sorted(os.sched_getaffinity(0))
    assert bound(0, len(cores) + 1) == f"{cores} None"
    assert bound(0, 2, OMPI_MCA_orte_bound_at_launch="1") == f"{cores} None"


def test_cores_are_those_near_the_gpu(tmp_path: Path):
    """Two GPUs on a machine whose second one hangs on another NUMA node; shown by a stand-in."""
    sys_folder = tmp_path / "sys"
    for bus, node in (("0000:17:00.0", 0), ("0000:9a:00.0", 1)):
        folder = sys_folder / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in ((0, "0"), (1, "1")):
        folder = sys_folder / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 00000000:9A:00.0\necho 00000000:17:00.0\n")
    smi.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "SYS": str(sys_folder)}
    assert [bound(rank, 2, **env)[:3] for rank in range(2)] == ["[1]", "[0]"]
    env["CUDA_VISIBLE_DEVICES"] = "1,0"
    assert [bound(rank, 2, **env)[:3] for rank in range(2)] == ["[0]", "[1]"]
