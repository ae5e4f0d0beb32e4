"""Millions of names in little memory: one string, and where each name begins."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from hvdkit.ranks import encoding

_NARROW = 2**32  # bytes of text that 32-bit places reach


@encoding.sendable("names")
class Names:
    """File names or paths, in order; any bytes that a file system accepts.

    A name takes its bytes and 4 more (8 from 4 GiB of text on), in TensorFlow's memory, where both
    graphs and Python read them. A list of Python strings takes about 100 bytes more for each.
    """

    def __init__(self, text: bytes, lengths: np.ndarray):
        """Args: text: all names, one after the other; lengths: bytes of each, integer [n]."""
        starts = np.zeros(len(lengths) + 1, np.uint32 if len(text) < _NARROW else np.int64)
        np.cumsum(lengths, dtype=starts.dtype, out=starts[1:])
        with tf.device("CPU:0"):  # where files are read
            self._text, self._starts = tf.constant(text), tf.constant(starts)

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        return cls(*packed(names))

    @classmethod
    def joined(cls, parts: Iterable[tuple[bytes, np.ndarray]]) -> tuple[Names, np.ndarray]:
        """The names of several `packed` parts, and where each part begins, int64 [parts + 1]."""
        text, lengths = bytearray(), []
        for some_text, some_lengths in parts:  # each is let go at once
            text += some_text
            lengths.append(some_lengths)
        starts = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
        return cls(bytes(text), np.concatenate(lengths)), starts

    def __len__(self) -> int:
        return int(self._starts.shape[0]) - 1

    def __getitem__(self, index: int) -> str:
        """Name number `index`, 0 .. len - 1."""
        return os.fsdecode(self.at(tf.constant(index, tf.int64)).numpy())

    def pick(self, indices: Iterable[int]) -> list[str]:
        """Many names at once, which is faster than one by one."""
        text, starts = self._text.numpy(), self._starts.numpy()
        return [os.fsdecode(text[starts[i] : starts[i + 1]]) for i in indices]

    def shared(self, other: Names) -> int:
        """How many names both have; neither has a name twice."""
        few, many = sorted((self, other), key=len)
        there = set(few._each())
        return sum(name in there for name in many._each())

    def at(self, index: tf.Tensor) -> tf.Tensor:
        """`names[index]` in a graph: string scalar from int64 scalar; only this name is copied."""
        places = tf.gather(self._starts, tf.stack([index, index + 1]))
        start, end = tf.unstack(tf.cast(places, tf.int64))
        return tf.strings.substr(self._text, start, end - start)

    def _each(self) -> Iterator[bytes]:
        text, starts = self._text.numpy(), self._starts.numpy().tolist()
        return (text[start:end] for start, end in itertools.pairwise(starts))

    def digest(self) -> str:
        """SHA-256 (64 hex digits) over the names in order."""
        sha = hashlib.sha256(self._text.numpy())
        sha.update(self._starts.numpy().tobytes())
        return sha.hexdigest()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What `made_of` takes: bytes, uint8, and the length of each name, integer [n]."""
        return np.frombuffer(self._text.numpy(), np.uint8), np.diff(self._starts.numpy())

    @classmethod
    def made_of(cls, text: np.ndarray, lengths: np.ndarray) -> Names:
        if text.dtype != np.uint8 or lengths.sum() != text.size:
            raise ValueError(f"{text.size} bytes of names are not the {lengths.sum()} of each")
        return cls(text.tobytes(), lengths)


def packed(names: Iterable[str]) -> tuple[bytes, np.ndarray]:
    """The names' bytes as in the file system, concatenated, and the length of each."""
    as_bytes = list(map(os.fsencode, names))
    return b"".join(as_bytes), np.fromiter(map(len, as_bytes), np.uint16, len(as_bytes))
