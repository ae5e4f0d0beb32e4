"""Holds hvdkit.checkpoint: runs that resume, or start from, another one.

check_one_* are for 1 rank, check_two_* then for 2; test_warm_start.py starts them.
"""

import math
import os
import re
from pathlib import Path

import numpy as np
from small_runs import Outcome, fit_config

from hvdkit import settings as settings_lib
from hvdkit.observe import report
from hvdkit.stop import DONE, WRONG_USE
from tasks.blank import Task

RUNS = Path(os.environ.get("WARM_RUNS", "."))
STEADY = ["--num_steps=6", "--log_every=1", "--optimizer=sgd", "--deterministic"]
STILL = ["--num_steps=40", "--optimizer=sgd", "--base_lr=1e-12", "--deterministic"]
EARLY = [
    *STILL,
    "--eval_every=2",
    "--checkpoint_every=2",
    "--early_stop_evals=3",
    "--keep=9",
]


def run(world, name: str, *flags: str, code: int = DONE) -> str:
    """Trains the skeleton in the folder RUNS/name; its refusal, and what rank 0 printed."""
    words = [
        "train.py",
        "--flagfile=configs/blank.cfg",
        f"--run_dir={RUNS / name}",
        *flags,
    ]
    ended = fit_config(settings_lib.parse(words), world, Task, code=code)
    return ended.message + world.broadcast_object(ended.printed, "warm.said")


def left(name: str) -> Outcome:
    """The outcome that a run has left in its folder, also one of an earlier launch."""
    return Outcome(DONE, "", "", RUNS / name, None)


HEAD = [*STILL, "--num_steps=2", "--num_classes=5", f"--init_from={RUNS / 'first'}"]


def check_one_a_run_with_averages_trains_alike_and_evaluates_them(world):
    run(world, "first", *STEADY)
    run(world, "one", *STEADY, "--ema_decay=0.8")
    plain, one = left("first").summary, left("one").summary
    assert one["weights_sha256"] == plain["weights_sha256"], (
        "evaluating must not change weights"
    )
    assert abs(one["eval_loss"] - plain["eval_loss"]) > 1e-4


def check_one_another_runs_checkpoint_is_gone_on_from_in_a_new_folder(world):
    """Its evaluations were the other run's; where one is due, the new run makes its own."""
    resume = f"--resume={RUNS / 'first'}"
    run(
        world,
        "later",
        *STEADY,
        resume,
        "--eval_every=2",
        "--early_stop_evals=2",
        "--num_steps=8",
    )
    assert (left("later").summary["step"], left("later").summary["exit_reason"]) == (
        8,
        "done",
    )
    file = RUNS / "later" / "config.cfg"
    lines = file.read_text().splitlines()
    assert resume in lines
    said = run(
        world, "later", f"--flagfile={file}", "--num_steps=9", "--early_stop_evals=0"
    )
    assert f"resuming from {RUNS}/later/checkpoints/step-00000008 at step 8" in said, (
        said
    )
    page = report.write(RUNS / "later").read_text()
    assert f"<th>began from</th><td>{RUNS}/first/checkpoints/step-00000006</td>" in page
    run(world, "ended", *STEADY, resume)
    ended = left("ended").summary
    assert (ended["step"], ended["exit_reason"]) == (6, "done") and "eval_loss" in ended
    assert "step-00000006" in left("ended").checkpoints


def check_one_ends_early_where_a_run_gets_no_better(world):
    said = run(world, "early", *EARLY)
    ended = left("early").summary
    assert (ended["step"], ended["exit_reason"]) == (8, "early stop")
    assert "stopped early: no accuracy above" in said and "of step 2, in 3 eval" in said


def suggested(world, name: str, *flags: str) -> tuple[float, str]:
    """The rate that --find_lr suggests on its page, all that it leaves; and what it printed."""
    said = run(world, name, "--find_lr", "--warmup_steps=0", "--num_steps=100", *flags)
    rate = float(re.search(r"try --base_lr=(\S+):", said)[1])
    page = (RUNS / f"{name}-find_lr.html").read_text()
    assert f"suggested: {rate:.1e}" in page and not (RUNS / name).exists()
    return rate, said


def check_one_a_rate_is_suggested_of_rates_that_rise(world):
    rate, said = suggested(world, "rate-of-one")
    rates = [float(row) for row in re.findall(r"^\s*(\d\.\d\de[-+]\d\d)  ", said, re.M)]
    assert rates[0] == 1e-7 and rates == sorted(rates) and len(rates) > 8
    assert 1e-5 < rate < 5


def check_two_ranks_suggest_the_same_rate(world):
    """As --base_lr, which --lr_scaling multiplies."""
    rate, _ = suggested(world, "rate-of-two", "--lr_scaling=linear")
    page = (RUNS / "rate-of-one-find_lr.html").read_text()
    of_one = float(re.search(r"suggested: ([\d.e+-]+)", page)[1])
    assert math.isclose(2 * rate, of_one, rel_tol=0.1)


def check_two_ranks_evaluate_the_same_averages(world):
    run(world, "two", *STEADY, "--ema_decay=0.8")
    before = left("one").summary["eval_loss"]
    assert math.isclose(left("two").summary["eval_loss"], before, rel_tol=1e-5)
    # Has nothing left to do but to evaluate.
    run(world, "one", *STEADY, "--ema_decay=0.8")
    assert math.isclose(left("one").summary["eval_loss"], before, rel_tol=1e-9)


def check_two_ranks_end_at_the_same_step_again(world):
    early = left("early")
    before = early.summary["eval_loss"]
    run(world, "early", *EARLY, f"--resume={RUNS / 'early/checkpoints/step-00000006'}")
    assert early.summary["step"] == 8
    evaluated = early.evaluated
    run(world, "early", *EARLY)  # has nothing left to do but to evaluate
    assert early.summary["step"] == 8 and early.evaluated == evaluated
    assert math.isclose(early.summary["eval_loss"], before, rel_tol=1e-6)


def check_two_ranks_start_from_another_runs_weights(world):
    start = f"--init_from={RUNS / 'first'}"
    said = run(world, "second", *STILL, "--num_steps=2", start)
    assert said.count(f"starting from the weights of {RUNS / 'first'}") == 1
    before = left("first").state(6)
    after = left("second").state(2)
    weights = [name for name in before if name.startswith("model/")]
    assert len(weights) == 4 and after["step"] == 2
    for name in weights:
        np.testing.assert_allclose(after[name], before[name], atol=1e-9)
    # Typed again, it resumes from its own checkpoint.
    said = run(world, "second", *STILL, "--num_steps=3", start)
    assert "resuming from" in said and "starting from" not in said


def check_two_ranks_refuse_a_head_of_another_size_or_leave_it_out_on_request(world):
    said = run(world, "head", *HEAD, code=WRONG_USE)
    # Keras counts its layers over a process.
    assert "/kernel ([32, 3] there, [32, 5] here)" in said, said
    assert "--init_skip_mismatched" in said
    said = run(world, "head", *HEAD, "--init_skip_mismatched")
    assert "left as made: " in said and "/kernel ([32, 3] there" in said, said
    before = left("first").state(6)
    after = left("head").state(2)
    body = next(name for name in before if name.endswith("/dense/kernel"))
    np.testing.assert_allclose(after[body], before[body], atol=1e-9)
