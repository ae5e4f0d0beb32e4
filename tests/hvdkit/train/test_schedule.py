"""Learning-rate policies against their formulas, written out in plain Python."""

import dataclasses
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.scores import MainMetric
from hvdkit.settings import Settings
from hvdkit.train.optim import plateau, schedule

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
        value = rate(step, end_lr=END, power=0.9, lr_policy=policy)
        assert value == pytest.approx(expected, rel=1e-12), policy


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
    for step in (0, 77, N, 10 * N):  # these steps include the last
        alone = rate(step, 1, lr_policy=policy, end_lr=END, lr_scaling=rule)
        on_nine = rate(step, 9, lr_policy=policy, end_lr=END, lr_scaling=rule)
        assert on_nine == pytest.approx(factor * alone, rel=1e-12)


class Follows:
    """What Keras's callback sees of a model: an optimizer's rate."""

    def __init__(self, rate: float) -> None:
        self.optimizer = SimpleNamespace(
            learning_rate=keras.Variable(rate, dtype="float64")
        )


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("seed", range(8))
def test_the_plateau_policy_is_kerass_callback(mode, seed):
    draw = np.random.default_rng(seed)
    patience, cooldown, lowest = draw.integers([1, 0, 0], [4, 4, 2])
    config = dataclasses.replace(
        Settings(),
        base_lr=BASE,
        lr_policy="plateau",
        plateau_factor=0.5,
        plateau_patience=int(patience),
        plateau_cooldown=int(cooldown),
        plateau_min_lr=0.02 * float(lowest),
        plateau_min_delta=0.1,
        lr_scaling="sqrt",
    )
    scaling = config.lr_factor(4)
    callback = keras.callbacks.ReduceLROnPlateau(
        "score",
        mode=mode,
        factor=config.plateau_factor,
        patience=config.plateau_patience,
        cooldown=config.plateau_cooldown,
        min_lr=config.plateau_min_lr * scaling,
        min_delta=config.plateau_min_delta,
    )
    callback.set_model(Follows(BASE * scaling))
    callback.on_train_begin()
    state = plateau.Plateau()
    rate_of = schedule.make(config, 4, plateau=state)
    for number, score in enumerate(draw.normal(size=40).cumsum() * 0.2, 1):
        callback.on_epoch_end(number, {"score": score})
        before = float(rate_of(tf.constant(number, tf.int64)))
        evaluation = {"value": score, "step": number, "scaling": scaling}
        note = state.judge(config, MainMetric("score", mode), **evaluation)
        assert not state.judge(config, MainMetric("score", mode), **evaluation)
        after = float(rate_of(tf.constant(number, tf.int64)))
        assert after == pytest.approx(
            float(callback.model.optimizer.learning_rate), rel=1e-12
        )
        assert bool(note) == (after < before) and (f"to {after:.3g}:" in note) == bool(
            note
        )


def test_what_a_plateau_does_not_count():
    """Scores that are no numbers are no better; warm-up; scores of another measure."""
    config = dataclasses.replace(
        Settings(),
        base_lr=BASE,
        lr_policy="plateau",
        plateau_patience=1,
        plateau_factor=0.5,
        warmup_steps=3,
    )
    state = plateau.Plateau()
    metric = MainMetric("score")
    rate_of = schedule.make(config, 2, plateau=state)
    lowered = []
    for step, score in enumerate([math.nan, 0.5, 0.4, math.nan, math.inf, 0.6], 1):
        lowered.append(bool(state.judge(config, metric, value=score, step=step)))
    assert lowered == [False, False, True, True, True, False]
    assert float(rate_of(tf.constant(0, tf.int64))) == pytest.approx(BASE * 0.125 / 3)
    for measure, is_lowered in (
        ("one", False),
        ("one", True),
        ("other", False),
        ("other", True),
    ):
        step += 1
        state.measures(measure)
        assert bool(state.judge(config, metric, value=0.1, step=step)) == is_lowered


def test_the_lines_of_a_run_tell_the_plateau_policy():
    task = SimpleNamespace(main_metric="mae")
    config = dataclasses.replace(Settings(), base_lr=BASE, lr_policy="plateau")
    line = schedule.describe_policy(task, config, 1)
    assert "plateau from 0.4, times 0.1 where mae" in line


def test_a_schedule_of_ones_own_may_give_python_numbers():
    task = SimpleNamespace(schedule=lambda config: lambda step: 0.1, config=Settings())
    rate = schedule.of_run(task, Settings(), 1)(tf.constant(1, tf.int64))
    assert float(rate) == 0.1, "rounded to float32"
