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
    """`asked`: requests for the first byte, by name of file; `latency`: seconds each waits;
    `status`: what each is answered, 0: the file; `surplus`: MiB that each is sent after what it
    asked for, and `sent`: MiB of them that went out."""

    def __init__(self, root: Path) -> None:
        self.root, self.latency, self.asked, self.port = root, 0.0, Counter(), 0
        self._leaves, self.status = False, 0
        self.surplus, self.sent = 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def up(self, away: float = 0) -> Iterator["FileServer"]:
        """Inside, it answers, always at the same port.

        With `away` it cuts off a later file, and is gone for so many seconds.
        """
        ready, ended, self._leaves = threading.Event(), threading.Event(), away > 0
        self.asked.clear()

        def serve() -> None:
            while not ended.is_set():
                with _Server(("127.0.0.1", self.port), _Handler) as self._server:
                    self._server.files, self.port = self, self._server.server_address[1]
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
        first, last = 0, len(data)
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or last) + 1, last)
        self.asked[path.name] += first == 0
        request.send_response(206 if given else 200)
        request.send_header("Content-Length", str(last - first + self.surplus * 2**20))
        if given:
            request.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
        request.end_headers()
        request.wfile.write(data[first:last])
        with contextlib.suppress(OSError):  # who asked has gone
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
