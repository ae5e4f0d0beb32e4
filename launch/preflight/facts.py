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
from .ranks import launcher

_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "horovod",
    "numpy",
    "mpi4py",
    "absl-py",
)
_MOST_FILES = 300_000  # of a larger data folder, the first files by name are compared
_NETWORK = "OMPI_MCA_btl_tcp_if_include"

_CARDS = Path("/sys/class/infiniband")
_CARD_FILES = Path("/dev/infiniband")
_DEVICES = Path("/sys/class/net")
_CAP_IPC_LOCK = 1 << 14
_SHARED = "/dev/shm"
_ENOUGH_SHARED = 512 << 20

# What is wrong, how to fix it, level as in `findings.Finding`.
Fault = tuple[str, str, str]


def collect(data_dir: str, run_dir: str, device: str) -> dict[str, Any]:
    """Facts of this rank, for JSON; "faults" need no other rank."""
    alike = versions()
    faults = import_faults()
    local_rank = launcher.launch_local_rank()
    facts: dict[str, Any] = {"host": os.uname().nodename, "local_rank": local_rank}
    first_of_host = local_rank == 0  # it alone reports what all ranks of its host see

    if device != "cpu":
        imports_work = not faults
        gpus, gpu_faults = gpus_of_driver()
        alike["GPU driver"] = gpus.pop("driver")
        alike["kind of GPU"] = gpus.pop("kinds")
        if first_of_host:
            faults += gpu_faults
            faults += shared_memory_faults(gpus["shown"])
        if imports_work:
            gpus |= gpus_of_tensorflow()
        facts["gpus"] = gpus

    facts["cards"] = cards()
    facts["link"] = link()
    if first_of_host:
        faults += card_faults(facts["cards"])
    facts["every_address"] = [address for _, address in ways()]
    facts["addresses"], address_faults = addresses()
    faults += address_faults

    if run_dir and first_of_host:
        faults += run_folder_faults(run_dir)
    if data_dir and first_of_host:
        summary, data_faults = listing(data_dir)
        if summary:
            alike[f"the data folder {os.path.abspath(data_dir)}"] = summary
        faults += data_faults
    return facts | {"alike": alike, "faults": faults}


def import_faults() -> list[Fault]:
    """Imports what training imports, up to the first one that fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    modules = ["hvdkit.ranks.quiet", "keras", "horovod.tensorflow"]
    if launcher.in_mpi_world():
        modules.insert(0, "mpi4py.MPI")
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            todo = f"install the requirements for {sys.executable} on that host"
            return [
                (
                    f"cannot import {name}: {type(error).__name__}: {error}",
                    todo,
                    "fatal",
                )
            ]
    return []


def versions() -> dict[str, str]:
    """Versions of Python, packages and MPI, and the first digits of the code's SHA-256."""
    versions = {"Python": platform.python_version(), "MPI": "none"}
    with contextlib.suppress(ImportError, RuntimeError):
        versions["MPI"] = ranks.mpi().Get_library_version().strip("\0").split(",")[0]
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    if Path("train.py").is_file():
        versions["the code beside train.py"] = _code(Path.cwd())
    return versions


def _code(folder: Path) -> str:
    """Digests names and contents of each Python file in the folder and in its packages."""
    try:
        from hvdkit.ranks import fingerprint
    except ImportError:  # `import_faults` says so
        return "none"
    digest = hashlib.sha256()
    for file in sorted(fingerprint.project_files(folder)):
        with contextlib.suppress(OSError):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def gpus_of_driver() -> tuple[dict[str, Any], list[Fault]]:
    """How many are "shown", their "kinds" and "driver"; faults of the driver."""
    gpus: dict[str, Any] = {"shown": 0, "kinds": "none", "driver": "none"}
    try:
        import pynvml
    except ImportError:  # nvidia-ml-py is not installed
        return gpus, []
    try:
        pynvml.nvmlInit()
        names = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            names.append(pynvml.nvmlDeviceGetName(handle))
        gpus["driver"] = pynvml.nvmlSystemGetDriverVersion()
        gpus["kinds"] = ", ".join(sorted(set(names)))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return gpus, []
    except pynvml.NVMLError as error:
        return gpus, [
            (f"the GPU driver fails: {error}", "look at nvidia-smi and dmesg", "wrong")
        ]
    # GPUs that CUDA_VISIBLE_DEVICES hides are not idle.
    first_visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first_visible not in ("", "-1"):
        gpus["shown"] = len(names)
    return gpus, []


def gpus_of_tensorflow() -> dict[str, Any]:
    """What TensorFlow sees (without taking GPU memory), and what both were built for."""
    import hvdkit.ranks.quiet  # noqa: F401 (Keras without keras.json, as in training)

    # isort: split
    import horovod.tensorflow as hvd
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    from hvdkit.ranks import placement

    return {
        "seen": count,
        "each": placement.gpus_of_driver(count),
        "cuda": tf.test.is_built_with_cuda(),
        "nccl": bool(hvd.nccl_built()),
    }


def cards() -> dict[str, float]:
    """Bytes a second of each InfiniBand or RoCE port that is up, by card and port (mlx5_0:1)."""
    rates = {}
    for port in sorted(_CARDS.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))  # 100 Gb/sec (4X EDR)
        if rate and "ACTIVE" in _read(port / "state"):
            rates[f"{port.parent.parent.name}:{port.name}"] = float(rate[1]) * 1e9 / 8
    return rates


def link() -> float:
    """Bytes a second of the fastest network card that MPI may take; 0: not known.

    A card without a device behind it, as a container's eth0, only claims a speed.
    """
    taken, _ = addresses()
    rates = [0.0]
    for name, address in ways():
        speed = _read(_DEVICES / name / "speed")  # in Mbit/s, -1 if not known
        if (
            address in taken
            and (_DEVICES / name / "device").exists()
            and speed.isdecimal()
        ):
            rates.append(int(speed) * 1e6 / 8)
    return max(rates)


def card_faults(cards: dict[str, float]) -> list[Fault]:
    """What keeps NCCL from the InfiniBand cards that the host has."""
    if not cards:
        return []
    names = ", ".join(cards)
    faults: list[Fault] = []

    if not list(_CARD_FILES.glob("uverbs*")):
        what = f"InfiniBand is there ({names}), but {_CARD_FILES} is not: NCCL takes Socket"
        faults.append(
            (what, f"give the container {_CARD_FILES}: launch/README.md", "note")
        )

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(
        r"^CapEff:\s*(\w+)", _read(Path("/proc/self/status")), re.MULTILINE
    )
    may_lock = capabilities and int(capabilities[1], 16) & _CAP_IPC_LOCK
    if limit != resource.RLIM_INFINITY and not may_lock:
        what = f"{limit / 1024:,.0f} KiB of memory may be locked; InfiniBand ({names}) locks more"
        todo = (
            "ulimit -l unlimited where ranks are started: in limits.conf for ssh, as LimitMEMLOCK "
            "of slurmd and of the container service, docker --ulimit memlock=-1"
        )
        faults.append((what, todo, "wrong"))
    return faults


def shared_memory_faults(gpus: int) -> list[Fault]:
    """A container has 64 MiB unless it is told; NCCL takes megabytes for each two GPUs."""
    try:
        status = os.statvfs(_SHARED)
    except OSError:
        return []
    size = status.f_blocks * status.f_frsize
    if gpus < 2 or size >= _ENOUGH_SHARED:
        return []
    what = f"{_SHARED} holds {size >> 20} MiB, which NCCL may fill between {gpus} GPUs"
    todo = "docker --shm-size 1g; in Kubernetes an emptyDir of medium Memory there"
    return [(what, todo, "note")]


def network_of_nccl(log: str) -> str:
    """What NCCL_DEBUG=INFO says that NCCL sends by, as `Socket ([0]eth0:10.0.0.1<0>)`; or ""."""
    name = re.search(r"Using network (.+)|Assigned NET plugin (\S+) to comm", log)
    if not name:
        return ""
    chosen = (name[1] or name[2]).strip()
    devices = re.search(rf"NET/{re.escape(chosen)} : Using (.+)", log)
    return f"{chosen} ({devices[1].strip()})" if devices else chosen


def _read(path: Path) -> str:
    """The stripped text; "" where there is no such file, or it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def ways() -> list[tuple[str, str]]:
    """(interface, address) by which another host might reach this one.

    Open MPI takes no address of a loopback interface, which routed hosts have (BGP).
    """
    usable = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name == "lo" or entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.split("%")[0])
            if not address.is_loopback and not address.is_link_local:
                usable.append((name, str(address)))
    return usable


def addresses() -> tuple[list[str], list[Fault]]:
    """Addresses of all `ways`, or of those that Open MPI may take."""
    usable = ways()
    setting = os.environ.get(_NETWORK, "")
    if not setting:
        return [address for _, address in usable], []

    taken = addresses_in(setting)
    # horovodrun names the loopback interface where all ranks are on one host.
    on_loopback = any(
        word == "lo" or word.startswith("127.") for word in setting.split(",")
    )
    if taken or on_loopback:
        return taken, []
    interfaces = ", ".join(f"{name} ({address})" for name, address in usable)
    fault = (
        f"{_NETWORK}={setting} names no network there",
        f"name one that every host has; there: {interfaces}",
        "fatal",
    )
    return taken, [fault]


def addresses_in(setting: str) -> list[str]:
    """Those of all `ways` that Open MPI takes by interfaces and networks: eth0,10.0.0.0/24."""
    words = setting.split(",")
    networks = []
    for word in words:
        # Open MPI passes over what is no network either, as 10.1/16.
        with contextlib.suppress(ValueError):
            if "/" in word:
                networks.append(ipaddress.ip_network(word, strict=False))
    taken = []
    for name, address in ways():
        in_network = any(
            ipaddress.ip_address(address) in network for network in networks
        )
        if name in words or in_network:
            taken.append(address)
    return taken


def resolve(name: str) -> tuple[list[str], str]:
    """The addresses of a host's name, as this host resolves it; or why there are none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries)), ""


def unheard(name: str) -> str:
    """Why Gloo cannot listen at this host's own name; "" where it can."""
    resolved, reason = resolve(name)
    if not resolved:
        return f"does not resolve: {reason}"
    local = set()
    for entries in psutil.net_if_addrs().values():
        local.update(entry.address for entry in entries)
    for address in resolved:
        # Debian names a host 127.0.1.1.
        if ("127.0.0.1" if address.startswith("127.") else address) not in local:
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as listener:
            listener.bind((address, 0))
            return ""
    return f"resolves to {', '.join(resolved)}, no address of it"


def run_folder_faults(path: str) -> list[Fault]:
    """A fault if files cannot be written or locked where the run folder is or will be."""
    folder = Path(path).absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        with open(probe, "xb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            return _lock_faults(file.fileno(), folder)
    except OSError as error:
        what = f"the run folder cannot be written to: {folder}: {error.strerror}"
        todo = (
            "free some space there, give the right to write, or choose another folder"
        )
        return [(what, todo, "wrong")]
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _lock_faults(handle: int, folder: Path) -> list[Fault]:
    """A fault if an open file in the folder, a new one, cannot be locked; `handle`: its number."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what = f"the file system of {folder} has no locks (flock: {error.strerror})"
        # Then hvdkit/checkpoint/lease.py watches for 8 s whether another run renews its lease.
        todo = (
            "mount it with them (Lustre: -o flock); else a start takes 8 s to see that no other "
            "run is in the folder, and --cache_dir must be on another disk"
        )
        return [(what, todo, "note")]
    return []


def listing(folder: str) -> tuple[str, list[Fault]]:
    """Number, bytes, and SHA-256 of names and sizes of a data folder's files; or a fault."""
    digest = hashlib.sha256()
    files = 0
    size = 0
    problem = ""
    try:
        for path in itertools.islice(_files(folder), _MOST_FILES):
            length = os.path.getsize(path)
            digest.update(os.fsencode(f"{os.path.relpath(path, folder)}\0{length}\n"))
            files += 1
            size += length
    except OSError as error:
        problem = error.strerror or str(error)
    if files and not problem:
        return (
            f"{files:,} files of {size:,} bytes (SHA-256 {digest.hexdigest()[:8]})",
            [],
        )
    what = f"the data folder {os.path.abspath(folder)}: {problem or 'it is empty'}"
    todo = "copy or mount it there (launch/README.md: rsync), or give --data_dir"
    return "", [(what, todo, "wrong")]


def _files(folder: str) -> Iterator[str]:
    """Lists them in the same order on every host."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names))


def leave_mark(run_dir: str) -> str:
    """A file by which other hosts see whether the folder is shared; "" if it cannot be made."""
    path = Path(run_dir, f".doctor-{uuid.uuid4().hex}").absolute()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(path) if path.exists() else ""
