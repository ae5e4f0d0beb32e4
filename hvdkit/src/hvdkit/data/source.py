"""What the input pipeline needs of a data set; readers/folders.py is an example to copy."""

import hashlib
import os
from collections.abc import Iterable
from typing import Protocol

import tensorflow as tf


class Source(Protocol):
    """A fixed, indexable list of samples. Sample ids are 0 .. len - 1 and mean the same everywhere.

    It neither orders nor augments: the sampler picks the ids, the task augments.
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the sample `index` (int64 scalar) with TensorFlow ops only.

        Return a picture that is decoded from a file as "image", and the file's bytes as "file":
        then a crop (data/image_ops.py) decodes only its part of the file, and an unused image is
        not decoded at all. Code that changes "image" must therefore remove "file" from the
        sample.

        It is traced once and runs on several threads of `tf.data`: no Python state, no
        `tf.py_function`. A bad sample raises `tf.errors.OpError` when it runs.
        """
        ...

    def explain(self, index: int) -> str | None:
        """What is wrong with a sample: file, value and how to fix it; None if it is fine.

        Plain Python; it may be slow and thorough, because it is called only after a read failed.
        """
        ...

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the listing; ranks compare it: all must see the same data."""
        ...


def unshared_classes(one: Source, other: Source) -> list[str]:
    """Classes that only one of two sources has, sorted; empty if either has no class names."""
    names = [set(getattr(source, "class_names", ())) for source in (one, other)]
    return sorted(names[0] ^ names[1]) if all(names) else []


def digest(listing: Iterable[tuple[str, int]]) -> str:
    """SHA-256 (64 hex digits) of (name relative to the root, size in bytes) pairs, in order."""
    sha = hashlib.sha256()
    for name, size in listing:
        sha.update(os.fsencode(f"{name}\0{size}\n"))  # names may not be UTF-8
    return sha.hexdigest()
