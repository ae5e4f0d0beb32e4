"""Whole small runs on real ranks: what a task or a run may do wrong, and what is promised of it."""

import pytest

from ranks import CHECKS, names_of_checks, run_checks

# On 1 rank as on 2.
BOTH = ("runs", "data", "bad_steps", "saving", "evaluation", "whole_pictures", "state", "objective")
PARTS = {1: BOTH, 2: (*BOTH, "tasks", "task_models", "stragglers"), 3: ("objective",)}
SLOW = {1: pytest.mark.slow, 2: (), 3: pytest.mark.slow}
# Those of a task are there where the task is.
FILES = {
    ranks: [f for part in parts if (f := CHECKS / f"checks_{part}.py").exists()]
    for ranks, parts in PARTS.items()
}


@pytest.fixture(scope="module")
def outcomes():
    """By number of ranks; each launch runs all checks once."""
    return {}


# The first waits for its launch: a minute, and several on a busy machine.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(n, name, marks=SLOW[n])
        for n, files in FILES.items()
        for name in names_of_checks(*files)
    ],
)
def test_small_run(ranks, name, outcomes):
    if ranks not in outcomes:
        outcomes[ranks] = run_checks(FILES[ranks], ranks, timeout=1000)
    failure = outcomes[ranks][name]
    assert failure is None, failure
