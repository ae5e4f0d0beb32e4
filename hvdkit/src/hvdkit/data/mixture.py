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
    a sample: a set that is small for its share comes several times, each time augmented anew.
    If all are packed (`Records`) they are read ahead; others are read where they are decoded,
    whole, and lose "file".
    ValueError: a share that is not above 0, or sets of other classes or kinds of labels.
    """

    def __init__(self, *sets: tuple[Source, float]) -> None:
        self._sources, shares = zip(*sets)
        if not all(0 < share < float("inf") for share in shares):
            raise ValueError(f"the shares of a mixture are {list(shares)}: give numbers above 0")
        for name, of in (("class_names", classes.of), ("kind", kind_of)):
            found = [of(source) for source in self._sources]
            if any(one != found[0] for one in found):
                raise ValueError(f"the sets of a mixture differ in {name}: {found}")
            setattr(self, name, found[0])
        if known := [s.num_classes for s in self._sources if hasattr(s, "num_classes")]:
            self.num_classes = max(known)
        self._sizes = np.array([len(source) for source in self._sources])
        parts = np.array(shares) * max(self._sizes / shares)
        self._ends = np.cumsum(np.ceil(parts - 1e-6).astype(np.int64))
        if all(type(source) is Records for source in self._sources):  # one `decode` fits all
            self.form, self.decode = self._sources[0].form, self._sources[0].decode
            self.bytes_each = float(np.mean([source.bytes_each for source in self._sources]))
        else:
            self.ahead = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """The set of each sample, and its index there."""
        which = np.searchsorted(self._ends, indices, "right")
        return which, (indices - np.append(0, self._ends)[which]) % self._sizes[which]

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        which, own = self._place(indices)
        found = [self._sources[n].fetch(own[which == n]) for n in np.unique(which)]
        back = np.argsort(np.argsort(which, kind="stable"))
        return [np.concatenate(part)[back] for part in zip(*found)]

    def read(self, index: tf.Tensor) -> Parts:
        if self.ahead:
            return super().read(index)
        which = tf.searchsorted(self._ends, [index], "right")[0]
        own = (index - tf.gather(np.append(0, self._ends), which)) % tf.gather(self._sizes, which)

        kinds = {}

        def sample(number: int, source: Source) -> Parts:
            # All pictures are decoded whole here: of a file, nothing is gained.
            parts = {name: part for name, part in source.read(own).items() if name != "file"}
            kinds[number] = {n: f"{x.dtype.name}, rank {x.shape.rank}" for n, x in parts.items()}
            return parts

        try:
            return tf.switch_case(which, [partial(sample, *of) for of in enumerate(self._sources)])
        except (TypeError, AssertionError):
            if len(kinds) < len(self._sources):  # a source's own mistake
                raise
            raise ValueError(f"the sets of a mixture give unlike samples: {kinds}") from None

    def explain(self, index: int) -> str | None:
        which, own = self._place(index)
        return self._sources[which].explain(int(own))

    def fingerprint(self) -> str:
        return digest((s.fingerprint(), int(end)) for s, end in zip(self._sources, self._ends))
