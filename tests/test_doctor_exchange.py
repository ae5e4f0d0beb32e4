"""What strangers send to the preflight: nothing of it is run, nothing of it hangs a rank."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hosts import ROOT, Ended, run

sys.path.insert(0, str(ROOT / "launch"))
from preflight import links

DOCTOR = str(ROOT / "launch" / "doctor.py")
# One rank's part of an exchange, without the rest of the preflight.
EXCHANGE = """
import sys; sys.path.insert(0, sys.argv[1])
from preflight import exchange
ranks = exchange.connect()
try:
    print(ranks.gather("facts", {}, 5) if ranks.rank == 0 else ranks.broadcast("plan", None, 5))
except exchange.Failed as error:
    sys.exit(f"error: {error}")
"""


@contextlib.contextmanager
def stand_in(content: bytes, put: int = 200):
    """A server that answers every GET with `content`; yields a rank's variables."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(put)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield variables(server.server_address[1])
        server.shutdown()


def variables(port: int, rank: int = 1) -> dict[str, str]:
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
    }


def exchange(env: dict[str, str], rank: int) -> Ended:
    words = [sys.executable, "-c", EXCHANGE, ROOT / "launch"]
    return run(words, timeout=60, env=env | {"HOROVOD_RANK": str(rank)})


class Bomb:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pickle_is_refused_and_what_it_says_is_not_run(tmp_path: Path, rank: int):
    trap = tmp_path / "trapped"
    bomb = pickle.dumps(Bomb(f"touch {trap}"))
    pickle.loads(bomb)
    assert trap.exists(), "it works where it is unpickled"
    trap.unlink()
    with stand_in(bomb) as env:
        ended = exchange(env, rank)
        whole = run([sys.executable, DOCTOR, "--no_collectives"], timeout=100, env=env)
    assert not trap.exists()
    [line] = ended.output.splitlines()
    assert line.startswith("error: '") and "is not what a rank of doctor.py writes" in line
    assert f"the launcher's server at 127.0.0.1 port {env['HOROVOD_GLOO_RENDEZVOUS_PORT']}" in line
    assert ended.code == whole.code == 1
    assert whole.output.count("is not what a rank of doctor.py writes") == 1
    assert "Traceback" not in whole.output


@pytest.mark.parametrize(
    "content", [b'{"a": ', b"\xff\xfe", b"", b"[" * 100_000, b"1" * 10_000], ids=lambda c: c[:4]
)
def test_broken_json_is_refused(content: bytes):
    with stand_in(content) as env:
        ended = exchange(env, 0)
    [line] = ended.output.splitlines()
    assert ended.code == 1 and "is not what a rank of doctor.py writes" in line


def test_too_much_is_refused():
    with stand_in(b" " * ((1 << 26) + 1)) as env:
        ended = exchange(env, 1)
    assert ended.code == 1 and "has more than 67,108,864 bytes" in ended.output


def test_a_server_that_refuses_is_named():
    with stand_in(b"null", put=413) as env:
        ended = run([sys.executable, DOCTOR, "--no_collectives"], timeout=100, env=env)
    assert ended.code == 1
    assert "refused 'facts.1' of rank 1: HTTP 413" in ended.output
    assert "Traceback" not in ended.output


def test_a_server_that_cannot_be_reached_is_named_with_who_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended = exchange(variables(port), 1)
    assert ended.code == 1
    assert ended.output.splitlines() == [
        f"error: rank 1 on {os.uname().nodename} cannot talk to the launcher's server at 127.0.0.1 "
        f"port {port}, tried 3 times: Connection refused; look at --interface and firewalls"
    ]


def test_what_ranks_say_arrives_as_it_was_said_under_mpi():
    """Values of every length, and none, from three ranks."""
    script = """
import json, sys; sys.path.insert(0, sys.argv[1])
from preflight import exchange
ranks = exchange.connect()
own = {"rank": ranks.rank, "text": "\\udcff\\u00e9" * 1000 * ranks.rank, "none": None}
every = ranks.gather("own", own, 5)
given = ranks.broadcast("given", every[2] if ranks.rank == 0 else None, 5)
assert given["rank"] == 2 and given["text"] == "\\udcff\\u00e9" * 2000, given
if ranks.rank == 0: print(json.dumps([[e["rank"], len(e["text"]), e["none"]] for e in every]))
"""
    prefix = Path(sys.executable).parent
    words = [prefix / "mpirun", "-np", "3", sys.executable, "-c", script, ROOT / "launch"]
    env = {"OPAL_PREFIX": str(prefix.parent)} if (prefix / "mpirun").exists() else {}
    ended = run(words if env else ["mpirun", *words[1:]], timeout=60, env=env)
    assert ended.code == 0, ended.output
    assert json.loads(ended.output) == [[0, 0, None], [1, 2000, None], [2, 4000, None]]


def test_nothing_of_ours_unpickles():
    """What would: in our own files, wherever they are."""
    words = r"pickle\.load|allow_pickle=True|import shelve|yaml\.load\(|torch\.load|marshal\.load"
    words += r"|safe_mode=False|unsafe_deserialization"
    folders = ["launch", "template", "hvdkit", "benchmarks", "docker"]
    found = subprocess.run(
        ["grep", "-rnE", words, "--include=*.py", "--include=*.sh", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""


@pytest.fixture
def door():
    opened = links.Door()
    yield opened
    opened.close()


def place(door: links.Door, token: str | None = None) -> links.Place:
    return ("127.0.0.1", door.port, token or door.token)


def test_strangers_who_say_nothing_keep_nobody_waiting(door):
    with contextlib.ExitStack() as open_links:
        for _ in range(50):
            open_links.enter_context(socket.create_connection(place(door)[:2]))
        start = time.monotonic()
        assert links.knock(0, [place(door), place(door)]) == []
        assert time.monotonic() - start < 2


def test_a_stranger_is_shown_out(door):
    strange = place(door, "00" * 16)
    [failed] = links.knock(0, [strange, strange])
    assert "closed the connection" in failed["error"]
    for said in (b"\0" * 20, b"GET / HTTP/1.1\r\n\r\n" * 100):
        with socket.create_connection(place(door)[:2]) as link:
            link.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1) == b""
    with pytest.raises(TimeoutError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_TIMEOUT", 0.2)
        door.caller(0)


@pytest.mark.parametrize("length", [-1, 1, 1 << 30])
def test_a_length_that_no_rank_sends_ends_the_measurement(length: int):
    ours, theirs = socket.socketpair()
    theirs.sendall(length.to_bytes(4, "big", signed=True))
    ours.settimeout(5)
    with pytest.raises(ConnectionResetError, match="does not speak as a door does"):
        links._receive(ours)


def test_one_who_dribbles_is_cut_off():
    ours, theirs = socket.socketpair()
    start = time.monotonic()
    with pytest.raises(OSError), links._at_most(ours, 0.3):
        while True:
            theirs.send(b"x")
            links._receive_exactly(ours, 1)
            time.sleep(0.05)
    assert time.monotonic() - start < 3


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_door_is_open_over_ipv6(door):
    assert links.knock(0, [("::1", door.port, door.token)] * 2) == []
