"""What the input pipeline needs of a data set, and sources without files."""

import hashlib
import os
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import tensorflow as tf


class Source(Protocol):
    """A fixed, indexable list of samples. Sample ids are 0 .. len - 1 and mean the same everywhere.

    It neither orders nor augments: the sampler picks the ids, the task augments. `class_names` (by
    label) and `sample_names()` (bytes, one a sample) are optional: with them, classes are matched
    by name, and a resume names the samples that changed.
    """

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the sample `index` (int64 scalar) with TensorFlow ops only.

        Return a picture of a file as "image", and the file's bytes as "file": then a crop decodes
        only its part, and an unused image is not decoded. Code that changes "image" must therefore
        remove "file" from the sample.

        It is traced once and runs on several threads of `tf.data`: no Python state, no
        `tf.py_function`. A bad sample raises `tf.errors.OpError` when it runs.
        """

    def explain(self, index: int) -> str | None:
        """What is wrong with a sample: file, value and how to fix it; None if it is fine.

        Plain Python; it may be slow and thorough, because it is called only after a read failed.
        """

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the listing; ranks compare it: all must see the same data."""


def digest(listing: Iterable[tuple[str, int]]) -> str:
    """SHA-256 (64 hex digits) of (name relative to the root, size in bytes) pairs, in order."""
    sha = hashlib.sha256()
    for name, size in listing:
        sha.update(os.fsencode(f"{name}\0{size}\n"))  # names may not be UTF-8
    return sha.hexdigest()


class Arrays:
    """A Source of arrays of equal length: sample i is entry i of each.

    `Arrays(image=images, label=labels)` reads {"image": images[i], "label": labels[i]}. They
    become constants of the input pipeline, so they should stay below some hundred MB. ValueError:
    there is no array, none has a sample, their lengths differ, or one is of objects.
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


class Synthetic:
    """A Source of `count` random samples, the same everywhere: for speed, or to run without data.

    `form`: name -> (shape, dtype, one more than the largest value); dtype uint8 or int32.
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
