"""find_batch.py: sizes are doubled in processes of their own, until the limit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import psutil
import pytest

from ranks import PROJECT

FLAGS = ["--flagfile=configs/blank.cfg"]


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "find_batch.py", *map(str, words)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)


def test_sizes_are_doubled_and_measured():
    found = call(*FLAGS, "--most=2")
    assert found.returncode == 0, found.stderr
    rows = re.findall(r"^ +(\d+) +([\d,.]+) +([\d.]+)$", found.stdout, re.M)
    assert [int(size) for size, _, _ in rows] == [1, 2], found.stdout
    assert all(float(peak) > 0.2 for _, _, peak in rows)
    assert "that fits: --batch_per_rank=2" in found.stdout


def test_what_takes_more_than_the_limit_is_ended():
    found = call(*FLAGS, "--memory=0.1")
    assert found.returncode == 1 and "not even one sample fits" in found.stderr
    assert "more than 0.1 GiB" in found.stdout


def test_another_failure_is_shown_as_what_it_is():
    found = call(*FLAGS, "--train_split=other", "--task=nothing", "--most=1")
    assert found.returncode == 2 and "nothing" in found.stderr and "Traceback" not in found.stderr
    found = call(*FLAGS, "--base_lr=x")
    assert found.returncode == 2 and "--base_lr" in found.stderr and not found.stdout


def test_limits_that_are_none_are_refused():
    for flag in ("--most=0", "--memory=0", "--memory=nan"):
        found = call(*FLAGS, flag)
        assert found.returncode == 2 and f"error: {flag}: give " in found.stderr, found.stderr
        assert not found.stdout


def test_a_batch_is_not_given():
    found = call(*FLAGS, "--global_batch_size=8")
    assert found.returncode == 2 and "--global_batch_size is what" in found.stderr


@pytest.mark.parametrize(("sent", "code"), [("SIGTERM", 128 + 15), ("SIGKILL", -9)])
def test_what_is_being_tried_ends_with_it(sent, code):
    command = [sys.executable, "find_batch.py", *FLAGS]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as search:
        search.stdout.readline()  # the table's head: the first size follows
        while not (children := psutil.Process(search.pid).children()):
            assert search.poll() is None
        search.send_signal(signal.Signals[sent])
        assert search.wait(20) == code
    _, left = psutil.wait_procs(children, timeout=1)  # by itself it takes longer
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)
