"""A run handed from 3 ranks to 1 and to 4, by a stop and a kill, is the run that 2 ranks made."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import PROJECT, last_lines, launch

FLAGS = [
    *("--flagfile=configs/digits.cfg", "--virtual_ranks=4", "--global_batch_size=22"),
    *("--num_steps=12", "--warmup_steps=0", "--log_every=1", "--eval_every=5"),
    *("--checkpoint_every=2", "--keep=9"),
]
# As train.py, but rank 1 gets a SIGTERM when step 4 is logged.
STOPPED = """
import os, signal, sys
sys.path.insert(0, ".")
import hvdkit, train
log = hvdkit.run.actions.Log.__call__
def stop(self, step, result):
    log(self, step, result)
    if step == 4 and self._run.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
hvdkit.run.actions.Log.__call__ = stop
print(f"exit-code-{hvdkit.main(train.train, train.Settings, ['train.py', *sys.argv[1:]])}")
"""


def compare(*folders: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "hvdkit", "compare", *map(str, folders)]
    return subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=60)


def train(ranks: int, folder: Path, *flags: str, **how):
    ended = launch(ranks, ["train.py", *FLAGS, f"--run_dir={folder}", *flags], **how)
    assert how or ended.code == 0, last_lines(ended.output)
    return ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """What 2 ranks make without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(2, folder)
    return folder


def test_stopped_on_3_ranks_killed_on_1_and_ended_by_4_it_is_the_run_of_2(whole, tmp_path):
    handed = tmp_path / "handed"
    ended = launch(3, ["-c", STOPPED, *FLAGS, f"--run_dir={handed}"])
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["75"] * 3, last_lines(ended.output)
    stopped = json.loads((handed / "summary.json").read_text())["step"]
    assert 4 <= stopped < 8

    eighth = handed / "checkpoints" / "step-00000008"
    train(1, handed, kill_when=eighth.exists)
    assert not (handed / "summary.json").exists(), "killed too late"

    ended = train(4, handed)
    assert "resuming from" in ended.output and "another run than" not in ended.output
    found = compare(whole, handed)
    assert found.returncode == 0 and "the same to the last bit" in found.stdout, found.stdout


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "code", "words"),
    [
        ("summary.json", '"weights_sha256": "', '"weights_sha256": "0', 1, "different weights"),
        ("summary.json", '"step": 12', '"step": 11', 1, "ended at different steps: 12 and 11"),
        ("metrics.jsonl", '{"step": 3, "loss": ', '{"step": 3, "loss": 1', 1, "first at step 3"),
        ("metrics.jsonl", '{"step": 3, "loss": ', '{"loss": ', 2, "lines that no run writes"),
        ("metrics.jsonl", "{", "7\n{", 2, "lines that no run writes"),
        ("summary.json", '"threads": "1"', '"threads": "2"', 2, "threads (1; 2)"),
        ("summary.json", '"fingerprint"', '"other"', 2, "no summary of a run"),
        ("summary.json", '"weights_sha256"', '"other"', 2, "no summary of a run"),
        ("summary.json", "{", "", 2, "folders of runs that have ended"),
    ],
)
def test_runs_that_are_not_the_same_are_told_how(whole, tmp_path, name, old, new, code, words):
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    change(other, name, old, new)
    found = compare(whole, other)
    assert found.returncode == code and words in found.stdout + found.stderr, found
    assert "Traceback" not in found.stderr


def test_what_has_not_ended_is_named(whole, tmp_path):
    found = compare(whole, tmp_path)
    assert found.returncode == 2 and f"{tmp_path} is no run's folder" in found.stderr
    (tmp_path / "config.cfg").write_text("--seed=2\n")
    found = compare(whole, tmp_path)
    assert (
        found.returncode == 2 and f"{tmp_path}/summary.json is no summary of a run" in found.stderr
    )


def test_lines_that_are_missing_are_told(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "other")
    (tmp_path / "other" / "metrics.jsonl").write_text("")
    found = compare(whole, tmp_path / "other")
    assert found.returncode == 1 and "and 0 lines" in found.stdout


def test_one_folder_is_not_compared_with_itself(whole):
    found = compare(whole, whole / ".." / whole.name)
    assert found.returncode == 2 and "one folder" in found.stdout


def test_times_are_no_difference(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "other")
    change(tmp_path / "other", "metrics.jsonl", '"samples_per_second": ', '"samples_per_second": 1')
    assert compare(whole, tmp_path / "other").returncode == 0


def test_a_build_that_changed_is_named_on_resume(whole, tmp_path):
    """Here a switch of TensorFlow's kernels."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    ended = train(1, run, "--num_steps=13", env={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert ended.code == 0
    assert "switches (none; TF_ENABLE_ONEDNN_OPTS=0)" in ended.output, ended.output


def test_ranks_that_compute_otherwise_are_refused(tmp_path):
    script = (
        "import os, sys; sys.path.insert(0, '.')\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\n"
        "import hvdkit, train; sys.exit(hvdkit.main(train.train, train.Settings, ['train.py', *sys.argv[1:]]))"
    )
    ended = launch(2, ["-c", script, *FLAGS, f"--run_dir={tmp_path}"], "mpirun")
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "differ in switches (none; TF_ENABLE_ONEDNN_OPTS=0)" in error
    assert "--virtual_ranks=4" in error and not list(tmp_path.iterdir())
