"""Which tests run which functions, measured: a copy whose functions say so is tested once.

Checks on real ranks (template/tests/checks_*.py) are told apart as well, though one launch runs
them all: each can be run by itself, in a launch of its own.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import scratch

_TOLD = """
import os
_told = set()
def told(function):
    test = os.environ.get("PYTEST_CURRENT_TEST", " (setup)")
    if (test, function) not in _told:
        _told.add((test, function))
        with open(os.environ["REACHED"], "a") as file:
            file.write(f"{os.getpid()}\\t{test}\\t{function}\\n")
"""
_LIMIT = 900  # seconds of a file of tests, or of a launch
# Files of checks that one launch runs, on how many ranks: those of test_small_runs.py,
# test_numbers.py and test_virtual.py.
LAUNCHES = {
    2: ("runs", "bad_steps", "saving", "evaluation", "whole_pictures", "tasks", "task_models"),
    3: ("reduction", "step", "batch_norm", "models"),
    1: ("virtual",),
}
_BACKENDS = {1: "alone", 2: "mpirun", 3: "gloo"}
# Tests of files that start programs take minutes, and checks reach what they reach; but for these,
# and for those of mixed files that start none.
_SLOW = "from ranks import"
_QUICK = ("test_reduction.py", "test_warm_start.py", "test_find_lr.py")
_QUICK += ("test_browse.py", "test_check.py", "test_live.py")
_MIXED = {
    "test_checkpoint_parts.py": "not on_ranks and not kill",
    "test_virtual.py": "not on_ranks and not same_bits",
    "test_report.py": "own_figure or time_lost or markup or many_points or no_run",
    "test_tasks.py": "not ranks and not loss_falls",
    "test_devices.py": "not training",
    "test_hangs.py": "thousands",
    "test_world.py": "thousands or sign_of_life or alike_send",
}

_TEST = """
import json, os, pathlib
import ranks
def test_checks(tmp_path):
    here = pathlib.Path(__file__)
    env = {{"VIRTUAL_RUNS": str(tmp_path), "VIRTUAL_LAUNCH": "chosen"}}
    file = here.with_name("checks_chosen.py")
    failed = ranks.run_checks([file], {ranks}, {backend!r}, timeout={timeout}, env=env)
    here.with_name("failed.json").write_text(json.dumps(failed))
    assert not any(failed.values()), failed
"""
_WATCHED = """
import os, time
import {modules}
def _watched(name, check):
    def watched(world):
        os.environ["PYTEST_CURRENT_TEST"] = name + " (call)"
        start = time.monotonic()
        check(world)
        with open(os.environ["REACHED"], "a") as file:
            file.write(f"{{time.monotonic() - start}}\\t{{name}}\\t\\n")
    return watched
for _module in ({modules},):
    for _name, _check in list(vars(_module).items()):
        if _name.startswith("check_"):
            globals()[_name] = _watched(_name, _check)
"""


class Reach(NamedTuple):
    """What one file of tests runs, and how long it takes."""

    seconds: float  # of the whole file
    tests: dict[str, float]  # seconds of each that passes, in their order
    functions: dict[str, list[str]]  # by function: tests that run it in their own process
    shared: list[str]  # functions that other processes, fixtures or imports run


def measure(files: Sequence[str], sources: Sequence[str], kept: Path) -> dict[str, Reach]:
    """By file of tests; each is kept as soon as it is known, and what is kept is not measured."""
    kept = kept.resolve()
    kept.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not _place(kept, file).exists()]
    if missing:
        with scratch.scratch() as root:
            for source in sources:
                path = root / source
                path.write_text(_telling(source, path.read_text()))
            (root / "template/_told.py").write_text(_TOLD)
            for file in missing:
                measured = _measure if file.endswith(".py") else _measure_checks
                found = measured(root, file, kept / "reached")
                _place(kept, file).write_text(json.dumps(found))
                print(f"{file}: {found.seconds:.0f} s, {len(found.tests)} tests", flush=True)
    return {file: Reach(*json.loads(_place(kept, file).read_text())) for file in files}


def test_files() -> list[str]:
    """Those whose tests take seconds, without ranks but for a few."""
    found = sorted((scratch.ROOT / "template/tests").glob("test_*.py"))
    some = (*_QUICK, *_MIXED)
    quick = [f for f in found if f.name in some or _SLOW not in f.read_text()]
    return [str(f.relative_to(scratch.ROOT)) for f in quick]


def _place(kept: Path, file: str) -> Path:
    return kept / f"{file.replace('/', '-')}.json"


class _Times:
    """A plugin: seconds of each test that passes."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.bad = path, {}, set()

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.bad.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        good = {name: s for name, s in self.seconds.items() if name not in self.bad}
        self.path.write_text(json.dumps([os.getpid(), good]))


def _measure(root: Path, file: str, log: Path) -> Reach:
    times = log.with_suffix(".times")
    for path in (log, times):
        path.unlink(missing_ok=True)
    os.environ["REACHED"] = str(log)
    some = _MIXED.get(Path(file).name)
    words = [file, "-k", some] if some else [file]
    ended = scratch.run_tests(root, words, _LIMIT, _Times(times), first=False)
    if not times.exists() or not log.exists():
        return Reach(ended.seconds, {}, {}, [])
    own, tests = json.loads(times.read_text())
    functions: dict[str, list[str]] = {}
    shared = set()
    for line in log.read_text().splitlines():
        pid, where, function = line.split("\t")
        test, phase = where.rsplit(" ", 1)
        if int(pid) == own and phase == "(call)":
            functions.setdefault(function, []).append(test)
        else:
            shared.add(function)
    return Reach(ended.seconds, tests, functions, sorted(shared))


def run_checks(root: Path, ranks: int, checks: Sequence[str], timeout: float) -> scratch.Ended:
    """Some checks, `module.check_name` each, in one launch."""
    lines = [f"from {module} import {name}" for module, name in (c.split(".") for c in checks)]
    return _launch(root, ranks, "\n".join(lines), timeout)


def _launch(root: Path, ranks: int, checks: str, timeout: float) -> scratch.Ended:
    tests = root / "template/tests"
    (tests / "checks_chosen.py").write_text(checks)
    how = {"ranks": ranks, "backend": _BACKENDS[ranks], "timeout": timeout}
    (tests / "test_chosen.py").write_text(_TEST.format(**how))
    (tests / "failed.json").unlink(missing_ok=True)
    ended = scratch.run_tests(root, ["template/tests/test_chosen.py"], timeout + 30)
    if (failed := tests / "failed.json").exists():
        bad = [name for name, why in json.loads(failed.read_text()).items() if why]
        ended = ended._replace(by=", ".join(bad[:1]) or ended.by)
    return ended


def _measure_checks(root: Path, name: str, log: Path) -> Reach:
    """`name`: the number of ranks and what they run, as "2 runs"."""
    ranks, part = name.split()
    log.unlink(missing_ok=True)
    os.environ["REACHED"] = str(log)
    ended = _launch(root, int(ranks), _WATCHED.format(modules=f"checks_{part}"), _LIMIT)
    failed = root / "template/tests/failed.json"
    if not failed.exists():
        print(ended.output[-2000:])
        return Reach(ended.seconds, {}, {}, [])
    good = {check for check, why in json.loads(failed.read_text()).items() if not why}
    tests: dict[str, float] = {}
    functions: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        first, test, function = line.split("\t")
        test = f"checks_{part}.{test.removesuffix(' (call)')}"
        if test.split(".")[1] not in good:
            continue
        if not function:
            tests[test] = max(tests.get(test, 0.0), float(first))
        elif test not in functions.setdefault(function, []):
            functions[function].append(test)
    return Reach(ended.seconds, tests, functions, [])


def launches() -> list[str]:
    return [f"{ranks} {part}" for ranks, parts in LAUNCHES.items() for part in parts]


def _telling(file: str, text: str) -> str:
    """The same code; each function first says that it runs."""
    lines, at = text.splitlines(keepends=True), {}

    def visit(node: ast.AST, names: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = [*names, child.name]
            if isinstance(child, ast.FunctionDef):
                body = child.body[ast.get_docstring(child) is not None :]
                if body and body[0].lineno > child.lineno:
                    decorators = getattr(body[0], "decorator_list", [])
                    first = min(node.lineno for node in [body[0], *decorators])
                    at[first] = (body[0].col_offset, ".".join(inner))
            visit(child, inner)

    tree = ast.parse(text)
    visit(tree, [])
    for line in sorted(at, reverse=True):
        indent, name = at[line]
        lines.insert(line - 1, f'{" " * indent}__import__("_told").told("{file}:{name}")\n')
    return "".join(lines) + f'\n__import__("_told").told("{file}:<module>")\n'
