"""Reductions, steps and batch norm on real ranks, against plain references."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import names_of_checks, run_checks

# All in one launch: ranks start slowly.
PARTS = ("reduction", "step", "batch_norm", "models")
FILES = [Path(__file__).parent / f"checks_{part}.py" for part in PARTS]


@pytest.fixture(scope="module")
def outcomes():
    """By backend and number of ranks; each launch runs all checks once."""
    return {}


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 3), ("mpi", 2)])
@pytest.mark.parametrize("name", names_of_checks(*FILES))
def test_number(name, backend, ranks, outcomes):
    if (backend, ranks) not in outcomes:
        outcomes[backend, ranks] = run_checks(FILES, ranks, backend, timeout=280)
    failure = outcomes[backend, ranks][name]
    assert failure is None, failure
