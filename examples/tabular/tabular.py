"""Rows of a table: numbers and words in named columns, one column of classes.

cp tabular.py FORK/tasks/ && cd FORK && hvdkit start people.csv --label=income --train

It reads DATA_DIR/train.csv and val.csv (or .parquet): "label" is the class, the rest are features.
Their means, spreads and words come from the training table, and are part of the model.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import tables
from hvdkit.data.source import Arrays
from hvdkit.train import losses
from hvdkit.train.preprocessing import wide


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config
        train = self.fitted = self._read(config.train_split)
        features = {name: train[name] for name in train if name != "label"}
        self.numbers = {n: x for n, c in features.items() if (x := tables.numbers(c)) is not None}
        self.words = {n: tables.ordered(c) for n, c in features.items() if n not in self.numbers}

    def _read(self, split):
        folder = Path(self.config.data_dir)
        paths = [folder / f"{split}{suffix}" for suffix in tables.SUFFIXES]
        table = tables.read(next((path for path in paths if path.exists()), paths[0]))
        if "label" not in table:
            raise ValueError(f"{folder}, {split}: no column is named label, which are {[*table]}")
        return table

    def sources(self):
        splits = map(self._read, (self.config.train_split, self.config.val_split))
        train, val = map(self._source, splits)
        return train, val

    def _source(self, table):
        names = tables.classes(self.fitted["label"])
        if strange := [*({*self.fitted} ^ {*table}), *({*table["label"]} - {*names})]:
            raise ValueError(f"{strange[0]!r} is not in both tables, as column or as label")
        # A number before them: a column may have none in this split.
        numbers = [tables.numbers(["0", *table[name]]) for name in self.numbers]
        if any(column is None for column in numbers):
            raise ValueError("a column of numbers in training holds other text in validation")
        arrays = {"label": _codes(table["label"], names)}
        if numbers:
            arrays["numbers"] = np.stack(numbers, 1)[1:]
        if self.words:  # 0: one that training does not have
            arrays["words"] = 1 + np.stack([_codes(table[n], w) for n, w in self.words.items()], 1)
        source = Arrays(**arrays)
        source.class_names = names
        return source

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        label = losses.require_classes(sample["label"], self.config.num_classes)
        return {"inputs": {n: x for n, x in sample.items() if n != "label"}, "targets": label}

    def build_model(self):
        """Numbers of mean 0 and spread 1, a missing one the mean and told; words one-hot."""
        inputs, parts = {}, []
        if self.numbers:
            table = np.stack([*self.numbers.values()], 1)
            differ = np.nanmax(table, 0) > np.nanmin(table, 0)
            mean, spread = np.nanmean(table, 0), np.where(differ, np.nanstd(table, 0), 1.0)
            # float64: dates in seconds differ where float32 has no digits left.
            x = inputs["numbers"] = keras.Input((len(mean),), name="numbers", dtype="float64")
            missing = keras.ops.isnan(x)
            scaled = keras.ops.cast((x - mean) / spread, "float32")
            parts += [keras.ops.where(missing, 0.0, scaled), keras.ops.cast(missing, "float32")]
        if self.words:
            x = inputs["words"] = keras.Input((len(self.words),), name="words", dtype="int64")
            sizes = [1 + len(words) for words in self.words.values()]
            parts += [keras.ops.one_hot(x[:, i], size) for i, size in enumerate(sizes)]
        x = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
        for _ in range(2):
            x = keras.layers.Dense(64, activation="relu")(x)
        logits = keras.layers.Dense(self.config.num_classes, dtype=wide())(x)
        return keras.Model(inputs, logits, name="tabular")

    def loss(self, outputs, targets):
        weights = self.config.class_weight_list
        return losses.cross_entropy(outputs, targets, class_weights=weights)

    def sums(self, outputs, targets):
        hits = tf.argmax(outputs, axis=-1) == targets
        return {"hits": tf.math.count_nonzero(hits), "samples": tf.size(targets, tf.int64)}

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["samples"])}


def _codes(column, names):
    """The place of each value in `names`, int64; -1 where it is none."""
    places = {name: place for place, name in enumerate(names)}
    return np.array([places.get(value, -1) for value in column], np.int64)
