"""`make setup`: what it builds, when again, and what it says when it cannot."""

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hosts import ROOT, executable, require

BIN = Path(sys.executable).parent
OUTSIDE = ":".join(p for p in os.environ["PATH"].split(":") if p != str(BIN))
SCRIPT = "docker/install-horovod.sh"
# Variables that `make test` and this machine set.
_NOT_OURS = (
    "MAKE",
    "MFLAGS",
    "PIP_",
    "UV_",
    "HOROVOD_",
    "CXX",
    "LDFLAGS",
    "DEVICE",
    "PYTHON",
)
_NOT_OURS += (
    "XDG_",
    "ALL_PROXY",
    "SSL_CERT",
    "CUDA_",
    "WHEELHOUSE",
    "VIRTUAL_ENV",
    "TMPDIR",
)


def run(
    *command: object, timeout: float = 240, **env: object
) -> subprocess.CompletedProcess:
    """With the environment of a user who set nothing but `env`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_OURS)}
    clean |= {"PYTHON": sys.executable, "DEVICE": "cpu", "PATH": OUTSIDE}
    return subprocess.run(
        [str(part) for part in command], env=clean | {k: str(v) for k, v in env.items()},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def setup(checkout: Path, **env: object) -> subprocess.CompletedProcess:
    return run("make", "--no-print-directory", "-C", checkout, "setup", **env)


def complaint(result: subprocess.CompletedProcess) -> str:
    """The last line that a failed set-up says, make's own apart: one sentence."""
    assert result.returncode != 0, result.stdout
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert lines[-1].startswith("error: ") and "Traceback" not in result.stderr, (
        result.stderr
    )
    return lines[-1]


def copy_checkout(to: Path) -> Path:
    for file in ["Makefile", "requirements.txt", "requirements-dev.txt", "docker", "hvdkit",
                 "template/pyproject.toml", "template/uv.lock"]:  # fmt: skip
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
        copy(ROOT / file, to / file)
    for file in ("requirements.txt", "requirements-dev.txt"):
        (to / "template" / file).symlink_to(f"../{file}")
    return to


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, str]:
    """Variables with which a set-up that has something to do stops with an error."""
    executable(tmp_path / "bin/getent", "exit 2")
    return {"PATH": f"{tmp_path}/bin:{OUTSIDE}"}


@pytest.mark.slow
def test_offline_from_a_wheelhouse(checkout: Path, tmp_path: Path):
    """For real, with the Horovod that was built for this Python before; downloads 0.5 GB."""
    require("unshare", "ip")
    network = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_")
    }
    result = run("make", "-C", checkout, "wheelhouse", timeout=900, **network)
    assert result.returncode == 0, result.stdout + result.stderr
    script = f"ip link set lo up && exec make -C {checkout} setup"
    result = run(
        "unshare",
        "--net",
        "sh",
        "-c",
        script,
        timeout=900,
        WHEELHOUSE=checkout / "wheelhouse",
        UV_NO_CACHE=1,
        PATH=f"{OUTSIDE}:/usr/sbin:/sbin",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "two ranks add up" in result.stdout
        and os.readlink(checkout / ".venv")[:6] == ".venvs"
    )
    assert not list((checkout / ".venvs").glob(".work*"))


def wanted(checkout: Path, stopped: dict[str, str], **env: object) -> Path:
    """The environment that set-up would make; it has not begun to."""
    result = setup(checkout, **stopped | env)
    assert "has no address" in complaint(result)
    return Path(result.stdout.split(": ")[1].strip())


def pretend(folder: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (folder / ".setup").write_text(f"{folder}\n")


def test_an_environment_does_not_depend_on_the_language(checkout, stopped, tmp_path):
    """Compilers speak it."""
    compiler = executable(
        tmp_path / "bin/speaks", 'echo "in ${LC_ALL-none} ${LANGUAGE-}"'
    )
    env = {"CXX": str(compiler), "CXXFLAGS": "-O1", "LDFLAGS": "-s"}
    folders = [
        wanted(checkout, stopped, LC_ALL=language, LANGUAGE=language, **env)
        for language in ("C.UTF-8", "de_DE.UTF-8")
    ]
    assert folders[0] == folders[1]


def with_functions(checkout: Path, commands: str) -> Path:
    """A program of these commands in the place of set-up, with its functions."""
    script = checkout / SCRIPT
    functions = script.read_text().split("\ncase $mode in")[0]
    script.write_text(f"{functions}\n{commands}\n")
    return script


def test_pips_variable_comes_before_its_file(checkout, tmp_path):
    """uv, which installs nearly everything, is told what pip would take."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://file.test/simple\nproxy = http://proxy.test:1\n"
        "[install]\nuser = true\n"
    )
    script = with_functions(
        checkout,
        f"pip={tmp_path}/pip/bin/pip\npass_pip_settings\n"
        'echo "$UV_DEFAULT_INDEX $ALL_PROXY ${UV_NO_CACHE-}"',
    )
    run(sys.executable, "-m", "venv", tmp_path / "pip")
    env = {"PIP_CONFIG_FILE": f"{tmp_path}/pip.conf", "HOME": "/proc/none"}
    for index in ("", "http://variable.test/simple"):
        more = {"PIP_INDEX_URL": index} if index else {}
        ended = run("bash", script, **env, **more)
        expected = index or "http://file.test/simple"
        assert ended.stdout == f"{expected} http://proxy.test:1 1\n", ended.stderr


def test_it_does_nothing_when_up_to_date_and_switches_back(checkout, stopped, tmp_path):
    first = wanted(checkout, stopped)
    pretend(first)
    other = checkout / ".venvs/other"
    pretend(other)
    (checkout / ".venv").symlink_to(".venvs/other")
    assert setup(checkout, **stopped).returncode == 0
    assert os.readlink(checkout / ".venv") == f".venvs/{first.name}"
    before = (checkout / ".venv").lstat().st_mtime_ns
    result = setup(checkout, **stopped)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (checkout / ".venv").lstat().st_mtime_ns == before and other.exists()

    # The disk under another path, as in a container: the environment there may be in use.
    (first / ".setup").write_text("/where/it/is/elsewhere\n")
    other = wanted(checkout, stopped)
    assert other.name.startswith(f"{first.name}-") and (first / "bin/python").exists()
    pretend(first)

    # Of another checkout, as where .venv of a git worktree is a link to the main one's.
    pretend(tmp_path / "main/.venvs" / first.name)
    (tmp_path / "main/.venv").symlink_to(f".venvs/{first.name}")
    (checkout / ".venv").unlink()
    (checkout / ".venv").symlink_to(tmp_path / "main/.venv")
    assert setup(checkout, **stopped).returncode == 0
    assert os.readlink(checkout / ".venv") == str(tmp_path / "main/.venv")

    (checkout / ".venv").unlink()
    # Its scripts name the place where it was built.
    first.rename(first.with_name("gone"))
    assert wanted(checkout, stopped) == first


def test_what_makes_another_environment(checkout, stopped, tmp_path):
    def name(**env: object) -> str:
        return wanted(checkout, stopped, **env).name

    before = name()
    assert name(HOROVOD_CYCLE_TIME="1", HOROVOD_DEBUG_BUILD="1", CXXFLAGS="") == before
    executable(tmp_path / "mpi/mpicxx", "exit 0")
    executable(tmp_path / "mpi/mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    executable(tmp_path / "c++", "echo 'c++ 98.0'")
    found = [before, name(HOROVOD_WITHOUT_GLOO="1"), name(CXX=tmp_path / "c++")]
    found += [
        name(CXX=f"env {tmp_path}/c++"),
        name(PATH=f"{tmp_path}/mpi:{stopped['PATH']}"),
    ]
    for version in {"3.11", "3.12", "3.13"} - {"{}.{}".format(*sys.version_info)}:
        places = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
        if python := (places and str(places[0])) or shutil.which(f"python{version}"):
            found.append(name(PYTHON=python))
    for file in (
        "docker/compat/tf_compat.h",
        "docker/setup/horovod.sh",
        "hvdkit/src/hvdkit/ranks/exchange.cc",
        "template/uv.lock",
    ):
        with (checkout / file).open("a") as opened:
            opened.write("\n")
        found.append(name())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("compiler", ["exit 1", ""])
def test_without_batch_norm_s_operation_set_up_goes_on_with_a_note(tmp_path, compiler):
    """Where its source does not compile, and where there is no compiler of MPI."""
    if compiler:
        executable(tmp_path / "mpicxx", f"echo 'error: no such header' >&2; {compiler}")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    for program in ("bash", "cat", "mv", "rm"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script = f"""
        set -euo pipefail
        . {ROOT}/docker/setup/machine.sh
        . {ROOT}/docker/setup/horovod.sh
        python={tmp_path}/env/bin/python work={tmp_path} log={tmp_path}/log
        find_engine() {{ echo {ROOT}/hvdkit; }}
        install_horovod_alone() {{ echo 'Horovod is built'; }}
        install_horovod
        echo 'set-up goes on'
    """
    ended = run("bash", "-c", script, PATH=tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, note, last = ended.stdout.splitlines()
    assert (first, last) == ("Horovod is built", "set-up goes on")
    assert note.startswith("note: ") and "exchange.cc does not compile" in note
    reason = "no such header" if compiler else "mpicxx: command not found"
    assert reason in (tmp_path / "log").read_text()


def test_a_certificate_in_a_home_that_no_variable_names(checkout, tmp_path):
    script = with_functions(
        checkout,
        "home=$1 pip=none\n"
        "pip_setting() { [ \"$1\" != cert ] || echo '~/ca.pem'; }\n"
        "unset HOME\npass_pip_settings\n"
        'echo "$SSL_CERT_FILE"',
    )
    (tmp_path / "ca.pem").touch()
    ended = run("bash", script, tmp_path)
    assert ended.stdout == f"{tmp_path}/ca.pem\n", ended.stderr


@pytest.mark.parametrize("typed", ["python3", "../env/bin/python"])
def test_requirements_go_into_the_environment_that_was_named(checkout, tmp_path, typed):
    """Also by a name that the rest of PATH has too, and by a path from the working folder."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    script = with_functions(
        checkout,
        "mode=--requirements log=/dev/null\ncheck_python\ninstall_launchers\n"
        '"$python" -c "import sys; print(sys.prefix)"',
    )
    (tmp_path / "work").mkdir()
    words = ["sh", "-c", 'cd "$1" && exec bash "$2"', "sh", tmp_path / "work", script]
    ended = run(*words, PYTHON=typed, PATH=f"{tmp_path}/env/bin:{OUTSIDE}")
    assert ended.stdout == f"{tmp_path}/env\n", ended.stderr
    assert not list((tmp_path / "work").iterdir())
    first = (tmp_path / "env/bin/horovodrun").read_text().splitlines()[0]
    python = os.path.normpath(first.removeprefix("#!"))
    assert python.startswith(f"{tmp_path}/env/bin/python")


def test_a_processor_without_avx_and_another_generator_of_cmakes(checkout, tmp_path):
    """As ARM's; the wheel is built all the same, by make, as Horovod's setup.py has it."""
    executable(tmp_path / "bin/grep", "exit 1")
    script = with_functions(
        checkout,
        "mpi=wheel DEVICE=cpu cache= work=/none\n"
        "build_settings() { echo settings; }\n"
        'step() { echo "$2 $CMAKE_GENERATOR"; }\n'
        "cache=$1\ninstall_horovod_alone",
    )
    env = {"CMAKE_GENERATOR": "Ninja", "PATH": f"{tmp_path}/bin:{OUTSIDE}"}
    ended = run("bash", script, tmp_path / "cache", **env)
    assert ended.stdout == "build Unix Makefiles\ntry_wheel Ninja\n", ended.stderr


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("install", "error: Failed to fetch", "no network?"),
        ("install", "No solution found: newer than exclude-newer", "the lines above"),
        ("try_wheel", "gloo: Connection reset by peer", "the lines above"),
        ("try_wheel", "No space left on device", "the disk is full"),
    ],
)
def test_only_a_download_that_fails_is_put_down_to_the_network(
    tmp_path, command, words, said
):
    script = f"""
        set -euo pipefail
        . {ROOT}/docker/setup/machine.sh
        log={tmp_path}/log
        {command}() {{ echo '{words}'; return 1; }}
        step Horovod {command}
    """
    assert f"Horovod failed: {said}" in complaint(run("bash", "-c", script))


def test_a_second_set_up_waits_for_the_first(checkout, stopped):
    name = wanted(copy_checkout(checkout.with_name("copy")), stopped).name
    folder = checkout / ".venvs"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [checkout / SCRIPT, "--venv", checkout / ".venv"]
        env = os.environ | {"PYTHON": sys.executable, "DEVICE": "cpu", **stopped}
        second = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        assert "waiting for another set-up" in second.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        pretend(folder / name)  # wherever the checkout is
    assert second.wait(60) == 0 and (checkout / ".venv").is_symlink()


def test_on_a_disk_without_locks_set_up_goes_on(checkout, stopped, tmp_path: Path):
    """As Lustre without -o flock."""
    code = "#include <errno.h>\nint flock(int file, int how) { errno = ENOSYS; return -1; }\n"
    (tmp_path / "flock.c").write_text(code)
    no_locks = tmp_path / "flock.so"
    run("cc", "-shared", "-fPIC", tmp_path / "flock.c", "-o", no_locks)
    name = wanted(copy_checkout(checkout.with_name("copy")), stopped).name
    pretend(checkout / ".venvs" / name)
    words = [checkout / SCRIPT, "--venv", checkout / ".venv"]
    env = {
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "LD_PRELOAD": str(no_locks),
        **stopped,
    }
    ended = subprocess.run(
        words,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Function not implemented" in ended.stderr and "waiting" not in ended.stdout


def test_what_runs_keeps_its_environment_when_the_link_is_switched(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / ".venvs" / name
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        [site] = folder.glob("lib/*/site-packages")
        shutil.copy(ROOT / "docker/setup/keep_environment.py", site)
        (site / "keep_environment.pth").write_text("import keep_environment\n")
        (site / "small.py").touch()
    link = tmp_path / ".venv"
    link.symlink_to(".venvs/one")
    code = "import sys; print(flush=True); sys.stdin.read(); import small; print(small.__file__)"
    code += "; print(sys.argv, sys.flags.utf8_mode)"
    running = subprocess.Popen(
        [link / "bin/python", "-X", "utf8", "-c", code, "two words"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    running.stdout.readline()
    link.unlink()
    link.symlink_to(".venvs/two")
    file, words = running.communicate("")[0].split("\n")[:2]
    assert (
        Path(file).is_relative_to(tmp_path / ".venvs/one")
        and words == "['-c', 'two words'] 1"
    )


def pins(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text()
    return dict(re.findall(r"^([\w-]+)(?:\[\S+\])?==([^\s;]+)", text, re.MULTILINE))


def test_the_locks_groups_have_the_versions_of_requirements():
    """That it has all of them: docker/install-horovod.sh."""
    requirements = pins("requirements.txt")
    project = tomllib.loads((ROOT / "template/pyproject.toml").read_text())
    for group in project["dependency-groups"].values():
        assert re.split(r"==| ", group[0])[1] == requirements["tensorflow"]
    [horovod] = project["tool"]["uv"]["dependency-metadata"]
    assert horovod["version"] == requirements["horovod"]


NEW_COMPILER = (
    'case "$1" in -dumpversion) echo 14;; *) echo Free Software Foundation;; esac'
)


def link_all_but_compilers(folder: Path) -> None:
    """A folder for PATH."""
    folder.mkdir()
    for tool in Path("/usr/bin").iterdir():
        if not re.match(r"([cg]\+\+|mpicxx)", tool.name):
            (folder / tool.name).symlink_to(tool)


@pytest.mark.parametrize(
    "env, said",
    [
        ({"DEVICE": "tpu"}, "DEVICE is 'tpu': cpu or gpu"),
        (
            {"PYTHON": "python3.99"},
            "python3.99 does not run: install or name a Python 3.11",
        ),
        (
            {"PYTHON": "{tmp}/3.10"},
            "3.10 is 3.10: install or name a Python 3.11 to 3.13",
        ),
        (
            {"PATH": "{tmp}/tools"},
            r"no c\+\+, .* Horovod: apt-get install build-essential",
        ),
        (
            {"PATH": "{tmp}/new:{tmp}/tools"},
            r"g\+\+ 14 does not compile Horovod, .*: apt-get install g\+\+-13",
        ),
        ({"PYTHON": "{tmp}/bare"}, "no Python.h .* apt-get install python3-dev"),
        (
            {"DEVICE": "gpu", "CUDA_HOME": "{tmp}"},
            "no nvcc of CUDA 12, .*CUDA_HOME, or choose",
        ),
        (
            {"CXX": "c++ -m1"},
            "name, .*, has no address of it: let its line in /etc/hosts be '127.0.0.1 ",
        ),
        (
            {"PATH": "{tmp}/stale:{tmp}/tools"},
            "name, .*, has no address of it: let its line in /etc/hosts be '127.0.0.1 ",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_is_built(
    env, said, checkout, stopped, tmp_path
):
    link_all_but_compilers(tmp_path / "tools")
    executable(tmp_path / "bin/nvcc", "echo 'release 13.0, V13.0'")
    executable(tmp_path / "new/c++", NEW_COMPILER)
    executable(tmp_path / "stale/getent", "echo '192.0.2.7  STREAM old'")
    executable(tmp_path / "stale/c++", "echo 'c++ 12'")
    executable(tmp_path / "3.10", "echo 3.10")
    executable(
        tmp_path / "bare",
        'case "$2" in *Python.h*) exit 1;; *_base*) echo "3.11 $0";; '
        f'*) exec {sys.executable} "$@";; esac',
    )
    env = {name: text.format(tmp=tmp_path) for name, text in env.items()}
    assert re.search(said, complaint(setup(checkout, **stopped | env)))
    assert not list((checkout / ".venvs").glob("[!.]*"))


def test_a_wheelhouse_is_filled_whatever_the_compiler(checkout, tmp_path):
    """Nothing is compiled: it goes on to where it wants a temporary folder."""
    link_all_but_compilers(tmp_path / "tools")
    executable(tmp_path / "new/c++", NEW_COMPILER)
    env = {"PATH": f"{tmp_path}/new:{tmp_path}/tools", "TMPDIR": "/nowhere"}
    said = complaint(run("make", "-C", checkout, "wheelhouse", **env))
    assert "no folder for temporary files" in said


def test_what_is_in_the_way_is_refused(checkout):
    (checkout / ".venv").mkdir()
    assert "is no link: move it away" in complaint(setup(checkout))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("", r"\Z", "numpy==1.0", "numpy==1.0 of .* uv.lock, which has numpy==2"),
        (
            "",
            r"\Z",
            "einops  # any",
            "einops of requirements.txt is not in uv.lock: make",
        ),
        (
            "",
            r"\Z",
            "Foo_Bar.x >= 2, <3 ; python_version > '3'",
            r"foo-bar-x<3,>=2 of ",
        ),
        (
            "",
            r"\Z",
            "foo @ git+https://host/foo@main",
            "foo of requirements.txt is not",
        ),
        ("", r"\Z", "-r others.txt", "-r others.txt of requirements.txt is not in"),
        ("", "^h5py==.*", "", "h5py==.* of uv.lock is not in requirements.txt: make"),
        (
            "",
            "^keras==.*",
            "keras",
            "keras of requirements.txt is not in .* has keras==",
        ),
        ("-dev", "^optuna", "optuna[x]", r"optuna\[x\]==.* of requirements-dev.txt is"),
        ("-dev", "^onnx==.*", "", "onnx==.* of uv.lock is not in requirements-dev.txt"),
    ],
)
def test_a_lock_of_other_requirements_is_refused(
    checkout, stopped, file, old, new, said
):
    path = checkout / f"requirements{file}.txt"
    text = re.sub(old, new, path.read_text(), count=1, flags=re.MULTILINE)
    path.write_text(f"{text}\n")
    assert re.search(f"error: {said}", complaint(setup(checkout, **stopped)))


def test_a_lock_knows_requirements_in_any_spelling(checkout, stopped):
    """pip's: other cases, dots for dashes, spaces, brackets, a line that goes on."""
    path = checkout / "requirements.txt"
    text = path.read_text()
    for old, new in {
        "pyyaml==": "PyYAML == ",
        "ml-dtypes": "ml_dtypes",
        "nvidia-ml-py": "Nvidia.ML_py",
        "cmake==3.31.10": "cmake (==3.31.10+local.1)",
        "keras==": "keras \\\n  ==",
    }.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    lock = checkout / "template/uv.lock"
    of_cmake = '{ name = "cmake", specifier = "==3.31.10'
    assert of_cmake in lock.read_text()
    lock.write_text(lock.read_text().replace(of_cmake, f"{of_cmake}+local.1"))
    assert "has no address" in complaint(setup(checkout, **stopped))


def test_a_lock_of_requirements_in_two_files(checkout, stopped):
    main = checkout / "requirements.txt"
    [moved] = re.findall("^h5py==.*", main.read_text(), re.MULTILINE)
    main.write_text(main.read_text().replace(moved, ""))
    further = checkout / "template/requirements-further.txt"
    further.write_text(moved)
    about = checkout / "template/pyproject.toml"
    one, two = '"requirements.txt"', '["requirements.txt", "requirements-further.txt"]'
    about.write_text(about.read_text().replace(one, two))
    assert "has no address" in complaint(setup(checkout, **stopped))
    # A package from a folder has no versions in the lock.
    lock = checkout / "template/uv.lock"
    entry = r'\{ name = "keras", specifier = .*? \}'
    from_folder = '{ name = "keras", directory = "keras" }'
    lock.write_text(re.sub(entry, from_folder, lock.read_text()))
    assert "has no address" in complaint(setup(checkout, **stopped))
    # uv writes the name of an extra in its normal form.
    (checkout / "template/requirements-docs.txt").write_text("einops>=2")
    extra = 'optional-dependencies.My_Docs = { file = "requirements-docs.txt" }'
    dev = "optional-dependencies.dev ="
    about.write_text(about.read_text().replace(dev, f"{extra}\n{dev}"))
    locked = (
        """{ name = "einops", marker = "extra == 'my-docs'", specifier = ">=2" },"""
    )
    text = lock.read_text().replace(from_folder, f"{locked}\n    {from_folder}")
    lock.write_text(text)
    assert "has no address" in complaint(setup(checkout, **stopped))
    further.write_text(f"{moved}\neinops>=2")
    said = "einops>=2 of requirements.txt and requirements-further.txt is not in"
    assert said in complaint(setup(checkout, **stopped))


@pytest.mark.parametrize("way", ["setup", "lock"])
@pytest.mark.parametrize("text", [None, "<<<<<<< HEAD\n", ""])
def test_a_lock_that_cannot_be_read_is_named(checkout, stopped, way, text):
    lock = checkout / "template/uv.lock"
    lock.unlink()
    fault = "is missing"
    if text is not None:
        lock.write_text(text)
        fault = "cannot be read"
    said = complaint(run("make", "-C", checkout, way, **stopped))
    assert said.startswith(f"error: {lock} {fault}")
    assert f"by `git checkout HEAD -- {lock}`, then make lock" in said


@pytest.mark.slow
def test_no_network_and_a_package_that_is_not_the_locked_one(checkout, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = setup(
        checkout,
        PIP_RETRIES=0,
        PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple",
        PIP_CONFIG_FILE=os.devnull,
    )
    said = complaint(ended)
    assert (
        "no network?" in said and "PIP_INDEX_URL" in said and "make wheelhouse" in said
    )
    assert "uv==" in Path(said.split("log: ")[1]).read_text()
    assert "make wheelhouse fills" in complaint(
        setup(checkout, WHEELHOUSE=tmp_path / "none")
    )
    (
        tmp_path / f"uv-{pins('requirements-dev.txt')['uv']}-py3-none-any.whl"
    ).write_bytes(b"other")
    assert "is not that of uv.lock" in complaint(setup(checkout, WHEELHOUSE=tmp_path))


def test_no_space(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", small]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        said = complaint(setup(copy_checkout(small / "checkout")))
        assert "MB free and 3000 MB are needed" in said
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_list_of_packages_names_the_engine_and_the_licenses():
    """SPDX names; hvdkit is on no index, so uv does not list it."""
    bare = {"metadata": {"component": {"name": "train"}}, "components": []}
    script = [sys.executable, "docker/setup/own_parts.py", "template", "hvdkit"]
    ended = subprocess.run(
        script, input=json.dumps(bare), cwd=ROOT, capture_output=True, text=True
    )
    parts = json.loads(ended.stdout)
    mit = [{"expression": "MIT"}]
    assert parts["metadata"]["component"] == {"name": "train", "licenses": mit}
    [engine] = parts["components"]
    assert engine["name"] == "hvdkit" and engine["licenses"] == mit
    assert engine["version"] == importlib.metadata.version("hvdkit")


@pytest.mark.parametrize(
    ("license", "listed"),
    [
        ('"MIT OR LicenseRef-Ours"', {"expression": "MIT OR LicenseRef-Ours"}),
        ('{file = "LICENSE"}', {"license": {"name": "LICENSE"}}),
    ],
)
def test_a_license_of_ones_own_is_listed_as_what_it_is(tmp_path, license, listed):
    """CycloneDX takes an id only of SPDX's own list."""
    (tmp_path / "pyproject.toml").write_text(f"[project]\nlicense = {license}\n")
    bare = {"metadata": {"component": {}}, "components": []}
    ended = subprocess.run(
        [sys.executable, ROOT / "docker/setup/own_parts.py", tmp_path, ROOT / "hvdkit"],
        input=json.dumps(bare),
        capture_output=True,
        text=True,
    )
    component = json.loads(ended.stdout)["metadata"]["component"]
    assert component == {"licenses": [listed]}


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 4), ("1", 1), ("0,2", 2), ("", 2), ("-1", 2)]
)
def test_make_train_starts_a_rank_for_each_gpu_that_may_be_used(
    tmp_path, visible, ranks
):
    """Two where there is none. Of the Makefile's own words; nothing is started."""
    lines = "\n".join(f"GPU {number}: H200 (UUID: GPU-{number})" for number in range(4))
    executable(tmp_path / "bin/nvidia-smi", f"cat <<'END'\n{lines}\nEND")
    env = {"PATH": f"{tmp_path}/bin:{OUTSIDE}"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    planned = run("make", "-n", "-C", ROOT, "train", **env)
    assert re.findall(r"hosts\.sh --plain -np (\d+) ", planned.stdout) == [
        str(ranks)
    ], planned.stdout + planned.stderr
