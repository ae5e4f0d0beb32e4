"""hosts.sh, bind.sh and stop.sh: on three hosts with their own sshd, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
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
STAND_IN = [sys.executable, str(ROOT / "tests" / "helpers" / "stand_in" / "train.py")]
OVER_SSH = ["-H", "node2:1,node1:1,node3:1", "-p", "2222"]
# Seconds of work at most; the graph is built in most of the time.
TRAINING = [
    *(sys.executable, "train.py", "--flagfile=configs/demo.cfg", "--image_size=32"),
    "--eval_crop=32",
    *("--global_batch_size=6", "--warmup_steps=0", "--log_every=1", "--eval_every=0"),
    *("--checkpoint_every=0", "--eval_batch_size=8"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few demo scenes."""
    from hvdkit.data import scenes

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
def test_three_hosts_train_stop_and_go_on(hosts: Hosts, data, tmp_path):  # noqa: F811
    """A stop request to the launcher, then the same command again."""
    words = [HOSTS_SH, *OVER_SSH, *TRAINING, f"--data_dir={data}", f"--run_dir={tmp_path}"]
    long = hosts[1].words(*words, "--num_steps=20000")
    code, output = stop_at(long, "step 2/", [signal.SIGTERM], timeout=240)
    assert code == 75, output
    assert "3 ranks on 3 host(s) (node1, node2, node3)" in output
    assert "stop signal received: saved at step" in output
    assert "Traceback" not in output
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert (stopped["exit_reason"], stopped["ranks"]) == ("preempted", 3)

    last = stopped["step"] + 2
    ended = hosts[1].run(*words, f"--num_steps={last}", timeout=200)
    assert ended.code == 0, ended.output
    assert re.search(f"resuming from .* at step {stopped['step']}", ended.output)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("done", last)
    for host in hosts:
        assert "train.py" not in host.sh("ps ax"), f"left behind on {host.name}"


ALLREDUCE = "from mpi4py import MPI; print(f'sum {MPI.COMM_WORLD.allreduce(1)}')"


def test_an_idle_docker0_on_every_host_is_not_waited_for(hosts: Hosts):  # noqa: F811
    """By default; mpirun that is told of it, as it would choose itself, hangs."""
    words = [HOSTS_SH, *OVER_SSH]
    ended = hosts[1].run(*words, sys.executable, "-c", ALLREDUCE, timeout=40)
    assert ended.code == 0 and ended.output.count("sum 3") == 3, ended.output
    assert "WARNING" not in ended.output
    words += ["--interface", "docker0,eth0"]
    with pytest.raises(AssertionError, match="hung"):
        hosts[1].run(*words, sys.executable, "-c", ALLREDUCE, timeout=10)


def ranks_left(hosts: Hosts) -> list[str]:  # noqa: F811
    shown = {host.name: host.sh("ps ax | grep -v 'mpirun\\|hosts.sh'") for host in hosts}
    return [name for name, processes in shown.items() if STAND_IN[1] in processes]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("lost", "named"), [(1, "node2"), (3, "node3")])
def test_ranks_end_when_a_host_is_lost(hosts: Hosts, tmp_path, lost, named):  # noqa: F811
    """The launcher's own, which has no rank: the others save; or one that has, which is named."""
    ranks = "node2:1,node3:1" if lost == 1 else "node1:1,node2:1,node3:1"
    words = [HOSTS_SH, "-H", ranks, "-p", "2222", *STAND_IN, f"--run_dir={tmp_path}"]
    words = hosts[1].words(*words, "--steps=100000")
    env = os.environ | ENVIRONMENT
    with subprocess.Popen(words, env=env, text=True, stderr=-2, stdout=subprocess.PIPE) as launcher:
        assert any("step 3" in line for line in launcher.stdout)
        reader = threading.Thread(target=lambda: lines.extend(launcher.stdout), daemon=True)
        lines: list[str] = []
        reader.start()
        hosts.cut(hosts[lost])
        end = time.monotonic() + 30
        try:
            while there := ranks_left(hosts):
                assert time.monotonic() < end, there
                time.sleep(0.5)
            assert launcher.wait(30) == 1
        finally:
            hosts.cut(hosts[lost], back=True)
        reader.join(10)
    assert f"error: lost {named}, which has not answered" in "".join(lines)
    assert (tmp_path / "told-1").exists()
    for host in hosts:
        assert "orted" not in host.sh("ps ax | grep -v mpirun"), f"left behind on {host.name}"


def test_a_stop_reaches_ranks_of_other_hosts_and_leaves_nothing(hosts: Hosts, tmp_path):  # noqa: F811
    """SIGUSR1 to hosts.sh, on a host that has no rank itself."""
    hosts_of_ranks = ["-H", "node2:1,node3:1", "-p", "2222"]
    words = [HOSTS_SH, *hosts_of_ranks, *STAND_IN, f"--run_dir={tmp_path}"]
    long = hosts[1].words(*words, "--steps=100000")
    code, output = stop_at(long, "step 3", [signal.SIGUSR1], timeout=60)
    assert code == 75, output
    assert list((tmp_path / "checkpoints").iterdir())
    for host in hosts:
        assert STAND_IN[1] not in host.sh("ps ax"), f"left behind on {host.name}"


def test_a_stop_reaches_a_rank_inside_a_shell(tmp_path: Path):
    """Which itself knows nothing of the signal and would end by it, the rank left behind."""
    rank = " ".join([*STAND_IN, f"--run_dir={tmp_path}", "--steps=100000"])
    words = [HOSTS_SH, "-np", "1", "bash", "-c", f"{rank}; code=$?; exit $code"]
    env = os.environ | ENVIRONMENT
    with subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE) as process:
        assert any("begins at step 0" in line for line in process.stdout)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    assert (tmp_path / "told-0").exists()


def test_a_second_ctrl_c_ends_all_ranks_on_all_hosts(hosts: Hosts, tmp_path):  # noqa: F811
    """Where no rank hears a signal, as while it builds its model."""
    words = [HOSTS_SH, *OVER_SSH, *STAND_IN, f"--run_dir={tmp_path}", "--deaf"]
    words = hosts[1].words(*words, "--steps=100000")
    code, output = stop_at(words, "begins at step 0", [signal.SIGINT] * 2, timeout=60)
    assert code == 130, output
    assert output.count("stopping after this step") == 1 and "Traceback" not in output
    for host in hosts:
        assert STAND_IN[1] not in host.sh("ps ax"), f"left behind on {host.name}"


SAYS = "stopping after this step: saving, then ending; Ctrl-C again ends at once"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [pytest.param("hosts.sh", marks=pytest.mark.slow), "make train"])
def test_ctrl_c_in_a_terminal(data: Path, tmp_path: Path, how: str):
    """Once while it trains: saved, 75, which make turns into its own; twice: ended at once."""
    flags = [f"--data_dir={data}", f"--run_dir={tmp_path}", "--num_steps=20000"]
    if how == "make train":
        flags = TRAINING[3:] + flags
        words = ["make", "-C", "..", "-o", "setup", "train", f"ARGS={' '.join(flags)}"]
    else:
        words = [HOSTS_SH, "-np", "2", *TRAINING, *flags]
    with Terminal(words, ROOT / "template", ENVIRONMENT) as terminal:
        terminal.wait_for("step 2/", 200)
        terminal.press(CTRL_C)
        assert terminal.wait(60) == (130 if how == "make train" else 75), terminal.shown
        assert terminal.shown.count(SAYS) == terminal.shown.count("stopping after") == 1
        saved = re.search(r"saved at step (\d+)", terminal.shown)
        assert saved, terminal.shown
        assert not terminal.left_after(10)
        assert how != "make train" or not re.search(r"\[1,0\]<\w+>:", terminal.shown)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{int(saved[1]):08}"]

    if how == "make train":
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


def test_ranks_save_when_the_terminal_is_gone(tmp_path: Path):
    words = [HOSTS_SH, "-np", "2", *STAND_IN, f"--run_dir={tmp_path}", "--steps=100000"]
    with Terminal(words, ROOT, ENVIRONMENT) as terminal:
        terminal.wait_for("rank 1 of 2 begins", 60)
        time.sleep(1)
        terminal.hang_up()
        assert not terminal.left_after(30)
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-0", "told-1"]


# A launcher's own exit code by that of the ranks; launch/README.md has the table.
CARRIED = {
    "hosts.sh": ([HOSTS_SH, "-np", "2"], (0, 2, 3, 75)),
    "mpirun": (["mpirun", "-np", "2", "--bind-to", "none"], (2, 3, 75)),
    "horovodrun --mpi": (["horovodrun", "--mpi", "-np", "2"], (75,)),
    "horovodrun": (["horovodrun", "-np", "2"], (75,)),  # MPI, where Horovod is built with it
}


@pytest.mark.parametrize("launcher", CARRIED)
def test_exit_codes_arrive(launcher: str):
    words, codes = CARRIED[launcher]
    for code in codes:
        ended = run([*words, "sh", "-c", f"exit {code}"], timeout=60)
        assert ended.code == code, ended.output
        assert "Traceback" not in ended.output


def test_horovodruns_own_exit_code_over_gloo_is_1_whatever_the_ranks_say():
    words = ["horovodrun", "--gloo", "-np", "2", "sh", "-c", "exit 75"]
    assert run(words, timeout=60).code == 1


def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, tmp_path):  # noqa: F811
    """With host, port and ssh's own words, before a launcher is started; with --check too."""

    def refused(*words: str) -> str:
        ended = hosts[1].run(HOSTS_SH, *words, "sh", "-c", "echo started", timeout=60)
        assert ended.code == 1 and "started" not in ended.output, ended.output
        lines = ended.output.splitlines()
        assert all(line.startswith("error: cannot reach ") for line in lines), ended.output
        return ended.output

    said = refused("-H", "node1:1,node2:1,node3:1", "-p", "2223")
    assert "cannot reach node2, port 2223, by ssh: " in said and "Connection refused" in said
    assert "cannot reach node3, port 2223" in said and "node1" not in said
    said = refused("--check", "-H", "nowhere.invalid:1")
    assert "cannot reach nowhere.invalid, port 22" in said and "resolve" in said
    other = tmp_path / "other_key"
    hosts[1].sh(f"ssh-keygen -q -t ed25519 -N '' -f {other}; mv ~/.ssh/id_ed25519 ~/.ssh/kept")
    said = refused("-H", "node2:1", "-p", "2222", "-i", str(other))
    assert "cannot reach node2, port 2222" in said and "Permission denied" in said
    hosts[1].sh("mv ~/.ssh/kept ~/.ssh/id_ed25519")
    # Another machine answers by a known host's name.
    hosts[1].sh("ssh-keyscan -p 2222 node3 2>/dev/null | sed s/node3/node2/ >~/.ssh/known_hosts")
    assert "Host key verification failed" in refused("-H", "node2:1", "-p", "2222")
    hosts[1].sh("rm ~/.ssh/known_hosts")


def test_the_environment_is_passed_on_and_its_values_are_in_no_command(hosts: Hosts, tmp_path):  # noqa: F811
    """But for launchers' own variables and CUDA_VISIBLE_DEVICES, which is each host's own."""
    env = {"WANDB_API_KEY": "secret-7", "https_proxy": "http://p:1", "KERAS_HOME": "/k"}
    env |= {"OFI_NCCL_PROTOCOL": "RDMA", "ODD": "a  'b'\n$c", "CUDA_VISIBLE_DEVICES": "0"}
    show = (
        "import glob, json, os; commands = [open(f).read() for f in glob.glob('/proc/*/cmdline')];"
    )
    show += (
        "facts = [dict(os.environ), [c for c in commands if 'secret-' + '7' in c], len(commands)];"
    )
    show += f"json.dump(facts, open('{tmp_path}/' + os.uname().nodename, 'w'))"
    words = [HOSTS_SH, "-H", "node1:1,node2:1", "-p", "2222", "--interface", "eth0"]
    ended = hosts[1].run(*words, sys.executable, "-c", show, timeout=60, env=env)
    assert ended.code == 0, ended.output
    for name in ("node1", "node2"):
        found, told, commands = json.loads((tmp_path / name).read_text())
        assert not told and commands > 3
        assert found["NCCL_SOCKET_IFNAME"] == "eth0"
        assert found.get("CUDA_VISIBLE_DEVICES") == ("0" if name == "node1" else None)
        assert env.items() - found.items() <= {("CUDA_VISIBLE_DEVICES", "0")}


def test_plain_launchers_on_other_hosts_as_the_readme_has_them(hosts: Hosts):  # noqa: F811
    venv = Path(sys.executable).parent.parent
    ranks = [sys.executable, "-c", "import os; print('on ' + os.uname().nodename)"]
    hosts[1].sh(
        "for n in 2 3; do ssh -p 2222 -o StrictHostKeyChecking=accept-new node$n true; done"
    )
    mpirun = ["mpirun", "--prefix", str(venv), "-x", f"OPAL_PREFIX={venv}"]
    mpirun += ["-mca", "plm_rsh_args", "-p 2222", "-H", "node2:1,node3:1"]
    ended = hosts[1].run(*mpirun, *ranks, timeout=60, env={"OPAL_PREFIX": str(venv)})
    assert ended.code == 0 and "on node2" in ended.output and "on node3" in ended.output
    words = ["horovodrun", "--mpi", "-np", "2", "-H", "node2:1,node3:1", "-p", "2222"]
    words += [f"--mpi-args=--prefix {venv}", "--network-interfaces", "eth0"]
    ended = hosts[1].run(*words, *ranks, timeout=100, env={"OPAL_PREFIX": str(venv)})
    assert ended.code == 0 and "on node2" in ended.output and "on node3" in ended.output


def test_folders_with_spaces(tmp_path: Path):
    folder = tmp_path / "my project"
    shutil.copytree(ROOT / "launch", folder / "launch")
    words = [folder / "launch" / "hosts.sh", "--bind", "-np", "1", "sh", "-c", "echo bound"]
    assert "bound" in run(words, timeout=60).output


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
    words = dry("-H", names)
    assert (f"plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent {count} " in words) == (
        count == 64
    )


def test_the_launcher_may_have_as_many_open_files_as_are_allowed():
    words = f"ulimit -S -n 1000; ulimit -H -n 3000; exec {HOSTS_SH} -np 1 sh -c 'ulimit -n'"
    assert re.search(r"3000$", run(["bash", "-c", words], timeout=60).output, re.MULTILINE)


def test_interface_port_and_key():
    words = dry("-H", "a:1,b:1", "-p", "2222", "-i", "/k", "--interface", "ib0")
    assert r"\ -p\ 2222\ -i\ /k" in words
    assert "btl_tcp_if_include ib0 -mca oob_tcp_if_include ib0" in words
    assert "-x NCCL_SOCKET_IFNAME -x" in words


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a/b", "a b", "*", "a;b", "é"])
def test_what_ssh_would_take_for_something_else_is_no_host(tmp_path: Path, name: str):
    """From the command line and a hostfile, as again.sh and Slurm give them."""
    (tmp_path / "hosts").write_text(f"node1:1\n{name}:1\n")
    for words in (["-H", f"node1:1,{name}:1"], ["--hostfile", tmp_path / "hosts"], []):
        env = {"LAUNCH_HOSTFILE": str(tmp_path / "hosts")}
        ended = run([HOSTS_SH, *words, "true"], timeout=20, env=env)
        assert ended.code == 2 and f"'{name}:1' is not HOST:RANKS" in ended.output
        assert ended.output.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["-H", "node1"], "'node1' is not HOST:RANKS"),
        (["-H", "node1:x"], "'node1:x' is not HOST:RANKS"),
        (["-H", "node1:99999999999999999999"], "is not HOST:RANKS"),
        (["-np", "99999999999999999999"], "how many ranks? Give -H, --hostfile or -np"),
        (["-H", "node1:2", "-np", "3"], "-np 3 is more than the 2 slots"),
        (["--hostfile", "/nowhere"], "cannot read the hostfile /nowhere"),
        (["--hostfile", "/dev/null", "-np", "2"], "no host in the hostfile /dev/null"),
        ([], "how many ranks? Give -H, --hostfile or -np"),
        (["--fast", "-np", "2"], "unknown option --fast"),
        (["-i", "my key", "-np", "2"], "mpirun splits words at spaces"),
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
    assert f"the data folder {tmp_path}/none: No such file or directory" in ended.output
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
    assert bound(0, 2, RANK_BOUND="0-1") == f"{cores} 0-1"  # by a bind.sh around this one


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
    # As in a container without the right to set_mempolicy: it would kill every rank.
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/bin/sh\necho 'set_mempolicy: Operation not permitted' >&2\nexit 1\n")
    numactl.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "SYS": str(sys_folder)}
    assert [bound(rank, 2, **env)[:3] for rank in range(2)] == ["[1]", "[0]"]
    env["CUDA_VISIBLE_DEVICES"] = "1,0"
    assert [bound(rank, 2, **env)[:3] for rank in range(2)] == ["[0]", "[1]"]
