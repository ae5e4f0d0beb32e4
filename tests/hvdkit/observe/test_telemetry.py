"""Records and trackers of a run: speeds are of training alone, by a clock that the test turns."""

import contextlib
import json
import os
import resource
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit import whole_files
from hvdkit.data.place import Place
from hvdkit.data.sampler import Sampler
from hvdkit.observe import telemetry, trackers
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from ranks import json_lines, last_lines, launch, launch_well

FIGURES = {"loss": 1.0, "lr": 0.1}


def opened(folder, first_step=0) -> telemetry.Telemetry:
    config = Settings(
        run_dir=str(folder), num_steps=100, global_batch_size=8, trackers=""
    )
    sampler = Sampler(50, 8, 1, 1, 0, 1, start=Place(first_step, 8 * first_step))
    return telemetry.Telemetry(config, World(0, 1, 0, 1), sampler)


def log(writer: telemetry.Telemetry, step: int, waited: float = 0.0) -> None:
    writer.step(step, FIGURES, losses=[1.0], waited=waited, times={})


def test_speed_is_of_the_steps_since_the_last_line_without_evaluation(
    tmp_path, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with opened(tmp_path, first_step=10) as writer:
        now += 20.0
        log(writer, 20, waited=5.0)  # 80 samples in 20 s
        assert writer.median_speed() is None  # the interval holds the start
        with writer.not_training():
            now += 300.0
        now += 5.0
        log(writer, 25)  # 40 samples in 5 s
        now += 10.0
        log(writer, 30, waited=10.0)  # 40 samples in 10 s
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert [line["samples_per_second"] for line in lines] == [4.0, 8.0, 4.0]
    assert [line["data_wait"] for line in lines] == [0.25, 0.0, 1.0]
    assert writer.median_speed() == 6.0  # the median of 8 and 4


def test_one_note_says_that_a_run_waits_for_its_data(tmp_path, capsys):
    with opened(tmp_path) as writer:
        # Nothing is read ahead of step 1.
        for step, waited in enumerate((9.0, 0.0, 9.0, 9.0), start=1):
            time.sleep(0.01)
            log(writer, step, waited)
            printed = capsys.readouterr().out
            is_noted = "input-bound: rank 0 waited for data 100% of the time" in printed
            assert is_noted == (step == 3)
    waits = [line["data_wait"] for line in json_lines(tmp_path / "metrics.jsonl")]
    assert [wait == 0 for wait in waits] == [False, True, False, False]


def test_a_loss_that_nobody_would_want_is_noted_once(tmp_path, capsys):
    with opened(tmp_path) as writer:
        for step, loss in enumerate((2.0, 8.0, 7.0, 8.0, 8.0, 2e6), start=1):
            writer.step(
                step, FIGURES | {"loss": loss}, losses=[1.0], waited=0.0, times={}
            )
    printed = capsys.readouterr().out
    assert (
        printed.count("has risen from 2 to 8") == 1
        and printed.count("the loss is 2e+06") == 1
    )


def test_lines_of_a_disk_that_was_full_are_written_once_it_is_not(tmp_path, capsys):
    """A limit of the file's size stands for the disk: it takes half a line, and then nothing."""
    file = tmp_path / "metrics.jsonl"

    @contextlib.contextmanager
    def full_after(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        _, hard = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with opened(tmp_path) as writer:
        log(writer, 1)
        with full_after(file.stat().st_size + 20):
            log(writer, 2)
            assert (
                file.read_text().count("\n") == 1 < len(file.read_text().splitlines())
            )
            log(writer, 3)
        log(writer, 4)
        with full_after(file.stat().st_size):
            log(writer, 5)  # no line comes after it
    assert [line["step"] for line in json_lines(file)] == [1, 2, 3, 4, 5]
    with full_after(file.stat().st_size), opened(tmp_path) as writer:
        log(writer, 6)
    printed = capsys.readouterr().out
    assert "the last 1 lines of metrics.jsonl are lost" in printed
    assert printed.count("metrics.jsonl cannot be written") == 2


def test_figures_of_each_layer_and_the_norm_of_all(tmp_path):
    """To gradients.jsonl and to trackers; NaN is null, as JSON has none."""
    shown = []
    with opened(tmp_path) as writer:
        tracker = SimpleNamespace(
            close=lambda: None, scalars=lambda *given: shown.append(given)
        )
        writer._trackers = [tracker]
        writer.gradients(4, ["a", "b"], np.array([[1.0, 3.0, 0.0], [np.nan, 4.0, 0.5]]))
    layers = {
        "a": {"sum": 1.0, "norm": 3.0, "nonfinite": 0.0},
        "b": {"sum": None, "norm": 4.0, "nonfinite": 0.5},
    }
    (line,) = json_lines(tmp_path / "gradients.jsonl")
    assert line == {"step": 4, "global_norm": 5.0, "layers": layers}
    ((step, values),) = shown
    assert step == 4 and values["gradient_norm/b"] == 4.0 and len(values) == 6


def test_what_json_has_no_word_for_is_null(tmp_path):
    numbers = {"x": [np.nan, (1.5, -np.inf)], "y": {"z": "nan"}}
    whole_files.write_json(tmp_path / "a", numbers)
    assert json.loads((tmp_path / "a").read_text()) == {
        "x": [None, [1.5, None]],
        "y": {"z": "nan"},
    }


def test_trackers_get_a_few_figures_of_thousands_of_ranks():
    few = telemetry._by_rank(range(16))
    assert few["loss_by_rank/7"] == 7 and len(few) == 20
    losses = np.arange(8192.0)
    losses[5] = np.nan
    assert len(telemetry._by_rank(losses)) == 4
    assert telemetry._by_rank(losses)["loss_by_rank/worst_rank"] == 5
    assert telemetry._by_rank([1.0, 4.0, 2.0])["loss_by_rank/median"] == 2


def test_a_tracker_without_pictures_leaves_the_others_theirs(tmp_path, capsys):
    class Broken:
        def pictures(self, step, pictures):
            raise RuntimeError("no pictures here")

    shown = []
    with opened(tmp_path) as writer:
        good = SimpleNamespace(pictures=lambda *given: shown.append(given))
        writer._trackers = [Broken(), good]
        pictures = np.zeros([2, 8, 8, 3], np.uint8)
        writer._pictures(5, pictures)
        writer._trackers.clear()
    assert len(shown) == 1 and (tmp_path / "predictions.png").stat().st_size
    printed = capsys.readouterr().out
    assert "Broken cannot be written; training continues: no pictures here" in printed
    assert "predictions.png" not in printed


OWN = '''
"""Records its calls beside the run's folder."""
import json, os
class Own:
    def __init__(self, run_dir, settings):
        self.path = run_dir.parent / "calls.jsonl"
        self.note(["init", settings["optimizer"]])
        if "REFUSE" in os.environ: raise RuntimeError("no server\\nthere")
    def note(self, entry):
        with self.path.open("a") as file: file.write(json.dumps(entry) + "\\n")
    def scalars(self, step, values):
        self.note([step, sorted(values)])
        if step == 2: raise RuntimeError("the server is gone")
    def pictures(self, step, pictures): self.note([step, list(pictures.shape)])
    def close(self): self.note(["close", ""])
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own", None)


def test_a_tracker_of_ones_own_gets_what_is_logged(own, tmp_path):
    words = [
        "train.py",
        "--flagfile=configs/blank.cfg",
        "--num_steps=4",
        "--log_every=1",
    ]
    words += ["--trackers=own:Own", f"--run_dir={tmp_path}/run"]
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = launch_well(2, words, "mpirun", env={"PYTHONPATH": python_path})
    note = "Own cannot be written; training continues: the server is gone"
    assert ended.output.count(note) == 1, last_lines(ended.output)
    calls = json_lines(tmp_path / "calls.jsonl")
    assert calls[0] == ["init", "adam"] and calls[-1] == ["close", ""]
    assert [step for step, _ in calls[1:-1]] == [1, 2, 3, 4, 4, 4]
    assert "train/loss" in calls[1][1] and "eval/loss" in calls[-3][1]
    assert len(calls[-2][1]) == 4 and calls[-2][1][-1] == 3  # the pictures' shape
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_tracker_that_is_not_there_leaves_the_runs_records(tmp_path):
    words = [
        "train.py",
        "--flagfile=configs/blank.cfg",
        "--num_steps=2",
        f"--run_dir={tmp_path}/run",
    ]
    launch_well(1, words)
    (tmp_path / "own.py").write_text(OWN)
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": python_path, "REFUSE": "1"}
    records = ("summary.json", "metrics.jsonl", "config.cfg")
    before = [(tmp_path / "run" / file).read_text() for file in records]
    # The one has no class, the other none who logs in.
    for name, resume in (("gone", "auto"), ("own", "auto"), ("own", "never")):
        trackers_flag = f"--trackers={name}:Own"
        ended = launch(1, [*words, trackers_flag, f"--resume={resume}"], env=env)
        assert ended.code == 2 and len(ended.errors()) == 1, ended.output
        assert before == [(tmp_path / "run" / file).read_text() for file in records]


NEITHER = {"dry_run": False, "find_lr": False, "optimizer": "adam"}


@pytest.mark.parametrize("mode", ["dry_run", "find_lr"])
def test_what_keeps_nothing_has_no_tracker(mode, own, tmp_path):
    assert trackers.make(["own:Own"], tmp_path / "run", NEITHER | {mode: True}) == []
    assert not (tmp_path / "calls.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own:Own", "no server there"),
        ("json:Other", "has no attribute 'Other'"),
        ("gone:Own", "No module named 'gone'"),
    ],
)
def test_a_tracker_that_cannot_be_started_is_named(
    own, tmp_path, monkeypatch, name, words
):
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(
        ValueError, match=f"--trackers={name} cannot be started: .*{words}"
    ):
        trackers.make([name], tmp_path / "run", NEITHER)
