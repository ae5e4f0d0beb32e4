"""Breaks the code in the ways of breaks.txt, one at a time: does the test that should notice fail?

    python tests/breaks.py [--flags] [NAME ...]                                      make breaks

--flags: instead, each flag of flags_seen.py is ignored, and its test must notice.

In a copy of the repository, never in this one. Each break's tests must fail with it, and pass
without it; a hang is a failure. Prints a table, and keeps it for tests/MUTATION.md. Exit code: 1
where a break is not caught; 2 where one does not apply any more.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "template"))

from hvdkit.settings import config

import mutation_page
import reach
import scratch
from flags_seen import SEEN

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
        lines = itertools.accumulate(map(len, text.splitlines(keepends=True)), initial=0)
        places = [at for at in lines if text.startswith(self.old, at)]
        if len(places) != 1:
            raise ValueError(
                f"breaks.txt: [{self.name}] is found {len(places)} times in {self.file}"
            )
        return text[: places[0]] + self.new + text[places[0] + len(self.old) :]


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


_IGNORED = """

_whole = Settings.__init__


def _ignoring(self, *args, **settings):
    _whole(self, *args, **settings)
    object.__setattr__(self, {name!r}, {default!r})


Settings.__init__ = _ignoring
"""


def ignored_flags() -> list[Break]:
    """Each flag of SEEN always as by default, whatever is said."""
    file = "hvdkit/src/hvdkit/settings/config.py"
    last = (scratch.ROOT / file).read_text().splitlines(keepends=True)[-1]
    found = []
    for field in dataclasses.fields(config.Config):
        if field.name in SEEN:
            code = last + _IGNORED.format(name=field.name, default=field.default)
            seen = SEEN[field.name]
            tests, checks = ([seen], []) if "::" in seen else ([], [seen])
            found.append(Break(f"--{field.name}", file, tests, checks, last, code))
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
    flags = "--flags" in names
    names = [name for name in names if name != "--flags"]
    everything = ignored_flags() if flags else breaks()
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
            record = {"id": one.name, "result": result, "by": by}
            mutation_page.keep("flags" if flags else "breaks", record)
    print(f"{len(chosen)} breaks, {uncaught} not caught")
    return int(uncaught > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
