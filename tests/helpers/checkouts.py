"""Copies of what set-up needs of the repository, to be changed at will, and set-ups in them.

`small_packages` puts small packages in the place of TensorFlow and Horovod, so that a whole set-up
takes seconds: pip, hashes, build, proof and environments are the real ones.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# What `make test` and the machine's own settings would let shine through.
OUTSIDE = ":".join(p for p in os.environ["PATH"].split(":") if p != str(BIN))
_NOT_OURS = ("MAKE", "MFLAGS", "PIP_", "HOROVOD_", "CXX", "LDFLAGS", "DEVICE", "PYTHON")
_NOT_OURS += ("CUDA_HOME", "WHEELHOUSE", "VIRTUAL_ENV", "TMPDIR")


def environment(**changes: object) -> dict[str, str]:
    """That of a user who set nothing; `changes` go on top."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_OURS)}
    clean |= {"PYTHON": sys.executable, "DEVICE": "cpu", "PATH": OUTSIDE}
    return clean | {k: str(v) for k, v in changes.items()}


def run(*command: object, timeout: float = 240, **env: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def setup(checkout: Path, **env: object) -> subprocess.CompletedProcess:
    """`make setup` in `checkout`."""
    return run("make", "--no-print-directory", "-C", checkout, "setup", **env)


def complaint(result: subprocess.CompletedProcess) -> str:
    """The one line that a failed setup says, make's own closing line apart."""
    assert result.returncode != 0, result.stdout
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def copy_checkout(to: Path) -> Path:
    to.mkdir(exist_ok=True, parents=True)
    shutil.copytree(ROOT / "docker", to / "docker", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(file, to)
    return to


def system_mpi(folder: Path, version: str = "4.1.4") -> dict[str, str]:
    executable(folder / "mpi/mpicxx", "exit 0")
    executable(folder / "mpi/mpirun", f"echo 'mpirun (Open MPI) {version}'")
    return {"PATH": f"{folder / 'mpi'}:{OUTSIDE}"}


def other_python() -> str:
    """A Python of another version than this one's that the script takes."""
    mine = "{}.{}".format(*sys.version_info)
    for version in sorted({"3.10", "3.11", "3.12", "3.13"} - {mine}):
        places = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python3"))
        found = str(places[0]) if places else shutil.which(f"python{version}")
        if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
            return found
    pytest.skip("only one Python on this machine")


def no_network() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "1",
    }


def tools_without(folder: Path, *names: str) -> Path:
    """A folder with what is in /usr/bin, but for some."""
    folder.mkdir()
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in names:
            (folder / tool.name).symlink_to(tool)
    return folder


# ------------------------------------------------------------------------- small packages

_TENSORFLOW = """
__version__ = "2.21.0"
constant = list
class sysconfig:
    get_compile_flags = staticmethod(lambda: ["-DSMALL"])
    get_include = staticmethod(lambda: __file__.rpartition("/")[0])
    get_build_info = staticmethod(lambda: {"cuda_version": "12.5.1"})
"""

_HOROVOD = """
import os
import numbers_of_ranks
Sum = None
init = lambda: None
rank, size = (lambda: 0), (lambda: 2)
def allreduce(*_, **__):
    return Total()
class Total:
    numpy = staticmethod(lambda: [numbers_of_ranks.TOTAL])
mpi_enabled = lambda: os.environ["VIA"] == "--mpi"
gloo_built = mpi_built = lambda: True
nccl_built = cuda_built = lambda: False
"""

_HOROVODRUN = """
import os, subprocess, sys
def main():
    via, *command = [w for w in sys.argv[3:] if not w.startswith(("--disable", "--binding"))]
    sys.exit(subprocess.run(command, env=os.environ | {"VIA": via}).returncode)
"""

# A backend that asks of its surroundings what Horovod's build does: programs run from where
# temporary files are, and flags are split at spaces.
_BACKEND = """
import io, os, pathlib, subprocess, tempfile, zipfile
def build_wheel(to, *_):
    program = pathlib.Path(tempfile.mkdtemp(), "program")
    program.write_text("#!/bin/sh\\n")
    program.chmod(0o755)
    subprocess.run([program], check=True)
    for flag in os.environ["CXXFLAGS"].split():
        assert not flag.startswith("-I/") or "external" in flag or os.path.isdir(flag[2:]), flag
    assert os.environ["MAKEFLAGS"].startswith("-j")
    name = "horovod-0.28.1-py3-none-any.whl"
    pathlib.Path(to, name).write_bytes(pathlib.Path("wheel").read_bytes())
    return name
"""


def wheel(name: str, version: str, files: dict[str, str]) -> bytes:
    about = f"{name}-{version}.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "horovod":
        files[f"{about}/entry_points.txt"] = "[console_scripts]\nhorovodrun = horovodrun:main\n"
    record = "".join(f"{path},sha256={_sum(text)},{len(text)}\n" for path, text in files.items())
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for path, text in (files | {f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}).items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return written.getvalue()


def _sum(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def horovod_wheel(total: float = 3.0) -> bytes:
    """One whose ranks add up to `total`."""
    files = {"horovod/__init__.py": "", "horovod/tensorflow.py": _HOROVOD}
    files |= {"horovodrun.py": _HOROVODRUN, "numbers_of_ranks.py": f"TOTAL = {total}\n"}
    return wheel("horovod", "0.28.1", files)


def _sdist(total: float) -> bytes:
    files = {
        "pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        b'backend-path = ["."]\n',
        "backend.py": _BACKEND.encode(),
        "wheel": horovod_wheel(total),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
    }
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def small_packages(checkout: Path, total: float = 3.0) -> Path:
    """Requirements, locks and the folder of the packages that they name.

    Args:
      total: what the ranks of the Horovod that is built add up to; 3.0 passes the proof.
    """
    house = checkout / "small packages"
    house.mkdir(exist_ok=True)
    packages = {"small": {"small.py": ""}, "keras": {"keras.py": '__version__ = "3.12.4"\n'}}
    packages |= {"cmake": {"cmake_small.py": ""}, "tensorflow_cpu": {"tensorflow.py": _TENSORFLOW}}
    contents = {
        f"{name}-1.0-py3-none-any.whl": wheel(name, "1.0", files)
        for name, files in packages.items()
    }
    contents["horovod-0.28.1.tar.gz"] = _sdist(total)
    entries = ""
    for file, content in contents.items():
        (house / file).write_bytes(content)
        name, version = re.match(r"(\w+)-([\d.]+\d)", file).groups()
        entries += f"{name.replace('_', '-')}=={version} \\\n"
        entries += f"    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
    wanted = "tensorflow==1.0\nhorovod==0.28.1\n"
    (checkout / "requirements.txt").write_text(wanted)
    (checkout / "requirements-dev.txt").write_text("small==1.0\n")
    for name, of in (("cpu", wanted), ("gpu", wanted), ("dev", f"{wanted}small==1.0\n")):
        digest = hashlib.sha256(of.encode()).hexdigest()[:16]
        text = f"# by make lock, of requirements {digest}\n"
        (checkout / f"docker/locks/{name}.txt").write_text(
            text + ("" if name == "dev" else entries)
        )
    return house


def small(checkout: Path, total: float = 3.0) -> dict[str, object]:
    """A checkout with small packages; the variables for its set-ups."""
    house = small_packages(checkout, total)
    return {"WHEELHOUSE": house, "HOROVOD_WHEELS": checkout / "kept"}
