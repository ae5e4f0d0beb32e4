"""What the checks on real ranks share."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvdkit.settings import Settings
from hvdkit.stop import Stop

PLAIN = dataclasses.replace(
    Settings(), global_batch_size=12, num_steps=100, base_lr=0.1, momentum=0.0
)


def rng(*seed):
    return np.random.default_rng(seed)


def gathered(world, value, name):
    return world.gather_objects(np.asarray(value), name)


def differ(call, *words):
    """`call` must raise Stop with these words in its message."""
    try:
        call()
    except Stop as stop:
        assert all(word in str(stop) for word in words), str(stop)
    else:
        raise AssertionError("no Stop was raised")


def refused(call, *words):
    """`call` must raise a ValueError of one line with these words in it."""
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in words), str(error)
        assert "\n" not in str(error), str(error)
    else:
        raise AssertionError("no ValueError was raised")
