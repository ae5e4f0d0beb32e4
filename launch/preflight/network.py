"""What one rank sees of its host's network: names, addresses, InfiniBand and EFA devices."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import psutil

# Bridges and tunnels of containers and virtual machines: every host has its own, often with the
# same address as the others'.
_INNER = ("docker", "br-", "virbr", "cni", "veth", "flannel", "cali", "cilium", "podman", "lxc")


def resolve(name: str) -> dict[str, Any]:
    """What this host's own name stands for, as this host sees it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"name": name, "addresses": [], "error": str(error)}
    return {"name": name, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def interfaces() -> dict[str, list[str]]:
    """Addresses by interface, of those that are up."""
    kinds, stats = (socket.AF_INET, socket.AF_INET6), psutil.net_if_stats()
    return {
        name: [a.address.split("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
        if name not in stats or "up" in stats[name].flags.split(",")
    }


def down() -> list[str]:
    """Those that are down, and those that are up with nothing behind them: no cable is in, or no
    container is on a bridge. Open MPI takes the latter too, NCCL does not.
    """
    return [name for name, stats in psutil.net_if_stats().items() if not stats.isup]


def is_for_others(address: str) -> bool:
    """Whether another host could reach it at all."""
    one = ipaddress.ip_address(address.split("%")[0])
    return not (one.is_loopback or one.is_link_local or one.is_unspecified)


def inner(interfaces: dict[str, list[str]]) -> str:
    """Names of interfaces that are most likely for this host alone; empty if there are none."""
    return ", ".join(n for n, its in interfaces.items() if n.startswith(_INNER) and its)


def address(interface: str, interfaces: dict[str, list[str]], names: dict[str, Any]) -> str:
    """Where other hosts reach this one: the interface that was named, else the host's own name."""
    named = interface or os.environ.get("HOROVOD_GLOO_IFACE", "")
    for name in (n for n in named.split(",") if n != "lo"):
        for found in filter(is_for_others, interfaces.get(name, [])):
            return found
    own = {a for addresses in interfaces.values() for a in addresses}
    outside = [a for a in names["addresses"] if a in own and is_for_others(a)]
    if outside:
        return outside[0]
    # The way out: towards the launcher, or towards anywhere; nothing is sent.
    target = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def fabric(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Ports that carry RDMA: InfiniBand, RoCE, EFA; each with its kind and state.

    EFA stands there too: its driver is `efa`, its link layer Unknown.
    """
    found = []
    for port in sorted(root.glob("*/ports/*")):
        device = port.parent.parent
        layer = _line(port / "link_layer")
        kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(layer, "")
        if os.path.basename(os.path.realpath(device / "device" / "driver")) == "efa":
            kind = "EFA"
        if kind:
            state = _line(port / "state").split(": ")[-1]  # "4: ACTIVE"
            found.append({"port": f"{device.name}:{port.name}", "kind": kind, "state": state})
    return found


def verbs(folder: Path = Path("/dev/infiniband")) -> bool:
    """Whether programs can open the devices of `fabric`; a container is given them, or not."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in folder.glob("uverbs*"))


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
