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

MESSAGES = {
    "random": os.urandom(4096),
    "a pickle": pickle.dumps({"a": [1]}),
    "a question without a key": bytes(48),
    # Asks Open MPI's daemon for its name: who knows it can stop the ranks.
    "Open MPI's": struct.pack(">7IB35x", 1, 1, 0, 0, 0, 0, 0, 2),
}


def say(port: list, message: bytes) -> int:
    got = 0
    with contextlib.suppress(OSError), socket.create_connection(port, 5) as link:
        link.sendall(message)
        link.settimeout(1)
        while part := link.recv(4096):
            got += len(part)
    return got


task = json.load(sys.stdin)
idle = [socket.create_connection(port, 5) for port in task["ports"] for _ in range(200)]
got = {f"{port}, {m}": say(port, text) for port in task["ports"] for m, text in MESSAGES.items()}
places = {"ps": subprocess.run(["ps", "auxeww"], capture_output=True).stdout}
for file in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    with contextlib.suppress(OSError), open(file, "rb") as content:
        places[file] = content.read()
shown = [at for at, text in places.items() if any(s.encode() in text for s in task["secrets"])]
print(json.dumps({"user": os.getuid(), "shown": shown, "got": got}))
