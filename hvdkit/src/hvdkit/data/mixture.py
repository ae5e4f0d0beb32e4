"""Several sets as one, each with its share of every epoch."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.data import classes
from hvdkit.data.open import kind_of
from hvdkit.data.readers.records import Records
from hvdkit.data.source import Parts, ReadAhead, Source, digest


class Mixture(ReadAhead):
    """Sources as one: `Mixture((streets, 3), (rain, 1))` has three of `streets` for one of `rain`.

    An epoch is as short as holds each sample of each set at least once, with these shares to within
    a sample: a set that is small for its share comes several times, each time augmented anew, and
    each of its samples equally often, or once more: those are spread over the whole set.
    If all are packed (`Records`) they are read ahead; others are read where they are decoded,
    whole, and lose "file".
    ValueError: a share that is not above 0, or sets of other classes or kinds of labels.
    """

    def __init__(self, *sets: tuple[Source, float]) -> None:
        self._sources = [source for source, _ in sets]
        shares = [share for _, share in sets]
        if not all(0 < share < float("inf") for share in shares):
            raise ValueError(
                f"the shares of a mixture are {shares}: give numbers above 0"
            )
        self.class_names = _common(
            "class_names", [classes.of(s) for s in self._sources]
        )
        self.kind = _common("kind", [kind_of(source) for source in self._sources])
        self.asks_mirror = self._any("asks_mirror")
        self.is_demo = self._any("is_demo")
        known = [s.num_classes for s in self._sources if hasattr(s, "num_classes")]
        if known:
            self.num_classes = max(known)

        self._sizes = np.array([len(source) for source in self._sources])
        counts = np.array(shares) * max(self._sizes / shares)
        self._counts = np.ceil(counts - 1e-6).astype(np.int64)  # of an epoch, by set
        self._ends = np.cumsum(self._counts)
        self._starts = np.append(0, self._ends)
        self._packed = [source for source in self._sources if type(source) is Records]
        self.reads_ahead = len(self._packed) == len(sets)
        if self.reads_ahead:
            self.form = self._packed[0].form
            self.bytes_each = float(
                np.mean([source.bytes_each for source in self._packed])
            )

    def _any(self, name: str) -> bool:
        return any(getattr(source, name, False) for source in self._sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """The number of each sample's set, and its index there."""
        numbers = np.searchsorted(self._ends, indices, "right")
        place = indices - self._starts[numbers]
        return numbers, place * self._sizes[numbers] // self._counts[numbers]

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        numbers, set_indices = self._place(indices)
        by_set = [
            self._packed[n].fetch(set_indices[numbers == n]) for n in np.unique(numbers)
        ]
        # `by_set` is sorted by sets; this is each sample's place in that order.
        places = np.argsort(np.argsort(numbers, kind="stable"))
        return [np.concatenate(part)[places] for part in zip(*by_set)]

    def decode(self, parts: Parts) -> Parts:
        return self._packed[0].decode(parts)  # the same for all packed sets

    def read(self, index: tf.Tensor) -> Parts:
        if self.reads_ahead:
            return super().read(index)
        number = tf.searchsorted(self._ends, [index], "right")[0]
        place = index - tf.gather(self._starts, number)
        size = tf.gather(self._sizes, number)
        set_index = place * size // tf.gather(self._counts, number)
        forms = {}

        def sample(place: int) -> Parts:
            # All pictures are decoded whole here, so a "file" would have no use.
            parts = self._sources[place].read(set_index)
            parts = {name: part for name, part in parts.items() if name != "file"}
            forms[place] = {
                n: f"{x.dtype.name}, rank {x.shape.rank}" for n, x in parts.items()
            }
            return parts

        try:
            branches = [partial(sample, place) for place in range(len(self._sources))]
            return tf.switch_case(number, branches)
        except (TypeError, AssertionError):
            if len(forms) < len(self._sources):  # a source's own mistake
                raise
            raise ValueError(
                f"the sets of a mixture give unlike samples: {forms}"
            ) from None

    def explain(self, index: int) -> str | None:
        number, set_index = self._place(index)
        return self._sources[number].explain(int(set_index))

    def fingerprint(self) -> str:
        prints = [source.fingerprint() for source in self._sources]
        # "spread": repetitions once began with a set's first samples.
        return digest([("spread", 0), *zip(prints, self._ends.tolist())])


def _common(name: str, values: list) -> object:
    """The one value that all sets of a mixture have; ValueError where they differ."""
    if any(value != values[0] for value in values):
        raise ValueError(f"the sets of a mixture differ in {name}: {values}")
    return values[0]
