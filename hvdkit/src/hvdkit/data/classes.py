"""Which class a label means: classes matched by name, values of label pictures mapped to classes.

A model's classes are numbered once, by the training split of its first run, and a checkpoint's data
card keeps their names (hvdkit/data/card.py). Data that are opened for that model later are mapped
to its numbers by the names of their classes.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdkit.data.labels import IGNORE
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.data.source import Source, Wrapper, digest
from hvdkit.data.spelling import composed
from hvdkit.logs import join

_known: list[str] = []  # names of the model's classes, by number


@contextlib.contextmanager
def known(names: Sequence[str]) -> Iterator[None]:
    """Inside, `open_sources` numbers classes as this model does; []: by the training split."""
    global _known
    before, _known = _known, list(names)
    try:
        yield
    finally:
        _known = before


def of(source: Source) -> list[str]:
    """The names of a source's classes by number; empty where it has none."""
    return [str(name) for name in getattr(source, "class_names", None) or ()]


def numbered(source: Source, where: object, names: Sequence[str] = ()) -> Source:
    """The source with the numbers of `names`, else of the model that is `known`.

    It may lack some of these classes. Raises ValueError for classes that are none of them.
    """
    own, model = of(source), list(names or _known)
    if not own or not model or own == model:
        return source
    numbers = {composed(name): number for number, name in enumerate(model)}
    if strange := [name for name in own if composed(name) not in numbers]:
        has = {composed(name) for name in own}
        lacks = [name for name in model if composed(name) not in has]
        whose = "the training split" if names else "the model"
        what = "has no such class" + f"; it lacks {join(lacks)}" * bool(lacks)
        rule = f"name its classes as {whose} does, or leave them out"
        raise ValueError(f"{where} has {join(strange)}, and {whose} {what}: {rule}")
    table = np.array([numbers[composed(name)] for name in own], np.int64)
    return Mapped(source, table, len(model), class_names=model)


def relabelled(source: Source, values: Mapping[int, int | None], count: int) -> Source:
    """The source with the values of its label pictures mapped, as --label_map says.

    Raises ValueError where its labels are no pictures.
    """
    if getattr(source, "kind", "class") != "map":
        raise ValueError("--label_map maps values of label pictures: rename classes instead")
    table = np.arange(256)
    table[list(values)] = [IGNORE if to is None else to for to in values.values()]
    return Mapped(source, table, count)


def doubt(source: Source, values: np.ndarray) -> str:
    """Why labels with so many pixels of each value, integer [256], cannot be meant; or ""."""
    of_reader = getattr(source, "doubt", None)
    return without_foreground(values) or (of_reader(values) if of_reader else "")


def without_foreground(values: np.ndarray) -> str:
    """What to do where label pictures, with so many pixels of each value, integer [256], hold
    nothing but 0 and 255; "" for others."""
    if not values[IGNORE] or not values[0] or values[1:IGNORE].any():
        return ""
    what = f"label pictures hold the values 0 and {IGNORE} only, and {IGNORE} means ignored"
    give = f"--label_map={IGNORE}:1 if it is a class (--num_classes=2)"
    give += f", or --label_map={IGNORE}:ignore if it is not"
    return f"{what}, so there is nothing to learn: give {give}"


class Mapped(Wrapper):
    """Another source's samples, their labels looked up in a table.

    `table`: the new label of each, integer [labels]; of label pictures, of the values 0 to 255.
    `classes`: their number; label pictures may hold IGNORE too.
    """

    def __init__(
        self, source: Source, table: np.ndarray, classes: int, *, class_names: Sequence[str] = ()
    ) -> None:
        super().__init__(source)
        self.num_classes, self.class_names = classes, list(class_names)
        if getattr(source, "kind", "class") == "map" and len(table) < 256:
            table = np.r_[table, np.arange(len(table), 256)]  # IGNORE stays; others are no class
        self._table = table
        if hasattr(source, "class_counts"):
            own = source.class_counts
            self.class_counts = lambda: np.bincount(self._table, own(), minlength=classes)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        sample = self._source.read(index)
        label = sample["label"]
        mapped = tf.gather(tf.constant(self._table), tf.cast(label, tf.int32))
        if label.shape.rank:
            highest = tf.reduce_max(tf.where(mapped == IGNORE, tf.zeros_like(mapped), mapped))
            words = f"is no class of 0 to {self.num_classes - 1}: add it to --label_map"
            pictures.require(highest < self.num_classes, "label value", highest, words)
        return {**sample, "label": tf.cast(mapped, label.dtype)}

    def explain(self, index: int) -> str | None:
        if fault := self._source.explain(index):
            return fault
        try:
            self.read(tf.constant(index, tf.int64))
        except tf.errors.OpError as error:
            file = getattr(self._source, "picture_file", lambda number: f"sample {number}")(index)
            return f"the label of {file} cannot be used: {reason_of(error)}"
        return None

    def fingerprint(self) -> str:
        table = hashlib.sha256(np.asarray(self._table, "<i8").tobytes()).hexdigest()
        return digest([(self._source.fingerprint(), 0), (table, self.num_classes)])
