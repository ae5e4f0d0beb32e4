"""Reductions, steps and batch norm on real ranks, against plain references (checks_numbers.py)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ranks import run_checks

FILE = Path(__file__).parent / "checks_numbers.py"
NAMES = [
    node.name
    for part in ("reduction", "step", "batch_norm", "models")
    for node in ast.parse((FILE.parent / f"checks_{part}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def outcomes():
    """By backend and number of ranks; each launch runs all checks once."""
    return {}


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 3), ("mpi", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_number(name, backend, ranks, outcomes):
    if (backend, ranks) not in outcomes:
        outcomes[backend, ranks] = run_checks(FILE, ranks, backend, timeout=280)
    failure = outcomes[backend, ranks][name]
    assert failure is None, failure
