"""Builds the image and trains in it: in one container, and in two over ssh.

make image-test    as root, with buildah and debootstrap; 25 minutes; with Docker, compose too
IMAGE_DEVICE=gpu make image-test    the image for GPUs, trained in on CPUs; 60 GB
"""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, make_key, require, run
from projects import make, repository

DEVICE = os.environ.get("IMAGE_DEVICE", "cpu")
RELEASE = {"cpu": "bookworm", "gpu": "trixie"}[DEVICE]  # trixie has nvcc of CUDA 12
BASE = f"localhost/{RELEASE}:base"
IMAGE = f"localhost/train:{DEVICE}"
BUILD_BASE = {"cpu": BASE, "gpu": f"localhost/{RELEASE}:cuda"}[DEVICE]
_CUDA = "apt-get update && apt-get install -y --no-install-recommends nvidia-cuda-toolkit g++-13"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
# Settings of this machine that some networks need to fetch packages.
_LENT = "etc/apt/apt.conf.d/*proxy*"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_WHEELS = os.environ.get("IMAGE_WHEELS", "")  # a folder that keeps them between builds
_TENSORFLOW = {"cpu": "tensorflow-cpu", "gpu": "nvidia-nccl-cu12"}[DEVICE]
_TINY = (
    "--image_size=32",
    "--global_batch_size=4",
    "--num_steps=3",
    "--warmup_steps=0",
    "--log_every=1",
    "--eval_every=0",
    "--checkpoint_every=0",
    "--run_dir=/runs/test",
)

pytestmark = pytest.mark.timeout(4000)


def buildah(*words: str, timeout: float = 300) -> str:
    ended = run(["buildah", *words], timeout, env={"BUILDAH_ISOLATION": "chroot"})
    assert ended.code == 0, ended.output[-5000:]
    return ended.output.strip()


def make_base(folder: Path) -> None:
    require("buildah", "debootstrap")
    if run(["buildah", "inspect", BUILD_BASE], 60).code == 0:
        return
    root = folder / "root"
    parts = "--components=main,contrib,non-free"
    ended = run(["debootstrap", "--variant=minbase", parts, RELEASE, root, MIRROR], 900)
    assert ended.code == 0, ended.output[-3000:]
    for path in Path("/").glob(_LENT):
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    container = buildah("from", "scratch")
    buildah("add", container, str(root), "/")
    buildah("config", "--cmd", "bash", container)
    buildah("commit", container, BASE)
    if DEVICE == "gpu":
        buildah("run", container, "--", "sh", "-c", _CUDA, timeout=900)
        buildah(
            "config",
            "--env=CUDA_HOME=/usr",
            "--env=CC=gcc-13",
            "--env=CXX=g++-13",
            container,
        )
        buildah("commit", container, BUILD_BASE, timeout=900)
    buildah("rm", container)


@pytest.fixture(scope="module")
def sbom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the image; returns the list of what is in it."""
    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    build(ROOT, IMAGE, SBOM=str(folder / "sbom.json"))
    return folder / "sbom.json"


def build(project: Path, image: str, *flags: str, **settings: str) -> None:
    """Runs docker/build.sh. Layers are cached: a second project compiles nothing."""
    env = {
        "DEVICE": DEVICE,
        "BASE_IMAGE": BUILD_BASE,
        "RUNTIME_IMAGE": BASE,
        "IMAGE": image,
        "BUILDER": "buildah",
        "BUILDAH_ISOLATION": "chroot",
        "BUILDAH_LAYERS": "true",
    }
    words = ["nice", "-n", "5", str(project / "docker/build.sh"), *flags]
    words += ["--secret", f"id=ca,src={_CERTIFICATES}"]  # PyPI's, or this network's own
    if _WHEELS:  # Horovod is compiled once
        Path(_WHEELS).mkdir(parents=True, exist_ok=True)
        words += ["--volume", f"{_WHEELS}:/tmp/wheels"]
    start = time.monotonic()
    ended = run(words, 3600, env=env | settings)
    print(ended.output[-3000:], f"\n{image} built in {time.monotonic() - start:.0f} s")
    assert ended.code == 0, ended.output[-8000:]


def config(image: str) -> dict:
    return json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]


@pytest.fixture(scope="module")
def roots(sbom: Path) -> Iterator[list[Path]]:
    containers = [buildah("from", IMAGE) for _ in range(2)]
    yield [Path(buildah("mount", container)) for container in containers]
    for container in containers:
        buildah("rm", container)


def inside(root: Path, *command: str, image: str = IMAGE, user: str = "") -> list[str]:
    """A container's command, with the image's entrypoint and variables; `user`: another UID:GID."""
    about = config(image)
    variables = shlex.join([*about["Env"], "PROOF=seen"])
    script = (
        f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; "
        f"mount --bind /etc/hosts {root}/etc/hosts; mount -t tmpfs -o mode=1777 tmpfs {root}/tmp; "
        f"exec chroot --userspec={user or about['User']} {root} env -i {variables} "
        f'sh -c \'cd {about["WorkingDir"]} && exec "$@"\' sh "$@"'
    )
    words = [str(word) for word in command]
    return [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        *about["Entrypoint"],
        *words,
    ]


def test_what_is_in_it(roots: list[Path]):
    root = roots[0]
    for pattern in (
        "etc/ssh/ssh_host_*",
        "home/trainer/.ssh/*",
        "var/lib/apt/lists/*_Packages*",
    ):
        assert not list(root.glob(pattern)), pattern
    for tool in ("gcc", "c++", "make", "nvcc"):
        assert run(inside(root, "sh", "-c", f"command -v {tool}"), 20).code == 127, tool
    assert run(inside(root, "id", "-u"), 20).output.splitlines()[-1] == "1000"
    settings = run(
        inside(root, "cat", "/etc/openmpi/openmpi-mca-params.conf"), 20
    ).output
    # Also under srun without slurm.sbatch.
    assert "\npml = ob1\nbtl = ^openib\n" in settings
    # hosts.sh finds networks by it.
    assert run(inside(root, "ip", "-4", "route"), 20).code == 0
    built = run(inside(root, "horovodrun", "--check-build"), 400).output
    assert "[X] MPI" in built
    assert "[X] Gloo" in built
    assert "[X] NCCL" in built or DEVICE != "gpu"
    about = buildah("inspect", "--type", "image", IMAGE)
    for part in ("Healthcheck", "/usr/bin/tini", "1000:1000"):
        assert part in about, part
    prefix = "org.opencontainers.image."
    labels = {}
    for name, text in config(IMAGE)["Labels"].items():
        labels[name.removeprefix(prefix)] = text
    assert labels.keys() >= {
        "title",
        "description",
        "licenses",
        "created",
        "revision",
        "version",
    }
    assert labels["base.name"] == BASE
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", labels["created"])


_OF_RUNS = ("/home/trainer", "/runs", "/app/runs", "/app/datasets")
_OF_ALL = ("/tmp", "/var/tmp", "/run/lock")
_OF_GROUP_0 = ("/var/log/", "/var/mail", "/var/local")


@pytest.mark.parametrize("user", ["", "54321:0"])
def test_only_what_a_run_writes_is_writable(roots: list[Path], user: str):
    """For its own user, and for one whom the image does not know (Debian's group 0 may log)."""
    script = (
        r"find / -xdev \( -path /proc -o -path /dev \) -prune -o ! -type l -writable -print "
        "2>/dev/null; true"
    )
    listed = run(inside(roots[0], "sh", "-c", script, user=user), 100)
    paths = [line for line in listed.output.splitlines() if line.startswith("/")]
    allowed = (*_OF_RUNS, *_OF_ALL)
    if user:
        allowed += _OF_GROUP_0
    assert not [path for path in paths if not path.startswith(allowed)]
    assert set(_OF_RUNS) <= set(paths)


def test_the_list_of_what_is_in_it(sbom: Path, roots: list[Path]):
    components = json.loads(sbom.read_text())["components"]
    listed = {component["name"]: component["version"] for component in components}
    [folder] = roots[0].glob("opt/venv/lib/python3*/site-packages")
    installed = {}
    for package in importlib.metadata.distributions(path=[str(folder)]):
        name = package.metadata["Name"].lower().replace("_", "-")
        installed[name] = package.version
    assert installed == {name: listed.get(name) for name in installed}
    assert _TENSORFLOW in installed


@pytest.mark.parametrize("user", ["", "54321:0"])
def test_two_ranks_train_in_one_container(roots: list[Path], user: str):
    flags = [flag.replace("/runs/", f"/runs/as-{user[:5]}") for flag in _TINY]
    command = inside(
        roots[0],
        "horovodrun",
        "-np",
        "2",
        "python",
        "train.py",
        "--flagfile=configs/demo.cfg",
        *flags,
        user=user,
    )
    ended = run(command, 400)
    assert ended.code == 0, ended.output[-4000:]
    assert "2 ranks on 1 host(s)" in ended.output and "step 3/3" in ended.output
    if user:  # ssh needs a line in /etc/passwd
        ended = run(inside(roots[0], "sshd", user=user), 20)
        assert ended.code == 2 and "--build-arg UID=54321" in ended.output


def test_exit_codes_arrive(roots: list[Path]):
    assert (
        run(inside(roots[0], "python", "train.py", "--no_such_flag=1"), 100).code == 2
    )
    command = inside(
        roots[0],
        "python",
        "train.py",
        "--flagfile=configs/demo.cfg",
        *_TINY,
        "--num_steps=100000",
        "--run_dir=/runs/stopped",
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert any(line.startswith("step 1/") for line in running.stdout)
            running.terminate()  # docker stop signals the first process too
            assert running.wait(60) == 75
        finally:
            running.kill()


def test_mirrors_and_certificates(sbom: Path, tmp_path: Path):
    """The Dockerfile's own lines, up to the first use of pip."""
    text = (ROOT / "Dockerfile").read_text()
    start = text.index(" \\\n    && PYTHON=/opt/venv/bin/python DEVICE=")
    end = text.index("\n\n", start)
    before = text[:start]
    after = text[end:]
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://secret.example.com/simple\n"
    )
    secrets = [
        f"--secret=id=pip.conf,src={tmp_path}/pip.conf",
        f"--secret=id=ca,src={_CERTIFICATES}",
    ]
    cases = [
        ([], "the usual", ""),
        (
            secrets,
            "/run/secrets/ca",
            "global.index-url='https://secret.example.com/simple'",
        ),
        (
            ["--build-arg=PIP_INDEX_URL=https://open.example.com"],
            "the usual",
            "https://open.",
        ),
    ]
    for number, (flags, certificates, index) in enumerate(cases):
        # Each case has other words, since a cached layer prints nothing.
        command = (
            ' && echo "certificates ${PIP_CERT:-the usual}" && python3 -m venv /tmp/pip'
            f" && /tmp/pip/bin/pip config list && : {number}"
        )
        (tmp_path / "Dockerfile").write_text(before + command + after)
        words = [
            "buildah",
            "build",
            "-f",
            tmp_path / "Dockerfile",
            "--target=build",
            *flags,
        ]
        words += [f"--build-arg=BASE_IMAGE={BASE}", "--build-arg=DEVICE=cpu", ROOT]
        env = {"BUILDAH_LAYERS": "true", "BUILDAH_ISOLATION": "chroot"}
        ended = run(words, 300, env=env)
        assert ended.code == 0, ended.output[-3000:]
        said = ended.output.split("\ncertificates ")[1]
        assert said.startswith(f"{certificates}\n")
        assert index in said and ("index-url" in said) == bool(index)


def test_system_packages_come_from_a_mirror(sbom: Path):
    """The base names a server that does not exist; the mirror replaces it."""
    container = buildah("from", BASE)
    try:
        buildah(
            "copy", container, str(ROOT / "docker/apt-install.sh"), "/tmp/apt-install"
        )
        server, path = re.fullmatch(r"(https?://[^/]+.*)(/debian)/?", MIRROR).groups()
        script = (
            f"echo 'deb http://archive.ubuntu.com{path} {RELEASE} main' >/etc/apt/sources.list; "
            f"APT_MIRROR={server} /tmp/apt-install file && file --version"
        )
        assert "file-5" in buildah("run", container, "--", "sh", "-ec", script)
        sources = buildah("run", container, "--", "cat", "/etc/apt/sources.list")
        assert "archive.ubuntu.com" in sources
    finally:
        buildah("rm", container)


def test_a_fork_builds_its_own_image(sbom: Path, tmp_path: Path):
    project = make(repository(tmp_path / "repository"), tmp_path / "my-model", "blank")
    image = f"my-model:{DEVICE}"
    for path in project.rglob("*.py"):
        path.chmod(0o600)  # as another umask leaves them
    build(
        project,
        image,
        "--build-arg=UID=1234",
        "--build-arg=GID=4321",
        "--build-arg=EXTRA_PACKAGES=file less",
    )
    assert config(image)["Labels"]["org.opencontainers.image.title"] == "my-model"
    container = buildah("from", image)
    try:
        root = Path(buildah("mount", container))
        horovodrun = ["horovodrun", "-np", "2"]
        command = inside(
            root, *horovodrun, "python", "train.py", "--num_steps=20", image=image
        )
        ended = run(command, 400)
        assert ended.code == 0, ended.output[-4000:]
        assert "2 ranks on 1 host(s)" in ended.output and "step 20/20" in ended.output
        [left] = (root / "app/runs").iterdir()
        assert (left.stat().st_uid, left.stat().st_gid) == (1234, 4321)
        assert run(inside(root, "file", "--version", image=image), 20).code == 0
    finally:
        buildah("rm", container)


def test_two_containers_train_over_ssh(roots: list[Path], tmp_path: Path):
    """As docker/compose.yaml starts them: node2 serves ssh, node1 launches."""
    hosts = Hosts(tmp_path, 2, ssh_port=2200)  # the image's own server has 2222
    try:
        key = tmp_path / "id_ed25519"
        make_key(key)
        for root in roots:
            folder = root / "home/trainer/.ssh"
            for name, source in (
                ("id_ed25519", key),
                ("authorized_keys", f"{key}.pub"),
            ):
                shutil.copy(source, folder / name)
                os.chown(folder / name, 1000, 1000)
        server = subprocess.Popen(hosts[2].words(*inside(roots[1], "sshd")))
        ended = run(hosts[1].words(*inside(roots[0], "sh", "-c", _LAUNCH)), 400)
        assert ended.code == 0, ended.output[-4000:]
        for text in ("PROOF=seen", "2 ranks on 2 host(s) (node1, node2)", "step 3/3"):
            assert text in ended.output
        server.terminate()
        assert server.wait(20) is not None
    finally:
        hosts.end()


@pytest.fixture
def compose(sbom: Path, tmp_path: Path) -> Iterator[Callable[[list[str]], list[str]]]:
    """docker-compose and its files, where node1 runs another command."""
    if not shutil.which("docker-compose") or run(["docker", "info"], 20).code != 0:
        pytest.skip("needs docker-compose and Docker's service")
    buildah("push", IMAGE, f"docker-daemon:{IMAGE}", timeout=600)

    def words(command: list[str]) -> list[str]:
        services = {"node1": {"command": command}}
        changed = tmp_path / "changed.yaml"
        changed.write_text(json.dumps({"services": services}))  # JSON is YAML
        return [
            "env",
            f"IMAGE={IMAGE}",
            "docker-compose",
            "-p",
            "imagetest",
            "-f",
            str(ROOT / "docker/compose.yaml"),
            "-f",
            str(changed),
        ]

    yield words
    run([*words([]), "down", "--volumes"], 100)


_TRAIN = [
    "launch/hosts.sh",
    "-H",
    "node1:1,node2:1",
    "python",
    "train.py",
    "--flagfile=configs/demo.cfg",
    *_TINY,
]


@pytest.mark.parametrize(
    ("code", "flags", "said"),
    [(0, [], "step 3/3"), (2, ["--no_such_flag=1"], "no_such_flag")],
)
def test_compose_trains_on_two_nodes(
    compose, code: int, flags: list[str], *, said: str
):
    ended = run([*compose([*_TRAIN, *flags]), "up", "--exit-code-from", "node1"], 500)
    assert ended.code == code and said in ended.output, ended.output[-5000:]
    assert code or "2 ranks on 2 host(s) (node1, node2)" in ended.output


_LAUNCH = (
    "for i in 1 2 3 4 5 6 7 8 9; do ssh node2 true && break; sleep 1; done; "
    "ssh node2 env | grep PROOF && "
    "launch/hosts.sh -H node1:1,node2:1 --interface eth0 python train.py "
    f"--flagfile=configs/demo.cfg {' '.join(_TINY)}"
)
