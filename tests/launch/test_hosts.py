"""hosts.sh and stop.sh: on three hosts with their own sshd, and what they refuse."""

import contextlib
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
from hosts import (
    ENVIRONMENT,
    ROOT,
    STAND_IN,
    Host,
    Hosts,
    executable,
    require,
    run,
    start,
)
from terminal import CTRL_C, Terminal

from hvdkit.testing import kill_session

HOSTS_SH = str(ROOT / "launch" / "hosts.sh")
THREE_HOSTS = ["-H", "node2:1,node1:1,node3:1"]
ON_TWO_HOSTS = [HOSTS_SH, "-H", "node1:1,node2:1", "-p", "2222"]
ON_THREE_HOSTS = [HOSTS_SH, *THREE_HOSTS, "-p", "2222"]
USUAL = ["--log_every=1", "--eval_every=0", "--checkpoint_every=0"]
# The graph is built in a few seconds, and a step takes milliseconds.
TRAINING = [sys.executable, "train.py", "--flagfile=configs/blank.cfg", *USUAL]
# Flags that make the run of `make train` small.
DEMO = [
    "--model=tiny",
    "--image_size=32",
    "--eval_crop=32",
    *USUAL,
    "--global_batch_size=6",
    "--eval_batch_size=8",
    "--warmup_steps=0",
    "--num_steps=100000",
]
RANKS_MEET = "from mpi4py import MPI; print(f'met {MPI.COMM_WORLD.allreduce(1)}')"


def endless(host: Host, run_dir: Path, *flags: str) -> list[str]:
    """The command that starts the stand-in on that host, by hosts.sh with these flags."""
    command = [*STAND_IN, f"--run_dir={run_dir}", "--steps=100000"]
    return host.words(HOSTS_SH, *flags, "-p", "2222", *command)


def stop_at(words: list[str], line: str, *numbers: int) -> tuple[int, str]:
    """Runs `words` and sends the signals to hosts.sh when `line` is printed, a second apart."""
    process = start(words)
    lines = []
    sent = 0
    for text in process.stdout:
        lines.append(text)
        if not sent and line in text:
            children = Path(
                f"/proc/{process.pid}/task/{process.pid}/children"
            ).read_text()
            for number in numbers:
                os.kill(int(children.split()[0]), number)
                time.sleep(1)
                sent += 1
    code = process.wait()
    assert sent == len(numbers), "".join(lines[-40:])
    return code, "".join(lines)


@pytest.mark.timeout(500)
def test_three_hosts_train_stop_and_resume(hosts: Hosts, tmp_path):
    def command(steps: int) -> list[str]:
        return hosts[1].words(
            *ON_THREE_HOSTS,
            *TRAINING,
            "--global_batch_size=36",
            f"--run_dir={tmp_path}",
            f"--num_steps={steps}",
        )

    code, output = stop_at(command(1_000_000), "step 2/", signal.SIGTERM)
    assert code == 75, output
    assert "3 ranks on 3 host(s) (node1, node2, node3)" in output
    assert "stop signal received: saved at step" in output
    assert "Traceback" not in output
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert (stopped["exit_reason"], stopped["ranks"]) == ("preempted", 3)

    last = stopped["step"] + 2
    ended = run(command(last), timeout=200)
    assert ended.code == 0, ended.output
    assert re.search(f"resuming from .* at step {stopped['step']}", ended.output)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("done", last)
    assert not hosts.left("train.py")


@pytest.mark.timeout(150)
def test_ranks_end_when_a_host_is_lost(hosts: Hosts, tmp_path):
    """Two runs lose node3, one a rank of it and one its launcher: the others' ranks save."""

    def begin(words: list[str], lines: list[str]) -> subprocess.Popen:
        process = start(words)
        assert any("step 3" in line for line in process.stdout)
        threading.Thread(
            target=lines.extend, args=[process.stdout], daemon=True
        ).start()
        return process

    loses_a_rank: list[str] = []
    loses_its_launcher: list[str] = []
    first = begin(endless(hosts[1], tmp_path / "0", *THREE_HOSTS), loses_a_rank)
    on_two = endless(hosts[3], tmp_path / "1", "-H", "node1:1,node2:1")
    second = begin(on_two, loses_its_launcher)
    hosts.cut(hosts[3])
    try:
        assert first.wait(40) == 76
        assert not hosts.left(STAND_IN[1], "orted", seconds=40)
        assert second.wait(40) == 76
    finally:
        hosts.cut(hosts[3], back=True)
    assert "error: lost node3, which has not answered" in "".join(loses_a_rank)
    output = "".join(loses_its_launcher)
    assert re.search("error: lost node[12], which has not answered", output)
    assert sorted(path.name for path in (tmp_path / "1").glob("told-*")) == [
        "told-0",
        "told-1",
    ]


def test_a_stop_reaches_ranks_of_other_hosts_and_leaves_nothing(hosts: Hosts, tmp_path):
    """SIGUSR1 to hosts.sh, on a host that has no rank itself."""
    words = endless(hosts[1], tmp_path, "-H", "node2:1,node3:1")
    code, output = stop_at(words, "step 3", signal.SIGUSR1)
    assert code == 75, output
    assert list((tmp_path / "checkpoints").iterdir())
    assert not hosts.left(STAND_IN[1])


def test_open_mpi_keeps_its_files_where_no_other_user_can(hosts: Hosts, tmp_path: Path):
    """Another user has made the folder that Open MPI takes by itself, on both hosts."""
    taken = [Path(f"/tmp/ompi.{name}.{os.geteuid()}") for name in ("node1", "node2")]
    for folder in taken:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        folder.chmod(0o777)
        shutil.chown(folder, 65534)
    words = endless(hosts[1], tmp_path, "-H", "node1:1,node2:1")
    launch_id = f"of-two-hosts-{os.getpid()}"
    process = start(words, {"LAUNCH_ID": launch_id})
    try:
        assert any("step 3" in line for line in process.stdout)
        (made,) = Path("/tmp").glob(f"launch-{launch_id}.*")
        assert made.stat().st_mode & 0o777 == 0o700 and any(made.iterdir())
        for folder in taken:
            assert not list(folder.iterdir())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGTERM)
        assert process.wait(60) == 75
        assert not made.exists()
    finally:
        kill_session(process.pid)
        for folder in taken:
            shutil.rmtree(folder)


@pytest.mark.timeout(120)
def test_ranks_save_and_end_when_their_launcher_is_killed(hosts: Hosts, tmp_path):
    stop_at(
        endless(hosts[1], tmp_path, "-H", "node1:1,node2:1"), "step 3", signal.SIGKILL
    )
    assert not hosts.left(STAND_IN[1], "orted", seconds=30)
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-0", "told-1"]


def lines_after_the_launch() -> list[int]:
    """Numbers of hosts.sh's lines in `launch` from where mpirun runs to where it is waited for."""
    lines = [line.strip() for line in Path(HOSTS_SH).read_text().splitlines()]
    first = lines.index("job=$!")
    waits = [line.startswith('while kill -0 "$job"') for line in lines]
    last = waits.index(True, first)
    return list(range(first + 1, last + 1))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [1, pytest.param(99, marks=pytest.mark.slow)])
def test_a_fault_of_the_launcher_leaves_no_rank_behind(tmp_path: Path, count: int):
    """It fails at each of its lines after the launch, or at the first; the ranks save and end."""
    folder = tmp_path / "launch"
    shutil.copytree(ROOT / "launch", folder)
    lines = Path(HOSTS_SH).read_text().splitlines()
    for number in lines_after_the_launch()[:count]:
        broken = [*lines[:number], "sleep 3; false", *lines[number:]]
        (folder / "hosts.sh").write_text("\n".join(broken) + "\n")
        run_dir = tmp_path / f"{number}"
        words = [
            folder / "hosts.sh",
            "-np",
            "1",
            *STAND_IN,
            f"--run_dir={run_dir}",
            "--steps=30",
        ]
        ended = run(words, timeout=60)
        assert "begins at step 0" in ended.output, (number, ended.output)
        assert (run_dir / "told-0").exists() and not left_of(run_dir), ended.output
    assert number > 0


def left_of(run_dir: Path) -> list[str]:
    """Processes whose command names the run's folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_text(errors="replace"))
    return [command for command in commands if f"--run_dir={run_dir}\0" in command]


def test_a_stop_reaches_a_rank_inside_a_shell(tmp_path: Path):
    """The shell has no handler: the signal would end it and leave the rank behind."""
    rank = " ".join([*STAND_IN, f"--run_dir={tmp_path}", "--steps=100000"])
    words = [HOSTS_SH, "-np", "1", "bash", "-c", f"{rank}; code=$?; exit $code"]
    with start(words) as process:
        assert any("begins at step 0" in line for line in process.stdout)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    assert (tmp_path / "told-0").exists()


def test_a_second_ctrl_c_ends_all_ranks_on_all_hosts(hosts: Hosts, tmp_path):
    """While no rank has a handler, as when it builds its model."""
    words = endless(hosts[1], tmp_path, *THREE_HOSTS)
    code, output = stop_at(
        [*words, "--deaf"], "begins at step 0", signal.SIGINT, signal.SIGINT
    )
    assert code == 130, output
    assert output.count("stopping after this step") == 1 and "Traceback" not in output
    assert not hosts.left(STAND_IN[1])


SAYS = "stopping after this step: saving, then ending; Ctrl-C again ends at once"


@pytest.mark.timeout(400)
def test_one_ctrl_c_in_a_terminal_saves(tiny_data: Path, tmp_path: Path):
    """Exit code 75, which make turns into its own."""
    flags = [*DEMO, f"--data_dir={tiny_data}", f"--run_dir={tmp_path}"]
    words = ["make", "-C", "..", "-o", "setup", "train", f"ARGS={' '.join(flags)}"]
    with Terminal(words, ROOT / "template", ENVIRONMENT) as terminal:
        terminal.wait_for("step 2/", 200)
        terminal.press(CTRL_C)
        assert terminal.wait(60) == 130, terminal.shown
        assert terminal.shown.count(SAYS) == terminal.shown.count("stopping after") == 1
        saved = re.search(r"saved at step (\d+)", terminal.shown)
        assert saved and not re.search(r"\[1,0\]<\w+>:", terminal.shown), terminal.shown
        assert not terminal.left_after(10)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert names == [f"step-{int(saved[1]):08}"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_saves_when_make_is_ended(tiny_data: Path, tmp_path: Path, number: int):
    """`timeout make train` ends it so, or the system where it lacks memory."""
    flags = [*DEMO, f"--data_dir={tiny_data}", f"--run_dir={tmp_path}"]
    make = start(
        ["make", "-C", str(ROOT), "-o", "setup", "train", f"ARGS={' '.join(flags)}"]
    )
    assert any("step 2/" in line for line in make.stdout)
    make.send_signal(number)
    assert any("saved at step" in line for line in make.stdout)
    assert (
        make.wait(60) != 0 and len(list((tmp_path / "checkpoints").glob("step-*"))) == 1
    )


def test_ranks_save_when_the_terminal_is_gone(tmp_path: Path):
    words = [HOSTS_SH, "-np", "2", *STAND_IN, f"--run_dir={tmp_path}", "--steps=100000"]
    with Terminal(words, ROOT, ENVIRONMENT) as terminal:
        terminal.wait_for("rank 1 of 2 begins", 60)
        time.sleep(1)
        terminal.hang_up()
        assert not terminal.left_after(30)
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-0", "told-1"]


# Variables that a Slurm job has left in a shell, or in a copy of a cluster's machine.
LEFT_BY_SLURM = {
    "SLURM_NODELIST": "cn01",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
}
TAKES_NAME = """
import os, socket, sys
socket.sethostname(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ([HOSTS_SH, "-np", "2"], "codespaces_3620e8"),
        ([HOSTS_SH, "-H", "localhost:2"], "(none)"),
        (["horovodrun", "-np", "2"], "Ann's büro-pc"),
    ],
)
def test_any_name_of_a_host_and_what_a_batch_system_has_left(
    launcher: list[str], name: str
):
    require("unshare")
    words = ["unshare", "--uts", sys.executable, "-c", TAKES_NAME, name, *launcher]
    ended = run(
        [*words, sys.executable, "-c", RANKS_MEET], timeout=60, env=LEFT_BY_SLURM
    )
    assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output


# A launcher's own exit code by that of the ranks. Plain horovodrun uses MPI, if Horovod has it.
@pytest.mark.parametrize(
    ("launcher", "codes"),
    [
        (HOSTS_SH, {0: 0, 2: 2, 3: 3, 75: 75}),
        ("mpirun", {75: 75}),
        ("horovodrun", {75: 75}),
        pytest.param("mpirun", {2: 2, 3: 3}, marks=pytest.mark.slow),
        pytest.param("horovodrun --mpi", {75: 75}, marks=pytest.mark.slow),
        ("horovodrun --gloo", {75: 75, 2: 2}),
    ],
)
def test_exit_codes_arrive(launcher: str, codes: dict[int, int]):
    for code, arrives in codes.items():
        ended = run(
            [*launcher.split(), "-np", "2", "sh", "-c", f"exit {code}"], timeout=60
        )
        assert ended.code == arrives and "Traceback" not in ended.output, ended.output


def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, tmp_path):
    """With host, port and ssh's own words, before a launcher is started; with --check too."""

    def refused(*words: str) -> str:
        ended = hosts[1].run(HOSTS_SH, *words, "sh", "-c", "echo started", timeout=60)
        assert ended.code == 76 and "started" not in ended.output, ended.output
        lines = ended.output.splitlines()
        assert all(line.startswith("error: cannot reach ") for line in lines), (
            ended.output
        )
        return ended.output

    said = refused("-H", "node1:1,node2:1,node3:1", "-p", "2223")
    assert (
        "cannot reach node2, port 2223, by ssh: " in said
        and "Connection refused" in said
    )
    assert "cannot reach node3, port 2223" in said and "node1" not in said
    said = refused("--check", "-H", "nowhere.invalid:1")
    assert "cannot reach nowhere.invalid, port 22" in said and "resolve" in said
    other = tmp_path / "other_key"
    hosts[1].sh(
        f"ssh-keygen -q -t ed25519 -N '' -f {other}; mv ~/.ssh/id_ed25519 ~/.ssh/kept"
    )
    said = refused("-H", "node2:1", "-p", "2222", "-i", str(other))
    assert "cannot reach node2, port 2222" in said and "Permission denied" in said
    hosts[1].sh("mv ~/.ssh/kept ~/.ssh/id_ed25519")
    # Another machine answers by a known host's name.
    hosts[1].sh(
        "ssh-keyscan -p 2222 node3 2>/dev/null | sed s/node3/node2/ >~/.ssh/known_hosts"
    )
    assert "Host key verification failed" in refused("-H", "node2:1", "-p", "2222")
    hosts[1].sh("rm ~/.ssh/known_hosts")


# A .bashrc that prints; .profile is what mpirun reads for sh.
TALKS = "echo hello from bashrc; printf 'without an end'\n"


@pytest.mark.parametrize(
    "shells",
    [
        ("/usr/bin/fish", "/usr/bin/tcsh"),
        ("/usr/bin/tcsh", "/usr/bin/fish"),
        ("/bin/sh",),
    ],
)
def test_ranks_start_by_any_login_shell(hosts: Hosts, shells: tuple[str, ...]):
    """Of the launching host, of another; the third one's .bashrc prints text."""
    require("fish", "tcsh")
    with contextlib.ExitStack() as logins:
        for host, shell in zip(hosts, shells):
            logins.enter_context(host.login(shell))
        logins.enter_context(hosts[3].login("/bin/bash", TALKS))
        ended = hosts[1].run(
            HOSTS_SH,
            "-H",
            "node1:1,node2:1,node3:1",
            "-p",
            "2222",
            "sh",
            "-c",
            "echo on $(hostname)",
            timeout=60,
        )
    assert ended.code == 0, ended.output
    assert all(f">:on {host.name}\n" in ended.output for host in hosts), ended.output


def not_now(hosts: Hosts, *words: str) -> str:
    """The output of hosts.sh where node2 cannot take part; it ends within 30 s."""
    start = time.monotonic()
    ended = hosts[1].run(*ON_TWO_HOSTS, *words, timeout=60)
    assert ended.code == 76 and time.monotonic() - start < 30, ended.output
    assert (
        "error: cannot start on node2: " in ended.output and "node3" not in ended.output
    )
    return ended.output


@pytest.mark.parametrize(
    ("shell", "bashrc"),
    [
        ("/bin/bash", "exec tcsh"),
        ("/bin/bash", "exec cat"),
        ("/bin/true", ""),
        ("/bin/false", ""),
    ],
)
def test_a_login_shell_that_runs_nothing_is_named(
    hosts: Hosts, shell: str, bashrc: str
):
    """ssh itself ends with 0, and mpirun would wait for ever."""
    require("tcsh")
    with hosts[2].login(shell, bashrc):
        assert "its login shell did not run " in not_now(hosts, "echo", "started")


def test_a_host_on_which_open_mpi_does_not_start_is_named(hosts: Hosts):
    with hosts[2].login("/bin/bash", "export TMPDIR=/nowhere"):
        said = not_now(hosts, "echo", "started")
    assert (
        "Open MPI's daemon ended there with exit code 1" in said and "/nowhere/" in said
    ), said


def test_a_forced_command_is_named_with_what_it_says(hosts: Hosts):
    keys = hosts.key.with_suffix(".pub")
    key = keys.read_text()
    keys.write_text(f'command="echo only backups here" {key}')
    try:
        assert "with exit code 0 and said 'only backups here'" in not_now(
            hosts, "echo", "started"
        )
    finally:
        keys.write_text(key)


@pytest.mark.parametrize(
    ("action", "why"), [("DROP", "no answer in 8 s"), ("REJECT", "Connection refused")]
)
def test_a_firewall_on_the_way_back_is_named(hosts: Hosts, action: str, why: str):
    """It lets node2 open connections to node1's ssh only."""
    require("iptables")

    def iptables(command: str) -> None:
        hosts[1].sh(
            f"PATH=$PATH:/usr/sbin; iptables {command} INPUT -s {hosts[2].address} -p tcp --syn "
            f"! --dport 2222 -j {action}"
        )

    iptables("-A")
    try:
        said = not_now(hosts, "echo", "started")
    finally:
        iptables("-D")
    assert f" of {hosts[1].address}: {why}): open the ports above 1023" in said


def test_a_daemon_that_hangs_is_named_after_the_start_limit(
    hosts: Hosts, tmp_path: Path
):
    """It hangs as where Open MPI's files are on a disk that does not answer.

    A start that is slow for another reason goes on, also where ranks hide their environment.
    """
    daemon = Path(sys.executable).with_name("orted")
    hangs = executable(tmp_path / "hangs", "exec sleep 300")
    hosts[2].sh(f"mount --bind {hangs} {daemon}")
    try:
        said = not_now(hosts, *STAND_IN, f"--run_dir={tmp_path}", "--start_limit_s=6")
    finally:
        hosts[2].sh(f"pkill -x sleep; umount {daemon}")
    assert (
        "no rank has begun within 6 s (--start_limit_s), and Open MPI's daemon is not"
        in said
    )
    # On a busy machine, a start over ssh takes more than 6 s.
    ended = hosts[1].run(
        HOSTS_SH,
        "-H",
        "node2:1",
        "-p",
        "2222",
        "env",
        "-i",
        "sh",
        "-c",
        "sleep 19; echo ended",
        *STAND_IN,
        f"--run_dir={tmp_path}",
        "--start_limit_s=12",
        timeout=60,
    )
    assert ended.code == 0 and "ended" in ended.output, ended.output


def test_the_environment_is_passed_on_and_its_values_are_in_no_command(
    hosts: Hosts, tmp_path
):
    """But for launchers' own variables and CUDA_VISIBLE_DEVICES, which is each host's own."""
    env = {
        "WANDB_API_KEY": "secret-7",
        "https_proxy": "http://p:1",
        "KERAS_HOME": "/k",
        "OFI_NCCL_PROTOCOL": "RDMA",
        "ODD": "a  'b'\n$c",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    show = f"""
import glob, json, os
commands = [open(file).read() for file in glob.glob("/proc/*/cmdline")]
secret = [command for command in commands if "secret-" + "7" in command]
json.dump([dict(os.environ), secret, len(commands)], open("{tmp_path}/" + os.uname().nodename, "w"))
"""
    ended = hosts[1].run(
        *ON_TWO_HOSTS,
        "--interface",
        "eth0",
        sys.executable,
        "-c",
        show,
        timeout=60,
        env=env,
    )
    assert ended.code == 0, ended.output
    for name in ("node1", "node2"):
        variables, commands_with_secret, commands = json.loads(
            (tmp_path / name).read_text()
        )
        assert not commands_with_secret and commands > 3
        assert variables["OMPI_MCA_btl_tcp_if_include"] == "eth0"
        assert variables.get("CUDA_VISIBLE_DEVICES") == (
            "0" if name == "node1" else None
        )
        assert env.items() - variables.items() <= {("CUDA_VISIBLE_DEVICES", "0")}


def test_hosts_each_in_a_network_of_its_own(hosts: Hosts):
    """Google Cloud gives them so: addresses of /32, and routes that name no network."""
    pair = (hosts[1], hosts[2])
    try:
        for host, other in (pair, pair[::-1]):
            give_address(host, f"{host.address}/32")
            host.sh(
                f"ip route add {other.address} dev eth0 scope link src {host.address}"
            )
        ended = hosts[1].run(
            *ON_TWO_HOSTS, sys.executable, "-c", RANKS_MEET, timeout=60
        )
    finally:
        for host in pair:
            give_address(host, f"{host.address}/24")
    assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output
    assert "WARNING" not in ended.output, ended.output


def test_a_host_without_the_project_is_named(hosts: Hosts, tmp_path: Path):
    """Its disk is not mounted there; Python would say that it cannot open a file, not where."""
    script = executable(tmp_path / "project" / "run.sh", "echo runs")
    hosts[2].sh(f"mount -t tmpfs none {tmp_path}/project")
    try:
        ended = hosts[1].run(*ON_TWO_HOSTS, script, timeout=60)
    finally:
        hosts[2].sh(f"umount {tmp_path}/project")
    message = f"error: cannot start on node2: no {script} there: is its disk mounted?"
    assert (ended.code, ended.output.strip()) == (76, message)


def test_names_that_lead_to_addresses_of_a_loopback_interface(hosts: Hosts):
    """Routed hosts have such names (BGP): the network card has to be named."""
    pair = (hosts[1], hosts[2])
    before = hosts[1].hosts_file.read_text()
    try:
        for number, (host, other) in enumerate((pair, pair[::-1]), start=1):
            host.sh(
                f"ip address add 10.200.0.{number}/32 dev lo; "
                f"ip route add 10.200.0.{3 - number}/32 via {other.address} src 10.200.0.{number}"
            )
            names = "127.0.0.1 localhost\n10.200.0.1 node1\n10.200.0.2 node2\n"
            host.hosts_file.write_text(names)
        unnamed = hosts[1].run(
            *ON_TWO_HOSTS, sys.executable, "-c", RANKS_MEET, timeout=60
        )
        ended = hosts[1].run(
            *ON_TWO_HOSTS,
            "--interface",
            "eth0",
            sys.executable,
            "-c",
            RANKS_MEET,
            timeout=60,
        )
    finally:
        for number, host in enumerate(pair, start=1):
            host.hosts_file.write_text(before)
            host.sh(
                f"ip route del 10.200.0.{3 - number}/32; ip address del 10.200.0.{number}/32 dev lo"
            )
    assert unnamed.code == 2 and "name a network card" in unnamed.output, unnamed.output
    assert unnamed.output.count("\n") == 1, unnamed.output
    assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output


def test_hosts_with_ipv6_alone_are_told_what_open_mpi_needs(hosts: Hosts):
    pair = (hosts[1], hosts[2])
    before = hosts[1].hosts_file.read_text()
    try:
        for number, host in enumerate(pair, start=1):
            give_address(host, f"fd00::{number}/64 nodad")
        hosts[1].hosts_file.write_text(
            "127.0.0.1 localhost\nfd00::1 node1\nfd00::2 node2\n"
        )
        ended = hosts[1].run(*ON_TWO_HOSTS, "true", timeout=60)
    finally:
        hosts[1].hosts_file.write_text(before)
        for host in pair:
            give_address(host, f"{host.address}/24")
    assert ended.code == 76 and ended.output.count("\n") == 1, ended.output
    assert "cannot start on node2: ssh reaches it over IPv6" in ended.output, (
        ended.output
    )


def give_address(host: Host, address: str) -> None:
    """Replaces all addresses of its network card."""
    host.sh(f"ip address flush dev eth0; ip address add {address} dev eth0")


def test_plain_horovodrun_on_other_hosts_as_the_readme_has_it(hosts: Hosts):
    """Plain mpirun: test_start.py."""
    venv = Path(sys.executable).parent.parent
    hosts[1].sh(
        "for n in 2 3; do ssh -p 2222 -o StrictHostKeyChecking=accept-new node$n true; done"
    )
    ended = hosts[1].run(
        "horovodrun",
        "--mpi",
        "-np",
        "2",
        "-H",
        "node2:1,node3:1",
        "-p",
        "2222",
        f"--mpi-args=--prefix {venv}",
        "--network-interfaces",
        "eth0",
        sys.executable,
        "-c",
        "import os; print('on ' + os.uname().nodename)",
        timeout=100,
        env={"OPAL_PREFIX": str(venv)},
    )
    assert ended.code == 0 and "on node2" in ended.output and "on node3" in ended.output


def test_folders_with_spaces(tmp_path: Path):
    folder = tmp_path / "my project"
    shutil.copytree(ROOT / "launch", folder / "launch")
    words = [folder / "launch" / "hosts.sh", "-np", "1", "sh", "-c", "echo started"]
    assert "started" in run(words, timeout=60).output


DOCKER0 = (
    "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; "
    "ip link set docker0 up; "
)


@pytest.mark.parametrize(
    ("networks", "ranks"), [("", ["-np", "2"]), (DOCKER0, ["-H", "localhost:2"])]
)
def test_ranks_of_one_host_need_no_network(networks: str, ranks: list[str]):
    require("unshare", "ip")
    script = f'ip link set lo up; {networks} exec "$0" "$@"'
    words = [HOSTS_SH, *ranks, sys.executable, "-c", RANKS_MEET]
    ended = run(["unshare", "--net", "sh", "-ec", script, *words], timeout=60)
    assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output


@pytest.mark.parametrize(
    "launcher", [[HOSTS_SH], ["horovodrun"], ["horovodrun", "--gloo"]]
)
def test_a_host_that_does_not_reach_itself_is_told_what_to_do(launcher: list[str]):
    require("unshare")
    ended = run(["unshare", "--net", *launcher, "-np", "2", "true"], timeout=60)
    assert (
        ended.code == 2 and "turn its loopback on (ip link set lo up)" in ended.output
    )
    assert ended.output.count("\n") == 1, ended.output


# `docker run --read-only` leaves this: no folder can be written, and there is no home.
READ_ONLY = """
for folder in $(awk '$2 !~ "^/(proc|sys|dev)" {print $2}' /proc/mounts | sort -u); do
    mount -o remount,ro,bind "$folder" || true
done
export HOME=/proc/nowhere
exec "$@"
"""


@pytest.mark.parametrize(
    "launcher", [[HOSTS_SH, "-np", "2"], ["horovodrun", "-np", "2"], []]
)
def test_without_a_folder_that_can_be_written_one_line_says_it(launcher: list[str]):
    require("unshare")
    program = [sys.executable, "-c", "import hvdkit.ranks.quiet"]
    words = ["unshare", "--mount", "bash", "-c", READ_ONLY, "bash", *launcher, *program]
    ended = run(words, timeout=60, cwd="/")
    assert ended.code == 2 and "TMPDIR (docker: --tmpfs /tmp)" in ended.output, (
        ended.output
    )
    assert ended.output.count("\n") == 1, ended.output


FULL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm; cat /dev/zero >/dev/shm/full 2>&-; exec "$@"'
MEET = (
    "import os; from hvdkit.ranks import start; start.start_mpi(20); from mpi4py import MPI; "
    "os.write(1, b'met %d' % MPI.COMM_WORLD.allreduce(1))"
)


def test_no_room_in_shared_memory_is_no_matter_or_one_line():
    """MPI needs none there, and Horovod's launcher a little."""
    require("unshare")
    words = ["unshare", "--mount", "sh", "-c", FULL, "sh"]
    program = ["-np", "2", sys.executable, "-c", MEET]
    ended = run([*words, HOSTS_SH, *program], timeout=60)
    assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output
    ended = run([*words, "horovodrun", *program], timeout=60)
    assert ended.code == 76 and ended.output.count("\n") == 1, ended.output
    assert (
        f"in /dev/shm of {os.uname().nodename}: No space left on device" in ended.output
    )


@pytest.mark.parametrize("backend", ["--mpi", "--gloo"])
def test_horovodrun_needs_no_home_folder(backend: str):
    words = [
        "env",
        "HOME=/proc/nowhere",
        "horovodrun",
        backend,
        "-np",
        "2",
        "echo",
        "ranks",
    ]
    ended = run(words, timeout=60)
    assert ended.code == 0 and ended.output.count("ranks") == 2, ended.output


WRITES = """
import os
names = os.environ
rank = names.get("OMPI_COMM_WORLD_RANK") or names["HOROVOD_RANK"]
print("a line")
open(f"{names['FOLDER']}/{rank}", "w").write("whole")
"""


@pytest.mark.parametrize(
    "launcher", [[HOSTS_SH], ["horovodrun"], ["horovodrun", "--gloo"]]
)
def test_a_closed_output_ends_no_ranks(launcher: list[str], tmp_path: Path):
    """One after the other, as another number is then free for the next file."""
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        words = [
            *launcher,
            "-np",
            "2",
            sys.executable,
            "-c",
            WRITES,
            f"--run_dir={tmp_path}",
        ]
        script = f'"$0" "$@" {closed}'
        folder = tmp_path / closed.replace("&", "")
        folder.mkdir()
        ended = run(
            ["sh", "-c", script, *words], timeout=60, env={"FOLDER": str(folder)}
        )
        assert ended.code == 0, (closed, ended.output)
        assert [file.read_text() for file in sorted(folder.iterdir())] == [
            "whole",
            "whole",
        ]
        assert not left_of(tmp_path)


# hvdkit supervise starts it so, with a list of the hosts that answer.
LEFT = ["env", "LAUNCH_HOSTFILE={tmp}/left", HOSTS_SH]


@pytest.mark.parametrize(("words", "shown"), [
    ([HOSTS_SH, "--hostfile", "{tmp}/hosts"], [r"-np 15 -H node1:8\,node2:4\,node3:2\,node4:1 "]),
    ([HOSTS_SH, "-H", "a:1,b:1", "-p", "2222", "-i", "/k", "--interface", "ib0"],
     [r"\ -p\ 2222\ -i\ /k", "btl_tcp_if_include ib0 -mca oob_tcp_if_include ib0",
      r"-mca pml ob1 -mca btl \^openib "]),
    (["env", "OMPI_MCA_pml=ucx", "OMPI_MCA_btl=self", HOSTS_SH, "-H", "a:1,b:1"],
     ["-mca pml ucx -mca btl self "]),
    # All are reached from here.
    ([HOSTS_SH, "-H", ",".join(f"n{i}:8" for i in range(64))],
     ["plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent 64 "]),
    # Else a for a.cluster.
    ([HOSTS_SH, "-H", "a.cluster:1,b:1"], ["-mca orte_keep_fqdn_hostnames true "]),
    ([HOSTS_SH, "-H", "gamma:1,beta:2,gamma:1"], [r"-np 4 -H gamma:2\,beta:2 "]),
    (LEFT, [r"-np 6 -H node1:2\,node7:4"]),
    ([*LEFT, "-np", "3"], [r"-np 3 -H node1:2\,node7:4"]),
    ([*LEFT, "-np", "9", "-H", "node1:2,node5:4,node7:4"], [r"-np 6 -H node1:2\,node7:4"]),
])  # fmt: skip
def test_the_command_of_mpirun(tmp_path: Path, words: list[str], shown: list[str]):
    (tmp_path / "hosts").write_text(
        "# two racks\nnode1 slots=8\n\nnode2:4  # half of it\nnode3 slots = 2 max_slots=4\nnode4\n"
    )
    (tmp_path / "left").write_text("node1:2\nnode7:4\n")
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    ended = run([*words, "--dry-run", "python", "train.py"], timeout=20)
    assert ended.code == 0 and all(text in ended.output for text in shown), ended.output
    assert ("plm_rsh_no_tree_spawn" in ended.output) == ("n63" in ended.output)


def test_networks_that_a_user_excludes_are_left_to_open_mpi():
    """Of an include and an exclude together it takes none; --interface is the newer word."""
    env = {"OMPI_MCA_btl_tcp_if_exclude": "lo", "OMPI_MCA_oob_tcp_if_include": "ib0"}
    words = [HOSTS_SH, "-H", "a:1,b:1", "--dry-run"]
    ended = run([*words, "true"], 20, env)
    assert ended.code == 0 and "_tcp_if_" not in ended.output, ended.output
    ended = run([*words, "--interface", "eth0", "true"], 20, env)
    assert "takes the place of OMPI_MCA_btl_tcp_if_exclude" in ended.output
    assert "btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0" in ended.output


def test_networks_that_the_cluster_s_files_or_a_user_name_stay(hosts: Hosts, tmp_path):
    settings = tmp_path / "mca-params.conf"
    settings.write_text("btl_tcp_if_include = eth0\noob_tcp_if_exclude = lo,docker0\n")
    show = "import os; print('told', os.environ.get('OMPI_MCA_btl_tcp_if_include'))"
    meet = [sys.executable, "-c", f"{RANKS_MEET}; {show}"]
    flags = ["-H", "node1:1,node2:1", "-p", "2222"]
    for variable in (
        f"OMPI_MCA_mca_base_param_files={settings}",
        "OMPI_MCA_btl_tcp_if_exclude=lo,docker0",
        "OMPI_MCA_oob_tcp_if_exclude=lo,docker0",
    ):
        ended = hosts[1].run("env", variable, HOSTS_SH, *flags, *meet, timeout=60)
        assert ended.code == 0 and ended.output.count("met 2") == 2, ended.output
        assert "could not find environment variable" not in ended.output
        has_network = "oob_tcp_if_exclude=" in variable
        assert ("told None" in ended.output) != has_network, ended.output


def test_the_ranks_get_variables_that_have_names_of_the_script_s_own():
    names = ("name", "work", "host", "port", "key", "others", "code", "prefix")
    env = {name: f"my {name}" for name in names}
    shown = " ".join(f"${name}" for name in names)
    ended = run([HOSTS_SH, "-np", "1", "--plain", "sh", "-c", f"echo {shown}"], 60, env)
    assert " ".join(env.values()) in ended.output, ended.output
    ended = run([HOSTS_SH, "-H", "a:1,b:1", "--dry-run", "true"], 20, env)
    assert all(f"-x {name} " in ended.output for name in names), ended.output


def test_a_launcher_that_cannot_begin_removes_its_own_folder_alone(tmp_path: Path):
    executable(tmp_path / "bin/mkfifo", "exit 1")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "mine").mkdir()
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path / "tmp"),
        "work": str(tmp_path / "mine"),
    }
    ended = run([HOSTS_SH, "-np", "1", "sleep", "100"], 60, env)
    assert ended.code, ended.output
    assert (tmp_path / "mine").exists() and not [*(tmp_path / "tmp").iterdir()]


def test_the_end_of_a_launch_removes_no_other_one_s_folder(tmp_path: Path):
    for name in ("launch-exp.aB3dE5gH", "launch-exp.2.aB3dE5gH"):
        (tmp_path / name).mkdir()
    words = ["sh", "-c", f"echo DONE | bash {ROOT}/launch/stop.sh exp WATCH"]
    assert run(words, 20, {"TMPDIR": str(tmp_path)}).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["launch-exp.2.aB3dE5gH"]


@pytest.mark.parametrize("name", ["R&D", "a(1)", "o'brien", "a$b", "a;b", "a b"])
def test_a_path_that_the_other_hosts_shell_would_read_is_refused(
    tmp_path: Path, name: str
):
    launch = shutil.copytree(ROOT / "launch", tmp_path / name / "launch")
    words = [launch / "hosts.sh", "-H", "node7:2", "--dry-run", "true"]
    ended = run(words, timeout=20)
    assert ended.code == 2 and "must be paths without" in ended.output, ended.output
    # On this host alone nothing reads them; and no shell minds other alphabets.
    ended = run([launch / "hosts.sh", "-np", "2", "--dry-run", "true"], timeout=20)
    assert ended.code == 0, ended.output
    other = shutil.copytree(launch, tmp_path / "J\u00fcrgen_1+2@%,:=-")
    words = [other / "hosts.sh", "-H", "node7:2", "--dry-run", "true"]
    assert run(words, timeout=20).code == 0


def test_open_mpi_of_another_version_is_refused_for_several_hosts(tmp_path: Path):
    """It ignores the settings that keep other users away from the ranks, and says nothing."""
    executable(tmp_path / "bin/mpirun", "echo 'mpirun (Open MPI) 5.0.7'")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    words = [HOSTS_SH, "-H", "node7:2", "--dry-run", "true"]
    ended = run(words, timeout=20, env=env)
    assert ended.code == 2 and "is not Open MPI 4" in ended.output, ended.output


def test_the_name_of_a_launch_is_one_word():
    words = [HOSTS_SH, "-H", "node7:2", "--dry-run", "true"]
    ended = run(words, timeout=20, env={"LAUNCH_ID": "a b"})
    assert ended.code == 2 and "LAUNCH_ID is 'a b'" in ended.output, ended.output
    ended = run(words, timeout=20)
    assert "ControlPath=none" in ended.output, ended.output


def test_without_a_name_stop_ends_no_other_program_of_mpi(hosts: Hosts):
    said = hosts[1].sh(
        "OMPI_COMM_WORLD_RANK=0 sleep 60 & sleep 0.5; "
        f"bash {ROOT}/launch/stop.sh || echo code $?; kill $! && echo it lives"
    )
    assert "sent USR1 to 0 rank(s)" in said and said.endswith("it lives\n"), said


def test_the_launcher_may_have_as_many_open_files_as_are_allowed():
    words = (
        f"ulimit -S -n 1000; ulimit -H -n 3000; exec {HOSTS_SH} -np 1 sh -c 'ulimit -n'"
    )
    assert re.search(
        r"3000$", run(["bash", "-c", words], timeout=60).output, re.MULTILINE
    )


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a/b", "a b", "*", "a;b", "é"])
def test_what_ssh_would_take_for_something_else_is_no_host(tmp_path: Path, name: str):
    """On the command line, in a hostfile, and as hvdkit supervise gives them."""
    file = tmp_path / "hosts"
    file.write_text(f"node1:1\n{name}:1\n")
    for words in (["-H", f"node1:1,{name}:1"], ["--hostfile", file], []):
        ended = run(
            [HOSTS_SH, *words, "true"], timeout=20, env={"LAUNCH_HOSTFILE": str(file)}
        )
        assert ended.code == 2 and f"'{name}:1' is not HOST:RANKS" in ended.output
        assert ended.output.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["-H", "node1"], "'node1' is not HOST:RANKS"),
        (["-H", "node1:99999999999999999999"], "is not HOST:RANKS"),
        (["-np", "99999999999999999999"], "how many ranks? Give -H, --hostfile or -np"),
        (["-H", "node1:2", "-np", "3"], "-np 3 is more than the 2 slots"),
        (["--hostfile", "/nowhere"], "cannot read the hostfile /nowhere"),
        (["--hostfile", "/dev/null", "-np", "2"], "no host in the hostfile /dev/null"),
        ([], "how many ranks? Give -H, --hostfile or -np"),
        (["--fast", "-np", "2"], "unknown option --fast"),
        (["-i", "my key", "-np", "2"], "mpirun splits words at spaces"),
        (["-p", "99999", "-np", "2"], "-p '99999' is no port"),
        (["-H", ""], "-H needs a value"),
        (["--hostfile", "/tmp", "-np", "2"], "cannot read the hostfile /tmp"),
    ],
)
def test_wrong_use_is_explained(words: list[str], message: str):
    ended = run([HOSTS_SH, *words, "python", "train.py"], timeout=20)
    assert ended.code == 2 and message in ended.output


def test_a_hostfile_may_begin_with_a_mark_of_byte_order(tmp_path: Path):
    """Editors on Windows write it."""
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\n", encoding="utf-8-sig")
    ended = run([HOSTS_SH, "--hostfile", file, "--dry-run", "true"], timeout=20)
    assert ended.code == 0 and "-np 2 -H node1:2" in ended.output, ended.output


@pytest.mark.parametrize("launcher", [f"{HOSTS_SH} --plain", "horovodrun --mpi"])
def test_a_launch_within_a_rank_is_one_of_its_own(launcher: str):
    """It neither takes the place of the outer one's rank, nor ends the outer run when it fails."""
    script = (
        "id=$LAUNCH_ID; "
        f"{launcher} -np 1 bash -c 'echo inner of $OMPI_COMM_WORLD_SIZE; exit 5'"
        " || echo ended $?; env | grep -c LAUNCH_ID=$id; sleep 1"
    )
    ended = run([HOSTS_SH, "--plain", "-np", "2", "bash", "-c", script], timeout=60)
    assert ended.code == 0, ended.output
    assert ended.output.count("inner of 1") == ended.output.count("ended 5") == 2, (
        ended.output
    )


def test_settings_of_open_mpi_stay_in_a_shell_that_srun_started():
    """As after `srun --pty bash`, which gives it a rank."""
    env = {"PMIX_RANK": "0", "OMPI_MCA_pml": "ucx", "OMPI_MCA_ess_base_jobid": "7"}
    ended = run([HOSTS_SH, "-np", "2", "--dry-run", "true"], timeout=20, env=env)
    assert ended.code == 0 and "-mca pml ucx" in ended.output, ended.output


def test_check_comes_first_and_looks_at_the_folders_of_the_run(tmp_path: Path):
    """Whether a flagfile names them, or two words."""
    (tmp_path / "own.cfg").write_text("--run_dir=/proc/none\n")
    train = [
        *STAND_IN,
        f"--flagfile={tmp_path}/own.cfg",
        "--data_dir",
        tmp_path / "none",
    ]
    ended = run([HOSTS_SH, "-np", "1", "--check", *train], timeout=100)
    assert ended.code == 1 and "begins at step" not in ended.output
    assert f"the data folder {tmp_path}/none: No such file or directory" in ended.output
    assert "the run folder cannot be written to: /proc" in ended.output


# Starts two launches of two ranks, prints exit codes by launch; a signal ends a rank with 75.
TWO_LAUNCHES = """
export D=$(mktemp -d)
wait='trap "exit 75" USR1; : > "$D/$LAUNCH_ID$HOROVOD_RANK"; while :; do sleep 0.05; done'
rank() { LAUNCH_ID=$1 HOROVOD_RANK=$2 bash -c "$wait" & }
rank one 0; pids=$!; rank one 1; pids="$pids $!"
rank two 0; others=$!; rank two 1; others="$others $!"
until [ "$(ls "$D" | wc -l)" = 4 ]; do sleep 0.05; done
sh "$STOP" one >&2
for pid in $pids; do wait $pid; echo $?; done
sleep 0.3
kill -KILL $others
for pid in $others; do wait $pid; echo $?; done 2>/dev/null
rm -r "$D"
"""


def test_stop_tells_only_the_ranks_of_the_launch_that_is_named():
    """In a process namespace, where other runs are out of reach."""
    require("unshare")
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
    ended = run([*words, TWO_LAUNCHES], 60, {"STOP": str(ROOT / "launch/stop.sh")})
    assert re.findall(r"^\d+$", ended.output, re.M) == ["75", "75", "137", "137"], (
        ended.output
    )
    assert "sent USR1 to 2 rank(s)" in ended.output
