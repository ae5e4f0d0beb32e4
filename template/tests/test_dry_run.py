"""--dry_run: what it shows is so, it runs all parts, and it leaves nothing."""

from __future__ import annotations

import re

import pytest

import dry_run
from ranks import last_lines, launch

FLAGS = ["--flagfile=configs/blank.cfg", "--dry_run", "--global_batch_size=10"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_shows_and_tries_everything_and_leaves_nothing(tmp_path, ranks):
    command = ["train.py", *FLAGS, f"--run_dir={tmp_path}/new/run"]
    ended = launch(ranks, command, "gloo" if ranks > 1 else "alone")
    assert ended.code == 0, last_lines(ended.output)
    shares = re.findall(
        r"rank (\d): (\d+) samples a step; the first step's: ([\d, ]+)", ended.output
    )
    assert [int(count) for _, count, _ in shares] == {1: [10], 3: [3, 3, 4]}[ranks]
    shown = [n for _, _, ids in shares for n in re.findall(r"\d+", ids)]
    assert len(shown) == len({*shown}) == (8 if ranks == 1 else 10)
    for words in ("--global_batch_size=10", "gradients: ", "learning rate (", "evaluated: loss"):
        assert words in ended.output, words
    assert "dry run: it works; nothing was kept" in ended.output
    assert not list(tmp_path.iterdir())


def test_a_used_folder_stays_as_it_is(tmp_path):
    run = tmp_path / "run"
    first = launch(1, ["train.py", FLAGS[0], "--num_steps=3", f"--run_dir={run}"])
    assert first.code == 0, last_lines(first.output)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    ended = launch(1, ["train.py", *FLAGS, f"--run_dir={run}"])
    assert ended.code == 0, last_lines(ended.output)
    assert "a run would resume from" in ended.output
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert after == before and list(tmp_path.iterdir()) == [run]


def test_what_fails_fails_there_too(tmp_path):
    ended = launch(1, ["train.py", *FLAGS, "--task=nothing", f"--run_dir={tmp_path}/run"])
    assert ended.code == 2 and not list(tmp_path.iterdir())


def test_the_plot_of_a_schedule():
    lines = dry_run.plot([1.0, 0.5, 0.0]).splitlines()
    assert lines[0] == "        1 |#" and lines[4] == "          |##" and lines[-1].endswith("+---")
