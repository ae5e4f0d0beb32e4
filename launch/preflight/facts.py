"""What one rank knows of its host, without other ranks. Nothing here raises."""

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import ipaddress
import itertools
import os
import platform
import re
import resource
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from . import ranks

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py", "absl-py")
_MOST_FILES = 300_000  # of a data folder: the first ones by name
_NETWORK = "OMPI_MCA_btl_tcp_if_include"

_CARDS = Path("/sys/class/infiniband")
_CARD_FILES = Path("/dev/infiniband")
_DEVICES = Path("/sys/class/net")
_CAP_IPC_LOCK = 1 << 14

Fault = tuple[str, str, str]  # what is wrong, how to fix it, level as in `findings.Finding`


def collect(data_dir: str, run_dir: str, device: str) -> dict[str, Any]:
    """Facts of this rank, for JSON; "faults" need no other rank."""
    alike, faults = versions(), import_faults()
    sound, first = not faults, not ranks.local_rank()  # of its host
    found: dict[str, Any] = {"host": os.uname().nodename, "local_rank": ranks.local_rank()}
    if device != "cpu":
        shown, more = gpus_of_driver()
        alike |= {"GPU driver": shown.pop("driver"), "kind of GPU": shown.pop("kinds")}
        faults += more if first else []
        found["gpus"] = shown | (gpus_of_tensorflow() if sound else {})
    found["cards"] = cards()
    found["link"] = link()
    faults += card_faults(found["cards"]) if first else []
    found["every_address"] = [address for _, address in ways()]
    found["addresses"], more = addresses()
    faults += more + (unwritable(run_dir) if run_dir and first else [])
    if data_dir and first:
        seen, more = listing(data_dir)
        alike |= {f"the data folder {os.path.abspath(data_dir)}": seen} if seen else {}
        faults += more
    return found | {"alike": alike, "faults": faults}


def import_faults() -> list[Fault]:
    """Imports what training imports, up to the first one that fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    mpi = ["mpi4py.MPI"] if ranks.launcher() == "mpi" else []
    for name in (*mpi, "hvdkit.ranks.quiet", "keras", "horovod.tensorflow"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            todo = f"install the requirements for {sys.executable} on that host"
            return [(f"cannot import {name}: {type(error).__name__}: {error}", todo, "fatal")]
    return []


def versions() -> dict[str, str]:
    """Of Python, packages and MPI, and the first digits of the code's SHA-256."""
    found = {"Python": platform.python_version(), "MPI": "none"} | dict.fromkeys(_PACKAGES, "none")
    with contextlib.suppress(ImportError, RuntimeError):
        found["MPI"] = ranks.mpi().Get_library_version().strip("\0").split(",")[0]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if Path("train.py").is_file():
        found["the code beside train.py"] = _code(Path.cwd())
    return found


def _code(folder: Path) -> str:
    """Of each Python file in the folder and in its packages: names and contents."""
    packages = [inner.parent for inner in folder.glob("*/__init__.py")]
    files = [*folder.glob("*.py"), *(file for inner in packages for file in inner.rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files):
        with contextlib.suppress(OSError):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def gpus_of_driver() -> tuple[dict[str, Any], list[Fault]]:
    """How many are "shown", their "kinds" and "driver"; faults of the driver."""
    found = {"shown": 0, "kinds": "none", "driver": "none"}
    try:
        import pynvml
    except ImportError:  # nvidia-ml-py is not installed
        return found, []
    try:
        pynvml.nvmlInit()
        every = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [pynvml.nvmlDeviceGetName(one) for one in every]
        found |= {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "kinds": ", ".join(sorted({*names})),
        }
        pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return found, []
    except pynvml.NVMLError as error:
        return found, [(f"the GPU driver fails: {error}", "look at nvidia-smi and dmesg", "wrong")]
    # GPUs that CUDA_VISIBLE_DEVICES hides are not idle.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
    return found | {"shown": 0 if hidden else len(names)}, []


def gpus_of_tensorflow() -> dict[str, Any]:
    """What TensorFlow sees (without taking GPU memory), and what both were built for."""
    import hvdkit.ranks.quiet  # noqa: F401 (Keras without keras.json, as in training)

    # isort: split
    import horovod.tensorflow as hvd
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    from hvdkit.ranks import placement

    its = placement.gpus_of_driver(count)
    found = {"seen": count, "each": its, "cuda": tf.test.is_built_with_cuda()}
    return found | {"nccl": bool(hvd.nccl_built())}


def cards() -> dict[str, float]:
    """Of each InfiniBand or RoCE port that is up: bytes a second, by card and port (mlx5_0:1)."""
    found = {}
    for port in sorted(_CARDS.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))  # 100 Gb/sec (4X EDR)
        if rate and "ACTIVE" in _read(port / "state"):
            found[f"{port.parent.parent.name}:{port.name}"] = float(rate[1]) * 1e9 / 8
    return found


def link() -> float:
    """Bytes a second of the fastest network card that MPI may take; 0: not known.

    What has no device behind it, as a container's eth0, only claims a speed.
    """
    taken, _ = addresses()
    rates = [0.0]
    for name, address in ways():
        speed = _read(_DEVICES / name / "speed")  # in Mbit/s, -1 if not known
        if address in taken and (_DEVICES / name / "device").exists() and speed.isdecimal():
            rates.append(int(speed) * 1e6 / 8)
    return max(rates)


def card_faults(there: dict[str, float]) -> list[Fault]:
    """What keeps NCCL from InfiniBand cards that are there."""
    if not there:
        return []
    shown = ", ".join(there)
    found: list[Fault] = []
    if not list(_CARD_FILES.glob("uverbs*")):
        what = f"InfiniBand is there ({shown}), but {_CARD_FILES} is not: NCCL takes Socket"
        found.append((what, f"give the container {_CARD_FILES}: launch/README.md", "note"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rights = re.search(r"^CapEff:\s*(\w+)", _read(Path("/proc/self/status")), re.MULTILINE)
    may_lock = rights and int(rights[1], 16) & _CAP_IPC_LOCK
    if limit != resource.RLIM_INFINITY and not may_lock:
        what = f"{limit / 1024:,.0f} KiB of memory may be locked; InfiniBand ({shown}) locks more"
        todo = (
            "ulimit -l unlimited where ranks are started: in limits.conf for ssh, as LimitMEMLOCK "
        )
        todo += "of slurmd and of the container service, docker --ulimit memlock=-1"
        found.append((what, todo, "wrong"))
    return found


def network_of_nccl(log: str) -> str:
    """What NCCL_DEBUG=INFO says that NCCL sends by, as `Socket ([0]eth0:10.0.0.1<0>)`; or ""."""
    name = re.search(r"Using network (.+)|Assigned NET plugin (\S+) to comm", log)
    if not name:
        return ""
    chosen = (name[1] or name[2]).strip()
    devices = re.search(rf"NET/{re.escape(chosen)} : Using (.+)", log)
    return f"{chosen} ({devices[1].strip()})" if devices else chosen


def _read(path: Path) -> str:
    """Empty where there is no such file, or it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def ways() -> list[tuple[str, str]]:
    """(interface, address) by which another host might reach this one.

    Open MPI takes no address of a loopback interface, which routed hosts have (BGP).
    """
    found = [
        (name, ipaddress.ip_address(one.address.split("%")[0]))
        for name, its in psutil.net_if_addrs().items()
        for one in its
        if name != "lo" and one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [(name, str(a)) for name, a in found if not (a.is_loopback or a.is_link_local)]


def addresses() -> tuple[list[str], list[Fault]]:
    """Of all `ways`, or of those that Open MPI may take."""
    there, setting = ways(), os.environ.get(_NETWORK, "")
    if not setting:
        return [address for _, address in there], []
    taken = addresses_in(setting)
    todo = f"name one that every host has; there: {', '.join(f'{n} ({a})' for n, a in there)}"
    fault = (f"{_NETWORK}={setting} names no network there", todo, "fatal")
    # horovodrun, on one host
    own = any(word == "lo" or word.startswith("127.") for word in setting.split(","))
    return taken, [] if taken or own else [fault]


def addresses_in(setting: str) -> list[str]:
    """Of all `ways`, those of interfaces and networks as Open MPI names them: eth0,10.0.0.0/24."""
    asked = setting.split(",")
    networks = [ipaddress.ip_network(word, strict=False) for word in asked if "/" in word]
    taken = []
    for name, address in ways():
        if name in asked or any(ipaddress.ip_address(address) in its for its in networks):
            taken.append(address)
    return taken


def resolve(name: str) -> tuple[list[str], str]:
    """The addresses of a host's name, as this host resolves it; or why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def unheard(name: str) -> str:
    """Why Gloo cannot listen at this host's own name; empty where it can."""
    addresses, why = resolve(name)
    there = [one.address for its in psutil.net_if_addrs().values() for one in its]
    for address in set(addresses).intersection(there):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as listener:
            listener.bind((address, 0))
            return ""
    where = f"resolves to {', '.join(addresses)}, no address of it"
    return where if addresses else f"does not resolve: {why}"


def unwritable(path: str) -> list[Fault]:
    """A fault if no file can be written where the run folder is or will be, or none be locked."""
    folder = Path(path).absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        with open(probe, "xb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            return _without_locks(file.fileno(), folder)
    except OSError as error:
        what = f"the run folder cannot be written to: {folder}: {error.strerror}"
        todo = "free some space there, give the right to write, or choose another folder"
        return [(what, todo, "wrong")]
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _without_locks(handle: int, folder: Path) -> list[Fault]:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what = f"the file system of {folder} has no locks (flock: {error.strerror})"
        todo = "mount it with them (Lustre: -o flock); else a start takes 8 s to see that no other "
        todo += "run is in the folder, and --cache_dir must be on another disk"
        return [(what, todo, "note")]
    return []


def listing(folder: str) -> tuple[str, list[Fault]]:
    """Number, bytes, and SHA-256 of names and sizes of a data folder's files; or a fault."""
    digest, files, size, problem = hashlib.sha256(), 0, 0, ""
    try:
        for path in itertools.islice(_files(folder), _MOST_FILES):
            length = os.path.getsize(path)
            digest.update(os.fsencode(f"{os.path.relpath(path, folder)}\0{length}\n"))
            files, size = files + 1, size + length
    except OSError as error:
        problem = error.strerror or str(error)
    if files and not problem:
        return f"{files:,} files of {size:,} bytes (SHA-256 {digest.hexdigest()[:8]})", []
    what = f"the data folder {os.path.abspath(folder)}: {problem or 'it is empty'}"
    todo = "copy or mount it there (launch/README.md: rsync), or give --data_dir"
    return "", [(what, todo, "wrong")]


def _files(folder: str) -> Iterator[str]:
    """In one order on every host."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names))


def leave_mark(run_dir: str) -> str:
    """A file by which other hosts see whether the folder is shared; empty without a folder."""
    path = Path(run_dir, f".doctor-{uuid.uuid4().hex}").absolute()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(path) if path.exists() else ""
