"""How the template's step is told from another one."""

import train
from hvdkit.train.step import reduction


def make_step(run):
    """A step of a user's."""
    return run.function(lambda batch: run.update([]))


def test_only_the_templates_step_is_taken_for_it():
    assert reduction.is_template(train.make_step)
    assert not reduction.is_template(make_step)
    assert not reduction.is_template(lambda run: None)
