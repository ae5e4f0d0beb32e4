"""A train.py that somebody wrote otherwise: right, or refused in one sentence."""

import json

import pytest

from ranks import last_lines, launch

PROGRAM = """
import sys, hvdkit, train
from settings import Settings
def own(run):
    {}
sys.exit(hvdkit.main(own, Settings, sys.argv))
"""
FLAGS = ("--flagfile=configs/blank.cfg", "--num_steps=6", "--warmup_steps=0", "--resume=never")
LOOP = "step = {}\n    for batch in run.batches():\n        "


def trained(tmp_path, body, *flags):
    command = ["-c", PROGRAM.format(body), *FLAGS, f"--run_dir={tmp_path}/run", *flags]
    return launch(2, command, timeout=100)


@pytest.mark.parametrize(
    "body, flags, why",
    [
        (LOOP.format("train.make_step(run)") + "run.after_step(step(batch))",
         ["--virtual_ranks=2"], "--virtual_ranks needs run.make_step"),
        (LOOP.format("run.make_step(lambda run: train.make_step(run))")
         + "run.after_step(step(batch))", ["--pack_bytes=99"], "make_step in train.py is not"),
        (LOOP.format("run.make_step(train.make_step)") + "step(batch)", [], "needs one run.after"),
        (LOOP.format("run.make_step(train.make_step)") + "break", [], "needs one run.after"),
        ("for batch in run.batches(): pass", [], "make the step"),
        ("pass", [], "needs one run.after"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_in_silence_is_refused(tmp_path, body, flags, why):
    ended = trained(tmp_path, body, *flags)
    (error,) = ended.errors()
    assert ended.code == 2 and why in error, last_lines(ended.output)
    assert "Traceback" not in ended.output


def test_a_run_that_train_ends_says_so_and_is_saved(tmp_path):
    body = "if run.step == 4: break"
    loop = LOOP.format("run.make_step(train.make_step)") + "run.after_step(step(batch))\n        "
    ended = trained(tmp_path, loop + body)
    assert ended.code == 0 and "train.py ended the run at step 4 of 6" in ended.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["step"] == 4 and summary["exit_reason"] == "ended by train.py"
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
