"""Nobody, the user of that name, on the host of a run: joins, speaks to each port, reads
secrets."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import strangers
from hosts import NOBODY, PYTHON, Hosts, require, run, start
from projects import tracked

from hvdkit.ranks import proof
from hvdkit.settings.project import ENGINE
from hvdkit.testing import kill_session
from ranks import ROOT

HERE = Path(__file__).parent
SECRETS = {
    "WANDB_API_KEY": "key-of-wandb-5071",
    "AWS_SECRET_ACCESS_KEY": "key-of-aws-5072",
}
# Prints address and port of everything that listens there for the launch, and its secret.
LOOK = """
import json, psutil, sys
environments = {p.pid: p.info["environ"] or {} for p in psutil.process_iter(["environ"])}
run = {pid: env for pid, env in environments.items() if env.get("LAUNCH_ID") == sys.argv[1]}
run |= {p.pid: {} for p in psutil.process_iter() if p.name() == "orted"}
[secret] = {env["LAUNCH_SECRET"] for env in run.values() if "LAUNCH_SECRET" in env}
found = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in run]
print(json.dumps([[[c.laddr.ip, c.laddr.port] for c in found], secret]))
"""


@contextlib.contextmanager
def running(*words: object, **env: str) -> Iterator[subprocess.Popen]:
    process = start(words, SECRETS | {"PYTHONPATH": str(ENGINE.parent)} | env)
    try:
        yield process
    finally:
        kill_session(process.pid)


def plain_words(*words: object) -> list[str]:
    """A command that runs on this host."""
    return [str(word) for word in words]


def attack(
    words_on: Callable[..., list[str]], run_id: str, *, on_one_host: bool
) -> None:
    """Lets nobody attack the run's ports on a host, on which words_on(*command) runs a command."""
    look = words_on(sys.executable, "-c", LOOK, run_id)
    ports, secret = json.loads(subprocess.check_output(look))
    assert len(secret) == 64 and len(ports) >= 3, ports
    if on_one_host:  # mpirun alone listens at all addresses, for each kind of address
        assert sum(address in ("0.0.0.0", "::") for address, _ in ports) <= 2, ports
    # A rank that is silent for 5 s would end the run, see victim.py.
    task = {"secrets": [secret, *SECRETS.values()], "ports": ports, "seconds": 12}
    stranger = words_on(*NOBODY, PYTHON, HERE / "stranger.py")
    report = json.loads(
        subprocess.check_output(stranger, input=json.dumps(task), text=True)
    )
    assert report["user"] == 65534 and not report["shown"], report
    sizes = list(report["got"].values())
    # A rank gives 16 bytes, a nonce; Open MPI nothing.
    assert set(sizes) <= {0, 16}, report
    # The ports of the watch were held.
    assert sizes.count(16) >= 1, report
    # At least mpirun's or its daemon's door for its own ranks is found.
    assert max(report["ranks_ports"].values()) >= 1, report


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nobody_gets_nothing_from_a_run(count: int, tmp_path: Path):
    """On one host or two: the run goes on, no secret is shown, and no port gives an answer."""
    require("setpriv", "ps", "cc")
    guard = strangers.guard(tmp_path)
    end = tmp_path / "end"
    run_id = f"attacked-{os.getpid()}"
    victim = [sys.executable, HERE / "victim.py", end]
    launch = [ROOT / "launch/hosts.sh", "--plain", "-np", f"{count + 1}"]
    hosts = None
    on_hosts: list[Callable[..., list[str]]] = [plain_words]
    if count == 2:
        hosts = Hosts(tmp_path, 2)
        on_hosts = [host.words for host in hosts]
        launch += ["-H", "node1:1,node2:2", "-p", 2222]
    words = on_hosts[0](*launch, *victim)
    try:
        with running(*words, LAUNCH_ID=run_id, LAUNCH_GUARD=str(guard)) as run:
            output = ""
            while output.count("ready") < count + 1:  # after the table of places
                line = run.stdout.readline()
                assert line, output
                output += line
            for words_on in on_hosts:
                attack(words_on, run_id, on_one_host=count == 1)
            end.touch()
            rest, _ = run.communicate(timeout=120)
            output += rest
        assert run.returncode == 0 and output.count("ended well") == count + 1, output
        assert not any(value in output for value in SECRETS.values())
    finally:
        end.touch()
        if hosts:
            hosts.end()


# A rank whose files of shared memory, as Open MPI would call them, are another user's already.
TAKEN = """
import os, subprocess, sys, time
from hvdkit.ranks import start
from hvdkit.launcher import launch_rank
job = int(os.environ["OMPI_MCA_ess_base_jobid"])
name = f"/dev/shm/vader_segment.{os.uname().nodename}.{os.geteuid()}.{job:x}."
if launch_rank() == 0:
    script = "ln -s $1 ${0}0; umask 0; : >${0}1; touch ${0}both"
    subprocess.run([*sys.argv[2:], "PATH=/usr/bin:/bin", "sh", "-c", script, name, sys.argv[1]])
while not os.path.exists(f"{name}both"):
    time.sleep(0.1)
start.start_mpi(20)
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(launch_rank() + 1)
MPI.COMM_WORLD.Barrier()
maps = open("/proc/self/maps").read()
sizes = [os.stat(f"{name}{rank}").st_size for rank in range(2)]
folder = os.environ["PMIX_SERVER_TMPDIR"]
os.write(1, f"{total} {maps.count('/dev/shm')} {maps.count('/SYSV')} {sizes} in {folder}\\n".encode())
"""


@pytest.mark.parametrize(
    "launcher", ["mpirun", "horovodrun --mpi", f"{ROOT}/launch/hosts.sh"]
)
def test_nobody_takes_the_memory_that_ranks_share(launcher: str, tmp_path: Path):
    """A link to a file of the user's, and a file that all may write, are there before MPI
    starts."""
    require("setpriv", "unshare")
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("all of it")
    script = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec "$@"'
    words = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        script,
        "sh",
        *launcher.split(),
        "-np",
        "2",
    ]
    words += [sys.executable, "-c", TAKEN, str(thesis), *NOBODY]
    ended = run(words, 60, {"PYTHONPATH": str(ENGINE.parent)})
    assert ended.code == 0, ended.output
    found = re.findall(r"3 0 (\d+) \[9, 0\] in (\S+)", ended.output)
    assert len(found) == 2 and all(int(mapped) >= 2 for mapped, _ in found), (
        ended.output
    )
    assert thesis.read_text() == "all of it"
    # Plain mpirun has files of its own in Open MPI's usual folder.
    for _, folder in found:
        assert ("/tmp/ompi." in folder) == (launcher == "mpirun"), folder
        assert not Path(folder).exists()


@pytest.mark.parametrize("secret", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nobody_is_a_rank_where_a_secret_is_asked_for(secret: bool, tmp_path: Path):
    """horovodrun over Gloo shows in ps how to join; without a secret the run says so, once."""
    require("setpriv")
    (tmp_path / "secret").write_text("of this launch" if secret else "")
    (tmp_path / "secret").chmod(0o600)
    # The second rank is slow to start, and somebody else comes first.
    script = (
        "[ $HOROVOD_RANK = 1 ] && exec sleep 99; "
        f"LAUNCH_SECRET=$(cat {tmp_path}/secret) "
        f"{sys.executable} {HERE}/victim.py {tmp_path}/end"
    )
    with running(
        "horovodrun", "--gloo", "--disable-cache", "-np", "2", "sh", "-c", script
    ) as run:
        known: dict[str, str] = {}
        while "HOROVOD_GLOO_RENDEZVOUS_PORT" not in known and run.poll() is None:
            time.sleep(0.2)
            commands = subprocess.check_output(["ps", "axww", "-o", "args"], text=True)
            mine = [line for line in commands.splitlines() if str(tmp_path) in line]
            known = dict(re.findall(r"(HOROVOD_\w+)=([\w.,-]+)", "\n".join(mine)))
        packages = f"{ENGINE.parent}:{Path(np.__file__).parents[1]}"
        known |= {
            "HOROVOD_RANK": "1",
            "HOROVOD_LOCAL_RANK": "1",
            "PYTHONPATH": packages,
        }
        with running(
            *NOBODY,
            *(f"{name}={value}" for name, value in known.items()),
            PYTHON,
            HERE / "victim.py",
            tmp_path / "end",
        ) as stranger:
            output = ""
            for line in run.stdout:
                output += line
                if "ready" in line or "error: " in line:
                    break
            joined = any("ready" in line for line in stranger.stdout)
    assert ("error: rank 1 does not hold this launch's secret" in output) == secret, (
        output
    )
    assert output.count(proof.OPEN) == (not secret), output
    assert joined == (not secret)


def test_no_code_of_ours_runs_what_it_reads_or_starts_the_parts_of_horovod_that_do():
    pattern = (
        r"\b(cloud)?pickle|\beval\(|\bexec\(|shell=True|yaml\.load\(|allow_pickle=True"
        r"|extractall|import (shelve|marshal|dill)|(torch|marshal)\.load|safe_mode=False"
        r"|host-discovery|--min-np|hvd\.elastic|horovod\.run\b"
    )
    files = []
    for name in tracked():
        is_code = not name.endswith((".lock", ".png", ".md", ".txt"))
        if is_code and "tests" not in Path(name).parts and (ROOT / name).is_file():
            files.append(name)
    assert len(files) > 100 and any(name.startswith("launch/") for name in files)
    found = []
    for file in files:
        for number, line in enumerate((ROOT / file).read_text().splitlines(), start=1):
            # An export reads back the file that it has just written, to say what can load it.
            if file.endswith("commands/export.py") and "safe_mode" in line:
                continue
            if re.search(pattern, line.split("  # ")[0]):
                found.append(f"{file}, line {number}: {line}")
    assert not found, "\n".join(found)
