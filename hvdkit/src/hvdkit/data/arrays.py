"""Samples that are already in memory: NumPy arrays as a Source."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf


class Arrays:
    """A Source (hvdkit/data/source.py) of arrays of equal length: sample i is entry i of each.

    `Arrays(image=images, label=labels)` reads {"image": images[i], "label": labels[i]}. They
    become constants of the input pipeline, so they should stay below some hundred MB.

    Raises:
      ValueError: there is no array, none has a sample, their lengths differ, or one is of objects.
    """

    def __init__(self, **arrays: np.ndarray) -> None:
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        # An array of objects holds addresses, which differ between ranks.
        objects = {n: a.tolist() for n, a in self._arrays.items() if a.dtype == object}
        for name, values in objects.items():
            if not all(isinstance(value, (str, bytes)) for value in values):
                raise ValueError(f"array {name} is of Python objects: make it numbers or strings")
            self._arrays[name] = np.asarray(values)
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"arrays must be of one length, and not empty; they are: {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Tensors of the arrays' own dtypes, by name."""
        return {name: tf.gather(array, index) for name, array in self._arrays.items()}

    def explain(self, index: int) -> str | None:
        return None

    def fingerprint(self) -> str:
        sha = hashlib.sha256()
        for name, array in self._arrays.items():
            sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
            sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()
