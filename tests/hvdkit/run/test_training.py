"""Whole runs with real ranks, through every way of starting them."""

import fcntl
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from hvdkit.checkpoint import files
from ranks import TINY_FLAGS, last_lines, launch, train


def run(ranks, flags, **how):
    ended = train(ranks, *flags, **how)
    assert ended.code == 0, last_lines(ended.output)
    return ended


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def lines(tmp_path):
    return [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("alone", 1),
        ("horovodrun", 2),
        pytest.param("mpi", 2, marks=pytest.mark.slow),
        ("mpirun", 2),
    ],
)
def test_a_run_starts_trains_and_leaves_its_records(backend, ranks, tiny, tmp_path):
    ended = run(ranks, tiny, backend=backend)
    folder = tmp_path / "run"
    steps = [x for x in lines(tmp_path) if "loss" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4]
    assert {"loss", "lr", "samples_per_second", "data_wait", "grad_norm"} <= set(steps[0])
    assert 0 < lines(tmp_path)[-1]["eval_miou"] < 1
    assert summary(tmp_path)["exit_reason"] == "done" and summary(tmp_path)["ranks"] == ranks
    assert re.fullmatch(r"[0-9a-f]{64}", summary(tmp_path)["weights_sha256"])
    assert files.fault(folder / "checkpoints" / "step-00000004") is None
    assert list((folder / "tensorboard").glob("events*"))
    picture = Image.open(folder / "predictions.png")
    assert picture.width > picture.height / 4
    assert f"report: {folder / 'report.html'}" in ended.output
    # The chief alone speaks, a line a step, and TensorFlow's start-up lines stay away.
    own = [x for x in ended.output.splitlines() if re.search(r"(^|>:)step \d/4 .* ETA", x)]
    assert len(own) == 4
    if backend in ("alone", "mpirun"):  # horovodrun itself imports TensorFlow
        assert "oneDNN" not in ended.output and "absl" not in ended.output


def test_evaluation_figures_do_not_depend_on_the_number_of_ranks(tiny, tmp_path):
    """10 samples in batches of 4: 3 batches, a short one among them; every rank has another one.

    A finished run that is started again evaluates its checkpoint and does nothing else.
    """
    figures = {}
    for ranks in (1, 3):
        run(ranks, [*tiny, "--num_steps=2", "--base_lr=0.01"])
        last = lines(tmp_path)[-1].items()
        # A class that does not occur has no IoU: null in JSON.
        figures[ranks] = {k: -1.0 if v is None else v for k, v in last if k.startswith("eval_")}
    assert len(figures[1]) == 14 and figures[1]["eval_miou"] > 0
    assert figures[3] == pytest.approx(figures[1], rel=1e-12)


STEADY = ("--deterministic", "--checkpoint_every=3", "--num_steps=8", "--keep=1")


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    """The folder of a run of 8 steps on 2 ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(2, [*TINY_FLAGS, *STEADY, f"--data_dir={tiny_data}", f"--run_dir={folder}"])
    return folder


def sha256(folder):
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(
    whole, tiny, tmp_path
):
    checkpoints = tmp_path / "run" / "checkpoints"
    killed = {"backend": "gloo", "kill_when": (checkpoints / "step-00000003").exists}
    train(2, *tiny, *STEADY, **killed)
    assert not (tmp_path / "run" / "summary.json").exists(), "killed too late"
    ended = run(2, [*tiny, *STEADY])
    assert "resuming from" in ended.output
    assert sha256(tmp_path / "run") == sha256(whole)
    assert [x["step"] for x in lines(tmp_path) if "loss" in x] == list(range(1, 9))
    assert len(list(checkpoints.iterdir())) <= 2  # the newest, and the best if it is another


STOPPED = """
import os, signal, sys, hvdkit, train
log = hvdkit.run.actions.Log.__call__
def stop(self, step, result):
    log(self, step, result)
    if step == 5 and self._run.world.rank == 1: os.kill(os.getpid(), signal.SIGTERM)
hvdkit.run.actions.Log.__call__ = stop
words = ["train.py", "--flagfile=configs/demo.cfg", *sys.argv[1:]]
code = hvdkit.main(train.train, train.Settings, words)
print(f"exit-code-{code}")
"""


def test_a_stop_signal_saves_and_the_run_goes_on_to_the_same_weights(whole, tiny, tmp_path):
    """SIGTERM to one rank: all agree on a step, save, exit 75; typed again, it goes on."""
    ended = launch(2, ["-c", STOPPED, *tiny, *STEADY])
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["75", "75"], ended.output
    assert summary(tmp_path)["exit_reason"] == "preempted" and summary(tmp_path)["step"] < 8
    run(2, [*tiny, *STEADY])
    assert sha256(tmp_path / "run") == sha256(whole)


def test_a_run_on_three_ranks_is_run_again_to_the_bit_from_its_own_config(
    tiny, tiny_data, tmp_path
):
    """On 3 ranks the order of a ring's additions depends on what was fused with what.

    The second reads a copy of the demo elsewhere: not its folder's name says that it is the demo.
    """
    run(3, [*tiny, "--deterministic"])
    shutil.copytree(tiny_data, tmp_path / "staged")
    again = [f"--flagfile={tmp_path}/run/config.cfg", f"--data_dir={tmp_path}/staged"]
    run(3, [*again, f"--run_dir={tmp_path}/again"])
    assert sha256(tmp_path / "again") == sha256(tmp_path / "run")


def test_a_trained_runs_folder_is_not_for_benchmarks_nor_for_two(whole, tiny):
    mine = [*tiny, f"--run_dir={whole}", "--num_steps=12"]
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    ended = train(1, *mine, "--synthetic_data", "--benchmark")
    assert ended.code == 2
    assert "choose another --run_dir" in ended.errors()[0]
    # The other run may save once more, and delete what this one would go on from.
    (whole / "checkpoints" / "step-00000009").mkdir()
    with (whole / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = train(1, *mine)
    (whole / "checkpoints" / "step-00000009").rmdir()
    assert ended.code == 2 and "is in use by another run" in ended.errors()[0]
    assert "step-00000009" not in ended.output, "it looked for a checkpoint before it locked"
    assert {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before


def test_synthetic_data_and_benchmark(tiny, tmp_path):
    """Needs no data, saves nothing, says the speed."""
    flags = [*tiny, "--synthetic_data", "--benchmark", "--data_dir=/nowhere", "--num_steps=15"]
    ended = run(1, flags)
    assert summary(tmp_path)["exit_reason"] == "benchmark"
    found = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert found["samples_per_second"]["mean"] > 0
    assert ended.output.count("95 % interval") == 1
    assert summary(tmp_path)["samples_per_second"] > 0
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_loss_falls(tiny, tmp_path):
    run(2, [*tiny, "--num_steps=60", "--global_batch_size=8", "--log_every=5"])
    losses = [x["loss"] for x in lines(tmp_path) if "loss" in x]
    assert np.mean(losses[-2:]) < 0.8 * losses[0]


@pytest.mark.slow
def test_eight_ranks_oversubscribed(tiny, tmp_path):
    run(8, [*tiny, "--global_batch_size=9", "--num_steps=2"], timeout=280)
    assert summary(tmp_path)["ranks"] == 8 and summary(tmp_path)["step"] == 2
