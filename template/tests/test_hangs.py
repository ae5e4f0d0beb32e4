"""A rank that comes no more: the run ends by itself, and one line names the rank and its host."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ranks import last_lines, launch

WAITS = Path(__file__).parent / "waits.py"
HOST = os.uname().nodename


@pytest.mark.parametrize("backend", ["gloo", "mpirun"])
@pytest.mark.parametrize(
    "how, words",
    [
        ("stop", [f"rank 1 on {HOST} has not answered for 5 s", "its process was stopped"]),
        ("hang", [f"rank 1 on {HOST}", "at tests/waits.py, line", "(fail)"]),
    ],
)
def test_a_rank_that_hangs_is_named(how: str, words: list[str], backend: str):
    ended = launch(3, [WAITS, how, 5], backend, timeout=200)
    assert ended.code != 0
    (said,) = ended.errors()
    assert all(word in said for word in words), said
    assert not re.search(r">:Traceback", ended.output), last_lines(ended.output)


def test_a_stopped_rank_is_not_said_to_have_ended():
    """Where Gloo gives up by itself, after 30 s unless it is told."""
    short = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    (said,) = launch(3, [WAITS, "stop", 0], "gloo", timeout=200, env=short).errors()
    assert f"rank 1 on {HOST} does not answer" in said
