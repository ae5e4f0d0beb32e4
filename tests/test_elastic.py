"""--elastic: ranks come and go under a real horovodrun, and the end has the bits of a quiet run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_run import HOSTS, Elastic
from hosts import ROOT, run

STEPS = 400
TEMPLATE = ROOT / "template"
DISCOVER = str(ROOT / "launch" / "discover.sh")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of small steps, logged one by one."""
    from data.demo import scenes

    data = tmp_path_factory.mktemp("scenes") / "data"
    scenes.make(data, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3)))
    return [
        *("--flagfile=configs/demo.cfg", "--model=tiny", f"--data_dir={data}", "--image_size=32"),
        *("--eval_crop=32", "--virtual_ranks=6", "--global_batch_size=12", "--warmup_steps=0"),
        *("--log_every=1", "--eval_every=0", "--checkpoint_every=50", "--keep=2"),
        *(f"--num_steps={STEPS}", "--elastic_commit_every=7"),
    ]


@pytest.fixture(scope="module")
def quiet(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The summary of the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    words = [sys.executable, "train.py", *flags, f"--run_dir={folder}"]
    ended = run(words, 200, cwd=TEMPLATE)
    assert ended.code == 0, ended.output
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def elastic(flags: list[str], tmp_path: Path) -> Iterator:
    """Starts the run on so many ranks; what is left of it at the test's end is killed."""
    made: list[Elastic] = []

    def start(ranks: int, *more: str) -> Elastic:
        made.append(Elastic(tmp_path / "run", HOSTS[:ranks], [*flags, *more]))
        return made[-1]

    yield start
    for it in made:
        it.kill_all()
        it.process.wait(60)


def judge(it: Elastic, quiet: dict) -> None:
    code = it.ended()
    assert code == 0, it.tail()
    summary = it.summary()
    assert summary["weights_sha256"] == quiet["weights_sha256"]
    assert it.logged() == list(range(1, STEPS + 1))
    assert not any("Traceback" in line for line in it.lines), "".join(it.lines)


def test_a_rank_joins_then_rank_0_is_lost(elastic, quiet, record_property):
    it = elastic(2)
    it.until(20)
    second = it.rank_of(HOSTS[1])
    grown = it.change(HOSTS[:3])
    assert any("3 ranks on " in line for line in it.lines)
    it.after(len(it.steps) + 10)
    lost = it.lose(HOSTS[0])
    record_property("elastic", f"{grown:.1f} s from a new host, {lost:.1f} s from a lost rank 0")
    assert it.rank_of(HOSTS[1]).pid == second.pid  # it was not started anew
    judge(it, quiet)
    assert it.summary()["ranks"] == 2
