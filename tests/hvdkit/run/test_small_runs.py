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
)
OF_TWO = ("tasks", "stragglers", "errors", "model_doctor")
# By what starts the ranks and how many there are. Layers do not know what carries their sums.
PARTS = {
    ("alone", 1): BOTH,
    ("gloo", 2): (*BOTH, *OF_TWO),
    ("gloo", 3): ("objective", "reduction", "step", "batch_norm", "world"),
    ("mpirun", 2): ("world",),
    ("mpi", 2): ("reduction",),
}
FILES = {launch: [CHECKS / f"checks_{p}.py" for p in parts] for launch, parts in PARTS.items()}
SLOW = ("alone", 1), ("mpi", 2)


@pytest.fixture(scope="module")
def outcomes(request):
    """By launch; one runs the checks that were chosen."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    of, found = [item.callspec.params for item in items], {}
    for (backend, ranks), files in FILES.items():
        names = [params["name"] for params in of if params["launch"] == (backend, ranks)]
        files = [file for file in files if {*names} & {*names_of_checks(file)}]
        if names:
            found[backend, ranks] = run_checks(files, ranks, backend, names=names, timeout=1800)
    return found


# The first waits for all launches: a minute each, and several on a busy machine.
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(launch, n, marks=[pytest.mark.slow] * (launch in SLOW or n.startswith("slow")))
        for launch, files in FILES.items()
        for n in names_of_checks(*files)
    ],
    ids=lambda part: part if isinstance(part, str) else "-".join(map(str, part)),
)
def test_small_run(launch, name, outcomes):
    assert outcomes[launch][name] is None, outcomes[launch][name]
