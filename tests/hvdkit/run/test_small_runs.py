"""Whole small runs on real ranks: what a task or a run may do wrong, and what is promised of it."""

import pytest

from ranks import CHECKS, names_of_checks, run_checks

# On 1 rank as on 2.
BOTH = ("runs", "data", "bad_steps", "saving", "evaluation", "whole_pictures", "state", "objective")
OF_TWO = ("tasks", "stragglers", "errors", "model_doctor")
PARTS = {1: BOTH, 2: (*BOTH, *OF_TWO), 3: ("objective",)}
# Those of a task are there where the task is.
FILES = {
    ranks: [f for part in parts if (f := CHECKS / f"checks_{part}.py").exists()]
    for ranks, parts in PARTS.items()
}


@pytest.fixture(scope="module")
def outcomes(request):
    """By number of ranks; a launch runs the checks that were chosen."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    of = [item.callspec.params for item in items]
    chosen = {n: [param["name"] for param in of if param["ranks"] == n] for n in PARTS}
    found, how = {}, {"timeout": 1000}
    for n, names in chosen.items():
        if names:
            found[n] = run_checks(FILES[n], n, "gloo" if n > 1 else "", names=names, **how)
    return found


# The first waits for its launch: a minute, and several on a busy machine.
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(n, name, marks=[pytest.mark.slow] * (n != 2 or name.startswith("slow")))
        for n, files in FILES.items()
        for name in names_of_checks(*files)
    ],
)
def test_small_run(ranks, name, outcomes):
    failure = outcomes[ranks][name]
    assert failure is None, failure
