"""--find_lr: the rates that were tried, what is suggested, and that nothing else is left."""

from __future__ import annotations

import math
import re

import pytest

from hvdkit.run import find_lr
from ranks import last_lines, launch

FLAGS = ["--flagfile=configs/blank.cfg", "--find_lr", "--warmup_steps=0", "--num_steps=60"]


@pytest.fixture(scope="module")
def suggested(tmp_path_factory):
    """What 1 and 2 ranks print."""
    found = {}
    for ranks, how in ((1, "alone"), (2, "gloo")):
        folder = tmp_path_factory.mktemp("find_lr")
        ended = launch(ranks, ["train.py", *FLAGS, f"--run_dir={folder}/run"], how)
        assert ended.code == 0, last_lines(ended.output)
        assert [path.name for path in folder.iterdir()] == ["run-find_lr.html"]
        page = (folder / "run-find_lr.html").read_text()
        found[ranks] = float(re.search(r"try --base_lr=(\S+):", ended.output)[1])
        assert f"suggested: {found[ranks]:.1e}" in page
        found[f"{ranks} output"] = ended.output
    return found


def test_any_number_of_ranks_suggests_the_same(suggested):
    assert suggested[1] == suggested[2] and 1e-5 < suggested[1] < 5


def test_too_few_steps_are_told_as_that(tmp_path):
    words = [*FLAGS, "--num_steps=9", f"--run_dir={tmp_path}/run"]
    output = launch(1, ["train.py", *words]).output
    assert "--num_steps=9 tells nothing: give 10 or more" in output, last_lines(output)


def test_rates_rise_by_one_factor(suggested):
    rows = re.findall(r"^\s*(\d\.\d\de[-+]\d\d)  ", suggested["1 output"], re.M)
    rates = [float(row) for row in rows]
    assert rates[0] == 1e-7 and rates == sorted(rates) and len(rates) > 8


def test_the_suggestion_is_where_the_loss_falls_most_steeply():
    rates = [10.0**-n for n in range(6, 0, -1)]
    assert find_lr.suggested(rates, [5.0, 4.9, 4.0, 2.0, 1.5, math.inf]) == pytest.approx(1e-4)
    assert find_lr.suggested(rates, [1.0, 2.0, 3.0, math.nan, 5.0, 6.0]) is None


def test_the_average_is_right_from_the_start():
    assert find_lr.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0] * 3)
    assert find_lr.smoothed([1.0, 2.0])[1] == pytest.approx((0.9 * 1 + 2) / 1.9)
