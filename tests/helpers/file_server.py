"""A real HTTP server of a folder's files, with ranges, that counts requests; on a thread."""

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer:
    """A server of the files in `root`, whose attributes say how it answers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.latency = 0.0  # seconds that each request waits
        # Requests for the first byte, by name of file.
        self.asked: Counter[str] = Counter()
        self.port = 0
        self.status = 0  # the answer to each request; 0: the file
        self.surplus = 0  # MiB sent after the bytes of each request
        self.sent = 0  # MiB of these that went out
        self._leaves = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def up(self, away: float = 0) -> Iterator["FileServer"]:
        """Inside, it answers, always at the same port.

        With `away` it cuts off a later file, and is gone for so many seconds.
        """
        ready = threading.Event()
        ended = threading.Event()
        self._leaves = away > 0
        self.asked.clear()

        def serve() -> None:
            while not ended.is_set():
                with _Server(("127.0.0.1", self.port), _Handler) as self._server:
                    self._server.files = self
                    _, self.port = self._server.server_address
                    ready.set()
                    self._server.serve_forever(0.05)
                ended.wait(away)

        thread = threading.Thread(target=serve)
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            ended.set()
            self._server.shutdown()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        time.sleep(self.latency)
        path = self.root / request.path.lstrip("/")
        if self._leaves and self.asked.total() >= 15:
            self._leaves = False
            self._server.shutdown()
            return
        if self.status or not path.is_file():
            request.send_error(self.status or 404)
            return
        data = path.read_bytes()
        first = 0
        end = len(data)
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if given:
            first = int(given[1])
            if given[2]:
                end = min(int(given[2]) + 1, end)
        self.asked[path.name] += first == 0
        request.send_response(206 if given else 200)
        request.send_header("Content-Length", str(end - first + self.surplus * 2**20))
        if given:
            request.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        request.end_headers()
        request.wfile.write(data[first:end])
        with contextlib.suppress(OSError):  # the client has gone
            for _ in range(self.surplus):
                request.wfile.write(bytes(2**20))
                self.sent += 1


class _Server(ThreadingHTTPServer):
    allow_reuse_address = daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.files.answer(self)

    def log_message(self, *_: object) -> None:
        pass
