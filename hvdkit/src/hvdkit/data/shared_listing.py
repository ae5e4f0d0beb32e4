"""Lookups that rank 0 makes for all ranks, such as listing a network disk.

A reader calls `found`. Inside `run.context.open_sources`, rank 0 looks and the others receive what
it found. Elsewhere (tests, hvdkit.data.prepare.pack) the caller itself looks.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvdkit.data.scoped import Scoped

T = TypeVar("T")


def found(
    key: object, find: Callable[[], T], look: Callable[[T], None] = lambda _: None
) -> T:
    """What `find()` returns, here or on rank 0, as `hvdkit.ranks.encoding` sends it.

    Ranks that look for the same have a `key` of one repr(). `find` uses no collective. `look`
    compares what rank 0 found with this host's disk, on one rank of each other host; it raises
    ValueError or OSError where they differ.
    """
    return _finding.value(repr(key), find, look)


def kept(findings: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """For rank 0: all that is found inside is kept in `findings` too."""
    return _finding.set(lambda key, find, _: findings.setdefault(key, find()))


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """For other ranks: leaves the block silently at the first lookup."""

    def wait(*_: Any) -> None:
        raise _Wait

    with contextlib.suppress(_Wait), _finding.set(wait):
        yield


def received(
    findings: dict[str, Any], *, checks_disk: bool
) -> contextlib.AbstractContextManager[None]:
    """For other ranks: inside, `found` returns what rank 0 found, or looks where it did not look.

    `checks_disk`: whether the `look` of each finding compares it with this host's disk.
    """

    def take(key: str, find: Callable[[], Any], look: Callable[[Any], None]) -> Any:
        if key not in findings:
            return find()
        if checks_disk:
            look(findings[key])
        return findings[key]

    return _finding.set(take)


class _Wait(BaseException):
    """Not an Exception, so that a task's own `except Exception` does not catch it."""


def _here(_key: str, find: Callable[[], T], _look: Callable[[T], None]) -> T:
    return find()


_finding = Scoped[Callable[..., Any]](_here)
