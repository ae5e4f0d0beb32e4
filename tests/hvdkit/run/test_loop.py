"""Whole runs with real ranks, uninterrupted and not, what their folders are not for; wrong use."""

import fcntl
import json
import re
import shutil
import sys

import pytest
from PIL import Image

from hvdkit.checkpoint import files
from ranks import TINY_FLAGS, json_lines, last_lines, launch, launch_well

TRAIN = ["train.py", "--flagfile=configs/demo.cfg"]


def run(ranks, flags, **options):
    return launch_well(ranks, [*TRAIN, *flags], **options)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def sha256(folder):
    return summary(folder)["weights_sha256"]


def lines(folder):
    return json_lines(folder / "metrics.jsonl")


def check_records(folder, ended, *, backend):
    steps = [x for x in lines(folder) if "loss" in x]
    assert [x["step"] for x in steps] == list(range(1, 9))
    assert {"loss", "lr", "samples_per_second", "data_wait", "grad_norm"} <= set(
        steps[0]
    )
    assert 0 < lines(folder)[-1]["eval_miou"] < 1
    assert summary(folder)["exit_reason"] == "done" and summary(folder)["ranks"] == 2
    assert files.verify(folder / "checkpoints" / "step-00000008")
    assert len(list((folder / "checkpoints").iterdir())) <= 2  # --keep=1, and the best
    assert list((folder / "tensorboard").glob("events*"))
    picture = Image.open(folder / "predictions.png")
    assert picture.width > picture.height / 4
    # The chief alone speaks, a line a step, and TensorFlow's start-up lines stay away.
    numbers = re.findall(r"(?:^|>:)step (\d)/8 .* ETA", ended.output, re.M)
    assert numbers == [str(step) for step in range(9 - len(numbers), 9)]
    assert len(numbers) == 8 or backend == "gloo"
    assert "oneDNN" not in ended.output and "absl" not in ended.output


STEADY = ("--deterministic", "--checkpoint_every=3", "--num_steps=8", "--keep=1")


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    flags = [*TINY_FLAGS, *STEADY, f"--data_dir={tiny_data}", f"--run_dir={folder}"]
    check_records(folder, run(2, flags, backend="mpirun"), backend="mpirun")
    return folder


# At step 5, once step 3 is saved, rank 1 makes a file MARK, and waits.
KILLED = """
import os, pathlib, sys, time, hvdkit, train
log = hvdkit.run.actions.Log.__call__
def wait(self, step, result):
    log(self, step, result)
    if step != 5 or self._run.world.rank != 1: return
    third = pathlib.Path(self._run.config.run_dir, "checkpoints/step-00000003")
    while not third.exists(): time.sleep(0.01)
    pathlib.Path(os.environ["MARK"]).touch()
    time.sleep(1000)
hvdkit.run.actions.Log.__call__ = wait
hvdkit.main(train.train, train.Settings, ["train.py", "--flagfile=configs/demo.cfg", *sys.argv[1:]])
"""


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    whole, tiny, tmp_path
):
    """One that is stopped, by a stand-in for the signal: checks_evaluation.py."""
    folder = tmp_path / "run"
    mark = tmp_path / "mark"
    command = ["-c", KILLED, *tiny, *STEADY]
    # Under mpirun: horovodrun's ranks are sent SIGTERM when it is killed, and end some seconds
    # later.
    ended = launch(2, command, "mpirun", env={"MARK": str(mark)}, kill_when=mark.exists)
    assert ended.code == -9, last_lines(ended.output)
    ended = run(2, [*tiny, *STEADY], backend="gloo")
    assert "resuming from" in ended.output
    check_records(folder, ended, backend="gloo")
    assert sha256(folder) == sha256(whole)


# It takes a minute; a smaller model has the same bits without --deterministic.
@pytest.mark.slow
def test_a_run_on_three_ranks_is_run_again_to_the_bit(tiny, tiny_data, tmp_path):
    """A ring adds in the order of what was fused; the last run reads a copy of the demo
    elsewhere."""
    folder = tmp_path / "run"
    run(3, [*tiny, "--deterministic"])
    shutil.copytree(tiny_data, tmp_path / "staged")
    again = [f"--flagfile={folder}/config.cfg", f"--data_dir={tmp_path}/staged"]
    run(3, [*again, f"--run_dir={tmp_path}/again"])
    assert sha256(folder) == sha256(tmp_path / "again")


def test_a_trained_runs_folder_is_not_for_benchmarks_nor_for_two(whole, tiny):
    mine = [*TRAIN, *tiny, f"--run_dir={whole}", "--num_steps=12"]
    # .lease names who came last.
    files = [p for p in whole.rglob("*") if p.is_file() and p.name != ".lease"]
    before = {p: p.read_bytes() for p in files}
    ended = launch(1, [*mine, "--synthetic_data", "--benchmark"])
    assert ended.code == 2
    assert "another --run_dir" in ended.errors()[0]
    # The other run may save once more, and delete what this one would go on from.
    (whole / "checkpoints" / "step-00000009").mkdir()
    with (whole / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = launch(1, mine)
    (whole / "checkpoints" / "step-00000009").rmdir()
    assert ended.code == 76 and "is in use by another run" in ended.errors()[0]
    assert "step-00000009" not in ended.output, (
        "it looked for a checkpoint before it locked"
    )
    left = [p for p in whole.rglob("*") if p.is_file() and p.name != ".lease"]
    assert {p: p.read_bytes() for p in left} == before


def test_bad_flags_under_horovodrun(tiny):
    """Each rank says its exit code, and then ends well so that the launcher kills nobody."""
    command = f"{' '.join([sys.executable, *TRAIN, *tiny])} --reduce_backend=mpi; echo exit-code-$?"
    code = f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"
    ended = launch(2, ["-c", code], "gloo")
    shown = last_lines(ended.output)
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["2"] * 2, shown
    (message,) = ended.errors()
    assert "horovodrun --mpi" in message and "Traceback" not in ended.output, shown
