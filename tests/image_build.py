"""Builds the CPU image for real, and trains in it: alone, and from two containers over ssh.

    make image-test    as root, with buildah and debootstrap; 25 minutes; with Docker, compose too

Not collected by `make test`. Both bases are a Debian made here by debootstrap. The image that was
built is run as two roots, each with a network, a name and processes of its own (hosts.py).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import ROOT, Hosts, require, run
from projects import make, repository

BASE, IMAGE = "localhost/bookworm:base", "localhost/train:cpu"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
# Settings of the machine that builds, without which packages cannot be fetched in some networks.
_LENT = ("usr/local/share/ca-certificates/*.crt", "etc/apt/apt.conf.d/*proxy*", "etc/pip.conf")
_WHEELS = os.environ.get("IMAGE_WHEELS", "")  # a folder that keeps them between builds
_TINY = (
    *("--image_size=32", "--global_batch_size=4", "--num_steps=3", "--warmup_steps=0"),
    *("--log_every=1", "--eval_every=0", "--checkpoint_every=0", "--run_dir=/runs/test"),
)

pytestmark = pytest.mark.timeout(3000)


def buildah(*words: str, timeout: float = 300) -> str:
    ended = run(["buildah", *words], timeout, env={"BUILDAH_ISOLATION": "chroot"})
    assert ended.code == 0, ended.output[-5000:]
    return ended.output.strip()


def make_base(folder: Path) -> None:
    """A plain Debian as an image."""
    require("buildah", "debootstrap")
    if run(["buildah", "inspect", BASE], 60).code == 0:
        return
    root = folder / "root"
    ended = run(["debootstrap", "--variant=minbase", "bookworm", root, MIRROR], 900)
    assert ended.code == 0, ended.output[-3000:]
    for path in (p for pattern in _LENT for p in Path("/").glob(pattern)):
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    container = buildah("from", "scratch")
    buildah("add", container, str(root), "/")
    buildah("config", "--cmd", "bash", container)
    buildah("commit", "--rm", container, BASE)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    make_base(tmp_path_factory.mktemp("base"))
    build(ROOT, IMAGE)
    return IMAGE


def build(project: Path, image: str) -> None:
    """By docker/build.sh. Layers are kept: a second project compiles nothing."""
    env = {"DEVICE": "cpu", "BASE_IMAGE": BASE, "RUNTIME_IMAGE": BASE, "IMAGE": image}
    env |= {"BUILDER": "buildah", "BUILDAH_ISOLATION": "chroot", "BUILDAH_LAYERS": "true"}
    words = ["nice", "-n", "5", str(project / "docker/build.sh")]
    if _WHEELS:  # Horovod is compiled once
        Path(_WHEELS).mkdir(parents=True, exist_ok=True)
        words += ["--volume", f"{_WHEELS}:/tmp/wheels"]
    ended = run(words, 2400, env=env)
    print(ended.output[-3000:], f"\n{image} built in {ended.seconds:.0f} s")
    assert ended.code == 0, ended.output[-8000:]


@pytest.fixture(scope="module")
def roots(image: str) -> Iterator[list[Path]]:
    """Two containers' file systems."""
    containers = [buildah("from", image) for _ in range(2)]
    yield [Path(buildah("mount", container)) for container in containers]
    for container in containers:
        buildah("rm", container)


def inside(root: Path, *command: str) -> list[str]:
    """The command that runs `command` there as the image's user."""
    script = (
        f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; "
        f"mount --bind /etc/hosts {root}/etc/hosts; mount -t tmpfs -o mode=1777 tmpfs {root}/tmp; "
        f"exec chroot --userspec=1000:1000 {root} env -i HOME=/home/trainer USER=trainer "
        f"PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PROOF=seen "
        f'sh -c \'cd /app && exec "$@"\' sh "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", *map(str, command)]


def test_what_is_in_it(roots: list[Path]):
    root = roots[0]
    assert not list((root / "etc/ssh").glob("ssh_host_*")), "host keys baked in"
    assert not list((root / "home/trainer/.ssh").iterdir()), "keys baked in"
    for tool in ("gcc", "c++", "make", "nvcc"):
        assert not run(inside(root, "sh", "-c", f"command -v {tool}"), 20).output.strip(), tool
    assert run(inside(root, "id", "-u"), 20).output.strip() == "1000"
    built = run(inside(root, "horovodrun", "--check-build"), 200).output
    assert "[X] MPI" in built and "[X] Gloo" in built
    about = buildah("inspect", "--type", "image", IMAGE)
    for part in ("org.opencontainers.image.title", "Healthcheck", "/usr/bin/tini", "1000:1000"):
        assert part in about, part


def test_two_ranks_train_in_one_container(roots: list[Path]):
    command = ["horovodrun", "-np", "2", "python", "train.py", "--flagfile=configs/demo.cfg"]
    ended = run(inside(roots[0], *command, *_TINY), 400)
    assert ended.code == 0, ended.output[-4000:]
    assert "2 ranks on 1 host(s)" in ended.output
    assert "step 3/3" in ended.output


def test_a_project_made_from_the_template_builds_its_own(image: str, tmp_path: Path):
    """Its Dockerfile is at the project's root, and so is what it copies."""
    project = make(repository(tmp_path / "repository"), tmp_path / "my-model", "blank")
    build(project, "localhost/my-model:cpu")
    container = buildah("from", "localhost/my-model:cpu")
    try:
        root = Path(buildah("mount", container))
        command = ["horovodrun", "-np", "2", "python", "train.py", "--run_dir=/runs/test"]
        ended = run(inside(root, *command, "--num_steps=20"), 400)
        assert ended.code == 0, ended.output[-4000:]
        assert "2 ranks on 1 host(s)" in ended.output and "step 20/20" in ended.output
    finally:
        buildah("rm", container)


def test_two_containers_train_over_ssh(roots: list[Path], tmp_path: Path):
    """As docker/compose.yaml starts them: node2 serves ssh, node1 launches."""
    hosts = Hosts(tmp_path, 2, ssh_port=2200)  # the image's own server has 2222
    try:
        key = tmp_path / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        for root in roots:
            own = root / "home/trainer/.ssh"
            for name, source in (("id_ed25519", key), ("authorized_keys", f"{key}.pub")):
                shutil.copy(source, own / name)
                os.chown(own / name, 1000, 1000)
        entrypoint = ["/usr/bin/tini", "--", "/app/docker/entrypoint.sh"]
        server = subprocess.Popen(hosts[2].words(*inside(roots[1], *entrypoint, "sshd")))
        launched = hosts[1].words(*inside(roots[0], *entrypoint, "sh", "-c", _LAUNCH))
        ended = run(launched, 400)
        assert ended.code == 0, ended.output[-4000:]
        assert "PROOF=seen" in ended.output, "ssh sessions do not see the environment"
        assert "2 ranks on 2 host(s) (node1, node2)" in ended.output
        assert "step 3/3" in ended.output
        server.terminate()
        assert server.wait(20) is not None
    finally:
        hosts.end()


def test_compose_trains_on_two_nodes(image: str, tmp_path: Path):
    """docker/compose.yaml as it is, but for a shorter run."""
    if not shutil.which("docker-compose") or run(["docker", "info"], 20).code != 0:
        pytest.skip("needs docker-compose and Docker's service")
    buildah("push", IMAGE, f"docker-daemon:{IMAGE}", timeout=600)
    shorter = tmp_path / "shorter.yaml"
    words = ["launch/hosts.sh", "-H", "node1:1,node2:1", "python", "train.py"]
    words += ["--flagfile=configs/demo.cfg", *_TINY]
    # Docker raises no limit that its own service may not.
    locked = {"ulimits": {"memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]}}
    services = {"keys": locked, "node2": locked, "node1": {"command": words, **locked}}
    shorter.write_text(json.dumps({"services": services}))  # JSON is YAML
    files = ["-f", ROOT / "docker/compose.yaml", "-f", shorter]
    compose = ["docker-compose", "-p", "imagetest", *files]
    try:
        ended = run([*compose, "up", "--abort-on-container-exit"], 500, env={"IMAGE": IMAGE})
        assert ended.code == 0, ended.output[-5000:]
        assert "2 ranks on 2 host(s) (node1, node2)" in ended.output
        assert "step 3/3" in ended.output
    finally:
        run([*compose, "down", "--volumes"], 100, env={"IMAGE": IMAGE})


_LAUNCH = (
    "for i in 1 2 3 4 5 6 7 8 9; do ssh node2 true && break; sleep 1; done; "
    "ssh node2 env | grep PROOF && "
    "launch/hosts.sh -H node1:1,node2:1 --interface eth0 python train.py "
    f"--flagfile=configs/demo.cfg {' '.join(_TINY)}"
)
