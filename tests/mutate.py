"""Automatic small changes of the code, one at a time: how many do the tests notice?

    python tests/mutate.py [--count=150] [--seed=1] [--again] [--page]                  make mutate

Draws so many of all changes that mutants.py knows, and for each runs the tests that reach the
changed function (reach.py) until one fails; a hang is a failure. First come tests without ranks,
then checks on real ranks, at most CHECKS on each number of ranks. Results are kept in
.cache/mutate, so that a run that is cut off goes on; --again tries those that survived anew, after
a test was added.
A change that nobody could see is listed with its reason in mutants_equivalent.txt and not counted.

Writes tests/MUTATION.md. Exit code: 0 the score is at least GOAL; 1 not; 2 wrong use.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import mutation_page
import scratch
from mutants import Mutant, mutants
from reach import Reach, launches, measure, run_checks, test_files

GOAL = 0.85
LONGEST = 40  # seconds of tests without ranks for one change
CHECKS = 9  # on each number of ranks, for one change
_TOP = ("actions", "combinations", "config", "ending", "evaluation", "flagfiles", "run")
_TOP += ("settings", "step", "train")
# hvdkit/ranks/quiet.py: imported before any fork.
_NOT = ("hvdkit/src/hvdkit/ranks/quiet.py",)


def sources() -> list[str]:
    """The files to be changed, relative to the repository."""
    template = scratch.ROOT / "template"
    found = [p for part in ("engine", "data", "tasks") for p in template.glob(f"{part}/**/*.py")]
    found += [template / f"{name}.py" for name in _TOP]
    names = [str(path.relative_to(scratch.ROOT)) for path in sorted(found) if path.stat().st_size]
    return [name for name in names if name not in _NOT]


def sample(count: int, seed: int) -> list[Mutant]:
    """By a hash of each one's id: a change of the code elsewhere leaves most of them in it."""
    everything = [m for f in sources() for m in mutants(f, (scratch.ROOT / f).read_text())]
    everything.sort(key=lambda m: hashlib.sha256(f"{seed} {m.id}".encode()).hexdigest())
    return everything[:count]


def choose(mutant: Mutant, reach: dict[str, Reach]) -> tuple[list[str], dict[int, list[str]]]:
    """Tests that run the function in their own process; by number of ranks, checks that do.

    Those named after the module first, then the quickest; of checks some of each file.
    """
    file, function = mutant.function.split(":")
    stem = Path(file).stem
    alone: dict[str, float] = {}
    checks: dict[int, list[str]] = {}
    for name in sorted(reach, key=lambda name: (stem not in name, reach[name].seconds)):
        found = reach[name]
        seconds = found.tests
        # Code that runs at import: what runs any function of the file may notice.
        alike = [f for f in found.functions if f.startswith(f"{file}:")]
        keys = alike if function == "<module>" else [mutant.function]
        own = [t for key in keys for t in found.functions.get(key, []) if t in seconds]
        if not name.endswith(".py"):
            ranks = int(name.split()[0])
            most = CHECKS if stem in name else CHECKS // 3
            quick = sorted({t for t in own if seconds[t] < 1.5 * LONGEST}, key=seconds.get)
            checks.setdefault(ranks, []).extend(quick[:most])
        elif mutant.function in found.shared and (stem in name or function != "<module>"):
            alone |= seconds  # in a fixture or a process of its own
        else:
            alone |= {test: seconds[test] for test in own}
    within, total = [], 0.0
    for test, needs in alone.items():
        if total + needs < LONGEST:  # a long one leaves room for quick ones after it
            within.append(test)
            total += needs
    return within, {ranks: some[:CHECKS] for ranks, some in checks.items() if some}


def judge(root: Path, mutant: Mutant, reach: dict[str, Reach]) -> tuple[str, str]:
    """What came of it (killed, survived, unreached), and by which test."""
    path = root / mutant.function.split(":")[0]
    sound = path.read_text()
    alone, checks = choose(mutant, reach)
    if not alone and not checks:
        return "unreached", ""
    for ranks, tests in [(0, alone), *checks.items()]:
        if not tests:
            continue
        path.write_text(mutant.text)
        try:
            ended = _run(root, ranks, tests)
        finally:
            path.write_text(sound)
        if not ended.passed and _confirmed(root, path, mutant, ranks, ended.by, tests):
            return "killed", ended.by + (f" ({ranks} ranks)" if ranks else "")
    return "survived", ""


def _run(root: Path, ranks: int, tests: Sequence[str]) -> scratch.Ended:
    """`ranks`: 0 for tests without."""
    if ranks:
        return run_checks(root, ranks, tests, 10 * LONGEST)
    return scratch.run_tests(root, tests, 6 * LONGEST)


_sound: dict[tuple[int, str], bool] = {}


def _confirmed(
    root: Path, path: Path, mutant: Mutant, ranks: int, by: str, tests: Sequence[str]
) -> bool:
    """Whether what failed passes without the change, and on ranks fails with it once more.

    On a busy machine a launch may fail by chance.
    """
    suspects = [test for test in tests if by in (test, test.split(".")[-1])] or tests
    key = ranks, " ".join(suspects)
    if key not in _sound:
        _sound[key] = _run(root, ranks, suspects).passed
    if not _sound[key] or not ranks:
        return _sound[key]
    sound = path.read_text()
    path.write_text(mutant.text)
    try:
        return not _run(root, ranks, suspects).passed
    finally:
        path.write_text(sound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="those that survived, anew")
    parser.add_argument("--page", action="store_true", help="only the page, of what is known")
    options = parser.parse_args()
    chosen = sample(options.count, options.seed)
    ids = [mutant.id for mutant in chosen]
    if options.page:
        return mutation_page.write(ids, options.seed, GOAL)
    scratch.warm_up()
    reach = measure([*test_files(), *launches()], sources(), mutation_page.KEPT / "reach")
    done = mutation_page.known("mutants")
    with scratch.scratch() as root:
        for number, mutant in enumerate(chosen, 1):
            before = done.get(mutant.id, {}).get("result")
            if before == "killed" or (before and not options.again):
                continue
            result, by = judge(root, mutant, reach)
            print(f"{number} {result}: {mutant.id}  {by}", flush=True)
            mutation_page.keep("mutants", {"id": mutant.id, "result": result, "by": by})
    return mutation_page.write(ids, options.seed, GOAL)


if __name__ == "__main__":
    sys.exit(main())
