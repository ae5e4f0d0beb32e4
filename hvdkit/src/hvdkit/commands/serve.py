"""A page in the browser that shows what a trained run's model says of a picture.

    hvdkit serve --run_dir=runs/demo [--port=8000]

It prints an address to open on this host alone (from another: `ssh -L 8000:127.0.0.1:8000 HOST`
first). The address holds a word drawn at random, without which nothing is answered: other users of
the host do not know it. Pictures are predicted one after the other, as `hvdkit predict` does, and
kept nowhere. For looking, not for production: there, serve the SavedModel of `hvdkit export`.
"""

import base64
import contextlib
import hmac
import http.server
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from typing import Any

import numpy as np
from PIL import Image

from hvdkit.checkpoint import files
from hvdkit.commands import predict
from hvdkit.data.labels import COLOURS
from hvdkit.data.pipeline import reason_of
from hvdkit.logs import say
from hvdkit.observe import pages
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop

Answer = Callable[[bytes], dict[str, Any]]
_MOST_BYTES = 64 * 2**20  # most bytes of a picture's file
_LAST_SECONDS = 60.0  # after an answer a client may go on sending for so long
_SILENT_SECONDS = 2.0  # after an answer a client may be silent for so long
_MOST_STRANGERS = 128  # so many connections that have not brought the word stay
_HEADER_SECONDS = 10.0  # such a connection stays for so long
_BODY = """
<p><label>A picture: <input type="file" id="file" accept="image/*"></label></p>
<p id="fault" role="alert" class="bad"></p>
<div id="shown"></div>
<table id="rows"></table>
"""
_SCRIPT = """
const [file, fault, shown, rows] = ["file", "fault", "shown", "rows"].map(
  name => document.getElementById(name))
let newest
file.onchange = async () => {
  const chosen = newest = file.files[0]
  shown.replaceChildren(); rows.replaceChildren()
  fault.textContent = chosen?.size > MOST_BYTES ? "the file is too large" : "..."
  if (!chosen || chosen.size > MOST_BYTES) return
  try {
    const reply = await fetch(location.href, {method: "POST", body: chosen})
    const found = await reply.json(), picture = new Image()
    if (chosen !== newest) return
    fault.textContent = found.error ?? ""
    picture.src = found.picture ?? URL.createObjectURL(chosen)
    picture.alt = found.picture ? "the picture, its classes drawn over it" : "the picture"
    picture.style = "min-width: 12rem; max-width: 100%; max-height: 70vh"
    if (!found.error) shown.append(picture)
    for (const [name, value, colour] of found.rows ?? []) {
      const row = rows.insertRow()
      for (const text of [name, value]) row.insertCell().textContent = text
      if (colour) row.cells[0].style = `border-left: 1rem solid ${colour}; padding-left: 0.5rem`
    }
  } catch (error) { if (chosen === newest) fault.textContent = String(error) }
}
"""


def serve(
    config: Settings, world: World, stop_signal: StopSignal, *, arguments: Any
) -> None:
    """Answers until it is stopped. Raises Stop where it cannot begin."""
    if world.size > 1:
        raise Stop(
            WRONG_USE, "hvdkit serve answers from one process: start it on one rank"
        )
    with world.fail_together("serving"):
        task, model, path, decode = load_run.model_of(
            config, arguments.checkpoint, arguments.ema
        )
        outputs_of = predict.of_picture(task, model, decode)
        names = files.read_manifest(path).card.get("class_names", [])
        word = secrets.token_urlsafe()
        one_at_a_time = threading.Lock()

        def answer(data: bytes) -> dict[str, Any]:
            with one_at_a_time:
                return answered(data, outputs_of, names)

        try:
            server = Server(
                ("127.0.0.1", arguments.port), handler(answer, word, str(path))
            )
        except OSError as error:
            raise ValueError(
                f"--port={arguments.port}: {error.strerror}; "
                "give another, or 0 for any that is free"
            ) from None
    with server:
        server.timeout = 0.5
        # By its number: on ::1, another name of localhost, another user may listen for the word.
        say(
            f"{path}: open http://127.0.0.1:{server.server_port}/{word} (Ctrl-C ends it)"
        )
        while not stop_signal.asked:
            server.handle_request()


class Server(http.server.ThreadingHTTPServer):
    """A thread a connection, so that none keeps the others waiting.

    Those of strangers, who do not know the word, are few: the oldest makes place for the newest.
    """

    # This many connections wait for `handle_request`; the others are reset.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], kind: type["Handler"]) -> None:
        super().__init__(address, kind)
        self._strangers: dict[Any, float] = {}  # since when, the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        self._strangers[request] = time.monotonic()
        self.handle_timeout()
        super().process_request(request, client_address)

    def handle_timeout(self) -> None:
        """Ends strangers' connections that are too old, or too many."""
        for request, since in list(self._strangers.items()):
            is_new = time.monotonic() - since < _HEADER_SECONDS
            if is_new and len(self._strangers) <= _MOST_STRANGERS:
                return
            self.welcome(request)
            with contextlib.suppress(OSError):  # it has ended just now
                request.shutdown(socket.SHUT_RDWR)

    def welcome(self, request: Any) -> None:
        """This connection is no stranger's: it has brought the word, or ends."""
        self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.welcome(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client went away."""


def answered(
    data: bytes, outputs_of: predict.OutputsOf, names: list[str]
) -> dict[str, Any]:
    """What the page shows: rows of name, value, perhaps colour, and an overlay; or an "error"."""
    try:
        image = predict.decoded(data, "the file")
        outputs = outputs_of(image)
        drawing = predict.drawn("the file", image=image, outputs=outputs)
    except Exception as error:  # whatever a picture does to a model, the server stays
        return {"error": reason_of(error)[:500]}
    rows: list[tuple[str, ...]] = []
    content: dict[str, Any] = {"rows": rows}
    if drawing:
        rows += _shares(drawing.classes, names)
        content["picture"] = _data_url(drawing.overlay)
    prediction = predict.prediction(outputs, is_drawn=bool(drawing))
    for number, probability in prediction.likeliest:
        rows.append((predict.class_name(number, names), f"{probability:.1%}"))
    for name, value in prediction.others.items():
        rows.append((name, json.dumps(value)[:500]))
    return content


def _shares(classes: Image.Image, names: list[str]) -> list[tuple[str, str, str]]:
    """Name, share of all pixels and colour of each class in a picture, the largest first."""
    counts = np.bincount(np.asarray(classes).ravel())
    rows = []
    for number in np.argsort(-counts, kind="stable"):
        if counts[number]:
            name = names[number] if number < len(names) else f"class {number}"
            colour = f"#{bytes(COLOURS[number]).hex()}"
            rows.append((name, f"{counts[number] / counts.sum():.1%}", colour))
    return rows


def _data_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/png;base64,{encoded}"


def refused(headers: Message) -> tuple[HTTPStatus, str] | None:
    """Why a body with these headers is not read, if it is not: a status and a sentence."""
    size = headers.get("Content-Length", "").strip()
    kind = headers.get("Content-Type", "")
    if headers.get("Transfer-Encoding"):
        return (
            HTTPStatus.LENGTH_REQUIRED,
            "a chunked upload is not read: send the picture's bytes with a Content-Length",
        )
    if kind.lower().startswith("multipart/"):
        return (
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"a form ({kind[:40]}) is not read: send the picture's bytes alone, as the body",
        )
    if not size:
        return (
            HTTPStatus.LENGTH_REQUIRED,
            "send the picture's bytes with a Content-Length",
        )
    if not (size.isascii() and size.isdecimal()):
        return (
            HTTPStatus.BAD_REQUEST,
            f"Content-Length: {size[:40]} is no number of bytes",
        )
    if len(size) > 40 or int(size) > _MOST_BYTES:
        return (
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"a picture of {size[:40]} bytes is too large: {_MOST_BYTES:,} bytes at most",
        )
    if int(size) == 0:
        return (
            HTTPStatus.BAD_REQUEST,
            "the picture is empty: send its bytes as the body",
        )
    return None


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET with the page and POST of a picture with JSON, both at /WORD only.

    `handler` makes a class of it.
    """

    server: Server
    answer: Answer
    word: str
    page: str
    protocol_version = "HTTP/1.1"  # or a client that expects "100 Continue" gets none
    timeout = 20  # seconds that a client may be silent

    def do_GET(self) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.page.encode())

    def do_POST(self) -> None:
        if refusal := refused(self.headers):
            self._send_error(*refusal)
            return
        size = int(self.headers["Content-Length"])
        try:
            data = self.rfile.read(size)
        except TimeoutError:
            self._send_error(
                HTTPStatus.REQUEST_TIMEOUT, f"no byte came for {self.timeout} s"
            )
            return
        if len(data) < size:
            self._send_error(
                HTTPStatus.BAD_REQUEST,
                f"Content-Length says {size:,} bytes, and {len(data):,} came",
            )
            return
        content = type(self).answer(data)
        status = (
            HTTPStatus.UNPROCESSABLE_ENTITY if "error" in content else HTTPStatus.OK
        )
        self._send(status, "application/json", json.dumps(content).encode())

    def parse_request(self) -> bool:
        """Whether to go on: False where the word is not known."""
        return super().parse_request() and self._knows_the_word()

    def handle_expect_100(self) -> bool:
        """Whether to go on: a client that asks before it sends learns at once what is wrong."""
        if not self._knows_the_word():
            return False
        if refusal := refused(self.headers):
            self._send_error(*refusal)
            return False
        return super().handle_expect_100()

    def finish(self) -> None:
        """Reads what still comes: a connection that is closed before it is reset, and a client
        that still sends would not read the answer."""
        super().finish()
        end = time.monotonic() + _LAST_SECONDS
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_SILENT_SECONDS)
            while time.monotonic() < end and self.connection.recv(2**16):
                pass

    def _knows_the_word(self) -> bool:
        known = hmac.compare_digest(self.path.encode(), f"/{self.word}".encode())
        if known:
            self.server.welcome(self.connection)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)
        return known

    def _send_error(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, "application/json", json.dumps({"error": sentence}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address is a secret
        # The page's own policy stands in it; a page cannot say who may frame it.
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *parts: Any) -> None:
        """Nothing: addresses hold the word."""


def handler(answer: Answer, word: str, title: str) -> type[Handler]:
    """The class of the handlers of one server, for its one address."""
    script = _SCRIPT.replace("MOST_BYTES", str(_MOST_BYTES))
    page = pages.page(title, [_BODY], by="serve", script=script)
    attributes = {"answer": staticmethod(answer), "word": word, "page": page}
    return type("OneAddress", (Handler,), attributes)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 stopped, 2 wrong use."""
    parser = load_run.parser(__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    arguments, flags = parser.parse_known_args(argv[1:])
    if not 0 <= arguments.port < 2**16:
        parser.error(f"--port={arguments.port}: 0 to 65535")
    config = load_run.settings(arguments.run_dir, ["--eval_crop=0", *flags])
    return load_run.on_ranks(config, arguments, serve)
