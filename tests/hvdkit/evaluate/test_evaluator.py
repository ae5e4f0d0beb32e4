"""An evaluation is of the model in evaluation mode, on every sample once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.data.pipeline import EvaluationFeed, reader
from hvdkit.data.source import Arrays
from hvdkit.evaluate.evaluator import make_step


class Plain:
    """Losses are the outputs themselves; weights come with the data."""

    def loss(self, outputs, targets):
        return outputs[:, 0], targets

    def sums(self, outputs, targets):
        return {"outputs": tf.reduce_sum(outputs)}


def feed(size: int, batch_size: int, rank: int = 0, ranks: int = 1) -> EvaluationFeed:
    """Samples 0, 1, 2, ... of weights 1, 2, 3, ..."""
    numbers = np.arange(size, dtype=np.float32)
    source = Arrays(x=numbers[:, None], weight=numbers + 1)
    example = lambda sample: {"inputs": sample["x"], "targets": sample["weight"]}  # noqa: E731
    made = reader(source, example, keyed=False)
    return EvaluationFeed(source, made, batch_size, rank=rank, size=ranks)


def test_batch_norm_and_dropout_are_as_in_use():
    """A moving mean of 1 and variance of 4: x becomes (x - 1) / 2, whatever the batch."""
    x = keras.Input((1,))
    norm = keras.layers.BatchNormalization(epsilon=0.0)
    model = keras.Model(x, keras.layers.Dropout(0.9)(norm(x)))
    norm.moving_mean.assign([1.0])
    norm.moving_variance.assign([4.0])
    given = feed(4, batch_size=4)
    outputs, sums, _ = make_step(Plain(), model, given.spec)(next(iter(given)))
    np.testing.assert_allclose(outputs[:, 0], [-0.5, 0.0, 0.5, 1.0], rtol=1e-6)
    assert sums["loss"].numpy() == pytest.approx(-0.5 * 1 + 0.5 * 3 + 1.0 * 4)
    assert sums["weight"] == 1 + 2 + 3 + 4 and sums["outputs"] == 1.0
    assert norm.moving_mean.numpy() == [1.0]


@pytest.mark.parametrize(
    ("ranks", "batches"),
    [
        (1, [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]),
        (2, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]]),
        (4, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]], []]),
    ],
)
def test_every_sample_once_the_last_batch_may_be_short(ranks, batches):
    feeds = [feed(10, 4, rank, ranks) for rank in range(ranks)]
    found = [[batch["inputs"][:, 0].numpy().tolist() for batch in one] for one in feeds]
    assert found == batches
    assert [[one.ids(i) for i in range(len(b))] for one, b in zip(feeds, batches)] == batches
    assert {one.rounds for one in feeds} == {len(batches[0])}
