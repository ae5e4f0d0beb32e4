"""Random samples of a given form, to measure speed or to run without data."""

from __future__ import annotations

import hashlib

import tensorflow as tf


class Synthetic:
    """A Source of `count` samples of uniform integers; sample i is the same everywhere.

    Args:
      form: name -> (shape, dtype, one more than the largest value); dtype uint8 or int32.
    """

    def __init__(self, count: int, form: dict[str, tuple[tuple[int, ...], tf.DType, int]]) -> None:
        self._count, self._form = count, form

    def __len__(self) -> int:
        return self._count

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        sample = {}
        for number, (name, (shape, dtype, end)) in enumerate(self._form.items()):
            key = tf.stack([tf.cast(index, tf.int32), number])
            draws = tf.random.stateless_uniform(shape, key, 0, end, tf.int32, alg="philox")
            sample[name] = tf.cast(draws, dtype)
        return sample

    def explain(self, index: int) -> str | None:
        return None

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self._count, self._form)).encode()).hexdigest()
