"""What set-up installs and builds: by the lock, whatever pip was told otherwise; a wheel is proved
before it is kept; only as many compilers as this process has cores and memory for."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkouts import (
    OUTSIDE,
    ROOT,
    append,
    complaint,
    copy_checkout,
    executable,
    horovod_wheel,
    no_network,
    run,
    setup,
    small,
    small_packages,
    tools_without,
)
from hosts import require


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout")


# ------------------------------------------------------------------------------ the lock


def pins(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w-]+)==([^\s;]+)", file.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("lock", ["cpu", "gpu", "dev"])
def test_a_lock_names_what_requirements_name_and_a_hash_for_each(lock):
    wanted = pins(ROOT / ("requirements-dev.txt" if lock == "dev" else "requirements.txt"))
    text = (ROOT / f"docker/locks/{lock}.txt").read_text()
    locked = pins(ROOT / f"docker/locks/{lock}.txt")
    assert {name: locked.get(name) for name in wanted} == wanted
    if lock == "cpu":
        assert locked["tensorflow-cpu"] == wanted["tensorflow"]
    entries = re.split(r"^(?=\S)", text.split("\n", 1)[1], flags=re.MULTILINE)[1:]
    assert len(entries) > 40
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_run_time_packages_are_of_one_version_for_cpus_and_gpus():
    cpu, gpu = (pins(ROOT / f"docker/locks/{name}.txt") for name in ("cpu", "gpu"))
    assert {name: gpu[name] for name in cpu if name in gpu} == {
        name: versions for name, versions in cpu.items() if name in gpu
    }
    assert cpu.keys() - gpu.keys() == {"tensorflow-cpu"}


def test_a_lock_of_other_requirements_is_refused(checkout):
    small_ones = small(checkout)
    append(checkout / "requirements.txt", "another==1.0")
    said = complaint(setup(checkout, **small_ones))
    assert "has changed" in said and "make lock" in said
    assert not (checkout / ".venvs").exists()


def test_a_package_that_is_not_the_locked_one_is_refused(checkout):
    small_ones = small(checkout)
    wheel = small_ones["WHEELHOUSE"] / "small-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(b"small.py", b"smell.py"))
    append(checkout / "docker/locks/cpu.txt", "")
    said = complaint(setup(checkout, **small_ones))
    assert "is not the one that" in said and "docker/locks" in said


@pytest.mark.slow
def test_a_wheelhouse_that_lacks_a_package(checkout):
    small_ones = small(checkout)
    (small_ones["WHEELHOUSE"] / "keras-1.0-py3-none-any.whl").unlink()
    said = complaint(setup(checkout, **small_ones))
    assert "lacks a package" in said and "make wheelhouse" in said
    assert "is no folder" in complaint(setup(checkout, WHEELHOUSE=checkout / "none"))


# ------------------------------------------------------------------ what pip is told besides


@contextlib.contextmanager
def index(house: Path) -> Iterator[str]:
    """A package index of the files in a folder; its address."""
    for file in list(house.iterdir()):
        folder = house / "simple" / re.match(r"[a-z_]+", file.name)[0].replace("_", "-")
        folder.mkdir(parents=True)
        shutil.move(file, folder)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=house)
    handler.log_message = None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.slow
def test_of_pips_settings_only_where_packages_are_counts(checkout, tmp_path):
    """Each of the others, in the environment or in a file, would break the set-up."""
    house = small_packages(checkout)
    (tmp_path / "constraints.txt").write_text("keras==0.1\n")
    config = tmp_path / "pip.conf"
    with index(house) as address:
        config.write_text(
            f"[global]\nindex-url = {address}\nconstraint = {tmp_path}/constraints.txt\n"
            "no-binary = :all:\n[install]\nuser = true\nno-deps = true\n[config]\nuser = true\n"
        )
        hostile = {"PIP_CONFIG_FILE": config, "PIP_CONSTRAINT": tmp_path / "constraints.txt"}
        hostile |= {"PIP_USER": 1, "PIP_REQUIRE_HASHES": 1, "PIP_TARGET": tmp_path / "target"}
        hostile |= {"PIP_PREFIX": tmp_path / "prefix", "PIP_ROOT": tmp_path / "root"}
        hostile |= {"PIP_QUIET": 3, "PIP_DRY_RUN": 1, "PIP_ONLY_BINARY": ":all:"}
        hostile |= {"PIP_REQUIREMENT": tmp_path / "constraints.txt"}
        result = setup(checkout, HOROVOD_WHEELS=tmp_path / "kept", **hostile)
    assert result.returncode == 0, result.stdout + result.stderr
    for folder in ("target", "prefix", "root"):
        assert not (tmp_path / folder).exists()
    assert (checkout / ".venv").resolve().joinpath("bin/horovodrun").exists()


def test_what_of_pips_settings_is_kept():
    told = "global.index-url='https://a:b@c/simple'\nglobal.user='true'\n"
    told += ":env:.break-system-packages='1'\ninstall.use-feature='truststore\\nfast-deps'\n"
    words = [sys.executable, ROOT / "docker/setup/pip_settings.py"]
    kept = subprocess.run(words, input=told, capture_output=True, text=True, check=True).stdout
    assert sorted(kept.splitlines()) == [
        "PIP_BREAK_SYSTEM_PACKAGES=1",
        "PIP_INDEX_URL=https://a:b@c/simple",
        "PIP_USE_FEATURE=truststore fast-deps",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["install", "the environment"])
def test_an_index_that_pip_is_told_of_is_asked(section, checkout, tmp_path):
    settings = no_network()
    if section != "the environment":
        address = settings.pop("PIP_INDEX_URL")
        settings["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
        (tmp_path / "pip.conf").write_text(f"[{section}]\nindex-url = {address}\n")
    small_packages(checkout)
    assert "package index cannot be reached" in complaint(setup(checkout, **settings))


# -------------------------------------------------------------------------- Horovod's wheel


@pytest.mark.slow
def test_a_kept_wheel_is_used_without_a_compiler_and_built_anew_where_it_fails(checkout, tmp_path):
    small_ones = small(checkout)
    first = setup(checkout, **small_ones)
    assert "building" in first.stdout, first.stdout + first.stderr
    [kept] = small_ones["HOROVOD_WHEELS"].glob("*/horovod-*.whl")

    append(checkout / "requirements.txt", "# another stamp")
    tools = tools_without(tmp_path / "tools", "c++", "g++", "make", "mpicxx")
    script = checkout / "docker/install-horovod.sh"
    words = (script, "--venv", checkout / ".venv")
    second = run(*words, **small_ones, PATH=tools)
    assert "built before" in second.stdout and second.returncode == 0, second.stderr

    kept.write_bytes(horovod_wheel(total=4.0))
    append(checkout / "requirements.txt", "# a third")
    third = setup(checkout, **small_ones)
    assert third.returncode == 0, third.stderr
    assert f"the wheel in {kept.parent} does not work here" in third.stdout
    assert "building" in third.stdout and kept.read_bytes() == horovod_wheel()


@pytest.mark.slow
def test_with_what_the_image_copies(checkout, tmp_path):
    """The script, its parts, locks, headers and requirements.txt; an environment is there."""
    small_ones = small(checkout)
    for file in ("Makefile", "requirements-dev.txt", "docker/build.sh", "docker/entrypoint.sh"):
        (checkout / file).unlink()
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    result = run(
        *("sh", "-c", f"cd {checkout} && PYTHON={python} docker/install-horovod.sh --requirements"),
        **small_ones,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "venv/bin/horovodrun").exists() and "Built: TensorFlow" in result.stdout


@pytest.mark.slow
def test_a_path_with_a_space_no_network_and_a_tmp_that_runs_no_programs(tmp_path):
    require("unshare", "mount")
    checkout = copy_checkout(tmp_path / "a space" / "checkout")
    small_ones = small(checkout) | {"HOROVOD_WHEELS": tmp_path / "kept", "DEVICE": ""}
    (tmp_path / "tmp").mkdir()
    script = (
        f"mount -t tmpfs -o noexec tmpfs {tmp_path}/tmp && ip link set lo up && exec make setup"
    )
    result = run(
        *("unshare", "--net", "--mount", "sh", "-c", f"cd '{checkout}' && {script}"),
        **small_ones,
        TMPDIR=tmp_path / "tmp",
        PATH=f"{OUTSIDE}:/usr/sbin:/sbin",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if not Path("/proc/driver/nvidia/version").exists() and not shutil.which("nvidia-smi"):
        assert "for GPU nodes: make setup DEVICE=gpu" in result.stdout
    assert (checkout / ".venv/bin/horovodrun").exists()
    words = ("make", "-C", checkout, "-o", "setup", "--no-print-directory", "--eval")
    asked = run(*words, "where:; @$(IN_VENV) python -c 'import sys; print(sys.prefix)'", "where")
    assert asked.stdout.strip() == str((checkout / ".venv").resolve())


# ------------------------------------------------------------------------------------ GPUs


def toolkit(folder: Path, release: str) -> Path:
    executable(
        folder / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'"
    )
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()
    return folder


def with_gpus(folder: Path, driver: str) -> str:
    """PATH of a machine with GPUs; its own name has no address, so that a set-up ends there."""
    executable(folder / "nvidia-smi", f"echo {driver}")
    executable(folder / "uname", '[ "$1" = -n ] && echo nowhere.invalid || exec /bin/uname "$@"')
    return f"{folder}:{OUTSIDE}"


@pytest.mark.parametrize(
    "release, driver, said",
    [
        ("13.0", "580.65.06", "uses CUDA 12 and .*/nvcc is of CUDA 13.*module load cuda/12"),
        ("12.9", "470.82.01", "needs an NVIDIA driver of 525.60.13 or newer, and this one is 470"),
        ("12.9", "525.60.13", "nowhere.invalid"),
        ("12.2", "580.95.05", "nowhere.invalid"),
    ],
)
def test_cuda_of_tensorflow_compiler_and_driver(release, driver, said, checkout, tmp_path):
    cuda = toolkit(tmp_path / "cuda", release)
    path = with_gpus(tmp_path / "bin", driver)
    found = complaint(setup(checkout, DEVICE="", CUDA_HOME=cuda, PATH=path))
    assert re.search(said, found), found
    assert not (checkout / ".venvs").exists()


def test_no_tensorflow_with_cuda_for_arm(checkout, tmp_path):
    executable(tmp_path / "bin/uname", "echo aarch64")
    said = complaint(setup(checkout, DEVICE="gpu", PATH=f"{tmp_path}/bin:{OUTSIDE}"))
    assert "no TensorFlow with CUDA for aarch64" in said and "DEVICE=cpu" in said
    assert not (checkout / ".venvs").exists()


def test_a_login_node_keeps_the_gpu_nodes_environment(checkout):
    """Without DEVICE, and without a GPU, what .venv was made for counts."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")

    def device() -> str:
        words = (checkout / "docker/install-horovod.sh", "--stamp", checkout / ".venv")
        return re.search(r"device (\w+)", run(*words, DEVICE="").stdout)[1]

    assert device() == "cpu"
    (checkout / ".venvs/one").mkdir(parents=True)
    (checkout / ".venv").symlink_to(".venvs/one")
    (checkout / ".venv/.setup").write_text("Python 3.11\n/usr/bin/python3, device gpu, mpi wheel\n")
    assert device() == "gpu"


# ------------------------------------------------------------------- cores and memory to build


def jobs(root: Path, *before: str) -> int:
    words = [*before, sys.executable, ROOT / "docker/setup/limits.py", root]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """/proc and /sys of one with 1 TB of memory; this process's cores count."""
    write(tmp_path, "proc/meminfo", "MemTotal: 2000000000 kB\nMemAvailable: 1000000000 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


CORES = len(os.sched_getaffinity(0))
TWO_CORES = pytest.mark.skipif(CORES < 2, reason="one core cannot be limited further")


def test_jobs_of_a_machine_without_limits(machine):
    assert jobs(machine) == CORES
    write(machine, "proc/meminfo", "MemAvailable: 2500000 kB")
    assert jobs(machine) == 1


@TWO_CORES
def test_jobs_of_a_process_that_is_bound_to_one_core(machine):
    assert jobs(machine, "taskset", "-c", str(min(os.sched_getaffinity(0)))) == 1


@TWO_CORES
@pytest.mark.parametrize(
    "files, expected",
    [
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "1"}, CORES),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "110000 100000"}, 2),
        ({"memory.max": "3900000000", "memory.current": "0"}, 1),
        ({"memory.max": "9000000000", "memory.current": "6000000000"}, 1),
        (
            {
                "memory.max": "9000000000",
                "memory.current": "6000000000",
                "memory.stat": "anon 1\ninactive_file 2000000000",
            },
            2,
        ),
    ],
)
@pytest.mark.parametrize("group", ["", "system.slice/job_7"])
def test_jobs_in_a_control_group(group, files, expected, machine):
    """Version 2: of the process itself or above it."""
    write(machine, "proc/self/cgroup", "0::/system.slice/job_7/step_0")
    for name, text in files.items():
        write(machine, f"sys/fs/cgroup/{group}/{name}", text)
    assert jobs(machine) == min(expected, CORES)


@TWO_CORES
@pytest.mark.parametrize(
    "files, expected",
    [
        ({"cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}}, CORES),
        ({"cpu,cpuacct": {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}}, 1),
        (
            {
                "memory": {
                    "memory.limit_in_bytes": "9223372036854771712",
                    "memory.usage_in_bytes": "1",
                }
            },
            CORES,
        ),
        (
            {
                "memory": {
                    "memory.limit_in_bytes": "3000000000",
                    "memory.usage_in_bytes": "2000000000",
                    "memory.stat": "total_inactive_file 1000000000",
                }
            },
            1,
        ),
    ],
)
def test_jobs_in_a_control_group_of_version_1(files, expected, machine):
    """In a container: its path is the host's, its own group is at the root."""
    write(machine, "proc/self/cgroup", "5:cpu,cpuacct:/docker/a1\n4:memory:/docker/a1\n1:name=x:/")
    for controller, own in files.items():
        for name, text in own.items():
            write(machine, f"sys/fs/cgroup/{controller}/{name}", text)
    assert jobs(machine) == min(expected, CORES)
