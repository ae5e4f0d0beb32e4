"""What the input pipeline needs of a data set, and sources without files."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import tensorflow as tf

from hvdkit.data.scoped import Scoped

_LARGE = 2**28  # bytes
_MOST_SAMPLED = 1_000  # samples that are looked at where each costs a request or a read


def sampled(count: int, most: int | None = None) -> range:
    """At most `most` indices, by default 1,000, spread over 0 .. count - 1."""
    return range(0, count, max(1, -(-count // (most or _MOST_SAMPLED))))


class Source(Protocol):
    """A fixed, indexable list of samples. Sample ids are 0 .. len - 1 and mean the same everywhere.

    It neither orders nor augments: the sampler picks the ids, the task augments. `class_names` (by
    label) and `sample_names()` (bytes, one a sample) are optional: with them, classes are matched
    by name, and a resume names the samples that changed. `shard_sizes`, for --shuffle_shards, has
    the samples of each file, in the order of ids.
    """

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Reads the sample `index` (int64 scalar) with TensorFlow ops only.

        Return a picture of a file as "image", and the file's bytes as "file": then a crop decodes
        only its part, and an unused image is not decoded. Code that changes "image" must therefore
        remove "file" from the sample.

        It is traced once and runs on several threads of `tf.data`: no Python state. What only
        Python can read is a `ReadAhead`. A bad sample raises `tf.errors.OpError` when it runs.
        """

    def explain(self, index: int) -> str | None:
        """What is wrong with a sample: file, value and how to fix it; None if it is fine.

        Plain Python; it may be slow and thorough, because it is called only after a read failed.
        """

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the listing; ranks compare it: all must see the same data."""


class Listed(Source, Protocol):
    """A source of files below a folder; `files()` gives their names, relative to `root`."""

    root: Path

    def files(self) -> Iterable[bytes]: ...


def is_listed(source: Source) -> TypeGuard[Listed]:
    return hasattr(source, "files")


class Wrapper:
    """Base of a Source that changes another's samples, and has all else from it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # a copy is being made and has no source yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)


def digest(listing: Iterable[tuple[str, int]]) -> str:
    """SHA-256 (64 hex digits) of (name relative to the root, size in bytes) pairs, in order."""
    sha = hashlib.sha256()
    for name, size in listing:
        sha.update(os.fsencode(f"{name}\0{size}\n"))  # names may not be UTF-8
    return sha.hexdigest()


Parts = dict[str, tf.Tensor]


class ReadAhead:
    """Base of a Source whose samples Python fetches, many at a time, on threads that wait.

    A subclass has `form`, `bytes_each`, `fetch` and, where what is fetched is no sample yet,
    `decode`. Feeds fetch ahead of what decodes, so that a slow disk is waited for beside the
    computing. Where `reads_ahead` is False, `read` does all.
    """

    reads_ahead = True
    form: dict[str, tf.TensorSpec]  # the parts of one sample, as they are fetched
    bytes_each: float  # approximate bytes of a sample's parts

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        """The parts of n samples (indices int64 [n]), in the order of `form`: each [n, ...].

        It does not raise for a bad sample: its parts say so, and then `decode` fails.
        """
        raise NotImplementedError

    def decode(self, parts: Parts) -> Parts:
        """Makes a sample of its parts, with TensorFlow ops."""
        return parts

    def ahead(self, indices: tf.Tensor) -> Parts:
        """Calls `fetch` from a graph; indices: int64 [n]."""
        types = [spec.dtype for spec in self.form.values()]
        # It is stateless, because files do not change.
        tensors = tf.numpy_function(self.fetch, [indices], types, stateful=False)
        if tf.is_tensor(tensors):  # outside a graph, a single part is no list
            tensors = [tensors]
        parts = {}
        for (name, spec), tensor in zip(self.form.items(), tensors, strict=True):
            parts[name] = tf.ensure_shape(tensor, [None, *spec.shape])
        return parts

    def read(self, index: tf.Tensor) -> Parts:
        if fetched.value.source is self and fetched.value.sample is index:
            return self.decode(fetched.value.parts)
        # A caller other than a feed waits for the disk.
        fetched_parts = self.ahead(tf.cast(index, tf.int64)[None])
        return self.decode({name: part[0] for name, part in fetched_parts.items()})


def sound(parts: Parts, name: str) -> tf.Tensor:
    """The part of this name; the sample fails with the words of parts["fault"] if there are any."""
    fine = tf.debugging.Assert(parts["fault"] == "", [parts["fault"]])
    # Without this order, decoding may fail first, with words of its own.
    with tf.control_dependencies([fine]):
        return tf.identity(parts[name])


class Fetched(NamedTuple):
    """The parts that the ReadAhead `source` takes where it is asked to read `index`."""

    source: Any
    sample: tf.Tensor
    parts: Parts


fetched = Scoped(Fetched(None, None, {}))


class Arrays(ReadAhead):
    """A Source of arrays of equal length: sample i is entry i of each.

    `Arrays(image=images, label=labels)` reads {"image": images[i], "label": labels[i]}. Above 256
    MB in all they stay where they are, so that `np.load(path, mmap_mode="r")` or a sliding window
    over it may be larger than the memory; of those, the fingerprint covers 1,000 entries only.
    ValueError: there is no array, none has a sample, their lengths differ, or one is of objects.
    """

    def __init__(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            _check_type(name, np.asanyarray(array))
        self._arrays = {}
        for name, array in arrays.items():
            # A memmap stays one; a mask that hides nothing goes.
            is_masked = isinstance(array, np.ma.MaskedArray)
            self._arrays[name] = np.asanyarray(array.data if is_masked else array)
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(
                f"arrays must be of one length, and not empty; they are: {lengths}"
            )
        size = sum(array.nbytes for array in self._arrays.values())
        self.bytes_each = size / len(self)
        self.reads_ahead = size > _LARGE
        self.form = {
            name: tf.TensorSpec(array.shape[1:], array.dtype)
            for name, array in self._arrays.items()
        }
        self._tensors: Parts = {}  # the arrays as tensors, once they have been read

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        parts = [array[indices] for array in self._arrays.values()]
        return [np.char.encode(x, "utf-8") if x.dtype.kind == "U" else x for x in parts]

    def read(self, index: tf.Tensor) -> Parts:
        """Tensors of the arrays' own dtypes, by name."""
        if self.reads_ahead:
            return super().read(index)
        if not self._tensors:
            # Graphs refer to these tensors. Of arrays, each graph would hold a copy of its own.
            with tf.init_scope(), tf.device("CPU"):
                self._tensors = {
                    name: tf.convert_to_tensor(array)
                    for name, array in self._arrays.items()
                }
        return {
            name: tf.gather(tensor, index) for name, tensor in self._tensors.items()
        }

    def explain(self, index: int) -> str | None:
        return None

    def fingerprint(self) -> str:
        sha = hashlib.sha256()
        for name, array in self._arrays.items():
            sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
            if self.reads_ahead:
                for index in sampled(len(array)):
                    sha.update(array[index].tobytes())
            else:
                sha.update(array.tobytes())
        return sha.hexdigest()


def _check_type(name: str, array: np.ndarray) -> None:
    """Raises ValueError for an array that TensorFlow does not take, or takes for other numbers."""
    try:
        # An array of objects holds addresses, which differ between ranks.
        known = (
            tf.as_dtype(array.dtype) and array.dtype.isnative and array.dtype != object
        )
    except TypeError:
        known = False
    if not known:
        raise ValueError(
            f"array {name} is of {array.dtype}: make it numbers, in this machine's byte order, "
            "or text"
        )
    if np.ma.is_masked(array):
        way_out = "leave those samples out"
        if array.dtype.kind == "f":
            way_out = f"give {name}.filled(np.nan), or {way_out}"
        raise ValueError(
            f"array {name} has masked values, below which are other numbers: {way_out}"
        )


class Synthetic:
    """A Source of `count` random samples, the same everywhere: for speed, or to run without data.

    `form`: name -> (shape, dtype, one more than the largest value); dtype uint8 or int32.
    """

    def __init__(
        self, count: int, form: dict[str, tuple[tuple[int, ...], tf.DType, int]]
    ) -> None:
        self._count = count
        self._form = form

    def __len__(self) -> int:
        return self._count

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        sample = {}
        for number, (name, (shape, dtype, end)) in enumerate(self._form.items()):
            key = tf.stack([tf.cast(index, tf.int32), number])
            draws = tf.random.stateless_uniform(
                shape, key, 0, end, tf.int32, alg="philox"
            )
            sample[name] = tf.cast(draws, dtype)
        return sample

    def explain(self, index: int) -> str | None:
        return None

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self._count, self._form)).encode()).hexdigest()
