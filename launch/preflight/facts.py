"""What one rank sees of its host, without asking any other rank.

Nothing here raises: what cannot be found out is written into the facts as an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from . import gpus, network

PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py", "absl-py"),
    *("pillow", "scikit-learn", "protobuf", "ml-dtypes"),
)
_MAX_FILES = 300_000  # of a data folder that are listed; the first ones in the order of names


def collect(data_dir: str, run_dir: str, interface: str, device: str) -> dict[str, Any]:
    """Facts of this rank, as JSON holds them."""
    addresses = network.interfaces()
    names = network.resolve(socket.gethostname())
    first = local_rank() == 0  # of its host: does what is done once a host
    return {
        "host": os.uname().nodename,
        "boot": _boot(),
        "local_rank": local_rank(),
        "local_size": local_size(),
        "program": sys.executable,
        "gpus": gpus.gpus(),
        "health": gpus.health() if first and device != "cpu" else None,
        "versions": versions(),
        "imports": import_errors(),
        "names": names,
        "interfaces": addresses,
        "down": network.down(),
        "address": network.address(interface, addresses, names),
        "disks": {"temporary files": disk(os.environ.get("TMPDIR") or "/tmp", True)}
        | ({"the run folder": disk(run_dir)} if run_dir else {})
        | {"/dev/shm": disk("/dev/shm", True)},
        "data": listing(data_dir) if data_dir and first else None,
        "limits": limits(),
        "fabric": network.fabric(),
        "verbs": network.verbs(),
        "cores": len(os.sched_getaffinity(0)),
        "environment": environment(),
    }


def _boot() -> str:
    """The machine, since it was started: containers on it have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def local_rank() -> int:
    return _first_of("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "0")


def local_size() -> int:
    return _first_of(
        "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE", "1"
    )


def _first_of(*names: str) -> int:
    *names, default = names
    text = next((os.environ[name] for name in names if name in os.environ), default)
    return int(text.split("(")[0].split(",")[0])  # Slurm: "4(x2)"


def versions() -> dict[str, str]:
    """Versions of Python and of what is installed for it; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def import_errors() -> dict[str, str]:
    """Imports what training imports; by module, why it failed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    errors = {}
    for name in ("tensorflow", "keras", "horovod.tensorflow"):
        with _held_back_stderr() as held:
            try:
                importlib.import_module(name)
            except Exception as error:  # whatever a broken installation raises
                errors[name] = f"{type(error).__name__}: {error}"
        if errors:
            sys.stderr.write(held[0][-2000:])
            break
    return errors


@contextlib.contextmanager
def _held_back_stderr():
    """TensorFlow writes lines of no interest when it is imported, past Python's sys.stderr."""
    shown, text = os.dup(2), [""]
    with open(os.memfd_create("stderr"), "w+b") as held:  # no disk, which may be full
        os.dup2(held.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            held.seek(0)
            text[0] = held.read().decode(errors="replace")


def library_versions() -> dict[str, str]:
    """What the imported frameworks were built with and run on; call after `import_errors`."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    found = {"CUDA (TensorFlow)": str(build.get("cuda_version", "none"))}
    found["NCCL (Horovod)"] = "yes" if hvd.nccl_built() else "none"
    found["NCCL"] = nccl_version() or "none"
    return found


def nccl_version() -> str | None:
    for path in (*_pip_nccl(), "libnccl.so.2"):
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return None


def _pip_nccl() -> list[Path]:
    return [p for s in sys.path for p in Path(s).glob("nvidia/nccl/lib/libnccl.so.2")]


def disk(path: str, must_be_there: bool = False) -> dict[str, Any]:
    """Free bytes where `path` is or will be, and whether a file can be written there."""
    folder = Path(path).absolute()
    if must_be_there and not folder.is_dir():
        return {"path": str(folder), "free": 0, "error": "there is no such folder"}
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    found: dict[str, Any] = {"path": str(folder), "free": 0, "error": None}
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        found["free"] = shutil.disk_usage(folder).free
        with open(probe, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found["error"] = error.strerror or str(error)
    with contextlib.suppress(OSError):
        probe.unlink()
    return found


def listing(folder: str) -> dict[str, Any]:
    """Number, bytes and SHA-256 of the names and sizes of a data folder's files."""
    if not os.path.isdir(folder):
        return {"path": os.path.abspath(folder), "error": "there is no such folder", "files": 0}
    digest, files, size = hashlib.sha256(), 0, 0
    try:
        for name, length in _files(folder):
            digest.update(f"{name}\0{length}\n".encode())
            files, size = files + 1, size + length
            if files == _MAX_FILES:
                break
    except OSError as error:
        return {"path": os.path.abspath(folder), "error": str(error), "files": files}
    path = os.path.abspath(folder)
    return {"path": path, "files": files, "bytes": size, "sha256": digest.hexdigest()}


def _files(folder: str):
    """Relative names and sizes, in one order on every host."""
    pending = [""]
    while pending:
        under = pending.pop()
        with os.scandir(os.path.join(folder, under)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = os.path.join(under, entry.name)
            if entry.is_dir():
                pending.append(name)
            else:
                yield name, entry.stat().st_size


def limits() -> dict[str, int | None]:
    """Soft limits, of open files the hard one, up to which ranks go; None where there is none."""
    names = {"open files": "NOFILE", "locked memory": "MEMLOCK", "processes": "NPROC"}
    both = {k: resource.getrlimit(getattr(resource, f"RLIMIT_{n}")) for k, n in names.items()}
    values = {k: limits[k == "open files"] for k, limits in both.items()}
    return {k: None if v == resource.RLIM_INFINITY else v for k, v in values.items()}


def environment() -> dict[str, str]:
    """Variables that change how ranks talk or compute, without those that differ by design."""
    chosen = ("NCCL_", "HOROVOD_", "OMPI_MCA_btl", "OMPI_MCA_pml", "UCX_", "FI_", "TF_", "OMP_")
    chosen += ("OFI_NCCL_", "CUDA_DEVICE_")
    own = ("RANK", "SIZE", "HOSTNAME", "RENDEZVOUS", "SECRET")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(chosen) and not any(part in name for part in own)
    }


def leave_mark(run_dir: str, mark: str) -> None:
    """Rank 0: a file in the run folder that others look for, to learn if the folder is shared."""
    with contextlib.suppress(OSError):
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        Path(run_dir, mark).touch()


def sees_mark(run_dir: str, mark: str) -> bool:
    with contextlib.suppress(OSError):
        os.listdir(run_dir)  # makes NFS look again
    return Path(run_dir, mark).exists()


def remove_mark(run_dir: str, mark: str) -> None:
    with contextlib.suppress(OSError):
        Path(run_dir, mark).unlink()
