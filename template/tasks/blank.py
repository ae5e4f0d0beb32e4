"""A task to start from. It trains on random numbers as it is: change it part by part.

    python train.py --flagfile=configs/blank.cfg

Copy this file to tasks/NAME.py and train it with --task=NAME. Change the data first (`sources`,
the two `..._example`), then `build_model`, then `loss`, then `sums` and `metrics`. After each part,
train 20 steps. hvdkit.train.task (in vendor/hvdkit/src) says what every function takes and returns,
and which others a task may have: an optimizer, a schedule, actions after a step.
"""

import keras
import numpy as np
import tensorflow as tf
from hvdkit.data.source import Arrays, Source
from hvdkit.settings import Settings
from hvdkit.train import losses
from hvdkit.train.outputs import softmax
from hvdkit.train.preprocessing import wide
from hvdkit.train.task import Example

FEATURES = 8


class Task:
    # The metric by which the best checkpoint is chosen: a key of what `metrics` returns, or "loss".
    # Its highest value is the best; of an error, "min": its lowest.
    main_metric = "accuracy"
    main_metric_mode = "max"

    def __init__(self, config: Settings) -> None:
        # Settings come from flags: config.num_classes is --num_classes. A setting of your own is
        # one more field in settings.py.
        self.config = config

    def sources(self) -> tuple[Source, Source]:
        """Training and validation data: arrays in memory as here, or files by a reader.

        hvdkit.data.readers has readers; hvdkit.data.source says how to write another.
        """
        classes = self.config.num_classes
        return numbers("train", 2000, classes), numbers("val", 400, classes)

    def training_example(self, sample: dict[str, tf.Tensor], key: tf.Tensor) -> Example:
        """Inputs of the model and targets of the loss. Random augmentation belongs here.

        Draw only with tf.random.stateless_*(seed=key): then the example is the same on whichever
        rank reads it, and after a restart.
        """
        noise = 0.1 * tf.random.stateless_normal([FEATURES], key)
        return {"inputs": sample["numbers"] + noise, "targets": self._label(sample)}

    def evaluation_example(self, sample: dict[str, tf.Tensor]) -> Example:
        return {"inputs": sample["numbers"], "targets": self._label(sample)}

    def _label(self, sample: dict[str, tf.Tensor]) -> tf.Tensor:
        """The class, checked: an invalid one ends the run with a message."""
        return losses.require_classes(sample["label"], self.config.num_classes)

    def build_model(self) -> keras.Model:
        """Any Keras model. Its last layer gives logits, in float32 at any --precision.

        For dropout use SampleDropout, as models.py does: its draws do not depend on the rank.
        """
        numbers = keras.Input((FEATURES,), name="numbers")
        x = keras.layers.Dense(32, activation="relu")(numbers)
        logits = keras.layers.Dense(self.config.num_classes, dtype=wide())(x)
        return keras.Model(numbers, logits, name="blank")

    def loss(
        self, outputs: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """A loss for every example (or pixel, or word), and its weight: 0 leaves it out.

        Not their mean: the run takes it, over the global batch of all ranks.
        """
        return losses.cross_entropy(
            outputs,
            targets,
            smoothing=self.config.label_smoothing,
            class_weights=self.config.class_weight_list,
        )

    def sums(self, outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
        """Counts of one batch, which are added up over the validation set; no means."""
        hits = tf.argmax(outputs, axis=-1) == targets
        return {
            "hits": tf.math.count_nonzero(hits),
            "samples": tf.size(targets, tf.int64),
        }

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        """Metrics from the added counts. `loss` is added by itself."""
        return {"accuracy": float(sums["hits"] / max(int(sums["samples"]), 1))}

    def decode(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """What the outputs mean, for `hvdkit predict` and `export`: probabilities and classes."""
        return softmax(outputs)

    def draw(
        self, inputs: tf.Tensor, targets: tf.Tensor, outputs: tf.Tensor
    ) -> np.ndarray:
        """A picture for the report: a row an example, a square a class, bright: likely.

        uint8 [n, height, width, 3].
        """
        shades = (tf.nn.softmax(outputs).numpy() * 255).astype(np.uint8)
        squares = np.kron(shades, np.ones((16, 16), np.uint8))
        return np.repeat(squares[None, :, :, None], 3, axis=-1)


def numbers(split: str, size: int, num_classes: int) -> Arrays:
    """Random numbers, float32 [size, FEATURES], and a class that can be learned from them."""
    rule = np.random.default_rng(0).normal(size=(FEATURES, num_classes))
    x = np.random.default_rng({"train": 1, "val": 2}[split]).normal(
        size=(size, FEATURES)
    )
    return Arrays(numbers=x.astype(np.float32), label=np.argmax(x @ rule, axis=-1))
