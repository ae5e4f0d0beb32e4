"""Hosts on one machine: each has its own network, name, processes, mounts and sshd.

A host is its sshd, in namespaces on a bridge that all share: with it ends all else of the host.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from hvdkit.testing import ENVIRONMENT, Launch, kill_session, last_lines

ROOT = Path(__file__).resolve().parents[2]
# Stands for training where a launcher is tested.
STAND_IN = [sys.executable, str(ROOT / "tests" / "helpers" / "stand_in" / "train.py")]
PORT = 2222
# Slower than this machine can copy, so that it is the same between all hosts.
_SPEED = "root tbf rate 400mbit burst 64kb latency 100ms"
_T = TypeVar("_T")
# ssh that learns no host key.
LEAVES_NO_TRACE = [
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
    "-q",
]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i"]
# NOBODY can start it: an environment's may be in a closed home.
PYTHON = "/usr/bin/python3"


def require(*programs: str) -> None:
    """Skips a test that needs root and these programs; in CI it fails instead."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if not shutil.which(program, path=path)]
    if os.geteuid() != 0:
        reason = "needs root, for namespaces"
    elif missing:
        reason = f"needs {', '.join(missing)}: see .ci/run"
    else:
        return
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def start(
    words: list, env: dict[str, str] | None = None, **options
) -> subprocess.Popen:
    """Starts a command in its own session, with one pipe for all that it prints.

    `options`: of subprocess.Popen.
    """
    return subprocess.Popen(
        [str(word) for word in words],
        env=os.environ | ENVIRONMENT | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
        **options,
    )


def run(
    words: list, timeout: float, env: dict[str, str] | None = None, **options
) -> Launch:
    """Runs a command in its own session; an AssertionError with its last lines if it hangs.

    `options`: of subprocess.Popen.
    """
    process = start(words, env, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        output, _ = process.communicate()
        message = f"{words} hung: killed after {timeout} s\n{last_lines(output)}"
        raise AssertionError(message) from None
    return Launch(process.returncode, output)


class Host:
    """One of the hosts; `pid` is its sshd's on this machine."""

    def __init__(self, number: int, hosts: "Hosts", count: int) -> None:
        self.name = f"node{number}"
        self.address = f"10.77.0.{number}"
        self._folder = hosts.folder / self.name
        self._switch = hosts.switch
        self.home = self._folder / "home"
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self._write_settings(hosts, count)
        # Other tests' node1 has the same /tmp, where Open MPI's folders are named by host and pid.
        last_pid = random.randrange(10_000, 30_000)
        script = f"""
            set -e
            hostname {self.name}
            echo {last_pid} >/proc/sys/kernel/ns_last_pid
            mount --bind {self._folder}/hosts /etc/hosts
            mount --bind {self._folder}/passwd /etc/passwd
            mkdir {self._folder}/sys
            mount -t sysfs sysfs {self._folder}/sys # which lists its own network cards
            mount --bind {self._folder}/sys/class/net /sys/class/net
            mount --bind {self._folder}/sys/devices/virtual/net /sys/devices/virtual/net
            read -r _ # until its network is there
            umask 077
            exec env --ignore-environment /usr/sbin/sshd -D -e -f {self._folder}/sshd_config
        """
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc"]
        self._outer = subprocess.Popen(
            ["unshare", *namespaces, "--fork", "--kill-child=KILL", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.pid = int(wait_for(children.read_text, "unshare started nothing"))
        self._connect(f"port{number}")
        self._outer.stdin.write(b"\n")
        self._outer.stdin.flush()

    def _write_settings(self, hosts: "Hosts", count: int) -> None:
        names = "".join(f"10.77.0.{n} node{n}\n" for n in range(1, count + 1))
        self.hosts_file = self._folder / "hosts"
        self.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
        host_key = self._folder / "host_key"
        make_key(host_key)
        (self._folder / "sshd_config").write_text(
            f"Port {hosts.ssh_port}\nHostKey {host_key}\nAuthorizedKeysFile {hosts.key}.pub\nPidFile none\n"
            "UsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "MaxStartups 100\n"
        )
        users = Path("/etc/passwd").read_text()
        users = re.sub(
            r"^(root(?::[^:\n]*){4}):[^:\n]*", rf"\1:{self.home}", users, flags=re.M
        )
        (self._folder / "passwd").write_text(users)
        shutil.copy(hosts.key, self.home / ".ssh" / "id_ed25519")

    def _connect(self, port: str) -> None:
        _in_network(
            self._switch,
            f"ip link add {port} type veth peer name eth0 netns {self.pid}",
        )
        _in_network(self._switch, f"ip link set {port} master bridge0 up")
        for command in (
            "ip link set lo up",
            f"ip address add {self.address}/24 dev eth0",
            "ip link set eth0 up",
            # Docker leaves such a bridge: idle, and with the same address on every host.
            "ip link add docker0 type bridge",
            "ip address add 172.17.0.1/16 dev docker0",
            "ip link set docker0 up",
            f"tc qdisc replace dev eth0 {_SPEED}",
        ):
            _in_network(self.pid, command)
        _in_network(self._switch, f"tc qdisc replace dev {port} {_SPEED}")

    def words(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            f"--wd={ROOT / 'template'}",
            "--",
            "env",
            f"HOME={self.home}",
            *(str(word) for word in command),
        ]

    def run(
        self, *command: str, timeout: float = 120, env: dict | None = None
    ) -> Launch:
        return run(self.words(*command), timeout, env)

    def sh(self, script: str) -> str:
        """A few quick commands; an error is raised if one fails."""
        ended = self.run("sh", "-ec", script, timeout=30)
        assert ended.code == 0, ended.output
        return ended.output

    @contextlib.contextmanager
    def login(self, shell: str, bashrc: str = "") -> Iterator[None]:
        """A login by ssh gets this shell; bash runs `bashrc` first."""
        file = self._folder / "passwd"
        users = file.read_text()
        file.write_text(
            re.sub(r"^(root(?::[^:\n]*){5}):.*$", rf"\1:{shell}", users, flags=re.M)
        )
        (self.home / ".bashrc").write_text(bashrc)
        try:
            yield
        finally:
            file.write_text(users)
            (self.home / ".bashrc").unlink()

    def end(self) -> None:
        """Ends all at once, as if its power were cut."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.stdin.close()
        self._outer.wait(10)


class Hosts:
    """`count` hosts named node1, node2, ... and the bridge between them."""

    def __init__(self, folder: Path, count: int, ssh_port: int = PORT) -> None:
        require("sshd", "ssh", "ip", "tc", "unshare", "nsenter")
        Path("/run/sshd").mkdir(exist_ok=True)
        self.folder = folder
        self.ssh_port = ssh_port
        self.key = folder / "key"
        make_key(self.key)
        self._bridge = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.switch = self._bridge.pid
        this_network = os.readlink("/proc/self/ns/net")
        wait_for(
            lambda: os.readlink(f"/proc/{self.switch}/ns/net") != this_network,
            "no network namespace",
        )
        _in_network(self.switch, "ip link add bridge0 type bridge")
        _in_network(self.switch, "ip link set bridge0 up")
        self._hosts: list[Host] = []
        try:
            for number in range(1, count + 1):
                self._hosts.append(Host(number, self, count))
            for host in self._hosts:
                self._wait_for_ssh(host)
        except BaseException:
            self.end()
            raise

    def __getitem__(self, number: int) -> Host:
        """By its number, from 1."""
        return self._hosts[number - 1]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def left(self, *names: str, seconds: float = 0) -> list[str]:
        """Hosts where after so many seconds a command, but no launcher, still holds a name."""
        end = time.monotonic() + seconds
        while True:
            left = []
            for host in self:
                processes = host.sh("ps ax | grep -v 'mpirun\\|hosts.sh'")
                if any(name in processes for name in names):
                    left.append(host.name)
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.5)

    def cut(self, host: Host, back: bool = False) -> None:
        """Takes it off the network, or `back` on it, like a cable; its processes run on."""
        _in_network(
            self.switch, f"ip link set port{host.name[4:]} {'up' if back else 'down'}"
        )

    def end(self) -> None:
        for host in self._hosts:
            host.end()
        self._bridge.kill()
        self._bridge.wait(10)

    def _wait_for_ssh(self, host: Host) -> None:
        ssh = ["ssh", "-p", str(self.ssh_port), *LEAVES_NO_TRACE]

        def answers() -> bool:
            ended = self[1].run(*ssh, host.name, "hostname", timeout=10)
            return ended.output.strip() == host.name

        wait_for(answers, f"no ssh from node1 to {host.name}", 10)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    three = Hosts(tmp_path_factory.mktemp("hosts"), 3)
    yield three
    three.end()


def executable(path: Path, script: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make_key(file: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True
    )


def _in_network(pid: int, command: str) -> None:
    words = ["nsenter", "--target", str(pid), "--net", *command.split()]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"


def wait_for(there: Callable[[], _T], message: str, seconds: float = 4) -> _T:
    """Waits until `there()` is true in a test, and returns that."""
    end = time.monotonic() + seconds
    while True:
        value = there()
        if value:
            return value
        assert time.monotonic() < end, message
        time.sleep(0.02)
