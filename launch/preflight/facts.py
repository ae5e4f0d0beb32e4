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
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py", "absl-py"),
    *("pillow", "scikit-learn", "protobuf", "ml-dtypes"),
)
_MAX_FILES = 300_000  # of a data folder that are listed; the first ones in the order of names


def collect(data_dir: str, run_dir: str, interface: str) -> dict[str, Any]:
    """Facts of this rank, picklable."""
    addresses = interfaces()
    names = resolve(socket.gethostname())
    return {
        "host": os.uname().nodename,
        "local_rank": local_rank(),
        "local_size": local_size(),
        "program": sys.executable,
        "versions": versions(),
        "imports": import_errors(),
        "gpus": gpus(),
        "names": names,
        "interfaces": addresses,
        "address": address(interface, addresses, names),
        "disks": {"temporary files": disk(tempfile.gettempdir())}
        | ({"the run folder": disk(run_dir)} if run_dir else {})
        | {"/dev/shm": disk("/dev/shm")},
        "data": listing(data_dir) if data_dir and local_rank() == 0 else None,
        "limits": limits(),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "cores": len(os.sched_getaffinity(0)),
        "environment": environment(),
    }


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
    with tempfile.TemporaryFile() as held:
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


def gpus() -> dict[str, Any]:
    """GPUs that the driver shows: all of them, and how many this process may use."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        return {"count": 0, "visible": 0, "names": [], "driver": "none"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"count": 0, "visible": 0, "names": [], "driver": "none", "error": str(error)}
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = len(rows)
    if chosen is not None:
        visible = min(visible, len([c for c in chosen.split(",") if c.strip() not in ("", "-1")]))
    names = sorted({row[0] for row in rows})
    driver = rows[0][-1] if rows else "none"
    return {"count": len(rows), "visible": visible, "names": names, "driver": driver}


def resolve(name: str) -> dict[str, Any]:
    """What this host's own name stands for, as this host sees it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"name": name, "addresses": [], "error": str(error)}
    return {"name": name, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def interfaces() -> dict[str, list[str]]:
    """Addresses by interface."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.split("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address(interface: str, interfaces: dict[str, list[str]], names: dict[str, Any]) -> str:
    """Where other hosts reach this one: the interface that was named, else the host's own name."""
    named = interface or os.environ.get("HOROVOD_GLOO_IFACE", "")
    for name in (n for n in named.split(",") if n != "lo"):
        for found in interfaces.get(name, []):
            return found
    own = {a for addresses in interfaces.values() for a in addresses}
    outside = [
        a for a in names["addresses"] if a in own and not a.startswith("127.") and a != "::1"
    ]
    if outside:
        return outside[0]
    # The way out: towards the launcher, or towards anywhere; nothing is sent.
    target = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def disk(path: str) -> dict[str, Any]:
    """Free bytes where `path` is or will be, and whether a file can be written there."""
    folder = Path(path).absolute()
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


def limits() -> dict[str, float]:
    """Soft limits; infinite where there is none."""
    names = {"open files": "NOFILE", "locked memory": "MEMLOCK", "processes": "NPROC"}
    values = {k: resource.getrlimit(getattr(resource, f"RLIMIT_{n}"))[0] for k, n in names.items()}
    infinite = resource.RLIM_INFINITY
    return {k: float("inf") if v == infinite else float(v) for k, v in values.items()}


def environment() -> dict[str, str]:
    """Variables that change how ranks talk or compute, without those that differ by design."""
    chosen = ("NCCL_", "HOROVOD_", "OMPI_MCA_btl", "OMPI_MCA_pml", "UCX_", "FI_", "TF_", "OMP_")
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
