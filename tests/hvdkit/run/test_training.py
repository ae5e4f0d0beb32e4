"""Whole runs with real ranks, through every way of starting them."""

import fcntl
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from hvdkit.checkpoint import files
from ranks import last_lines, launch, train


def run(ranks, flags, **how):
    ended = train(ranks, *flags, **how)
    assert ended.code == 0, last_lines(ended.output)
    return ended


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def lines(tmp_path):
    return [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("backend", "ranks"), [("alone", 1), ("horovodrun", 2), ("mpi", 2), ("mpirun", 2)]
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


def test_eight_ranks_oversubscribed(tiny, tmp_path):
    run(8, [*tiny, "--global_batch_size=9", "--num_steps=2"], timeout=280)
    assert summary(tmp_path)["ranks"] == 8 and summary(tmp_path)["step"] == 2


def test_evaluation_figures_do_not_depend_on_the_number_of_ranks(tiny, tmp_path):
    """10 samples in batches of 4: 3 batches, a short one among them; every rank has another one.

    A finished run that is started again evaluates its checkpoint and does nothing else.
    """
    figures = {}
    for ranks in (1, 3):
        run(ranks, [*tiny, "--num_steps=6", "--base_lr=0.01"])
        last = lines(tmp_path)[-1].items()
        # A class that does not occur has no IoU: null in JSON.
        figures[ranks] = {k: -1.0 if v is None else v for k, v in last if k.startswith("eval_")}
    assert len(figures[1]) == 14 and figures[1]["eval_miou"] > 0
    assert figures[3] == pytest.approx(figures[1], rel=1e-12)


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(tiny, tmp_path):
    flags = [*tiny, "--deterministic", "--checkpoint_every=3", "--num_steps=8", "--keep=1"]
    run(2, [*flags, f"--run_dir={tmp_path / 'whole'}"])
    checkpoints = tmp_path / "run" / "checkpoints"
    train(2, *flags, backend="gloo", kill_when=lambda: (checkpoints / "step-00000003").exists())
    assert not (tmp_path / "run" / "summary.json").exists(), "killed too late"
    ended = run(2, flags)
    assert "resuming from" in ended.output
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]
    assert [x["step"] for x in lines(tmp_path) if "loss" in x] == list(range(1, 9))
    assert len(list(checkpoints.iterdir())) <= 2  # the newest, and the best if it is another


def test_a_run_can_be_run_again_from_its_own_config(tiny, tmp_path):
    run(1, [*tiny, "--deterministic"], backend="alone")
    first = summary(tmp_path)["weights_sha256"]
    again = ["--flagfile=" + str(tmp_path / "run" / "config.cfg"), "--resume=never"]
    run(1, again, backend="alone")
    assert summary(tmp_path)["weights_sha256"] == first


def test_loss_falls(tiny, tmp_path):
    run(2, [*tiny, "--num_steps=60", "--global_batch_size=8", "--log_every=5"])
    losses = [x["loss"] for x in lines(tmp_path) if "loss" in x]
    assert np.mean(losses[-2:]) < 0.8 * losses[0]


def test_deterministic_runs_on_three_ranks_are_bit_identical(tiny, tiny_data, tmp_path):
    """On 3 ranks the order of a ring's additions depends on what was fused with what.

    The second reads a copy of the demo elsewhere: not its folder's name says that it is the demo.
    """
    sums, data = [], tmp_path / "staged"
    shutil.copytree(tiny_data, data)
    for name, root in (("first", tiny_data), ("second", data)):
        folder = tmp_path / name
        flags = ["--deterministic", "--num_steps=8", f"--run_dir={folder}", f"--data_dir={root}"]
        run(3, [*tiny, *flags])
        sums.append(json.loads((folder / "summary.json").read_text())["weights_sha256"])
    assert sums[0] == sums[1]


def test_after_training_all_ranks_hold_the_same_weights_and_statistics(tiny, tmp_path):
    """`--bn_sync=none` leaves the moving statistics apart: what the sync is for.

    That they are the same with `mean` and `full` every run here tells itself, at its end.
    """
    script = (
        "import os, sys; sys.path.insert(0, '.'); import hvdkit, train; from hvdkit.ranks import world as w;"
        "seen = []; hash_all = w.weights_sha256;"
        "w.weights_sha256 = lambda vs: seen.append(hash_all(vs)) or seen[-1];"
        "code = hvdkit.main(train.train, train.Settings, ['train.py', '--flagfile=configs/demo.cfg', *sys.argv[1:]]);"
        "print('weights', seen[0]); sys.exit(code)"
    )
    hashes = {}
    for mode, ranks in (("moments", 3), ("none", 2)):
        flags = [*tiny, f"--bn_sync={mode}", f"--run_dir={tmp_path / mode}"]
        ended = launch(ranks, ["-c", script, *flags], "gloo")  # which tears no line
        assert ended.code == 0, last_lines(ended.output)
        hashes[mode] = re.findall(r"weights ([0-9a-f]{64})", ended.output)
    assert len(hashes["moments"]) == 3 and len(set(hashes["moments"])) == 1
    assert len(set(hashes["none"])) == 2


def test_ranks_that_drifted_apart_are_told(tiny, tmp_path):
    """The run's own check at its end, seen to fail: one rank's weights are changed in mid-run."""
    script = (
        "import os, sys; sys.path.insert(0, '.'); import hvdkit, train; Run = hvdkit.run.loop.Run; finish = Run.finish;\n"
        "def drifted(run):\n"
        "    if run.world.rank == 1: run.model.variables[0].assign_add([[[[1.0]]]])\n"
        "    finish(run)\n"
        "Run.finish = drifted\n"
        "sys.exit(hvdkit.main(train.train, train.Settings, ['train.py', '--flagfile=configs/demo.cfg', *sys.argv[1:]]))"
    )
    ended = launch(2, ["-c", script, *tiny])
    assert ended.code != 0
    assert len(ended.errors()) == 1 and "final weights on rank 1" in ended.errors()[0]


def test_a_stop_signal_saves_and_the_run_goes_on_to_the_same_weights(tiny, tmp_path):
    """SIGTERM to one rank: all agree on a step, save, exit 75; typed again, it goes on."""
    flags = [*tiny, "--deterministic", "--num_steps=12"]
    run(2, [*flags, f"--run_dir={tmp_path / 'whole'}"])
    script = (
        "import os, signal, sys; sys.path.insert(0, '.'); import hvdkit, train; log = hvdkit.run.actions.Log.__call__;\n"
        "def stop(self, step, result):\n"
        "    log(self, step, result)\n"
        "    if step == 5 and self._run.world.rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
        "hvdkit.run.actions.Log.__call__ = stop\n"
        "code = hvdkit.main(train.train, train.Settings, ['train.py', '--flagfile=configs/demo.cfg', *sys.argv[1:]])\n"
        "print(f'exit-code-{code}')"
    )
    ended = launch(2, ["-c", script, *flags])
    assert re.findall(r"exit-code-(\d+)", ended.output) == ["75", "75"], ended.output
    assert summary(tmp_path)["exit_reason"] == "preempted" and summary(tmp_path)["step"] < 12
    run(2, flags)
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]


def test_a_run_that_diverges_says_so_and_keeps_its_checkpoints(tiny, tmp_path):
    flags = [*tiny, "--checkpoint_every=1", "--optimizer=sgd", "--lr_policy=constant"]
    run(1, [*flags, "--num_steps=2", "--base_lr=0.01"])
    ended = train(2, *flags, "--num_steps=40", "--base_lr=1e30")
    assert ended.code != 0
    assert len(ended.errors()) == 1 and "diverged at step" in ended.errors()[0], ended.output
    assert summary(tmp_path)["exit_reason"] == "diverged"
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert kept and all(files.fault(path) is None for path in kept)


def test_synthetic_data_and_benchmark(tiny, tmp_path):
    """Needs no data, saves nothing, says the speed."""
    flags = [*tiny, "--synthetic_data", "--benchmark", "--data_dir=/nowhere", "--num_steps=15"]
    ended = run(2, flags)
    assert summary(tmp_path)["exit_reason"] == "benchmark"
    found = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert found["samples_per_second"]["mean"] > 0 and len(found["by_rank"]) == 2
    assert ended.output.count("95 % interval") == 1
    assert summary(tmp_path)["samples_per_second"] > 0
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_trained_runs_folder_is_not_for_benchmarks_nor_for_two(tiny, tmp_path):
    run(1, [*tiny, "--num_steps=2"])
    folder = tmp_path / "run"
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ended = train(1, *tiny, "--synthetic_data", "--benchmark")
    assert ended.code == 2
    assert "choose another --run_dir" in ended.errors()[0]
    # The other run may save once more, and delete what this one would go on from.
    (folder / "checkpoints" / "step-00000009").mkdir()
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = train(1, *tiny, "--num_steps=4")
    assert ended.code == 2 and "is in use by another run" in ended.errors()[0]
    assert "step-00000009" not in ended.output, "it looked for a checkpoint before it locked"
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
