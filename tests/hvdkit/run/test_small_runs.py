"""tests/ranks/ on real ranks: what a task or a run may do wrong, and what is promised of it."""

import pytest

from ranks import CHECKS, names_of_checks, run_checks

# On 1 rank as on 2.
BOTH = (
    "runs",
    "data",
    "bad_steps",
    "saving",
    "evaluation",
    "whole_pictures",
    "state",
    "objective",
    "own_step",
    "calls",
)
OF_THREE = ("reduction", "step", "world")
OF_TWO = ("tasks", "stragglers", "errors", "model_doctor")
# By what starts the ranks and how many there are. Layers do not know what carries their sums.
# Over MPI a small run takes two thirds of the time that it takes over Gloo.
PARTS = {
    ("alone", 1): BOTH,
    ("mpirun", 2): (*BOTH, *OF_TWO, "sync_batch_norm"),
    ("mpirun", 3): (*OF_THREE, "exchange", "batch_norm", "sync_batch_norm"),
    ("gloo", 2): ("exchange", "world", "reduction"),
    ("gloo", 3): ("objective",),
}
FILES = {
    launch: [CHECKS / f"checks_{p}.py" for p in parts]
    for launch, parts in PARTS.items()
}
SLOW = (("alone", 1), ("gloo", 3))


@pytest.fixture(scope="module")
def outcomes(request):
    """By launch; one runs the checks that were chosen."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    chosen = [
        (item.callspec.params["launch"], item.callspec.params["name"]) for item in items
    ]
    outcomes = {}
    for launch, files in FILES.items():
        names = [name for its_launch, name in chosen if its_launch == launch]
        if names:
            backend, ranks = launch
            files = [file for file in files if {*names} & {*names_of_checks(file)}]
            outcomes[launch] = run_checks(
                files, ranks, backend, names=names, timeout=3000
            )
    return outcomes


def small_runs() -> list:
    """Launch and name of each check; a test's name has both."""
    params = []
    for launch, files in FILES.items():
        backend, ranks = launch
        for name in names_of_checks(*files):
            is_slow = launch in SLOW or name.startswith("slow")
            marks = [pytest.mark.slow] if is_slow else []
            params.append(
                pytest.param(launch, name, marks=marks, id=f"{backend}-{ranks}-{name}")
            )
    return params


# The first waits for all launches: 20 minutes, and more on a busy machine.
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(("launch", "name"), small_runs())
def test_small_run(launch, name, outcomes):
    assert outcomes[launch][name] is None, outcomes[launch][name]
