"""Losses of several terms, rows of all ranks and a task's optimizers, on 1, 2 and 3 real ranks."""

from __future__ import annotations

import pytest

from ranks import CHECKS, names_of_checks, run_checks

FILE = CHECKS / "checks_objective.py"


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", names_of_checks(FILE))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_objective(ranks, name, outcomes):
    if ranks not in outcomes:
        outcomes[ranks] = run_checks([FILE], ranks, timeout=500)
    failure = outcomes[ranks][name]
    assert failure is None, failure
