"""hvdkit serve: what it answers to uploads that are not a picture's bytes, and to many at once."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.request

import pytest

from hvdkit.commands import serve

LARGE = 65 * 2**20


@pytest.fixture
def server():
    """At /word; it answers with the number of bytes that came."""
    handler = serve.handler(lambda data: {"rows": [len(data)]}, "word", "title")
    handler.timeout = 5
    with serve.Server(("127.0.0.1", 0), handler) as server:
        server.timeout = 0.1
        yield server


@pytest.fixture
def port(server):
    ends = threading.Event()

    def answer():
        while not ends.is_set():
            server.handle_request()

    thread = threading.Thread(target=answer)
    thread.start()
    yield server.server_port
    ends.set()
    thread.join()


def post(port, body, **headers) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/word", body, named)
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    return reply.status, answer


def sent(port, *lines, body=b"") -> tuple[int, dict]:
    """What is answered to these lines of a request."""
    text = "\r\n".join(["POST /word HTTP/1.1", "Host: here", *lines, "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text.encode() + body)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        return reply.status, json.loads(reply.read())


def test_the_page_allows_its_own_script_alone(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/word", timeout=60) as reply:
        page, headers = reply.read().decode(), reply.headers
    pattern = r'http-equiv="Content-Security-Policy" content="([^"]+)"'
    policy = re.search(pattern, page)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert (
        rules["default-src"] == "'none'" and rules["script-src"] == f"'sha256-{digest}'"
    )
    # It sends the picture to its own address, shows it, and colours its classes.
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data: blob:"
    assert (
        page.index("Content-Security-Policy")
        < page.index("<style>")
        < page.index("<script>")
    )
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_sixty_connections_at_once_wait_and_are_answered(server, request):
    address = ("127.0.0.1", server.server_port)
    waiting = [socket.create_connection(address, timeout=0.5) for _ in range(60)]
    request.getfixturevalue("port")  # the server begins to answer here
    for connection in waiting:
        with connection:
            connection.settimeout(60)
            connection.sendall(b"POST /word HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            assert (reply.status, json.loads(reply.read())) == (200, {"rows": [3]})


def test_strangers_hold_few_threads_and_not_for_long(port, monkeypatch):
    """Half a header each, then one that never ends; who knows the word is answered meanwhile."""
    assert serve._HEADER_SECONDS == 10  # the test shortens it
    before = threading.active_count()
    with contextlib.ExitStack() as strangers:
        for _ in range(400):
            stranger = strangers.enter_context(
                socket.create_connection(("127.0.0.1", port), 60)
            )
            stranger.sendall(b"POST /wor")
        assert post(port, b"abc") == (200, {"rows": [3]})
        assert threading.active_count() < before + serve._MOST_STRANGERS + 20
        monkeypatch.setattr(serve, "_HEADER_SECONDS", 0.3)
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < start + 20:
                stranger.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < start + 10


def test_an_upload_that_is_no_pictures_bytes_is_told_why(port):
    assert post(port, b"abc") == (200, {"rows": [3]})
    parts = iter([b"a" * 2**16] * (LARGE // 2**16))
    for status, words, answer in (
        (411, "chunked", post(port, parts, Transfer_Encoding="chunked")),
        (
            415,
            "multipart/form-data",
            post(port, b"--a--", Content_Type="multipart/form-data; boundary=a"),
        ),
        (413, f"{LARGE} bytes is too large", post(port, b"a" * LARGE)),
        (413, f"{10**30 - 1} bytes", sent(port, f"Content-Length: {10**30 - 1}")),
        (411, "Content-Length", sent(port)),
        (400, "empty", sent(port, "Content-Length: 0")),
        (400, "Content-Length: -1", sent(port, "Content-Length: -1")),
        (400, "Content-Length: 1, 2", sent(port, "Content-Length: 1, 2")),
        (408, "no byte came", sent(port, "Content-Length: 9", body=b"abc")),
    ):
        assert answer[0] == status and words in answer[1]["error"], answer


def test_a_client_that_asks_before_it_sends_is_answered_before_it_sends(port):
    status, answer = sent(port, "Expect: 100-continue", f"Content-Length: {LARGE}")
    assert status == 413 and "too large" in answer["error"]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        lines = [
            "POST /word HTTP/1.1",
            "Expect: 100-continue",
            "Content-Length: 3",
            "",
            "",
        ]
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 200
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(["POST /other HTTP/1.1", *lines[1:]]).encode())
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 404


def test_a_body_that_ends_early_is_told(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /word HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")
        connection.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 400 and "and 3 came" in reply.read().decode()
