"""The image's files: lint, and what it must not hold. It is built by image_build.py."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from hosts import ENVIRONMENT, ROOT, run

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
