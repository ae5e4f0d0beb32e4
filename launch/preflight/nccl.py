"""Which network NCCL took: it says so in its log, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

# Of libfabric; NCCL's plugin for it (aws-ofi-nccl) takes them where it finds nothing faster.
_PLAIN = {"tcp", "sockets", "tcp;ofi_rxm", "udp;ofi_rxd"}


@contextlib.contextmanager
def listening() -> Iterator[Log]:
    """NCCL's log of what happens in the block, for this process; before its first collective.

    What the user set stays: NCCL_DEBUG_FILE is then the log, NCCL_DEBUG alone goes to the terminal
    and leaves no log.
    """
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        excuse = "NCCL_DEBUG or NCCL_DEBUG_FILE is set: look for 'Using network' in NCCL's lines"
        yield Log(os.environ.get("NCCL_DEBUG_FILE"), excuse)
        return
    try:
        folder = tempfile.mkdtemp(prefix="doctor-nccl-")
    except OSError as error:
        yield Log(None, f"no temporary file could be made: {error}")
        return
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/log"}
    try:
        yield Log(f"{folder}/log", "NCCL wrote no line about it")
    finally:
        del os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"]
        shutil.rmtree(folder, ignore_errors=True)


class Log:
    """`excuse`: why the network is not known, if the log does not tell."""

    def __init__(self, pattern: str | None, excuse: str) -> None:
        self._pattern, self.excuse = pattern, excuse

    def network(self) -> str:
        """As `network` below."""
        if not self._pattern:
            return ""
        # NCCL's own %h ends at the first dot.
        values = {"%%": "%", "%h": socket.gethostname().split(".")[0], "%p": str(os.getpid())}
        path = re.sub("%(?:%|h|p)", lambda found: values[found[0]], self._pattern)
        with contextlib.suppress(OSError):
            return network(Path(path).read_text(errors="replace"))
        return ""


def network(log: str) -> str:
    """NCCL's name for the network that it took: IB, Socket, AWS Libfabric over efa, ...

    Empty where the log does not say. NET/IB and NET/Socket lines alone say what was found; "Using
    network" and the channels, what was taken. One GPU of one host has no channels.
    """
    took = re.findall(r"NCCL INFO Using network (.+)", log)
    took = took or re.findall(r" via NET/([^/\n]+)/", log)
    # NCCL before 2.7, which prints only the one that it uses.
    took = took or re.findall(r"NCCL INFO NET/(\w+) ?: Using \[", log)
    if not took:
        return ""
    provider = re.findall(r"NET/OFI Selected [Pp]rovider is ([^\s,(]+)", log)
    return took[-1].strip() + (f" over {provider[-1]}" if provider else "")


def is_plain(network: str) -> bool:
    """Whether it is TCP, which goes through the kernel and the hosts' memory."""
    name, _, provider = network.partition(" over ")
    return name == "Socket" or provider in _PLAIN


def would_take(
    setting: str, interfaces: dict[str, list[str]], down: Collection[str] = ()
) -> list[str]:
    """The interfaces that NCCL would use for sockets, as its `ncclFindInterfaces` chooses them.

    Args:
      setting: NCCL_SOCKET_IFNAME; empty if it is not set.
      interfaces: addresses by name.
      down: names of those with nothing behind them.
    """
    names = [name for name, addresses in interfaces.items() if addresses and name not in down]

    def those(text: str) -> list[str]:
        refused, text = text.startswith("^"), text.removeprefix("^")
        exact, text = text.startswith("="), text.removeprefix("=")
        given = [word.partition(":")[0] for word in text.split(",")]
        return [
            name
            for name in names
            if refused != any(name == g if exact else name.startswith(g) for g in given)
        ]

    if len(setting) > 1:
        return those(setting)
    # Newer ones leave virbr out as well.
    return those("ib") or those("^docker,lo") or those("docker")
