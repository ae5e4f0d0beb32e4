"""One thing that is wrong: who, what, what to do; and how ranks are named and compared."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """`wrong` fails the preflight; a note does not. `fatal`: Horovod would not come up."""

    level: str
    where: str
    what: str
    todo: str
    fatal: bool = False


def wrong(where: str, what: str, todo: str, fatal: bool = False) -> Finding:
    return Finding("wrong", where, what, todo, fatal)


def note(where: str, what: str, todo: str) -> Finding:
    return Finding("note", where, what, todo)


def place(facts: list[Facts | None], ranks: list[int]) -> str:
    """`node2 (rank 2, 3)`, for ranks of any number of hosts."""
    by_host = collections.defaultdict(list)
    for rank in ranks:
        fact = facts[rank]
        by_host[fact["host"] if fact else "unknown host"].append(rank)
    return places(by_host)


def places(by_host: dict[str, list[int]]) -> str:
    parts = []
    for host, its in by_host.items():
        shown = ", ".join(map(str, its[:8])) + (", ..." if len(its) > 8 else "")
        parts.append(f"{host} (rank {shown})")
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more hosts" if len(parts) > 6 else "")


def leaders(facts: list[Facts | None]) -> dict[str, int]:
    """The lowest rank on each host."""
    found: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        if fact:
            found.setdefault(fact["host"], rank)
    return found


def tell_apart(facts: list[Facts | None]) -> None:
    """Machines of one name get their addresses behind it: a host is known by its name here."""
    machines = collections.defaultdict(set)
    for fact in filter(None, facts):
        machines[fact["host"]].add(fact["boot"])
    for fact in filter(None, facts):
        if len(machines[fact["host"]]) > 1:
            fact["host"] += f" at {fact['address']}"


def usual_and_odd(values: dict[int, Any]) -> tuple[Any, dict[Any, list[int]]]:
    """The commonest value (of a draw, the one with the lowest rank), and the others' ranks."""
    ranks = collections.defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    usual = max(ranks, key=lambda value: (len(ranks[value]), -ranks[value][0]))
    return usual, {value: its for value, its in ranks.items() if value != usual}
