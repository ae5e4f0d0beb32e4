"""Learning-rate policies against their formulas, written out in plain Python."""

import dataclasses
import math

import pytest
import tensorflow as tf

from hvdkit.settings import Settings
from hvdkit.train import schedule

N, BASE, END = 200, 0.4, 0.01


def rate(step, size=1, **settings):
    config = dataclasses.replace(Settings(), num_steps=N, base_lr=BASE, **settings)
    return float(schedule.make(config, size)(tf.constant(step, tf.int64)))


@pytest.mark.parametrize("step", [0, 1, 50, 77, 199, 200, 500])
def test_poly_and_cosine(step):
    share = min(step, N) / N
    for policy, part in (
        ("poly", (1 - share) ** 0.9),
        ("cosine", (1 + math.cos(math.pi * share)) / 2),
    ):
        found = rate(step, end_lr=END, power=0.9, lr_policy=policy)
        assert found == pytest.approx(END + (BASE - END) * part, rel=1e-12), policy


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 1), (99, 1), (100, 0.1), (150, 0.01), (999, 0.01)]
)
def test_step_policy(step, factor):
    assert rate(step, lr_policy="step") == pytest.approx(BASE * factor, rel=1e-12)


def test_constant():
    assert rate(0, lr_policy="constant") == rate(10_000, lr_policy="constant") == BASE


def test_warm_up_is_linear_and_then_joins_the_policy():
    first, fifth = rate(0, warmup_steps=10), rate(4, warmup_steps=10)
    assert first == pytest.approx(BASE / 10, rel=1e-12)
    assert fifth == pytest.approx(0.5 * rate(4), rel=1e-12)
    assert rate(10, warmup_steps=10) == rate(10)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 9), ("sqrt", 3)])
@pytest.mark.parametrize("policy", ["poly", "cosine"])
def test_scaling_by_the_number_of_ranks(policy, rule, factor):
    scaled = {"size": 9, "lr_policy": policy, "end_lr": END, "lr_scaling": rule}
    for step in (0, 77, N, 10 * N):  # the last rate too
        alone = rate(step, **scaled | {"size": 1})
        assert rate(step, **scaled) == pytest.approx(factor * alone, rel=1e-12)


@pytest.mark.parametrize("policy", ["poly", "cosine", "step", "constant"])
def test_a_run_shorter_than_its_warm_up_ends_within_it(policy):
    for step in (0, 99, N - 1):
        warm, cold = rate(step, warmup_steps=5 * N, lr_policy=policy), rate(step, lr_policy=policy)
        assert warm == pytest.approx(cold * (step + 1) / (5 * N), rel=1e-12)


def test_rates_are_made_in_float64_inside_a_graph_too():
    config = dataclasses.replace(Settings(), num_steps=3, base_lr=0.1, power=1.0)
    made = tf.function(schedule.make(config, 1), autograph=False)
    found = made(tf.constant(1, tf.int64))
    assert found.dtype == tf.float64 and float(found) == pytest.approx(0.1 * 2 / 3, rel=1e-15)
