"""What a run costs rank 0 by the number of ranks and of steps: benchmarks/scale.py's short form."""

from __future__ import annotations

import by_path
import pytest

scale = by_path.benchmark("scale")


@pytest.fixture(scope="module")
def thousands() -> dict:
    """Rank 0 of 8,192, a mocked number."""
    return scale.run(8192, True, [*scale.SHORT, "--global_batch_size=8192"])[-1]


def test_a_start_takes_as_many_exchanges_on_thousands_of_ranks_as_on_two(thousands):
    two = scale.run(2, False, scale.SHORT)[-1]
    assert thousands["exchanges"] == two["exchanges"] < 60
    # Names and addresses of all ranks are told once; all else does not grow.
    assert thousands["kB"] < 8192 * 0.25


def test_a_log_line_and_an_agreement_cost_rank_0_of_thousands_little(thousands):
    """Milliseconds; a log line with each rank's loss took 200 at 1,024."""
    assert thousands["together"] < 20 and thousands["log"] < 100
    assert thousands["MB"] < 1000 and thousands["files"] < 50


def test_nothing_grows_with_steps_but_what_is_written():
    *rows, _ = scale.run(1, False, ["--num_steps=3000", "--log_every=1", "--eval_every=300"])
    tenth, half, end = rows
    assert [row["step"] for row in rows] == [300, 1500, 3000]
    assert end["MB"] - half["MB"] < 8 and end["files"] <= tenth["files"] + 2
    lines = [row["bytes"]["metrics.jsonl"] / row["step"] for row in rows]
    assert max(lines) / min(lines) < 1.2
    assert end["bytes"]["checkpoints"] < 1.5 * half["bytes"]["checkpoints"]
