"""What breaks.py and mutate.py found, kept between runs, and the page about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

KEPT = Path(__file__).resolve().parents[1] / ".cache/mutate"
PAGE = Path(__file__).with_name("MUTATION.md")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")


def keep(what: str, record: Mapping[str, str]) -> None:
    """At once, so that a run that is cut off loses nothing."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{what}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def known(what: str) -> dict[str, dict[str, str]]:
    """Records so far by id; the newest of each counts."""
    path = KEPT / f"{what}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def equivalents() -> dict[str, str]:
    """Reasons by id: a line with the id, and below it, indented, why nobody can see it."""
    reasons: dict[str, str] = {}
    key = ""
    for line in EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []:
        if line.startswith(" "):
            reasons[key] = f"{reasons[key]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            key = line
            reasons[key] = ""
    return reasons
