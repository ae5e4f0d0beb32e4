"""What another user of a host can try: speaks to ports and looks for secrets, as JSON says."""

import contextlib
import glob
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import strangers

# PMIx's first words of a rank: a header, then its claims. The listener answers in four bytes.
_CLAIMS = (
    b"native\0"
    + struct.pack(">IB", 0, 0)
    + b"nobody\0"
    + struct.pack(">I", 0)
    + b"3.2.5\0v3\0\2hash\0"
)
MESSAGES = {
    "random": os.urandom(4096),
    "a pickle": pickle.dumps({"a": [1]}),
    "a question without a key": bytes(48),
    # Asks Open MPI's daemon for its name: with it, one can stop the ranks.
    "Open MPI's": struct.pack(">7IB35x", 1, 1, 0, 0, 0, 0, 0, 2),
    "PMIx's": struct.pack("=iIII", -1, 0, len(_CLAIMS), 0) + _CLAIMS,
}


def say(
    port: list, message: bytes, *, source: tuple | None = None, half_closed=False
) -> int:
    """Bytes of the answer to a message, from an address and port of this host."""
    got = 0
    link_to = socket.create_connection
    with contextlib.suppress(OSError), link_to(port, 5, source_address=source) as link:
        link.sendall(message)
        if half_closed:
            link.shutdown(socket.SHUT_WR)
        link.settimeout(1)
        while part := link.recv(4096):
            got += len(part)
    return got


def answers_of(port: list) -> dict[str, int]:
    """Bytes of the answers to all messages."""
    answers = {f"{port}, {name}": say(port, text) for name, text in MESSAGES.items()}
    answers[f"{port}, by a rank's port"] = max(borrowing(port), default=0)
    return answers


def ranks_ports(port: list) -> list[int]:
    """Ports of this host from which somebody is connected to `port`: anybody can read the table."""
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                local, remote, state = line.split()[1:4]
                if state == "01" and int(remote.split(":")[1], 16) == port[1]:
                    ports.append(int(local.split(":")[1], 16))
    return ports


def borrowing(port: list) -> list[int]:
    """Answers to connections that look like a rank's: its port number, at another address of lo."""
    answers = []
    addresses = ["::1"] if ":" in port[0] else [f"127.0.{n}.{n + 2}" for n in range(8)]
    for number in ranks_ports(port):
        for address in addresses:
            for half_closed in (True, False):
                source = (address, number)
                answers.append(
                    say(
                        port, MESSAGES["PMIx's"], source=source, half_closed=half_closed
                    )
                )
    return answers


task = json.load(sys.stdin)
idle = []
for port in task["ports"]:
    for _ in range(200):
        idle.append(socket.create_connection(port, 5))
got = {}
for port in task["ports"]:
    got |= answers_of(port)
# A port that answers with a nonce is that of a rank's watch.
strangers.hold(
    [port for port in task["ports"] if got[f"{port}, random"] == 16], task["seconds"]
)
time.sleep(task["seconds"])
tried = {f"{port}": len(ranks_ports(port)) for port in task["ports"]}
places = {"ps": subprocess.run(["ps", "auxeww"], capture_output=True).stdout}
for file in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    with contextlib.suppress(OSError), open(file, "rb") as content:
        places[file] = content.read()
secrets = [secret.encode() for secret in task["secrets"]]
shown = []
for place, text in places.items():
    if any(secret in text for secret in secrets):
        shown.append(place)
print(
    json.dumps({"user": os.getuid(), "shown": shown, "got": got, "ranks_ports": tried})
)
