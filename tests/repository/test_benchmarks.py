"""Benchmarks: the table of gpu.py, the short forms of scale.py and batch_norm.py."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from hosts import ROOT

from ranks import ENVIRONMENT

FOLDER = ROOT / "benchmarks"


def benchmark(name: str):
    """A file of benchmarks/ as a module: other files there have the names of tests' modules."""
    spec = importlib.util.spec_from_file_location(
        f"benchmarks_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu = benchmark("gpu")
scale = benchmark("scale")


def record(rate, **more):
    speed = {
        "mean": rate,
        "interval_95": [rate - 2, rate + 2],
        "median": rate,
        "jitter": 1.0,
    }
    return {"samples_per_second": speed} | more


def test_a_line_of_gpus_table():
    ours = record(
        200.0,
        ranks=2,
        shares_of_a_step={
            "input": 0.011,
            "bookkeeping": 0.002,
            "reduction_alone": None,
        },
        model_flops={"utilization": 0.42},
        by_rank=[{"gpu_peak_bytes": 3 * 2**30, "host_peak_bytes": 2**30}],
    )
    row = gpu.Row("", bare=True, over="plain")
    line = gpu.cells(
        {"same-batch": ours, "bare": record(160.0)},
        row,
        over=record(300.0),
        alone=record(125.0),
    )
    assert line == [
        "",
        "160 ± 2",
        "200 ± 2",
        "1.250",
        "1.50 (plain)",
        "0.80",
        "42.0%",
        "1.1%",
        "",
        "3.0",
    ]
    failed = gpu.cells({"same-batch": {}}, row, over={}, alone={})
    assert failed[2] == "failed" and not any(failed[3:])


@pytest.mark.slow
def test_the_small_form_of_gpu_runs():
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--ranks=1,2",
        "float32",
        "bfloat16, input",
    ]
    env = os.environ | ENVIRONMENT
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=800
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("No GPU here: the small form on CPUs")
    lines = [
        line.split(" | ")
        for line in ended.stdout.splitlines()
        if re.match(r"\| \d", line)
    ]
    names = ["float32", "bfloat16, input on"] * 2 + ["float32, --virtual_ranks"]
    assert [line[1] for line in lines] == names
    for line in lines:
        assert re.match(r"[\d.e+]+ ± [\d.e+]+$", line[4]), line
        assert bool(line[5]) == (line[1] == "float32")  # over the bare loop
        assert bool(line[10]) == (line[0] == "| 2")  # the reduction


@pytest.mark.slow
def test_the_short_form_of_batch_norm_compares_each_kind():
    command = [sys.executable, "benchmarks/batch_norm.py", "--rounds=1", "--steps=1"]
    ended = subprocess.run(
        [*command, "19"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split(" | ") for line in ended.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == ["mean", "full, Keras's formula", "full"]
    assert all(float(row[2]) > 0 for row in rows)


@pytest.mark.slow
def test_thousands_of_ranks_cost_rank_0_little():
    """As many exchanges as 2 ranks until the first step; a log line once took 200 ms at 1,024."""
    mocked = scale.run(8192, True, [*scale.SHORT, "--global_batch_size=8192"])[-1]
    two = scale.run(2, True, scale.SHORT)[-1]  # real ones have MPI, which needs fewer
    # Of few ranks the table of places is one more.
    assert mocked["exchanges"] + 1 == two["exchanges"] < 80
    # Names and addresses of all ranks are sent once; all else does not grow.
    assert mocked["kB"] < 8192 * 0.25
    assert mocked["together"] < 20 and mocked["log"] < 100  # milliseconds
    assert mocked["MB"] < 1000 and mocked["files"] < 50


@pytest.mark.slow
def test_only_what_is_written_grows_with_steps():
    flags = [
        "--num_steps=1000",
        "--log_every=1",
        "--eval_every=100",
        "--checkpoint_every=100",
    ]
    *rows, _ = scale.run(1, False, flags)
    tenth, half, end = rows
    assert [row["step"] for row in rows] == [100, 500, 1000]
    # TensorFlow takes 16 MB at once at some step.
    assert end["MB"] - half["MB"] < 24 and end["files"] <= tenth["files"] + 2
    lines = [row["bytes"]["metrics.jsonl"] / row["step"] for row in rows]
    assert max(lines) / min(lines) < 1.2
    assert end["bytes"]["checkpoints"] < 1.5 * half["bytes"]["checkpoints"]
