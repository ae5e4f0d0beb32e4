"""Questions that ranks ask each other, and answers: over TCP, signed with the run's key.

Anybody who reaches a port may connect, as often as they like. So connections on which nothing was
signed yet have few places, and the newest always gets one: the oldest loses its own. A connection
that has brought a signed question is kept for as long as who asks holds it, whoever else comes.
"""

import contextlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence

_NONCE = 16  # bytes
_TAG = 32  # bytes
_LONGEST_ANSWER = 2**16  # bytes
# So many connections may have signed nothing yet; each takes an open file.
_UNSIGNED = 64
_UNSIGNED_SECONDS = 5.0


def sign(key: bytes, rank: int, nonces: bytes, answer: bytes = b"?") -> bytes:
    """The HMAC-SHA256 of a question to that rank, or of its answer."""
    return hmac.digest(key, b"peer %d " % rank + nonces + answer, "sha256")


class Link:
    """A connection to the port of a rank, which answers any number of questions on it."""

    def __init__(
        self, door: tuple[str, int], key: bytes, rank: int, *, seconds: float
    ) -> None:
        """Connects; `seconds` is how long that and each answer may take."""
        self._key = key
        self._rank = rank
        self._nonce = b""
        self._read = b""
        host, port = door
        self._socket = socket.create_connection((host, port), seconds)

    def ask(self) -> list:
        """Raises ConnectionRefusedError if another program answers, a TimeoutError if none does.

        After a TimeoutError it may be called again. Any other ConnectionError is an end of the
        connection by who listens, which shows that this process runs or has just ended.
        """
        while len(self._nonce) < _NONCE:
            self._nonce += self._more(_NONCE - len(self._nonce))
        nonce = os.urandom(_NONCE)
        nonces = self._nonce + nonce
        self._socket.sendall(nonce + sign(self._key, self._rank, nonces))
        # Answers to earlier questions, which came too late, may stand before this one.
        for _ in range(_LONGEST_ANSWER):
            while b"\n" not in self._read:
                self._read += self._more(_LONGEST_ANSWER)
                if len(self._read) > _LONGEST_ANSWER:
                    raise ConnectionRefusedError("another program has the port by now")
            line, _, self._read = self._read.partition(b"\n")
            tag = line[: 2 * _TAG]
            answer = line[2 * _TAG :]
            expected = sign(self._key, self._rank, nonces, answer).hex().encode()
            if hmac.compare_digest(tag, expected):
                return json.loads(answer)
        raise ConnectionRefusedError("another program has the port by now")

    def _more(self, most: int) -> bytes:
        more = self._socket.recv(most)
        if not more and self._read:
            raise ConnectionRefusedError("another program has the port by now")
        if not more:
            raise ConnectionAbortedError("closed by who listens")
        return more

    def close(self) -> None:
        self._socket.close()


class Answers:
    """Answers, by `serve` in a thread, who asks this rank with the run's key."""

    def __init__(self, servers: Sequence[socket.socket], key: bytes, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._nonces: dict[socket.socket, bytes] = {}
        # The time at which each connection came that has signed nothing yet, the oldest first.
        self._unsigned: dict[socket.socket, float] = {}
        self._servers = set(servers)
        self._selector = selectors.DefaultSelector()
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def serve(self, state: Callable[[], object]) -> None:
        """Answers with what `state` returns, as JSON; it does not end."""
        while True:
            ready = {key.fileobj for key, _ in self._selector.select(_UNSIGNED_SECONDS)}
            # Questions come before new connections, for which a place may have to be made.
            for link in self._nonces.keys() & ready:
                self._answer(link, state)
            for server in self._servers & ready:
                self._accept(server, state)

    def _accept(self, server: socket.socket, state: Callable[[], object]) -> None:
        late = time.monotonic() - _UNSIGNED_SECONDS
        for link, since in list(self._unsigned.items()):
            if since < late:
                self._drop(link)
        if len(self._unsigned) >= _UNSIGNED:
            self._make_room(state)
        try:
            link, _ = server.accept()
        except BlockingIOError:
            return
        except OSError:  # There are no more open files, or its end was closed already.
            self._make_room(state)
            time.sleep(0.01)
            return
        link.setblocking(False)
        self._nonces[link] = os.urandom(_NONCE)
        self._unsigned[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ)
        try:
            link.sendall(self._nonces[link])
        except OSError:
            self._drop(link)

    def _make_room(self, state: Callable[[], object]) -> None:
        """Drops the oldest that has signed nothing, unless its question has come by now."""
        for link in list(self._unsigned)[:1]:
            self._answer(link, state)
            if link in self._unsigned:
                self._drop(link)

    def _answer(self, link: socket.socket, state: Callable[[], object]) -> None:
        try:
            question = link.recv(_NONCE + _TAG)
            nonces = self._nonces[link] + question[:_NONCE]
            tag = question[_NONCE:]
            if not hmac.compare_digest(tag, sign(self._key, self._rank, nonces)):
                self._drop(link)
                return
            self._unsigned.pop(link, None)
            answer = json.dumps(state()).encode()
            tag = sign(self._key, self._rank, nonces, answer)
            link.sendall(tag.hex().encode() + answer + b"\n")
        except BlockingIOError:
            return
        except OSError:
            self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        self._unsigned.pop(link, None)
        del self._nonces[link]
        with contextlib.suppress(OSError):
            link.close()
