"""Links of benchmarks/links.py: limited, delayed, and asked for their round trip.

Hosts are those of tests/hosts.py. Run as a program it is one end of a link, or the switch.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

MTU = 9000
# What tbf counts of a full frame is 9,014 bytes, with 8,948 of data.
PAYLOAD = (MTU - 52) / (MTU + 14)
_SELF = (sys.executable, __file__)
_PORT, _ENOUGH = 7007, b"!"
_OFFLOADS = (0x17, 0x1F, 0x21, 0x25)  # linux/ethtool.h: checksums, TSO, UFO, GSO


def prepare(hosts) -> None:
    """Frames of MTU bytes, limited by nothing."""
    for host in hosts:
        shape(hosts, host, None)
        for pid, name in ((host.pid, "eth0"), (hosts.switch, f"port{host.name[4:]}")):
            _in(pid, f"ip link set {name} mtu {MTU}")
            subprocess.run([*_enter(pid), *_SELF, "plain", name], check=True)


def shape(hosts, host, megabits: float | None) -> None:
    """Limits what the host sends; None: nothing does."""
    _in(hosts.switch, f"tc qdisc del dev port{host.name[4:]} root", quiet=True)
    _in(host.pid, "tc qdisc del dev eth0 root", quiet=True)
    if megabits:
        how = f"tbf rate {megabits:g}mbit burst 20kb latency 2000ms"
        _in(host.pid, f"tc qdisc add dev eth0 root {how}")


@contextlib.contextmanager
def delayed(hosts, seconds: float) -> Iterator[None]:
    """Frames take this long from host to host."""
    if not seconds:
        yield
        return
    ports = [f"port{host.name[4:]}" for host in hosts]
    for port in ports:
        _in(hosts.switch, f"ip link set {port} nomaster")
    words = [*_enter(hosts.switch), *_SELF, "switch", str(seconds), *ports]
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)
        for port in ports:
            _in(hosts.switch, f"ip link set {port} master bridge0")


def switch(seconds: str, *ports: str) -> None:
    """Hands frames from port to port, each after so many seconds; until it is killed."""
    delay = float(seconds)
    # A switch has no scheduler: no other process here may make it late.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sockets = {}
    for port in ports:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        end.bind((port, 0))
        end.setblocking(False)
        sockets[end.fileno()] = end
    lives: dict[bytes, socket.socket] = {}  # by hardware address
    held: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        rest = max(0.0, held[0][0] - time.monotonic()) if held else None
        for number in select.select(list(sockets), [], [], rest)[0]:
            frame, about = sockets[number].recvfrom(65536)
            if about[2] == socket.PACKET_OUTGOING:
                continue
            lives[frame[6:12]] = sockets[number]
            to = lives.get(frame[:6])
            for end in [to] if to else [s for n, s in sockets.items() if n != number]:
                held.append((time.monotonic() + delay, end, frame))
        while held and held[0][0] <= time.monotonic():
            _, end, frame = held.popleft()
            with contextlib.suppress(OSError):  # a full queue drops, as a switch does
                end.send(frame)


def round_trip(hosts) -> float:
    """Seconds, of small packets between the first two hosts: the least of 30."""
    server = subprocess.Popen(hosts[2].words(*_SELF, "echo"))
    try:
        return float(hosts[1].run(*_SELF, "ask", hosts[2].address).output)
    finally:
        server.wait(10)


def echo() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("", _PORT))
        while True:
            said, asker = end.recvfrom(64)
            end.sendto(said, asker)
            if said == _ENOUGH:
                return


def ask(address: str) -> None:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.settimeout(0.5)
        deadline = time.monotonic() + 30  # until the other one listens
        while len(times) < 30 and time.monotonic() < deadline:
            start = time.perf_counter()
            with contextlib.suppress(OSError):
                end.sendto(b"?", (address, _PORT))
                end.recv(64)
                times.append(time.perf_counter() - start)
            time.sleep(0.02)
        end.sendto(_ENOUGH, (address, _PORT))
    print(min(times))


def plain(name: str) -> None:
    """Whole frames with their checksums, which `switch` can pass on; what `ethtool -K` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", name.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # a kernel without that offload
                fcntl.ioctl(any_socket, 0x8946, request)  # SIOCETHTOOL


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net"]


def _in(pid: int, command: str, quiet: bool = False) -> None:
    words = [*_enter(pid), *command.split()]
    subprocess.run(words, check=not quiet, capture_output=quiet)


def main(words: list[str]) -> None:
    commands = {"echo": echo, "ask": ask, "plain": plain, "switch": switch}
    commands[words[0]](*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
