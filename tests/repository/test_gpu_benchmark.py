"""benchmarks/gpu.py in its small form, on CPUs: rows, and a real run of two of them."""

import os
import re
import subprocess
import sys

import by_path
import pytest
from hosts import ROOT

from ranks import ENVIRONMENT

gpu = by_path.benchmark("gpu")


def record(rate, **more):
    found = {"mean": rate, "interval_95": [rate - 2, rate + 2], "median": rate, "jitter": 1.0}
    return {"samples_per_second": found} | more


def test_rows_are_compared_with_rows_that_come_before():
    for gpus in (True, False):
        names = list(gpu.rows(gpus))
        for place, row in enumerate(gpu.rows(gpus).values()):
            assert not row.over or row.over in names[:place]
    assert "float32, TF32 off" not in gpu.rows(False)
    on, off = (gpu.rows(True)[f"float32, TF32 {how}"] for how in ("on", "off"))
    assert off.env == gpu.TF32_OFF and on.env is None and on.over == "float32, TF32 off"
    assert gpu.rows(True)["float32, TF32 off, --virtual_ranks"].env == gpu.TF32_OFF


def test_powers_of_two():
    assert [gpu.powers(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


def test_a_line_of_the_table():
    by_rank = [{"gpu_peak_bytes": 3 * 2**30, "host_peak_bytes": 2**30}]
    shares = {"input": 0.011, "bookkeeping": 0.002, "reduction_alone": None}
    ours = record(
        200.0, shares_of_a_step=shares, model_flops={"utilization": 0.42}, by_rank=by_rank
    )
    found = {"same-batch": ours, "bare": record(160.0)}
    row = gpu.Row("", bare=True, over="plain")
    line = gpu.cells("name", 2, found, row, record(300.0), record(125.0))
    assert line == [
        *("2", "name", "160 ± 2", "200 ± 2", "1.250", "1.50 (plain)", "0.80"),
        *("42.0%", "1.1%", "", "3.0"),
    ]
    failed = gpu.cells("name", 2, {"same-batch": {}}, row, {}, {})
    assert failed[3] == "failed" and not any(failed[4:])


@pytest.mark.slow
def test_the_small_form_runs():
    command = [sys.executable, "benchmarks/gpu.py", "--ranks=1,2", "float32", "bfloat16, input"]
    env = os.environ | ENVIRONMENT
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("No GPU here: the small form on CPUs")
    lines = [line.split(" | ") for line in ended.stdout.splitlines() if re.match(r"\| \d", line)]
    names = ["float32", "bfloat16, input on", "float32", "bfloat16, input on"]
    assert [line[1] for line in lines[:2]] + [line[1] for line in lines[2:4]] == names
    assert len(lines) == 5 and lines[4][1] == "float32, --virtual_ranks"
    for line in lines:
        assert re.match(r"[\d.e+]+ ± [\d.e+]+$", line[3]), line
        assert bool(line[4]) == (line[1] == "float32")  # over the bare loop
        assert bool(line[9]) == (line[0] == "| 2")  # the reduction
