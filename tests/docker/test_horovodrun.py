"""horovodrun of the environment: what it refuses, and how it stops runs that it cannot see."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hosts import Hosts, executable, run, start

BIN = Path(sys.executable).parent
# A rank that needs six seconds to save, longer than mpirun waits.
SAVES = """
import signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
print("listens", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(6)
print("saved", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--gloo -np 2", 2, "what is to be started?"),
        ("-np 2", 2, "what is to be started?"),
        ("--gloo -np 0 true", 2, "-np 0: at least one rank"),
        ("-np -1 true", 2, "-np -1: at least one rank"),
        ("-np 2 traim train.py", 127, "traim: no such program"),
        ("-H localhost -np 2 true", 2, "Invalid host input"),
        ("--hostfile /nowhere -np 2 true", 2, "/nowhere"),
    ],
)
def test_what_cannot_start_is_wrong_use(words: str, code: int, text: str):
    """hvdkit supervise does not try it again, as it does after 1 or 134."""
    ended = run(["horovodrun", *words.split()], 60)
    assert ended.code == code, ended.output
    assert f"error: horovodrun: {text}" in ended.output or text == "/nowhere"
    assert text in ended.output and "Traceback" not in ended.output


@pytest.mark.parametrize("name", ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"])
def test_gloo_by_a_variable_needs_gloo_by_the_flag(name: str):
    """Ranks over MPI would end with a fault of MPI or of memory."""
    ended = run(["horovodrun", "-np", "2", "true"], 60, env={name: "gloo"})
    assert ended.code == 2 and f"{name}=gloo needs --gloo" in ended.output


def test_ranks_may_print_any_bytes_over_gloo():
    """The rest of a rank's output was lost, and the run hung once a pipe was full."""
    prints = r"printf 'caf\351\n'; seq 20000; exit 0"
    ended = run(["horovodrun", "--gloo", "-np", "2", "sh", "-c", prints], 60)
    assert ended.code == 0
    assert len(re.findall(r"<stdout>:20000$", ended.output, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    "command",
    [
        ["horovodrun", "--mpi", "-np", "1"],
        ["horovodrun", "--gloo", "-np", "1"],
        ["hvdkit", "supervise", "--"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_codes_come_back_where_a_parent_ignores_sigchld(command: list[str]):
    words = ["env", "--ignore-signal=CHLD", *command, "sh", "-c", "exit 3"]
    ended = run(words, 60)
    assert ended.code == 3, ended.output


@pytest.mark.parametrize("launcher", ["--gloo", "--mpi"])
def test_two_dashes_may_come_before_the_command(launcher: str):
    assert run(["horovodrun", launcher, "-np", "2", "--", "true"], 60).code == 0


def test_it_is_started_by_its_path():
    """As by cron: mpirun and the environment's python are found beside it."""
    env = {"PATH": "/usr/bin:/bin"}
    words = [str(BIN / "horovodrun"), "-np", "2", "python", "-c", "import horovod"]
    assert run(words, 60, env=env).code == 0


def test_it_starts_in_a_rank_of_another():
    """Its variables would make each new rank the only one."""
    env = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0"}
    prints = 'echo "rank $HOROVOD_RANK of $HOROVOD_SIZE"'
    ended = run(["horovodrun", "--gloo", "-np", "2", "sh", "-c", prints], 60, env=env)
    assert ended.code == 0
    assert "rank 0 of 2" in ended.output and "rank 1 of 2" in ended.output


def _listens(process: psutil.Process) -> bool:
    """Whether it is an mpirun with a handler for SIGUSR1."""
    try:
        if not process.name().startswith(("mpirun", "orterun")):
            return False
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (OSError, psutil.NoSuchProcess):
        return False
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def test_a_stop_that_mpirun_hears_before_it_has_ranks_is_told_them_later(tmp_path):
    """mpirun takes it and forgets it; ranks without a handler end by the next one."""
    begins = executable(tmp_path / "rank", "sleep 600")
    words = ["horovodrun", "--mpi", "-np", "2", "sh", str(begins)]
    process = subprocess.Popen(words, start_new_session=True)
    horovodrun = psutil.Process(process.pid)
    end = time.monotonic() + 30
    while not any(map(_listens, horovodrun.children(recursive=True))):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75


def test_ranks_on_other_hosts_have_the_time_that_they_need(hosts: Hosts):
    environment = os.path.realpath(BIN.parent)
    words = hosts[1].words(
        "env",
        f"OPAL_PREFIX={environment}",
        f"PATH={environment}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "horovodrun",
        "--mpi",
        f"--mpi-args=--prefix {environment} -x OPAL_PREFIX",
        "-np",
        "2",
        "-H",
        "node2:1,node3:1",
        "-p",
        str(hosts.ssh_port),
        f"{environment}/bin/python",
        "-c",
        f"exec({SAVES!r})",
    )
    process = start(words)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum("listens" in line for line in lines) == 2:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGTERM)
    lines += process.stdout
    output = "".join(lines)
    assert process.wait(60) == 75, output
    assert output.count("saved") == 2, output
