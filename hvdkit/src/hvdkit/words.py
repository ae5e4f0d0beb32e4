"""Text of messages that several modules need."""

from __future__ import annotations

from collections.abc import Iterable


def join(things: Iterable[object], most: int = 5) -> str:
    """The first `most` things, separated by commas, and how many more there are."""
    things = list(things)
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more
