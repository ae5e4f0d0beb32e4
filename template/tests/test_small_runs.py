"""Whole small runs on real ranks: what a task or a run may do wrong, and what is promised of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ranks import run_checks

FILES = [Path(__file__).parent / name for name in ("checks_tasks.py", "checks_runs.py")]
CHECKS = [
    (file.name, node.name)
    for file in FILES
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def outcomes():
    """By file and number of ranks; each launch runs all checks of a file once."""
    return {}


# The first of a file waits for its launch: a minute, and several on a busy machine.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("file", "name"), CHECKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_small_run(file, name, ranks, outcomes):
    if ranks == 1 and file == "checks_tasks.py":
        pytest.skip("told before the first step, on 1 rank as on 2")
    if (file, ranks) not in outcomes:
        outcomes[file, ranks] = run_checks(Path(__file__).parent / file, ranks, timeout=1000)
    failure = outcomes[file, ranks][name]
    assert failure is None, failure
