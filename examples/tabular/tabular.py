"""Rows of a table: numbers and words in columns that are named here, and one column of classes.

cp tabular.py FORK/tasks/ && cd FORK, name the columns below, then
python train.py --task=tabular --data_dir=FOLDER --num_classes=2

It reads FOLDER/train.csv and val.csv (UTF-8, commas, a line of names). Other columns are not read.
Means, spreads, words and classes come from the training table, and are part of the model.
"""

import csv
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train import losses
from hvdkit.train.preprocessing import wide

NUMBERS = ("age", "hours")  # an empty cell is a missing number
WORDS = ("job",)  # an empty cell is a word like others
LABEL = "income"


class Task:
    main_metric = "accuracy"

    def __init__(self, config):
        self.config = config
        self.fitted = self._read(config.train_split)
        self.words = {name: sorted({*self.fitted[name]}) for name in WORDS}
        self.classes = sorted({*self.fitted[LABEL]})

    def _read(self, split):
        """The named columns: float64, NaN where one is missing, or text."""
        path = Path(self.config.data_dir, f"{split}.csv")
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
        table = {}
        for name in (*NUMBERS, *WORDS, LABEL):
            column = [row.get(name) for row in rows]
            if None in column or not column:
                raise ValueError(f"{path} has no value of column {name} in each row")
            table[name] = column
        if "" in table[LABEL]:
            row = table[LABEL].index("") + 1
            raise ValueError(f"{path}: row {row} has no {LABEL}: fill it in, or remove the row")
        for name in NUMBERS:
            try:
                table[name] = np.array([float(text or "nan") for text in table[name]])
            except ValueError as error:
                raise ValueError(f"{path}, column {name}: {error}") from None
            if np.isinf(table[name]).any() or np.isnan(table[name]).all():
                raise ValueError(f"{path}, column {name} must hold numbers, and finite ones")
        return table

    def sources(self):
        return self._source(self.fitted), self._source(self._read(self.config.val_split))

    def _source(self, table):
        if strange := {*table[LABEL]} - {*self.classes}:
            raise ValueError(f"{min(strange)!r} is no {LABEL} of the training table")
        arrays = {"label": _codes(table[LABEL], self.classes)}
        if NUMBERS:
            arrays["numbers"] = np.stack([table[name] for name in NUMBERS], axis=1)
        if WORDS:  # 0: a word that training does not have
            codes = [1 + _codes(table[name], self.words[name]) for name in WORDS]
            arrays["words"] = np.stack(codes, axis=1)
        source = Arrays(**arrays)
        source.class_names = self.classes
        return source

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        label = losses.require_classes(sample["label"], self.config.num_classes)
        inputs = {name: sample[name] for name in ("numbers", "words") if name in sample}
        return {"inputs": inputs, "targets": label}

    def build_model(self):
        """Numbers of mean 0 and spread 1, a missing one the mean and told; words one-hot."""
        inputs = {}
        parts = []
        if NUMBERS:
            table = np.stack([self.fitted[name] for name in NUMBERS], axis=1)
            differ = np.nanmax(table, axis=0) > np.nanmin(table, axis=0)
            spread = np.where(differ, np.nanstd(table, axis=0), 1.0)
            # float64: dates in seconds differ where float32 has no digits left.
            x = inputs["numbers"] = keras.Input((len(NUMBERS),), name="numbers", dtype="float64")
            missing = keras.ops.isnan(x)
            scaled = keras.ops.cast((x - np.nanmean(table, axis=0)) / spread, "float32")
            parts.append(keras.ops.where(missing, 0.0, scaled))
            parts.append(keras.ops.cast(missing, "float32"))
        if WORDS:
            x = inputs["words"] = keras.Input((len(WORDS),), name="words", dtype="int64")
            for place, name in enumerate(WORDS):
                parts.append(keras.ops.one_hot(x[:, place], 1 + len(self.words[name])))
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
