"""What the input pipeline asks of a data set; folders.py is an example to copy."""

import hashlib
import os
from collections.abc import Iterable
from typing import Protocol

import tensorflow as tf


class Source(Protocol):
    """A fixed, indexable list of samples. Sample ids are 0 .. len - 1 and mean the same everywhere.

    Order and augmentation are not its job: the sampler picks the ids, the task augments.
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the sample `index` (int64 scalar) with TensorFlow ops only.

        A picture that is decoded from a file is returned as "image", and the file's bytes beside it
        as "file": what takes only a part of it (hvdkit/data/image_ops.py) decodes no more than that, and an
        image that nobody asks for is not decoded at all. So who changes an image takes its "file"
        out of the sample.

        It is traced once inside `tf.data` and then runs on several threads, so it holds no Python
        state and no `tf.py_function`. A bad sample raises `tf.errors.OpError` when it runs.
        """
        ...

    def explain(self, index: int) -> str | None:
        """What is wrong with a sample: file, value and way out; None when it is fine.

        Plain Python, as slow and thorough as it likes: it is called only after a read failed,
        which is what lets `read` stay fast.
        """
        ...

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the listing, for ranks to compare that they see the same."""
        ...


def unshared_classes(one: Source, other: Source) -> list[str]:
    """Classes that only one of two sources has, sorted; none where one does not know its names."""
    names = [set(getattr(source, "class_names", ())) for source in (one, other)]
    return sorted(names[0] ^ names[1]) if all(names) else []


def digest(listing: Iterable[tuple[str, int]]) -> str:
    """SHA-256 (64 hex digits) of (name relative to the root, size in bytes) pairs, in order."""
    sha = hashlib.sha256()
    for name, size in listing:
        sha.update(os.fsencode(f"{name}\0{size}\n"))  # names may be no UTF-8
    return sha.hexdigest()
