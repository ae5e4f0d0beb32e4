"""`make setup` and docker/install-horovod.sh as a newcomer meets them: what they build, when they
build it again, and what they say where they cannot."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkouts import (
    BIN,
    OUTSIDE,
    append,
    complaint,
    copy_checkout,
    executable,
    no_network,
    other_python,
    run,
    setup,
    system_mpi,
    tools_without,
)

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def checkout(tmp_path):
    """What setup needs of the repository, to be changed at will."""
    return copy_checkout(tmp_path / "checkout")


# ---------------------------------------------------------------- what was built


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_two_ranks_add_up(transport, tmp_path):
    (tmp_path / "sum.py").write_text(
        "import sys\n"
        "import tensorflow as tf\n"
        "import horovod.tensorflow as hvd\n"
        "hvd.init()\n"
        "mine = tf.constant([1.0, 10.0, -3.5]) * (hvd.rank() + 1)\n"
        "total = hvd.allreduce(mine, op=hvd.Sum, name='sum')\n"
        "over = 'mpi' if hvd.mpi_enabled() else 'gloo'\n"
        "open(f'{sys.argv[1]}/rank{hvd.rank()}', 'w').write(f'{over} {total.numpy().tolist()}')\n"
    )
    result = run(
        *(BIN / "horovodrun", "-np", 2, f"--{transport}", "--disable-cache"),
        *(sys.executable, tmp_path / "sum.py", tmp_path),
        PATH=f"{BIN}:{OUTSIDE}",
        **AS_ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == f"{transport} [3.0, 30.0, -10.5]"


# ---------------------------------------------------------------- when it is built again


def test_setup_does_nothing_when_up_to_date(checkout):
    venv = checkout / ".venvs/one"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    executable(venv / "bin/horovodrun", "exit 1")
    (checkout / ".venv").symlink_to(".venvs/one")
    stamp = run(checkout / "docker/install-horovod.sh", "--stamp", checkout / ".venv").stdout
    (venv / ".setup").write_text(f"{stamp}in {venv}\n")
    before = {path: path.lstat().st_mtime_ns for path in venv.rglob("*")}

    start = time.monotonic()
    result = setup(checkout)
    seconds = time.monotonic() - start

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert {path: path.lstat().st_mtime_ns for path in venv.rglob("*")} == before
    assert seconds < 10  # 0.3 when the machine has nothing else to do


def test_a_host_whose_own_name_has_no_address_is_told_before_anything_is_built(checkout, tmp_path):
    name = '[ "$1" = -n ] && echo nowhere.invalid || exec /bin/uname "$@"'
    executable(tmp_path / "bin/uname", name)
    said = complaint(setup(checkout, PATH=f"{tmp_path}/bin:{OUTSIDE}"))
    assert "nowhere.invalid, has no address" in said and "/etc/hosts" in said
    assert not (checkout / ".venvs").exists()


def test_a_folder_that_is_no_environment_is_left_alone(checkout):
    mine = checkout / ".venv/thesis.tex"
    mine.parent.mkdir()
    mine.write_text("years of work")
    assert "no virtual environment" in complaint(setup(checkout))
    assert mine.read_text() == "years of work"


CHANGES = ["requirements", "development tools", "lock", "script", "part", "header", "device"]
CHANGES += ["MPI", "Python", "architecture", "C library", "compiler", "build"]


@pytest.mark.parametrize("change", CHANGES)
def test_stamp_depends_on(change, checkout):
    def stamp(**env):
        result = run(checkout / "docker/install-horovod.sh", "--stamp", checkout / ".venv", **env)
        assert result.returncode == 0, result.stderr
        return result.stdout

    before, env = stamp(), {}
    assert stamp(HOROVOD_CYCLE_TIME="1", CXXFLAGS="") == before
    match change:
        case "requirements":
            append(checkout / "requirements.txt", "# changed")
        case "development tools":
            append(checkout / "requirements-dev.txt", "# changed")
        case "script":
            append(checkout / "docker/install-horovod.sh", "# changed")
        case "lock":
            append(checkout / "docker/locks/dev.txt", "# changed")
        case "part":
            append(checkout / "docker/setup/horovod.sh", "# changed")
        case "header":
            append(checkout / "docker/compat/tf_compat.h", "// changed")
        case "device":
            env = {"DEVICE": "gpu"}
        case "MPI":
            env = system_mpi(checkout)
        case "Python":
            env = {"PYTHON": other_python()}
        case "architecture":
            executable(checkout / "bin/uname", "echo riscv64")
            env = {"PATH": f"{checkout}/bin:{OUTSIDE}"}
        case "C library":
            executable(checkout / "bin/getconf", "echo glibc 2.17")
            env = {"PATH": f"{checkout}/bin:{OUTSIDE}"}
        case "compiler":
            env = {"CXX": "g++-99"}
        case "build":
            env = {"HOROVOD_WITHOUT_GLOO": "1"}
    assert stamp(**env) != before


@pytest.fixture
def key(checkout, tmp_path):
    """The key of the wheel for a TensorFlow of the test's making, and what it is made from."""
    package = tmp_path / "site/tensorflow/__init__.py"
    package.parent.mkdir(parents=True)

    def key(tensorflow="2.21.0", flags="-DONE", **env):
        package.write_text(
            f"__version__ = {tensorflow!r}\n"
            "class sysconfig:\n"
            f"    get_compile_flags = staticmethod(lambda: ['-I/somewhere', {flags!r}])\n"
        )
        env = {"PYTHONPATH": tmp_path / "site", "PYTHONDONTWRITEBYTECODE": 1} | env
        # Not of the environment of the tests: it may have an Open MPI of its own.
        env = {"PYTHON": sys._base_executable} | env
        result = run(checkout / "docker/install-horovod.sh", "--key", **env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()[-1]

    return key


def test_key_depends_on_tensorflow(key):
    assert len({key(), key(tensorflow="2.20.0"), key(flags="-DTWO")}) == 3


def test_key_depends_on_python(key):
    assert key() != key(PYTHON=other_python())


def test_key_depends_on_mpi(key, checkout):
    four = key(**system_mpi(checkout, "4.1.4"))
    five = key(**system_mpi(checkout, "5.0.6"))
    assert len({key(), four, five}) == 3


def test_an_environment_keeps_its_own_mpi(key, checkout, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "own")
    own = {"PYTHON": tmp_path / "own/bin/python"}
    system = system_mpi(checkout, "4.1.4")
    without = key(**own, **system)
    for name in ("mpicxx", "mpirun"):
        executable(tmp_path / "own/bin" / name, "echo 'mpirun (Open MPI) 4.1.8'")
    assert key(**own, **system) == key(**own) != without


def test_key_depends_on_device_and_cuda(key, tmp_path):
    executable(tmp_path / "cuda/bin/nvcc", "echo Build cuda_12.9")
    (tmp_path / "cuda/include").mkdir()
    (tmp_path / "cuda/include/cuda_runtime.h").touch()
    gpu = {"DEVICE": "gpu", "CUDA_HOME": tmp_path / "cuda"}
    older = key(**gpu)
    executable(tmp_path / "cuda/bin/nvcc", "echo Build cuda_13.0")
    assert len({key(), older, key(**gpu)}) == 3


def test_key_depends_on_headers(key, checkout):
    before = key()
    append(checkout / "docker/compat/tf_compat.h", "// changed")
    changed = key()
    (checkout / "docker/compat/tf_compat.h").rename(checkout / "docker/compat/renamed.h")
    assert len({before, changed, key()}) == 3


def test_key_depends_on_compiler_and_flags(key, tmp_path):
    other = executable(tmp_path / "c++", "echo 'c++ 98.0'")
    older = key(CXX=other)
    executable(other, "echo 'c++ 99.0'")
    assert len({key(), older, key(CXX=other), key(CXXFLAGS="-O0"), key(HOROVOD_DEBUG=1)}) == 5


def test_a_compiler_of_two_words(key, tmp_path):
    other = executable(tmp_path / "c++", "echo 'c++ 98.0'")
    older = key(CXX=f"env {other}")
    executable(other, "echo 'c++ 99.0'")
    assert key(CXX=f"env {other}") != older


def test_key_depends_on_nothing_else(key, checkout):
    """The same in another folder and with another cache, or the cache would never be hit."""
    before = key()
    append(checkout / "requirements.txt", "# changed")
    append(checkout / "docker/install-horovod.sh", "# changed")
    assert key(HOROVOD_WHEELS="/nowhere") == before


# ---------------------------------------------------------------- what it says where it cannot


def test_no_network(checkout):
    said = complaint(setup(checkout, **no_network()))
    assert "package index cannot be reached" in said and "PIP_INDEX_URL" in said
    log = Path(said.split("log: ")[1])
    assert "tensorflow" in log.read_text()


def test_no_compiler(checkout, tmp_path):
    tools = tools_without(tmp_path / "tools", "c++", "g++", "mpicxx")
    said = complaint(setup(checkout, PATH=tools, HOROVOD_WHEELS=tmp_path / "none"))
    assert "no c++" in said and "build-essential" in said and "HOROVOD_WHEELS" in said
    assert not (checkout / ".venvs").exists()


def test_no_nvcc(checkout, tmp_path):
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("the CUDA toolkit is where it is looked for last")
    gpu = {"DEVICE": "gpu", "HOROVOD_WHEELS": tmp_path, "PATH": "/usr/bin:/bin"}
    assert "CUDA_HOME" in complaint(setup(checkout, **gpu))


def test_unknown_device(checkout):
    assert "cpu or gpu" in complaint(setup(checkout, DEVICE="tpu"))


@pytest.mark.parametrize("version", ["3.7", "3.9", "3.14"])
def test_python_of_a_version_without_tensorflow(version, checkout, tmp_path):
    """A real one where the machine has it, else one that says so."""
    places = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    python = places[0] if places else executable(tmp_path / "python3", f"echo {version}")
    said = complaint(setup(checkout, PYTHON=python))
    assert f"is Python {version}" in said and "3.10 to 3.13" in said and "PYTHON=" in said
    assert not (checkout / ".venvs").exists()


def test_no_python(checkout):
    assert "install Python 3.10 to 3.13" in complaint(setup(checkout, PYTHON="python3.99"))


def test_no_space(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", small]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        said = complaint(setup(copy_checkout(small / "checkout")))
        assert "MB free" in said and "3000 MB are needed" in said
        assert not os.path.lexists(small / "checkout/.venv")
    finally:
        subprocess.run(["umount", small], check=True)
