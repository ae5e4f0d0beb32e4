"""Losses of several terms, rows of all ranks and a task's optimizers, on 1, 2 and 3 real ranks."""

from __future__ import annotations

import pytest

from ranks import CHECKS, names_of_checks, run_checks

FILE, SLOW = CHECKS / "checks_objective.py", pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", names_of_checks(FILE))
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_objective(ranks, name, outcomes):
    if ranks not in outcomes:
        outcomes[ranks] = run_checks([FILE], ranks, timeout=500)
    failure = outcomes[ranks][name]
    assert failure is None, failure
