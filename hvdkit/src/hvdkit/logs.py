"""Log lines go through absl.logging: as bare text, with the rank in front where it is not 0.

Progress goes to standard output, because people pipe it; warnings and errors to standard error.
Imports no TensorFlow.
"""

import argparse
import contextlib
import functools
import logging as python_logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from absl import flags, logging

from hvdkit import streams
from hvdkit.stop import WRONG_USE, launch_rank

_BAR = 30  # columns
_UNTIL_ENDED = 10.0  # seconds from the end of rank 0 to that of the others, by their launcher


class _Lines(python_logging.Handler):
    """Writes to what sys.stdout and sys.stderr are now."""

    def emit(self, record: python_logging.LogRecord) -> None:
        to_errors = record.levelno >= python_logging.WARNING
        rank = "" if hasattr(record, "names_rank") else launch_rank()
        text = "\n".join(map(printable, record.getMessage().split("\n")))
        text = f"rank {rank}: {text}" if rank else text
        # One write a line: launchers put their tags between writes.
        file = sys.stderr if to_errors else sys.stdout
        file.write(f"{text}\n")
        file.flush()


_handler = _Lines()


def use() -> None:
    """Makes absl's logger write such lines; what others log by Python's logging stays as it is.

    The program outlives who reads them.
    """
    streams.hold()
    logger = logging.get_absl_logger()
    if _handler in logger.handlers:
        return
    # absl.app.run shows every library's lines by absl's handler.
    python_logging.root.removeHandler(logging.get_absl_handler())
    python_logging.root.setLevel(python_logging.WARNING)
    logger.addHandler(_handler)
    logger.propagate = False
    own = flags.FLAGS["verbosity"].using_default_value
    logging.set_verbosity(logging.INFO if own else logging.get_verbosity())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back what libraries say by absl's logging, but for warnings."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def say(text: str) -> None:
    """A line of progress, from any rank."""
    use()
    logging.info("%s", text)


def complain(text: str) -> None:
    """An error; its text names the rank where that is not rank 0."""
    use()
    logging.error("error: %s", text, extra={"names_rank": True})


def refuse(text: str, code: int = WRONG_USE) -> NoReturn:
    """Wrong use, before the ranks know each other: rank 0 reports it, and all exit with `code`.

    Another rank reports it only if no launcher has ended it meanwhile: then it was started with
    other flags than rank 0, or its host has other files.
    """
    if rank := launch_rank():
        time.sleep(_UNTIL_ENDED)
        text = f"rank {rank} on {socket.gethostname()}: {text}"
    complain(text)
    sys.exit(code)


def parser(about: str) -> argparse.ArgumentParser:
    """What commands begin with; `about` is the module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=about, formatter_class=raw, allow_abbrev=False)
    made.error = lambda message: refuse(f"{message} (--help says what there is)")
    return made


def explained(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Of a command: a ValueError or OSError becomes a sentence, and the exit code 2."""

    @functools.wraps(main)
    def told(argv: list[str]) -> int:
        try:
            return main(argv)
        except (ValueError, OSError) as error:
            complain(str(error))
            return WRONG_USE

    return told


def printable(text: object) -> str:
    """For a terminal: what is no character to be seen, as in names of files, is escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def one_line(text: object) -> str:
    """With a blank in place of each line break and of several blanks."""
    return " ".join(str(text).split())


def join(things: Iterable[object], most: int = 5) -> str:
    """The first `most` things, separated by commas, and how many more there are."""
    things = list(things)
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more


def progress(what: str, done: int, count: int) -> None:
    """How far something is, on standard error: a bar on a terminal, in a log a line each tenth."""
    if sys.stderr.isatty():
        if done % max(1, count // 200) == 0 or done == count:
            end = "\n" if done == count else ""
            full = _BAR * done // count
            bar = f"[{'#' * full}{'-' * (_BAR - full)}]"
            print(f"\r{what:>8} {bar} {done}/{count}", end=end, file=sys.stderr, flush=True)
    elif 10 * done // count > 10 * (done - 1) // count:
        sys.stderr.write(f"{what}: {done}/{count}\n")  # one write: launchers put tags between
        sys.stderr.flush()
