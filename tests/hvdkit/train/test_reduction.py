"""Reductions, steps and batch norm on real ranks, by numbers; what Horovod is told."""

import functools

import pytest

from ranks import CHECKS, names_of_checks, run_checks

# All of a backend in one launch: ranks start slowly. Layers do not know what carries their sums.
PARTS = {("gloo", 3): ("reduction", "step", "batch_norm", "world"), ("mpi", 2): ("reduction",)}
FILES = {launch: [CHECKS / f"checks_{p}.py" for p in parts] for launch, parts in PARTS.items()}


@functools.cache
def outcomes(backend, ranks):
    """Of all checks, in one launch."""
    return run_checks(FILES[backend, ranks], ranks, backend, timeout=560)


@pytest.mark.parametrize(
    ("backend", "ranks", "name"),
    [
        pytest.param(*launch, name, marks=[pytest.mark.slow] * (launch[0] == "mpi"))
        for launch, files in FILES.items()
        for name in names_of_checks(*files)
    ],
)
def test_number(backend, ranks, name):
    failure = outcomes(backend, ranks)[name]
    assert failure is None, failure
