"""--trackers: TensorBoard, and a class of one's own."""

from __future__ import annotations

import json

import numpy as np
import psutil
import pytest

from hvdkit.observe import telemetry, trackers
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from ranks import last_lines, launch

FLAGS = ["train.py", "--flagfile=configs/blank.cfg", "--num_steps=4", "--log_every=1"]


def test_weeks_of_logs_leave_memory_as_it_was(tmp_path):
    """As numbers of Python's, 20,000 steps and figures took 31 MB."""
    board = trackers.TensorBoard(tmp_path, {})
    memory = psutil.Process().memory_info
    for step in range(21_000):
        board.scalars(step, {"loss": 1.0 / (step + 1)})
        if step == 1000:
            before = memory().rss
    assert memory().rss - before < 5e6
    board.close()


def test_trackers_get_a_few_figures_of_thousands_of_ranks():
    few = telemetry._by_rank(range(16))
    assert few["loss_by_rank/7"] == 7 and len(few) == 20
    losses = np.arange(8192.0)
    losses[5] = np.nan
    assert len(telemetry._by_rank(losses)) == 4
    assert telemetry._by_rank(losses)["loss_by_rank/worst_rank"] == 5
    assert telemetry._by_rank([1.0, 4.0, 2.0])["loss_by_rank/median"] == 2


OWN = '''
"""Notes what it is asked in the run's folder."""
import json, os
class Own:
    def __init__(self, run_dir, settings):
        self.path = run_dir.parent / "told.jsonl"
        self.note(["init", settings["optimizer"]])
        if "REFUSE" in os.environ: raise RuntimeError("no server\\nthere")
    def note(self, what):
        with self.path.open("a") as file: file.write(json.dumps(what) + "\\n")
    def scalars(self, step, values):
        self.note([step, sorted(values)])
        if step == 2: raise RuntimeError("the server is gone")
    def pictures(self, step, pictures): self.note([step, list(pictures.shape)])
    def close(self): self.note(["close", ""])
'''


@pytest.fixture
def own(tmp_path):
    """The environment of a run with a module `own`, and its command."""
    (tmp_path / "own.py").write_text(OWN)
    words = [*FLAGS, "--trackers=own:Own", f"--run_dir={tmp_path}/run"]
    return {"PYTHONPATH": str(tmp_path)}, words


def test_a_tracker_of_ones_own_gets_what_is_logged(own, tmp_path):
    env, words = own
    ended = launch(2, words, "mpirun", env=env)
    assert ended.code == 0, last_lines(ended.output)
    said = "Own cannot be written; training continues: the server is gone"
    assert ended.output.count(said) == 1, last_lines(ended.output)
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert told[0] == ["init", "adam"] and told[-1] == ["close", ""]
    assert [step for step, _ in told[1:-1]] == [1, 2, 3, 4, 4, 4]
    assert "train/loss" in told[1][1] and "eval/loss" in told[-3][1]
    assert len(told[-2][1]) == 4 and told[-2][1][-1] == 3  # pictures
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("flag", ["--dry_run", "--find_lr"])
def test_what_keeps_nothing_tells_trackers_nothing(flag, own, tmp_path):
    env, words = own
    ended = launch(1, [*words, flag], env=env)
    assert ended.code == 0, last_lines(ended.output)
    assert not (tmp_path / "told.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own:Own", "no server there"),
        ("own:Other", "has no attribute 'Other'"),
        ("gone:Own", "No module named 'gone'"),
    ],
)
def test_a_tracker_that_cannot_be_started_is_refused_in_one_sentence(name, words, own):
    env, command = own
    ended = launch(2, [*command, f"--trackers={name}"], "mpirun", env=env | {"REFUSE": "1"})
    assert ended.code == 2 and "Traceback" not in ended.output, last_lines(ended.output)
    (error,) = ended.errors()
    assert f"--trackers={name} cannot be started: " in error and words in error


def test_speeds_of_weeks_are_a_bounded_list(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "_RATES", 50)
    monkeypatch.setattr(telemetry, "say", lambda *_: None)
    config = Settings(run_dir=str(tmp_path), trackers="")
    with telemetry.Telemetry(config, World(0, 1, 0, 1), 0, 100) as records:
        assert records.median_speed() is None
        for step in range(200):
            records.step(step, 8, {"loss": 1.0, "lr": 0.1}, [1.0], 0.0, {})
            assert (records.median_speed() is None) == (step == 0)  # which builds the graphs
        assert len(records._rates) == 50
