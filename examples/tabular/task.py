r"""Rows of a table: numbers and words in columns that are named here, and one column of classes.

    hvdkit example tabular          # then name the columns below
    horovodrun -np 2 python train.py --task=tabular --run_dir=runs/tabular --data_dir=FOLDER \
        --num_classes=2 --optimizer=adam --base_lr=0.003 --num_steps=300 --eval_every=0
    echo '{"age": 41, "hours": NaN, "job": "baker"}' > people.jsonl
    hvdkit predict --run_dir=runs/tabular --out=predicted people.jsonl
    hvdkit export --run_dir=runs/tabular --out=exported --check=people.jsonl
    python -c 'import hvdkit; hvdkit.load("runs/tabular").summary()'

It reads FOLDER/train.csv and val.csv (UTF-8, commas, a line of names). Other columns are not read.
Means, spreads and words come from train.csv, and what to expect is up to it. Checkpoints hold means
and spreads. predict, export and load read the words of train.csv again and refuse others; only what
export wrote needs no table. With --jit, look words up in `evaluation_example`: XLA has no text.
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
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
        names = reader.fieldnames or []
        if len({*names}) < len(names):
            raise ValueError(f"{path} has two columns of one name: {names}")
        for number, row in enumerate(rows, start=1):
            if None in row:  # the cells that have no name
                raise ValueError(f"{path}: row {number} has more values than names")
        table = {}
        for name in (*NUMBERS, *WORDS, LABEL):
            column = [row.get(name) for row in rows]
            if None in column or not column:
                raise ValueError(f"{path} has no value of column {name} in each row")
            table[name] = column
        if "" in table[LABEL]:
            row = table[LABEL].index("") + 1
            raise ValueError(
                f"{path}: row {row} has no {LABEL}: fill it in, or remove the row"
            )
        for name in NUMBERS:
            try:
                table[name] = np.array([float(text or "nan") for text in table[name]])
            except ValueError as error:
                raise ValueError(f"{path}, column {name}: {error}") from None
            if np.isinf(table[name]).any() or np.isnan(table[name]).all():
                raise ValueError(
                    f"{path}, column {name} must hold numbers, and finite ones"
                )
        return table

    def sources(self):
        return self._source(self.fitted), self._source(
            self._read(self.config.val_split)
        )

    def _source(self, table):
        if strange := {*table[LABEL]} - {*self.classes}:
            raise ValueError(f"{min(strange)!r} is no {LABEL} of the training table")
        columns = {name: table[name] for name in NUMBERS}
        columns |= {name: np.array(table[name]) for name in WORDS}
        source = Arrays(**columns, **{LABEL: _codes(table[LABEL], self.classes)})
        source.class_names = self.classes
        return source

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        label = losses.require_classes(sample[LABEL], self.config.num_classes)
        inputs = {name: sample[name] for name in (*NUMBERS, *WORDS)}
        return {"inputs": inputs, "targets": label}

    def build_model(self):
        """Numbers of mean 0 and spread 1, a missing one the mean and told; words one-hot."""
        inputs = {}
        parts = []
        for name in NUMBERS:
            known = self.fitted[name][~np.isnan(self.fitted[name])]
            if known.min() == known.max():
                known = np.array([known[0] - 1, known[0] + 1])  # of spread 1
            if known.std() < 1e-6:  # Keras divides by 1e-7 at least
                raise ValueError(
                    f"{name} spreads by {known.std():.1g}: take a smaller unit"
                )
            # float64: dates in seconds differ where float32 has no digits left. Checkpoints hold
            # the layer's mean and variance, so that predictions do not need the table.
            normalization = keras.layers.Normalization(axis=None, dtype="float64")
            normalization.adapt(known[:, None])
            x = inputs[name] = keras.Input((), name=name, dtype="float64")
            x = keras.ops.expand_dims(x, axis=-1)
            missing = keras.ops.isnan(x)
            scaled = keras.ops.cast(normalization(x), "float32")
            parts.append(keras.ops.where(missing, 0.0, scaled))
            parts.append(keras.ops.cast(missing, "float32"))
        for name in WORDS:
            x = inputs[name] = keras.Input((), name=name, dtype="string")
            words = keras.layers.StringLookup(
                vocabulary=self.words[name], output_mode="one_hot"
            )
            parts.append(words(x))
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
        return {
            "hits": tf.math.count_nonzero(hits),
            "samples": tf.size(targets, tf.int64),
        }

    def metrics(self, sums):
        return {"accuracy": float(sums["hits"] / sums["samples"])}


def _codes(column, names):
    """The place of each value in `names`, int64; -1 where it is none."""
    places = {name: place for place, name in enumerate(names)}
    return np.array([places.get(value, -1) for value in column], np.int64)
