"""What breaks.py and mutate.py found, kept between runs, and the page about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def write(ids: Sequence[str], seed: int, goal: float) -> int:
    """The page, of all that is known; returns 0 where the score is at least `goal`, else 1."""
    found, reasons = known("mutants"), equivalents()
    counted = [key for key in ids if key in found and key not in reasons]
    killed = [key for key in counted if found[key]["result"] == "killed"]
    score = len(killed) / max(len(counted), 1)
    hangs = sum(found[key]["by"].startswith("hang") for key in killed)
    lines = [
        "# What the tests notice",
        "",
        "Written by `make breaks` and `make mutate`; neither is part of `make test`.",
        "",
        "## Automatic mutants",
        "",
        f"`make mutate ARGS='--count={len(ids)} --seed={seed}'` draws {len(ids)} of the changes "
        "that mutants.py knows in",
        "engine/, data/, tasks/ and the files beside train.py, and runs for each the tests that "
        "reach the",
        "changed function, until one fails.",
        "",
        "| drawn | equivalent | counted | killed | of these by a hang | survived | score | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| {len(ids)} | {len(reasons.keys() & {*ids})} | {len(counted)} | {len(killed)} "
        f"| {hangs} | {len(counted) - len(killed)} | {score:.2f} | {goal} |",
        "",
        "Survivors, as file:function: code -> change. What only slow tests reach (elastic runs, "
        "hosts that are",
        "lost, hangs) is among them.",
        "",
        *[f"- `{key}`" for key in counted if key not in killed],
        "",
        "Equivalent: nobody could see them.",
        "",
        *[f"- `{key}`: {reasons[key]}" for key in ids if key in reasons],
        "",
        "## Breaks by hand",
        "",
        "breaks.txt has the code; `make breaks` tries each. The first test that failed:",
        "",
        "| break | result | by |",
        "| --- | --- | --- |",
        *[f"| {r['id']} | {r['result']} | {_name(r['by'])} |" for r in known("breaks").values()],
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"{len(killed)} of {len(counted)} killed: {score:.3f} (goal {goal}); {PAGE}")
    return int(score < goal)


def _name(test: str) -> str:
    """Of a test's id: its file's and its own name."""
    return f"`{test.split('[')[0].removeprefix('template/tests/').removeprefix('tests/')}`"
