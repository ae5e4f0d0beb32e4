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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from absl import flags, logging

from hvdkit import streams
from hvdkit.launcher import launch_rank
from hvdkit.stop import WRONG_USE

_BAR_COLUMNS = 30
# A launcher ends the other ranks within these seconds after rank 0.
_UNTIL_ENDED = 10.0


class _Lines(python_logging.Handler):
    """Writes to what sys.stdout and sys.stderr are now."""

    def emit(self, record: python_logging.LogRecord) -> None:
        lines = [printable(line) for line in record.getMessage().split("\n")]
        if not hasattr(record, "names_rank") and launch_rank():
            lines[0] = f"rank {launch_rank()}: {lines[0]}"
        file = sys.stderr if record.levelno >= python_logging.WARNING else sys.stdout
        # All is one write: launchers put their tags between writes.
        file.write("\n".join([*lines, ""]))
        file.flush()


_handler = _Lines()


def use() -> None:
    """Makes absl's logger write by `_Lines`, from INFO on or from --verbosity on if it is given.

    What others log by Python's logging goes its own way, from WARNING on. The program goes on when
    the program that reads its lines has ended (`streams.hold`).
    """
    streams.hold()
    logger = logging.get_absl_logger()
    if _handler in logger.handlers:
        return
    # absl.app.run gave the root logger absl's handler, and its level: undo both.
    python_logging.root.removeHandler(logging.get_absl_handler())
    python_logging.root.setLevel(python_logging.WARNING)
    logger.addHandler(_handler)
    logger.propagate = False
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    else:
        # absl's logger took the root logger's level: this gives it one of its own.
        logging.set_verbosity(logging.get_verbosity())


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
        complain(f"rank {rank} on {socket.gethostname()}: {text}")
    else:
        complain(text)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(f"{message} (--help says what there is)")


def parser(about: str) -> argparse.ArgumentParser:
    """A command's parser; `about` is the docstring of the command's module."""
    return _Parser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def explained(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """A command whose ValueError or OSError becomes a sentence, and the exit code 2."""

    @functools.wraps(main)
    def explained_main(argv: list[str]) -> int:
        try:
            return main(argv)
        except (ValueError, OSError) as error:
            complain(str(error))
            return WRONG_USE

    return explained_main


def printable(text: object) -> str:
    """Text for a terminal: characters that cannot be seen, as in names of files, are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def one_line(text: object) -> str:
    """The text with one blank in place of each line break and of several blanks."""
    return " ".join(str(text).split())


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, in columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def join(things: Iterable[object], most: int = 5) -> str:
    """The first `most` things, separated by commas, and how many more there are."""
    words = [str(thing) for thing in things]
    text = ", ".join(words[:most])
    if len(words) > most:
        text += f" and {len(words) - most} more"
    return text


def progress(title: str, done: int, count: int) -> None:
    """How far something is, on standard error: a bar on a terminal, in a log a line each tenth."""
    if sys.stderr.isatty():
        if done % max(1, count // 200) == 0 or done == count:
            bar = ("#" * (_BAR_COLUMNS * done // count)).ljust(_BAR_COLUMNS, "-")
            end = "\n" if done == count else ""
            print(
                f"\r{title:>8} [{bar}] {done}/{count}",
                end=end,
                file=sys.stderr,
                flush=True,
            )
    elif 10 * done // count > 10 * (done - 1) // count:
        # One write a line: launchers put their tags between writes.
        sys.stderr.write(f"{title}: {done}/{count}\n")
        sys.stderr.flush()
