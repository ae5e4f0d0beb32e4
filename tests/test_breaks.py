"""breaks.txt still fits the code and the tests; what mutants.py changes. make breaks tries them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import breaks
import mutants
import mutation_page
import reach
import scratch

LIST = breaks.breaks()


@pytest.mark.parametrize("one", LIST, ids=lambda one: one.name)
def test_a_break_applies_and_its_tests_are_there(one):
    text = (scratch.ROOT / one.file).read_text()
    broken = one.applied(text)  # its lines are found exactly once
    assert broken != text
    if one.file.endswith(".py"):
        ast.parse(broken)
    named = [test.split("[")[0].split("::") for test in one.tests]
    for check in one.checks:
        ranks, name = check.split()
        assert int(ranks) in reach.LAUNCHES
        module, function = name.split(".")
        named.append([f"template/tests/{module}.py", function])
    assert named
    for file, function in named:
        tree = ast.parse((scratch.ROOT / file).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, function


def test_names_of_breaks_are_unique():
    assert len({one.name for one in LIST}) == len(LIST) >= 64


def test_a_break_that_does_not_apply_is_refused():
    one = LIST[0]
    with pytest.raises(ValueError, match="found 0 times"):
        one.applied("something else\n")
    with pytest.raises(ValueError, match="found 2 times"):
        one.applied(one.old * 2)


TEXT = '''
def f(a, b: int = 3):
    """Text: 1 + 1."""
    if a and b > 0:
        g(a, key=True)
    return f"{a + 1}" or a - b
'''


def test_mutants_of_a_function():
    found = [m.id.removeprefix("x.py:f: ") for m in mutants.mutants("x.py", TEXT)]
    assert found == [
        "3 -> 4",
        "a and b > 0 -> not (a and b > 0",
        "a and b > 0 -> a or b > 0",
        "b > 0 -> b >= 0",
        "0 -> 1",
        "g(a, key=True) -> pass",
        "g(a, key=True) -> g(a",
        "True -> False",
        "return f'{a + 1}' or a - b -> return None",
        "f'{a + 1}' or a - b -> f'{a + 1}' and a - b",
        "a - b -> a + b",
    ]
    for one in mutants.mutants("x.py", TEXT):
        assert one.function == "x.py:f" and one.text != TEXT
        ast.parse(one.text)


def test_a_mutant_that_counts_as_equivalent_is_one_of_todays_code():
    known = dict.fromkeys(key.split(":")[0] for key in mutation_page.equivalents())
    ids = {
        one.id for file in known for one in mutants.mutants(file, (scratch.ROOT / file).read_text())
    }
    assert set(mutation_page.equivalents()) <= ids
    assert all(mutation_page.equivalents().values()), "each with its reason"


def test_a_forked_test_run_tells_what_failed_and_ends_what_hangs():
    """In a process of its own, as it makes a process the parent of all that lose theirs."""
    code = """
import sys, pathlib, tempfile
import scratch
scratch.warm_up()
with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]")
    (root / "test_x.py").write_text('''
import subprocess, time
import tensorflow as tf
def test_good(): assert int(tf.add(1, 1)) == 2
def test_bad(): assert 1 == 2
def test_hangs(): subprocess.run(["sleep", "1234.5"])
''')
    for name in ("good", "bad", "hangs"):
        ended = scratch.run_tests(root, [f"test_x.py::test_{name}"], 20 if name != "hangs" else 3)
        print(ended.passed, ended.by)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(scratch.ROOT / "tests"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = ["True exit code 0", "False test_x.py::test_bad", "False hang"]
    assert ended.stdout.splitlines() == lines, ended.stderr
    assert subprocess.run(["pgrep", "-f", "^sleep 1234.5"]).returncode == 1
