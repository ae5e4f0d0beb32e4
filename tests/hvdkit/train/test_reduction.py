"""How the template's step is told from another one, and what its sums refuse."""

import dataclasses

import pytest
from refusals import refused

import train
from hvdkit.settings import Settings
from hvdkit.train.step import reduction


def make_step(run):
    """A step of a user's."""
    return run.function(lambda batch: run.update([]))


def test_only_the_templates_step_is_taken_for_it():
    assert reduction.is_template(train.make_step)
    assert not reduction.is_template(make_step)
    assert not reduction.is_template(lambda run: None)


@pytest.mark.parametrize("value", ["1", "true"])
def test_autotuning_is_refused_where_sums_have_one_order(monkeypatch, value):
    config = dataclasses.replace(Settings(), deterministic=True)
    monkeypatch.setenv("HOROVOD_AUTOTUNE", value)
    refused(
        lambda: reduction.check_backend(config),
        f"--deterministic needs one order of additions, and HOROVOD_AUTOTUNE={value}",
    )
    reduction.check_backend(Settings())
    reduction.check_backend(dataclasses.replace(config, virtual_ranks=2))
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "0")
    reduction.check_backend(config)
