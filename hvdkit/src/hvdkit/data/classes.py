"""Which class a label means: classes matched by name, values of label pictures mapped to classes.

A model's classes are numbered once, by the training split of its first run, and a checkpoint's data
card keeps their names (hvdkit/data/card.py). Data that are opened for that model later are mapped
to its numbers by the names of their classes.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from hvdkit.data.labels import IGNORE
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.data.scoped import Scoped
from hvdkit.data.source import Parts, Source, Wrapper, digest
from hvdkit.data.spelling import composed
from hvdkit.logs import join

# Names of the model's classes, by number, as which `open_sources` numbers classes; []: as the
# training split does.
known = Scoped[Sequence[str]]([])


def of(source: Source) -> list[str]:
    """The names of a source's classes by number; empty where it has none."""
    return [str(name) for name in getattr(source, "class_names", None) or ()]


def numbered(source: Source, where: object, names: Sequence[str] = ()) -> Source:
    """The source, its labels numbered as `names` are, else as the classes of the `known` model.

    The source may lack some of these classes. Raises ValueError for a class of the source that is
    none of them; `where` is what the message calls the source.
    """
    own_names = of(source)
    model_names = list(names or known.value)
    if not own_names or not model_names or own_names == model_names:
        return source

    number_of = {composed(name): number for number, name in enumerate(model_names)}
    unknown = [name for name in own_names if composed(name) not in number_of]
    if unknown:
        present = {composed(name) for name in own_names}
        missing = [name for name in model_names if composed(name) not in present]
        owner = "the training split" if names else "the model"
        lacks = f"; it lacks {join(missing)}" if missing else ""
        raise ValueError(
            f"{where} has {join(unknown)}, and {owner} has no such class{lacks}: name its classes "
            f"as {owner} does, or leave them out"
        )

    table = np.array([number_of[composed(name)] for name in own_names], np.int64)
    return Mapped(source, table, len(model_names), class_names=model_names)


def relabelled(source: Source, values: Mapping[int, int | None], count: int) -> Source:
    """The source with the values of its label pictures mapped, as --label_map says.

    Raises ValueError where its labels are no pictures.
    """
    if getattr(source, "kind", "class") != "map":
        raise ValueError(
            "--label_map maps values of label pictures: rename classes instead"
        )
    table = np.arange(256)
    for value, new_class in values.items():
        table[value] = IGNORE if new_class is None else new_class
    return Mapped(source, table, count)


def doubt(source: Source, values: np.ndarray) -> str:
    """Why labels with so many pixels of each value, integer [256], cannot be meant; or ""."""
    return without_foreground(values) or doubt_of_files(source, values)


def doubt_of_files(source: Source, values: np.ndarray) -> str:
    """As `doubt`, but only what no flag can set right, and a packed set does not show any more."""
    fault = ""
    if hasattr(source, "doubt"):
        fault = source.doubt(values)
    if not fault and hasattr(source, "doubt_of_palettes"):
        fault = source.doubt_of_palettes()
    return fault


def without_foreground(values: np.ndarray) -> str:
    """What to do where label pictures, with so many pixels of each value, integer [256], hold
    nothing but 0 and 255; "" for others."""
    if not values[IGNORE] or not values[0] or values[1:IGNORE].any():
        return ""
    return (
        f"label pictures hold the values 0 and {IGNORE} only, and {IGNORE} means ignored, so there "
        f"is nothing to learn: give --label_map={IGNORE}:1 if it is a class (--num_classes=2), or "
        f"--label_map={IGNORE}:ignore if it is not"
    )


class Mapped(Wrapper):
    """Another source's samples, their labels looked up in a table.

    `table`: the new label of each, integer [labels]; of label pictures, of the values 0 to 255.
    `classes`: their number; label pictures may hold IGNORE too.
    """

    def __init__(
        self,
        source: Source,
        table: np.ndarray,
        classes: int,
        *,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__(source)
        self.num_classes = classes
        self.class_names = list(class_names)
        if getattr(source, "kind", "class") == "map" and len(table) < 256:
            # IGNORE stays what it is, and so do values that are no class.
            table = np.r_[table, np.arange(len(table), 256)]
        self._table = table
        if hasattr(source, "class_counts"):
            self.class_counts = partial(self._class_counts, source.class_counts)

    def _class_counts(self, of_source: Callable[[], Sequence[int]]) -> np.ndarray:
        return np.bincount(self._table, of_source(), minlength=self.num_classes)

    def read(self, index: tf.Tensor) -> Parts:
        sample = self._source.read(index)
        label = sample["label"]
        mapped = tf.gather(tf.constant(self._table), tf.cast(label, tf.int32))
        if label.shape.rank:
            pictures.require_classes(mapped, self.num_classes)
        return {**sample, "label": tf.cast(mapped, label.dtype)}

    def explain(self, index: int) -> str | None:
        if fault := self._source.explain(index):
            return fault
        try:
            self.read(tf.constant(index, tf.int64))
        except tf.errors.OpError as error:
            file = f"sample {index}"
            if hasattr(self._source, "picture_file"):
                file = self._source.picture_file(index)
            return f"the label of {file} cannot be used: {reason_of(error)}"
        return None

    def fingerprint(self) -> str:
        table = hashlib.sha256(np.asarray(self._table, "<i8").tobytes()).hexdigest()
        return digest([(self._source.fingerprint(), 0), (table, self.num_classes)])
