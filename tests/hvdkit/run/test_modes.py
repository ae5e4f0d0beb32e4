"""--dry_run and --find_lr; on ranks: checks_runs.py, checks_warm_start.py."""

import fcntl
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit.ranks.world import World
from hvdkit.run import benchmark, dry_run, find_lr, main
from hvdkit.settings import Settings
from hvdkit.stop import Stop


def throwaway(run_dir):
    settings = Settings(run_dir=str(run_dir), dry_run=True)
    return dry_run.throwaway(settings, World(0, 1, 0, 1))


def test_what_killed_dry_runs_left_is_removed_and_a_live_one_stays(tmp_path):
    killed = tmp_path / ".dry-run-1"
    goes_on = tmp_path / ".dry-run-2"
    for folder in (killed, goes_on):
        (folder / "run").mkdir(parents=True)
        (folder / ".lock").touch()
    with (goes_on / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with throwaway(tmp_path / "run"):
            pass
    assert [*tmp_path.iterdir()] == [goes_on]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_what_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with (
        pytest.raises(Stop, match=f"{tmp_path}/file is no folder"),
        throwaway(tmp_path / name),
    ):
        pass
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_named_by_dots_is_left_as_it_was(tmp_path):
    (tmp_path / "run").mkdir()
    with throwaway(tmp_path / "run" / "..") as tried:
        assert Path(tried.run_dir).name == tmp_path.name
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


@pytest.mark.parametrize(("end", "code"), [(None, 0), (3, 3)])
def test_an_exit_of_train_py_is_the_exit_code_and_words_stay_its_words(
    monkeypatch, end, code
):
    def exits(*_, **__):
        sys.exit(end)

    monkeypatch.setattr(main.streams, "never_wait", lambda: None)
    monkeypatch.setattr(main.app, "run", exits)
    assert main.main(None, Settings, []) == code
    end = "no picture was drawn"
    with pytest.raises(SystemExit, match=end):
        main.main(None, Settings, [])


def test_a_kernel_that_tells_no_peak_of_memory_ends_no_benchmark(monkeypatch):
    known, _ = benchmark.peak_bytes()
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\n")
    assert known / 2 < benchmark.peak_bytes()[0] < 100 * known


def test_a_loss_below_0_does_not_end_the_search_for_a_rate(tmp_path):
    x = np.linspace(np.log(1e-7), np.log(10), 200)
    curve = (
        2 - 1.5 / (1 + np.exp((np.log(1e-3) - x) / 0.7)) + np.exp(2 * (x - np.log(0.1)))
    )
    run = SimpleNamespace(
        config=SimpleNamespace(num_steps=200, lr_factor=lambda size: 1.0),
        world=World(0, 1, 0, 1),
    )

    def suggestion(losses: np.ndarray) -> str:
        test = find_lr.FindLr(run, tmp_path / "page.html")
        for step, (rate, loss) in enumerate(zip(np.exp(x), losses), 1):
            if ending := test(step, {"lr": rate, "loss": loss}):
                return re.search("try --base_lr=([^:]+):", ending.message)[1]
        raise AssertionError("the search did not end")

    assert suggestion(curve) == suggestion(curve - 1) == suggestion(curve - 5)


def test_a_noisy_loss_gives_a_rate_near_the_best_or_none():
    """400 curves that fall around a rate of their own and blow up, with 6 % of noise.

    The best rate is taken for 1.5 times that, the middle of what sweeps of real tasks show.
    """
    far = 0
    x = np.linspace(np.log(1e-7), np.log(10), 200)
    for seed in range(400):
        draw = np.random.default_rng(seed)
        steepest = np.log(10) * draw.uniform(-4.5, -1.5)
        width = draw.uniform(0.4, 1.2)
        blows_up = steepest + np.log(draw.uniform(20, 300))
        fall = draw.uniform(0.5, 0.9) / (1 + np.exp((steepest - x) / width))
        curve = draw.uniform(0.7, 6) * (1 - fall + np.exp(2 * (x - blows_up)))
        end = int(np.argmax(curve > 5 * np.minimum.accumulate(curve))) or len(x)
        noisy = curve * (1 + 0.06 * draw.normal(size=len(x)))
        suggestion = find_lr.suggested(np.exp(x[:end]), noisy[:end])
        if not suggestion:
            far += 1
            continue
        rate, low, high = suggestion
        assert low <= rate <= high
        if abs(np.log(rate / 1.5) - steepest) > np.log(3):
            far += 1
    assert far <= 4
    flat = 1 + 0.06 * np.random.default_rng(0).normal(size=200)
    assert find_lr.suggested(np.exp(x), flat) is None
    broken = [*np.linspace(5, 1, 99), math.nan, *np.linspace(9, 0, 100)]
    _, _, high = find_lr.suggested(np.exp(x), broken)
    assert high <= np.exp(x[98])
