"""launch/scaling.py: formulas by hand, a table, refusals, and published figures."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hosts import ROOT

sys.path.append(str(ROOT / "launch"))
import published
import scaling
from scaling import Cluster, Horovod, Job, allreduce

PLAN = ["--params=25.6M", "--step_ms=110", "--batch=64", "--link=25Gbit"]
ONE = Cluster(1, 1e9, 1e9, 0.0, 0.0)  # GPU a host
EIGHT = Cluster(8, 10e9, 1e9, 0.0, 0.0)
FAST = Horovod(cycle=1e-6)


def run(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "launch" / "scaling.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def seconds(jobs_profile: tuple, **job: float) -> float:
    """A step of 3 s, whose backward pass is 2 s, of 1 GB on two hosts: a sum takes 1 s."""
    return sum(scaling.step(Job(3.0, 1, 1e9, jobs_profile, **job), 2, ONE, horovod=FAST).values())


@pytest.mark.parametrize(
    ("found", "by_hand"),
    [
        # Each rank sends 6 quarters of 100 MB at 100 MB/s, in 6 hops of 1 ms.
        (scaling.ring(100e6, 4, bandwidth=100e6, hop=1e-3), 1.506),
        # Inside 2 x 7/8 of 1 GB at 10 GB/s, between four hosts 2 x 3/4 of it at 1 GB/s.
        (allreduce(1e9, 32, EIGHT, how="two-level"), 0.175 + 1.5),
        # One ring over all 32: 2 x 31/32 of it over the slowest link.
        (allreduce(1e9, 32, EIGHT, how="ring"), 2 * 31 / 32),
        # A tree has 2 x log2(1024) hops, and 0.9 of the bandwidth; a ring would take 3.8 s.
        (allreduce(9e8, 1024, ONE._replace(hop=1e-3), how="auto"), 2 + 20e-3),
        # Tables of order statistics: 2.508.
        (scaling.expected_maximum(100), pytest.approx(2.508, rel=0.01)),
        # sqrt(2 C M) = 1,000 s, to which Daly adds 1/3 sqrt(C/2M) + 1/9 C/2M of it, less C.
        (scaling.daly(50, 10_000), 1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50),
        # What is ready early is summed behind the backward pass, what is ready last after it.
        (seconds(((0.0, 1.0),)), 3.0),
        (seconds(((0.75, 1.0),)), 3.5),
        (seconds(((1.0, 1.0),)), 4.0),
        (seconds(((1.0, 1.0),), jitter=0.1), pytest.approx(4.0 + 0.3 * np.pi**-0.5, rel=0.01)),
        (seconds(((1.0, 1.0),), input_rate=0.25), 4.0 + 1.0),
        # Packed: asked at 0.5 s for 3 + 3 and 3, at 1.5 s for 1, at 2.5 s for 1; each takes 2 s.
        (scaling.messages_end([(0.0, 3.0), (0.1, 3.0), (0.2, 3.0), (1.0, 1.0), (2.4, 1.0)],
                              lambda size: 2.0 * (size < 8), Horovod("auto", 1.0, 6.0)), 8.5),
    ],
)  # fmt: skip
def test_a_formula_by_hand(found, by_hand):
    assert found == (pytest.approx(by_hand, rel=1e-4) if isinstance(by_hand, float) else by_hand)


def test_a_table_also_of_a_benchmarked_run(tmp_path):
    typed = run(*PLAN, "--gpus=8,64,512")
    said = {line[:43].strip(): line[43:].split() for line in typed.stdout.splitlines()}
    rates = said["efficiency"]
    assert len(rates) == 3 and sorted(rates, reverse=True) == rates, typed.stdout + typed.stderr
    assert said["with --compression=fp16"][2] > rates[2]
    record = {"ranks": 1, "seconds_a_step": 0.11, "global_batch_size": 64}
    (tmp_path / "config.cfg").write_text("--accumulation_steps=1\n--virtual_ranks=0\n")
    (tmp_path / "benchmark.json").write_text(json.dumps(record | {"trained_parameters": 25.6e6}))
    words = [f"--run_dir={tmp_path}", "--link=25Gbit", "--gpus=8,64,512"]
    assert run(*words).stdout == typed.stdout
    assert "--run_dir and --params: choose one" in run(*words, "--params=1M").stderr
    (tmp_path / "config.cfg").write_text("--accumulation_steps=1\n--virtual_ranks=8\n")
    ended = run(*words)
    assert ended.returncode == 2 and "is not a run of train.py" in ended.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--gpus=8,x", "'x' is not a whole number"),
        ("--link=25", "'25' is not a rate"),
        ("--params=-1M", "'-1M' is not a number above 0"),
        ("--step_ms=nan", "'nan' is not a number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(word: str, said: str):
    ended = run(*PLAN, "--gpus=8", word)
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1


def test_published_figures_are_predicted_from_other_sources():
    rows = published.rows()
    points = published.errors(rows)
    assert len(rows) == 23 and np.median(np.abs(points)) <= 5
    assert f"median error {np.median(np.abs(points)):.1f} points" in run("--published").stdout
