"""Learning-rate policies against their formulas, written out in plain Python."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvdkit.settings import Settings
from hvdkit.train import schedule

N, BASE, END = 200, 0.4, 0.01


def rate(step, size=1, **settings):
    config = dataclasses.replace(Settings(), num_steps=N, base_lr=BASE, **settings)
    return float(schedule.make(config, size)(tf.constant(step, tf.int64)))


@pytest.mark.parametrize("step", [0, 1, 50, 77, 99, 100, 150, 199, 200, 500])
def test_policies(step):
    share = min(step, N) / N
    for policy, expected in (
        ("poly", END + (BASE - END) * (1 - share) ** 0.9),
        ("cosine", END + (BASE - END) * (1 + math.cos(math.pi * share)) / 2),
        ("step", BASE * (1 if share < 0.5 else 0.1 if share < 0.75 else 0.01)),
        ("constant", BASE),
    ):
        found = rate(step, end_lr=END, power=0.9, lr_policy=policy)
        assert found == pytest.approx(expected, rel=1e-12), policy


@pytest.mark.parametrize("warm_up", [10, 5 * N])
@pytest.mark.parametrize("policy", ["poly", "cosine", "step", "constant"])
def test_warm_up_is_linear_and_then_joins_the_policy(policy, warm_up):
    """A run that is shorter ends within it."""
    for step in (0, 4, 9, 10, 99, N - 1):
        warm = rate(step, warmup_steps=warm_up, lr_policy=policy)
        expected = rate(step, lr_policy=policy) * min((step + 1) / warm_up, 1)
        assert warm == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 9), ("sqrt", 3)])
@pytest.mark.parametrize("policy", ["poly", "cosine"])
def test_scaling_by_the_number_of_ranks(policy, rule, factor):
    scaled = {"size": 9, "lr_policy": policy, "end_lr": END, "lr_scaling": rule}
    for step in (0, 77, N, 10 * N):  # the last rate too
        alone = rate(step, **scaled | {"size": 1})
        assert rate(step, **scaled) == pytest.approx(factor * alone, rel=1e-12)


def test_a_schedule_of_ones_own_may_give_python_numbers():
    task = SimpleNamespace(schedule=lambda config: lambda step: 0.1, config=Settings())
    rate = schedule.of_run(task, Settings(), 1)(tf.constant(1, tf.int64))
    assert float(rate) == 0.1, "rounded to float32"
