"""Breaks the code in the ways of breaks.txt, one at a time: does the test that should notice fail?

    python tests/breaks.py [NAME ...]                                                make breaks

In a copy of the repository, never in this one. Each break's tests must fail with it, and pass
without it; a hang is a failure. Prints a table, and keeps it for tests/MUTATION.md. Exit code: 1
where a break is not caught; 2 where one does not apply any more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import mutation_page
import reach
import scratch

LIST = Path(__file__).with_name("breaks.txt")
_LIMIT = 600  # seconds of one break's tests


class Break(NamedTuple):
    name: str
    file: str  # relative to the repository
    tests: list[str]  # ids of pytest, relative to the repository
    checks: list[str]  # "RANKS module.check_name" of template/tests/checks_*.py
    old: str  # whole lines
    new: str

    def applied(self, text: str) -> str:
        """Raises ValueError where `old` is not found exactly once."""
        if (found := ("\n" + text).count("\n" + self.old)) != 1:
            raise ValueError(f"breaks.txt: [{self.name}] is found {found} times in {self.file}")
        at = ("\n" + text).index("\n" + self.old)
        return text[:at] + self.new + text[at + len(self.old) :]


def breaks() -> list[Break]:
    """Those of the list, in its order. Raises ValueError for a line that is none."""
    found: list[Break] = []
    for number, line in enumerate(LIST.read_text().splitlines(), 1):
        if line.startswith("[") and "] " in line:
            name, file = line[1:].split("] ")
            found.append(Break(name, file, [], [], "", ""))
        elif line.startswith("test: "):
            found[-1].tests.append(line.removeprefix("test: "))
        elif line.startswith("check: "):
            found[-1].checks.append(line.removeprefix("check: "))
        elif line.startswith("-"):
            found[-1] = found[-1]._replace(old=f"{found[-1].old}{line[1:]}\n")
        elif line.startswith("+"):
            found[-1] = found[-1]._replace(new=f"{found[-1].new}{line[1:]}\n")
        elif line and not line.startswith("#"):
            raise ValueError(f"breaks.txt:{number}: {line!r} is no part of a break")
    return found


def run(root: Path, one: Break) -> scratch.Ended:
    """Its tests, then its checks on ranks, until one fails."""
    ended = scratch.Ended(True, "", 0.0, "")
    if one.tests:
        ended = scratch.run_tests(root, one.tests, _LIMIT)
    for check in one.checks:
        if ended.passed:
            ranks, name = check.split()
            ended = reach.run_checks(root, int(ranks), [name], _LIMIT)
    return ended


def judge(root: Path, one: Break) -> tuple[str, str]:
    """What came of a break (caught, SURVIVED, UNSOUND: fails without it), and by which test."""
    path = root / one.file
    sound = path.read_text()
    try:
        path.write_text(one.applied(sound))
        ended = run(root, one)
    finally:
        path.write_text(sound)
    if ended.passed:
        return "SURVIVED", ""
    return ("caught", ended.by) if run(root, one).passed else ("UNSOUND", ended.by)


def main(names: list[str]) -> int:
    everything = breaks()
    for one in everything:
        one.applied((scratch.ROOT / one.file).read_text())
    chosen = [one for one in everything if not names or one.name in names]
    scratch.warm_up()
    uncaught = 0
    with scratch.scratch() as root:
        for one in chosen:
            result, by = judge(root, one)
            uncaught += result != "caught"
            print(f"{one.name:45} {result:9} {by}", flush=True)
            mutation_page.keep("breaks", {"id": one.name, "result": result, "by": by})
    print(f"{len(chosen)} breaks, {uncaught} not caught")
    return int(uncaught > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
