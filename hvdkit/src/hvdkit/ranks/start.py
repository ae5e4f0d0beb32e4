"""From a rank's first line until all have met: which networks, and how long a rank waits.

Before `peers` watches, a rank that waits says so after 30 s: what for, and for whom. Each wait has
a limit (--start_limit_s); then the process ends with NOT_NOW, which a supervisor tries again.
"""

import contextlib
import ctypes
import ipaddress
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from hvdkit.launcher import launch_rank
from hvdkit.logs import complain, join, refuse
from hvdkit.stop import NOT_NOW

# A rank says after so many seconds that it waits, or at a limit that is less.
_SAY_AFTER = 30.0
_ROLL_CALL = 5.0  # Ranks that are there tell rank 0 within so many seconds.
# Names of interfaces that lead to no other host begin so.
_NOWHERE = (
    "docker",
    "virbr",
    "cni",
    "cilium",
    "flannel",
    "cali",
    "kube-",
    "dummy",
    "ifb",
)
_DEVICES = "/sys/class/net"
_SHARED_BYTES = 4 << 20  # that a rank of Open MPI shares with those of its host
_IPC_PRIVATE = 0
_IPC_RMID = 0
_INCLUDE = "OMPI_MCA_btl_tcp_if_include"  # eth0,10.0.0.0/24
_EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"
# Where Open MPI reads settings besides the environment, unless _FILES names others: the user's, and
# those of the installation, which Debian keeps elsewhere.
_OF_USER = "~/.openmpi/mca-params.conf"
_OF_INSTALLATION = "etc/openmpi-mca-params.conf"
_OF_DEBIAN = "/etc/openmpi/openmpi-mca-params.conf"
_FILES = "OMPI_MCA_mca_base_param_files"
# What the launcher said, where the environment had to be changed.
_included = ""
_NCCL_SETTINGS = ("~/.nccl.conf", "/etc/nccl.conf")
# Horovod's cycle in milliseconds. At 0 its thread never rests, and exchanges take longer.
_SHORT_CYCLE = "0.1"
_NETWORK = "look at firewalls, and at the network that MPI takes: --interface (launch/README.md)"


def ways() -> list[tuple[str, str]]:
    """(interface, IPv4 address) by which other hosts may reach this one.

    Those of the network that MPI was told to use; else all that may lead to another host.
    """
    all_ways = []
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                all_ways.append((name, entry.address))
    include = (
        os.environ.get(_INCLUDE) or _included or of_mpi_files("btl_tcp_if_include")
    )
    networks = include.split(",")
    chosen = [
        way for way in all_ways if any(_is_in(network, way) for network in networks)
    ]
    if chosen:
        return chosen
    return [
        (name, address)
        for name, address in all_ways
        if not _leads_nowhere(name, address)
    ]


def _is_in(network: str, way: tuple[str, str]) -> bool:
    """Whether an interface and its address belong to `network`: eth0, or 10.0.0.0/24."""
    name, address = way
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(
            network, strict=False
        )
    except ValueError:
        return name == network


def _leads_nowhere(name: str, address: str) -> bool:
    """An interface of this host alone: loopback, a bridge of containers, a controller's USB."""
    if name.split(":")[0] == "lo" or name.startswith(_NOWHERE):
        return True
    if ipaddress.ip_address(address).is_link_local:
        return True
    return Path(_DEVICES, name, "bridge").exists() and not _has_card(name)


def _has_card(name: str) -> bool:
    """Whether it is a network card, or joins one: a bond, a bridge."""
    if Path(_DEVICES, name, "device").exists():
        return True
    below = Path(_DEVICES, name).glob("lower_*")
    return any(_has_card(link.name.removeprefix("lower_")) for link in below)


def tell_networks() -> None:
    """NCCL the network that MPI was told to use; where there is none, neither takes what leads to
    no other host: an idle docker0 has the same address on every host, where connections wait for
    ever. What whoever started the run has set stays, also in files of Open MPI and NCCL."""
    global _included
    names = sorted({name for name, _ in ways()})
    if not names:  # Ranks of one host need loopback.
        return
    if not _nccl_file_names_network():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={','.join(names)}")
    if _EXCLUDE in os.environ or of_mpi_files("btl_tcp_if_include"):
        return
    excluded_by_file = of_mpi_files("btl_tcp_if_exclude")
    if _INCLUDE in os.environ:
        if not excluded_by_file:
            return
        # Open MPI takes one of the two: what was included is all that is not excluded.
        _included = os.environ.pop(_INCLUDE)
    others = [name for name in psutil.net_if_addrs() if name not in names]
    excluded = dict.fromkeys([*excluded_by_file.split(","), *others])
    if _included:  # It comes before what a file says of the same network.
        taken = [way for way in ways() if way[0] in names]
        excluded = dict.fromkeys(
            network
            for network in excluded
            if not any(_is_in(network, way) for way in taken)
        )
    os.environ[_EXCLUDE] = ",".join(name for name in excluded if name)


def of_mpi_files(setting: str) -> str:
    """What the files of Open MPI's settings say; "" where they say nothing."""
    files = [file for file in re.split("[:,]", os.environ.get(_FILES, "")) if file]
    if not files:
        files = [_OF_USER]
        prefixes = [os.environ.get("OPAL_PREFIX", ""), sys.prefix]
        if mpirun := shutil.which("mpirun"):
            prefixes.append(str(Path(mpirun).resolve().parent.parent))
        for prefix in filter(None, prefixes):
            files.append(str(Path(prefix, _OF_INSTALLATION)))
        if "/usr" in prefixes:
            files.append(_OF_DEBIAN)
    for file in files:
        value = _value_in(Path(file), setting)
        if value:
            return value
    return ""


def _nccl_file_names_network() -> bool:
    files = [os.environ.get("NCCL_CONF_FILE", ""), *_NCCL_SETTINGS]
    return any(_value_in(Path(file), "NCCL_SOCKET_IFNAME") for file in files if file)


def _value_in(file: Path, setting: str) -> str:
    """Of the last line `setting = value` of a file; "" where there is none, or no such file."""
    try:
        text = file.expanduser().read_text(errors="replace")
    except (OSError, RuntimeError):  # RuntimeError: there is no home.
        return ""
    lines = re.findall(rf"^[ \t]*{setting}[ \t]*=[ \t]*([^#\n]*)", text, re.MULTILINE)
    return lines[-1].strip() if lines else ""


def shorten_cycle() -> None:
    """Has Horovod look for sums every 0.1 ms, not every millisecond; call it before Horovod starts.

    It is for batch norms whose statistics Horovod sums: each sum waits until Horovod looks.
    """
    # Autotuning would take a cycle that is set for fixed.
    if "HOROVOD_AUTOTUNE" not in os.environ:
        os.environ.setdefault("HOROVOD_CYCLE_TIME", _SHORT_CYCLE)


def carrier_of_one() -> dict[str, str]:
    """Variables for a rank that runs alone, without a launcher: Gloo needs none.

    Gloo ends the process where this host's name has no address; MPI asks for none, and must not
    look for its daemon.
    """
    if not gloo_fault():
        return {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    mpi = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    return mpi | {"OMPI_MCA_ess_singleton_isolated": "1"}


def gloo_fault() -> str:
    """Why Gloo cannot listen at the address of this host's name, as it does whatever interface it
    is given; empty where it can."""
    name = socket.gethostname()
    try:
        addresses_of_name = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        addresses_of_name = []
    addresses_here: set[str] = set()
    for entries in psutil.net_if_addrs().values():
        addresses_here.update(entry.address for entry in entries)
    for family, kind, protocol, _, address in addresses_of_name:
        with (
            contextlib.suppress(OSError),
            socket.socket(family, kind, protocol) as listener,
        ):
            listener.bind(address)
            # A process can bind to 127.0.0.1, and to 127.0.1.1, Debian's address of a host's name,
            # although loopback is off.
            is_loopback = str(address[0]).startswith("127.")
            if ("127.0.0.1" if is_loopback else address[0]) in addresses_here:
                return ""
    return (
        f"the name of this host, {name}, leads to no address of it, and Gloo needs one: add the "
        f"line '127.0.0.1 {name}' to /etc/hosts, or use MPI (horovodrun --mpi)"
    )


@contextlib.contextmanager
def waiting(what: str, seconds: int, whom: Callable[[], str] = str) -> Iterator[None]:
    """Around a wait for other ranks: says so after 30 s, and `whom`; ends the process after
    `seconds`, 0: never."""
    quiet = _quiet(seconds)
    done = threading.Event()
    rank = launch_rank()
    host = os.uname().nodename
    addresses = ", ".join(f"{name} {address}" for name, address in ways())

    def watch() -> None:
        speaks = rank < 2  # Two ranks speak, as one of them may be the one that hangs.
        if done.wait(quiet):
            return
        if speaks:
            hosts = os.environ.get("LAUNCH_HOSTS") or os.environ.get(
                "SLURM_JOB_NODELIST"
            )
            complain(
                f"rank {rank} on {host} has waited {quiet:.0f} s for {what}{whom()}, on "
                f"{hosts or 'its hosts'} (this one has {addresses}). {_NETWORK}"
            )
        if seconds and not done.wait(seconds - quiet):
            if speaks:
                complain(
                    f"the run ends: rank {rank} on {host} has waited {seconds} s for {what} "
                    "(--start_limit_s)"
                )
            os._exit(NOT_NOW)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _quiet(seconds: int) -> float:
    """Seconds of a wait with this limit in which nothing is said."""
    return min(_SAY_AFTER, seconds or _SAY_AFTER)


def share_without_names() -> None:
    """Has Open MPI share memory between the ranks of a host that no other user can name or open.

    By default it writes into files of /dev/shm, whoever made them, and their names can be foretold.
    What whoever started the run has set stays. Ends the process where there is none left.
    """
    if "OMPI_MCA_shmem" in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(_IPC_PRIVATE, ctypes.c_size_t(_SHARED_BYTES), 0o600)
    if segment < 0:
        why = os.strerror(ctypes.get_errno())
        refuse(
            f"{os.uname().nodename} has no System V shared memory left for its ranks ({why}): look "
            "at ipcs -m and at kernel.shmmni, shmall and shmmax there (sysctl)",
            NOT_NOW,
        )
    libc.shmctl(segment, _IPC_RMID, None)
    # mpirun tells its ranks, as a hint, what it takes itself, and they would take nothing else.
    os.environ |= {
        "OMPI_MCA_shmem": "sysv",
        "OMPI_MCA_shmem_RUNTIME_QUERY_hint": "sysv",
    }


def start_mpi(seconds: int) -> None:
    """Before Horovod, which would own MPI otherwise, and finalize it when it shuts down."""
    import mpi4py

    share_without_names()
    # A rank that waits leaves its core to others: 3.9 for 5.5 ms a small step, 2 ranks on 2 cores.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    if MPI.Is_initialized():
        return
    with waiting("all ranks to start MPI", seconds):
        # mpi4py's own call would block all Python threads.
        provided = ctypes.c_int()
        library = ctypes.CDLL(MPI.__file__)
        library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    _meet(MPI, seconds)


def _meet(mpi: Any, seconds: int) -> None:
    """Waits until each rank has come; where one has not after 30 s, rank 0 names it.

    Only shortly before does each rank send to rank 0, which thousands would overrun.
    """
    world = mpi.COMM_WORLD
    present = {0}
    request = None  # This rank's message to rank 0, once it is sent.

    def absent() -> str:
        missing = sorted(set(range(world.size)) - present)
        if world.rank or not missing:
            return ""
        return f": no message yet from rank {join(missing)}"

    with waiting("all ranks to exchange messages", seconds, absent):
        barrier = world.Ibarrier()
        start = time.monotonic()
        while not barrier.Test():
            waited = time.monotonic() - start
            time.sleep(min(0.01, waited / 8))
            if waited <= _quiet(seconds) - _ROLL_CALL:
                continue
            if world.rank and request is None:
                request = world.Isend([b"", mpi.BYTE], 0)
            while not world.rank and world.Iprobe():
                status = mpi.Status()
                world.Recv([bytearray(), mpi.BYTE], status=status)
                present.add(status.source)
