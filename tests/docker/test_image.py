"""The image's files: secrets, build.sh, the entrypoint. image_build.py builds it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import ENVIRONMENT, ROOT, Host, Hosts, executable, run, wait_for
from projects import GIT, shell, tracked

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_only_what_all_builders_know():
    for pattern in (
        r"<<",
        r"^\s*FROM\s+\S*stage-\$",  # stages named by an argument
        r"COPY\s[^\n]*--(link|exclude|parents)",
        r"^#\s*syntax=",
        r"--mount=type=(?!secret,id=[\w.]+(,mode=0444)? )",
    ):
        assert not re.search(pattern, DOCKERFILE, re.MULTILINE), pattern


def test_it_runs_as_an_ordinary_user_by_number_with_ssh_by_key_only():
    """By number, so that Kubernetes can tell that it is not root."""
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "${UID}:${GID}"
    assert "\nARG UID=1000\nARG GID=1000\n" in DOCKERFILE
    settings = (ROOT / "docker" / "sshd_config").read_text()
    assert "PasswordAuthentication no" in settings and "Port 2222" in settings
    assert "HostKey " not in settings  # made at start


def test_the_image_and_the_launchers_pin_the_same_transports():
    hosts_sh = (ROOT / "launch" / "hosts.sh").read_text()
    slurm = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert '"pml = ob1" "btl = ^openib"' in DOCKERFILE and " iproute2 " in DOCKERFILE
    for script in (hosts_sh, slurm):
        assert "${OMPI_MCA_pml:-ob1}" in script and "${OMPI_MCA_btl:-^openib" in script


def test_every_source_of_a_copy_is_let_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = re.findall(
        r"^COPY (?:--chown=\S+ )?([^-\s]\S*) ", DOCKERFILE, re.MULTILINE
    )
    for source in sources:
        path = source.replace("${PROJECT}", "template").replace("${ENGINE}", "hvdkit")
        assert f"!{path.split('/')[0]}" in ignored, source
        assert (ROOT / path).exists(), source


@pytest.mark.parametrize("folder", ["", "template"])
def test_passwords_and_keys_stay_outside(folder: str):
    """A pattern after the last ! counts whatever was let through."""
    ignored = (
        (ROOT / folder / ".dockerignore").read_text().rpartition("\n!")[2].splitlines()
    )
    assert {"**/pip.conf", "**/.netrc", "**/.env*", "**/*.pem", "**/id_rsa*"} <= set(
        ignored
    )


@pytest.fixture
def builder(tmp_path: Path) -> Path:
    """A checkout, and a stand-in for docker that prints its arguments."""
    checkout = tmp_path / "checkout"
    (checkout / "docker").mkdir(parents=True)
    shutil.copy(ROOT / "docker/build.sh", checkout / "docker")
    shutil.copy(ROOT / "Dockerfile", checkout)
    where = "https://ada:geheim@git.example.com/train.git"
    shell(
        f"git init -q; git add -A; git commit -qm 1; git remote add origin {where}",
        checkout,
    )
    executable(tmp_path / "docker", 'printf "%s\\n" "BUILDKIT $DOCKER_BUILDKIT" "$@"')
    return checkout / "docker/build.sh"


@pytest.mark.parametrize("device, driver", [("cpu", True), ("gpu", False)])
def test_arguments_of_the_builder(
    builder: Path, tmp_path: Path, device: str, driver: bool
):
    base = "ubuntu@sha256:" + "ab" * 32
    env = {
        "PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}",
        "BUILDER": "docker",
        "DEVICE": device,
    }
    env |= {"RUNTIME_IMAGE": base, "SOURCE_DATE_EPOCH": "0", **GIT}
    ended = run([builder, "--build-arg", "UID=7"], 20, env)
    assert ended.code == 0, ended.output
    words = ended.output.splitlines()
    assert words[:2] == ["BUILDKIT 1", "build"] and words[-4:-1] == [
        "--build-arg",
        "UID=7",
        ".",
    ]
    labels = {
        "created": "1970-01-01T00:00:00Z", "source": "https://git.example.com/train.git",
        "base.name": base, "base.digest": base.split("@")[1],
        "revision": shell("git rev-parse HEAD", builder.parent).strip(),
    }  # fmt: skip
    for name, text in labels.items():
        assert f"org.opencontainers.image.{name}={text}" in words
    assert "geheim" not in ended.output
    assert ("NVIDIA_VISIBLE_DEVICES=void" in words) == driver


def test_an_image_that_docker_keeps_elsewhere_is_not_called_built(builder, tmp_path):
    """As with a builder of buildx that is a container, without --load."""
    executable(tmp_path / "docker", '[ "$1 $2" != "image inspect" ]')
    env = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "BUILDER": "docker", **GIT}
    ended = run([builder], 20, env)
    assert ended.code == 0 and ended.output.count("\n") == 1, ended.output
    assert "built train:gpu, which is not among the images here: --load" in ended.output


@pytest.mark.parametrize(
    ("flags", "platform"),
    [
        (["--platform", "linux/arm64"], ""),
        (["--platform=linux/arm64"], ""),
        (["--build-arg", "DEVICE=cpu"], ""),
        (["--build-arg=DEVICE=cpu"], ""),
        ([], "linux/arm64"),
    ],
)
def test_a_list_of_another_images_packages_is_refused(
    builder, tmp_path, flags, platform
):
    env = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "BUILDER": "docker", **GIT}
    env |= {"DOCKER_DEFAULT_PLATFORM": platform}
    assert run([builder, *flags], 20, env).code == 0
    ended = run([builder, *flags], 20, env | {"SBOM": "list.json"})
    assert ended.code == 2 and ended.output.count("\n") == 1, ended.output
    assert "SBOM=list.json would list another image's packages" in ended.output


def test_nothing_secret_is_in_the_repository():
    marker = b"PRIVATE KEY" + b"-----"
    for name in tracked():
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1 << 20:
            assert marker not in path.read_bytes(), name


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
ENTRYPOINT = str(ROOT / "docker/entrypoint.sh")
SERVER = Path("/tmp/.sshd-0")  # the entrypoint's folder for its ssh server


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host on which nothing uses the entrypoint's port, 2222."""
    hosts = Hosts(tmp_path, 1, ssh_port=2200)
    yield hosts[1]
    hosts.end()
    shutil.rmtree(SERVER, ignore_errors=True)


def serve(host: Host, home: Path, **env: str) -> subprocess.Popen:
    env = os.environ | ENVIRONMENT | {"HOME": str(home)} | env
    server = subprocess.Popen(host.words(ENTRYPOINT, "sshd"), env=env)

    def is_healthy() -> bool:
        if not (SERVER / "pid").exists():
            return False
        return host.run(ENTRYPOINT, "healthy", timeout=20).code == 0

    wait_for(is_healthy, "the ssh server does not answer", 20)
    return server


def test_a_container_that_is_ended_lets_its_ranks_save_first(
    host: Host, tmp_path: Path
):
    saved = tmp_path / "saved"
    env = os.environ | ENVIRONMENT | {"HOROVOD_RANK": "0"}
    server = serve(host, tmp_path)
    words = host.words(sys.executable, "-c", _RANK, str(saved))
    rank = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)
    assert rank.stdout.readline() == b"ready\n"
    [child] = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert server.wait(30) == 143
    assert saved.exists(), "ended without waiting for the rank"
    assert rank.wait(10) == 75
    assert host.run(ENTRYPOINT, "healthy", timeout=20).code != 0


def test_a_killed_ssh_server_is_no_success(host: Host, tmp_path: Path):
    server = serve(host, tmp_path)
    host.sh(f"kill -KILL $(cat {SERVER}/pid)")
    assert server.wait(30) == 137


# Variables of services, which Kubernetes sets in every container.
_SERVICES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443", "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "KUBERNETES_PORT_443_TCP": "tcp://10.0.0.1:443", "KUBERNETES_PORT_443_TCP_ADDR": "10.0.0.1",
    "MY_PORT_SERVICE_HOST": "10.0.0.2", "MY_PORT_PORT": "udp://10.0.0.2:7",
}  # fmt: skip
_KEPT = {
    "MASTER_PORT": "29500", "MASTER_ADDR": "node1", "DB_SERVICE_HOST": "db", "DB_PORT": "5432",
    "PROXY_PORT_RANGE": "1-2", "QUOTED": 'a "b" \'c\' # d', "SLASHES": r"C:\\a\b \"x\\",
    "EMPTY": "", "SPACES": "  a  b  ", "DOLLAR": "$HOME %h `id` *",
}  # fmt: skip


AS_ORDINARY = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups"]


@pytest.fixture
def ordinary(host: Host) -> Iterator[Path]:
    """The home of user 4321, who is on this host only; it holds the files of the image's /app."""
    home = Path(tempfile.mkdtemp())
    for folder in ("docker", "launch"):
        shutil.copytree(ROOT / folder, home / folder)
    (home / ".ssh").mkdir()
    users = f"root:x:0:0::/root:/bin/sh\ntrainer:x:4321:4321::{home}:/bin/sh\n"
    (home / "passwd").write_text(users)
    for path in (home, *home.rglob("*")):
        os.chown(path, 4321, 4321)
    host.sh(f"mount --bind {home}/passwd /etc/passwd")
    yield home
    shutil.rmtree(home)
    shutil.rmtree("/tmp/.sshd-4321", ignore_errors=True)


def test_ssh_sessions_get_the_containers_environment_and_nobody_else_does(
    host, ordinary, tmp_path
):
    server_folder = Path("/tmp/.sshd-4321")
    server_folder.mkdir(mode=0o777)
    os.chown(server_folder, 4321, 4321)
    shutil.copy(tmp_path / "key.pub", ordinary / ".ssh/authorized_keys")
    shutil.copy(tmp_path / "key", ordinary / ".ssh/id_rsa")
    os.chown(ordinary / ".ssh/id_rsa", 4321, 4321)
    env = {**ENVIRONMENT, "HOME": str(ordinary), **_SERVICES, **_KEPT, "LINES": "a\nb"}
    words = host.words(*AS_ORDINARY, ordinary / "docker/entrypoint.sh", "sshd")
    server = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    said = []
    for line in server.stderr:
        if line == "Server listening on :: port 2222.\n":
            break
        said.append(line)
    else:
        pytest.fail("".join(said))
    assert said[0].startswith("ssh sessions do not get LINES"), said
    modes = {path.name: path.stat().st_mode & 0o777 for path in server_folder.iterdir()}
    assert server_folder.stat().st_mode & 0o777 == 0o700
    assert modes["sshd_config"] == modes["host_key"] == 0o600
    assert not [name for name in modes if name.startswith("sshd_config.")]

    # ssh knows the host, by the key that all hosts mount.
    def over_ssh(command: str) -> str:
        ended = host.run(
            *AS_ORDINARY,
            "ssh",
            "-F",
            ordinary / "docker/ssh_config",
            "-o",
            "StrictHostKeyChecking=yes",
            "node1",
            command,
        )
        return ended.output

    assert over_ssh("umask") == host.run("sh", "-c", "umask").output
    variables = over_ssh("env -0").rstrip("\0").split("\0")
    seen = dict(variable.split("=", 1) for variable in variables)
    assert {name: seen.get(name) for name in _KEPT} == _KEPT
    assert not seen.keys() & {*_SERVICES, "LINES"}


def test_a_folder_of_somebody_elses_is_not_used(host: Host, tmp_path: Path):
    """In /tmp anybody may have made it, to read what is written there."""
    SERVER.mkdir()
    os.chown(SERVER, 4321, 4321)
    ended = host.run(ENTRYPOINT, "sshd", timeout=20)
    assert ended.code == 1 and f"{SERVER} is there and not this user's" in ended.output
    assert not list(SERVER.iterdir())


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_exit_codes_pass_the_entrypoint(code: int):
    assert run([ENTRYPOINT, "sh", "-c", f"exit {code}"], 20).code == code
    assert run([ENTRYPOINT], 20).code == 2
