"""Set-ups for real, with TensorFlow and Horovod: from a folder without a network, in a path with a
space, two at once; and the wheels of every Python and machine that the locks serve.

    make setup-test    as root, for network namespaces; downloads 0.6 GB; 20 minutes

Not collected by `make test`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import BIN, OUTSIDE, ROOT, copy_checkout, environment, run
from hosts import require

pytestmark = pytest.mark.timeout(3000)
PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
# Those without a network of their own but the loopback.
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    require("unshare", "ip")
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def wheelhouse(folder: Path) -> Path:
    """By `make wheelhouse`, with the settings for the network that this machine has."""
    network = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    network |= {"WHEELHOUSE": folder / "house", "HOROVOD_WHEELS": folder / "none"}
    checkout = copy_checkout(folder / "online")
    result = run("make", "-C", checkout, "wheelhouse", timeout=1500, **network)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "house"


def begin(checkout: Path, folder: Path, wheelhouse: Path) -> subprocess.Popen:
    env = {"WHEELHOUSE": wheelhouse, "HOROVOD_WHEELS": folder / "kept"}
    return subprocess.Popen(
        [*OFFLINE, "make", "-C", checkout, "setup"],
        env=environment(PATH=f"{OUTSIDE}:/usr/sbin:/sbin", **env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_offline_in_a_path_with_a_space(folder: Path, wheelhouse: Path):
    """Horovod is compiled; its proof, two ranks, is part of the set-up."""
    checkout = copy_checkout(folder / "a space" / "checkout")
    process = begin(checkout, folder, wheelhouse)
    output = process.communicate()[0]
    print(output)
    assert process.returncode == 0 and "building" in output and "Built: TensorFlow" in output
    [library] = (checkout / ".venv").resolve().glob("lib/*/site-packages/horovod/tensorflow/*.so")
    where = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "$ORIGIN" in where and ".horovod-" not in where


def test_two_at_once_offline_with_the_wheel_kept(folder: Path, wheelhouse: Path):
    checkout = copy_checkout(folder / "checkout")
    two = [begin(checkout, folder, wheelhouse) for _ in range(2)]
    outputs = [process.communicate()[0] for process in two]
    print(*outputs)
    assert [process.returncode for process in two] == [0, 0]
    assert sum("built before" in output for output in outputs) == 1
    assert len(list((checkout / ".venvs").iterdir())) == 1


@pytest.mark.parametrize("machine", PLATFORMS)
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_index_has_a_wheel_for_each(device, version, machine, tmp_path: Path):
    """What `pip install --require-hashes` would take; Horovod alone has none."""
    if (device, machine) == ("gpu", "aarch64"):
        pytest.skip("no TensorFlow with CUDA")
    text = "".join((ROOT / f"docker/locks/{name}.txt").read_text() for name in (device, "dev"))
    entries = text.replace("\n    ", " ").splitlines()
    (tmp_path / "lock.txt").write_text(
        "\n".join(sorted({e.replace("\\", "") for e in entries if not e.startswith("horovod==")}))
    )
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty")
    words = [
        BIN / "uv",
        "pip",
        "install",
        "--dry-run",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    words += ["--python", tmp_path / "empty/bin/python", "--python-version", version]
    words += ["--python-platform", PLATFORMS[machine], "-r", tmp_path / "lock.txt"]
    result = run(*words)
    assert result.returncode == 0, result.stderr
    print(result.stderr.splitlines()[-1])
