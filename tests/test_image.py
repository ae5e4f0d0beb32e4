"""The image's files: lint, and what it must not hold. It is built by image_build.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hosts import ENVIRONMENT, ROOT, Hosts, run

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def tool(name: str) -> str:
    found = shutil.which(name, path=ENVIRONMENT["PATH"])
    assert found, f"no {name}: pip install -r requirements-dev.txt"
    return found


def test_hadolint_finds_nothing():
    ended = run([tool("hadolint"), ROOT / "Dockerfile"], timeout=60)
    assert ended.code == 0, ended.output


def test_shellcheck_finds_nothing():
    scripts = [*(ROOT / "docker").glob("*.sh"), *(ROOT / "launch").glob("*.sh")]
    ended = run([tool("shellcheck"), *scripts, ROOT / "launch/slurm.sbatch"], timeout=60)
    assert ended.code == 0, ended.output


@pytest.mark.parametrize(
    "pattern, what",
    [
        (r"<<", "heredocs"),
        (r"^\s*FROM\s+\S*stage-\$", "stages named by an argument"),
        (r"COPY\s[^\n]*--(link|exclude|parents)", "COPY --link, --exclude, --parents"),
        (r"^#\s*syntax=", "a syntax line"),
        (r"RUN\s[^\n]*--mount", "mounts, which the classic builder does not have"),
    ],
)
def test_only_what_all_builders_know(pattern: str, what: str):
    assert not re.search(pattern, DOCKERFILE, re.MULTILINE), what


def test_it_runs_as_an_ordinary_user_by_number():
    """By number, so that Kubernetes can tell that it is not root."""
    last = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1]
    assert last == "1000:1000"


def test_every_source_of_a_copy_is_let_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = re.findall(r"^COPY (?:--chown=\S+ )?([^-\s]\S*) ", DOCKERFILE, re.MULTILINE)
    for source in sources:
        top = source.replace("${PROJECT}", "template").split("/")[0]
        assert f"!{top}" in ignored, source
        assert (ROOT / source.replace("${PROJECT}", "template")).exists(), source


def test_ssh_is_by_key_only_on_a_high_port():
    settings = (ROOT / "docker" / "sshd_config").read_text()
    assert "PasswordAuthentication no" in settings
    assert int(re.search(r"^Port (\d+)", settings, re.MULTILINE)[1]) > 1024
    assert "HostKey " not in settings  # made at start


def test_nothing_secret_is_in_the_repository():
    marker = b"PRIVATE KEY" + b"-----"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in listed.split():
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            assert marker not in path.read_bytes(), name


def test_compose_describes_two_nodes_of_one_image():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"keys", "node1", "node2"}
    assert {s["image"] for s in services.values()} == {"${IMAGE:-train:cpu}"}
    for name in ("node1", "node2"):
        assert services[name]["hostname"] == name
        for volume in services[name]["volumes"]:
            assert volume.split(":")[0] in compose["volumes"]
    command = services["node1"]["command"]
    assert "node1:1,node2:1" in command
    assert (ROOT / command[0]).exists()


_RANK = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_container_that_is_ended_lets_its_ranks_save_first(tmp_path: Path):
    """entrypoint.sh sshd: healthy while it serves, and SIGTERM waits for a rank."""
    hosts = Hosts(tmp_path, 1, ssh_port=2200)  # 2222 is the entrypoint's
    entrypoint, saved = str(ROOT / "docker/entrypoint.sh"), tmp_path / "saved"
    env = os.environ | ENVIRONMENT | {"HOME": str(tmp_path)}

    def healthy() -> bool:
        return (
            hosts[1].run(entrypoint, "healthy", timeout=20, env={"HOME": str(tmp_path)}).code == 0
        )

    try:
        server = subprocess.Popen(hosts[1].words(entrypoint, "sshd"), env=env)
        words = hosts[1].words(sys.executable, "-c", _RANK, str(saved))
        rank = subprocess.Popen(words, env=env | {"HOROVOD_RANK": "0"}, stdout=subprocess.PIPE)
        assert rank.stdout.readline() == b"ready\n"
        for _ in range(50):
            if Path("/tmp/.sshd.pid").exists() and healthy():
                break
            time.sleep(0.1)
        assert healthy()
        [child] = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert server.wait(30) == 0
        assert saved.exists(), "ended without waiting for the rank"
        assert rank.wait(10) == 75
        assert not healthy()
    finally:
        hosts.end()
        Path("/tmp/.sshd.pid").unlink(missing_ok=True)
