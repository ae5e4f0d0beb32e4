"""Scores against counts made by hand and scikit-learn's."""

import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import r2_score, top_k_accuracy_score

from hvdkit.evaluate import metrics


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_counts_ties_as_scikit_learn_does(k):
    rng = np.random.default_rng(3)
    labels = rng.integers(9, size=500)
    shape = (500, 9)
    for scores in (
        rng.normal(size=shape),
        rng.integers(3, size=shape) / 2,
        np.ones(shape),
    ):
        hits = metrics.in_top(tf.constant(labels), tf.constant(scores), k).numpy()
        assert hits.mean() == top_k_accuracy_score(labels, scores, k=k, labels=range(9))
    assert hits.mean() < 0.8  # equal scores for all classes are no way to a high one


def test_nan_scores_are_no_hit():
    scores = tf.constant(
        [[0.0, np.nan, 1.0], [0.0, -np.inf, np.inf], [0.0, -np.inf, np.inf]]
    )
    hits = metrics.in_top(tf.constant([2, 2, 1]), scores, 2).numpy()
    assert hits.tolist() == [False, True, False]


def test_figures_of_each_class():
    confusion = np.array([[8, 2, 0], [4, 1, 0], [0, 0, 0]])
    figures = metrics.class_figures(confusion)
    assert figures["labels"] == [10, 5, 0]
    assert figures["recall"][:2] == [0.8, 0.2] and np.isnan(figures["recall"][2])
    np.testing.assert_allclose(figures["precision"][:2], [8 / 12, 1 / 3])
    np.testing.assert_allclose(figures["iou"][:2], [8 / 14, 1 / 7])


def test_classes_are_named_as_either_split_names_them():
    named, unnamed = (
        types.SimpleNamespace(class_names=names) for names in (["a", "b"], None)
    )
    assert metrics.class_names(2, unnamed, named) == ["a", "b"]
    assert metrics.class_names(3, named, unnamed) == ["a", "b", "2"]
    assert metrics.class_names(2, unnamed, unnamed) == ["0", "1"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda most, errors: keras.ops.maximum(most, keras.ops.max(errors)),
        # It depends on the size of batches.
        lambda means, errors: means + keras.ops.mean(errors),
    ],
)
def test_a_keras_metric_whose_state_is_no_sum_is_refused(changed):
    class Other(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.state = self.add_variable((), "zeros", name="state")

        def update_state(self, labels, predictions):
            self.state.assign(changed(self.state, labels - predictions))

    with pytest.raises(
        ValueError, match="one: the state of Other is no sum over samples"
    ):
        metrics.KerasMetrics(one=Other()).sums(tf.ones([4, 1]), tf.zeros([4, 1]))


class MeanOfF1(keras.metrics.Metric):
    """A mean of batches' F1, weighted by their samples: twice a batch gives twice its state."""

    def __init__(self):
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, labels, predictions):
        hits = keras.ops.sum(labels * predictions)
        both = keras.ops.sum(labels) + keras.ops.sum(predictions)
        self.total.assign_add(2 * hits / both * len(labels))


def test_a_keras_metric_whose_states_of_different_batches_do_not_add_up_is_refused():
    with pytest.raises(ValueError, match="f1: the state of MeanOfF1 is no sum"):
        metrics.KerasMetrics(f1=MeanOfF1()).sums(tf.ones([4, 1]), tf.zeros([4, 1]))


ONE_HOT = (tf.eye(3), tf.eye(3) * 0.5)
NUMBERED = (tf.constant([0, 1, 2]), tf.eye(3))
BINARY = (tf.constant([[1.0], [0.0]]), tf.constant([[0.3], [0.2]]))


@pytest.mark.parametrize(
    ("metric", "batch"),
    [
        (keras.metrics.AUC(), BINARY),
        (keras.metrics.Precision(), BINARY),
        (keras.metrics.PrecisionAtRecall(0.5), BINARY),
        (keras.metrics.BinaryIoU(), BINARY),
        (keras.metrics.Hinge(), BINARY),
        (keras.metrics.F1Score(average="macro"), ONE_HOT),
        (keras.metrics.CategoricalCrossentropy(), ONE_HOT),
        (keras.metrics.KLDivergence(), ONE_HOT),
        (keras.metrics.Poisson(), ONE_HOT),
        (keras.metrics.CosineSimilarity(), ONE_HOT),
        (keras.metrics.ConcordanceCorrelation(), ONE_HOT),
        (keras.metrics.R2Score(), ONE_HOT),
        (keras.metrics.RootMeanSquaredError(), ONE_HOT),
        (keras.metrics.MeanAbsolutePercentageError(), ONE_HOT),
        (keras.metrics.MeanSquaredLogarithmicError(), ONE_HOT),
        (keras.metrics.LogCoshError(), ONE_HOT),
        (keras.metrics.TopKCategoricalAccuracy(2), ONE_HOT),
        (keras.metrics.SparseTopKCategoricalAccuracy(2), NUMBERED),
        (keras.metrics.SparseCategoricalCrossentropy(), NUMBERED),
        (keras.metrics.MeanIoU(3), (NUMBERED[0], NUMBERED[0])),
        (keras.metrics.Mean(), ONE_HOT[:1]),
        (keras.metrics.Sum(), ONE_HOT[:1]),
        (keras.metrics.Accuracy(), (*BINARY, tf.constant([0.5, 2.0]))),
    ],
)
def test_kerass_own_metrics_are_taken(metric, batch):
    scores = metrics.KerasMetrics(one=metric)
    assert all(scores.figures(scores.sums(*batch)))


def test_a_keras_metric_that_would_count_padding_is_refused():
    labels = tf.constant([[1.0, 0.0, 0.0]])
    outputs = tf.constant([[1.0, 1.0, 1.0]])
    outputs._keras_mask = tf.constant([[True, False, False]])
    scores = metrics.KerasMetrics(precision=keras.metrics.Precision())
    with pytest.raises(ValueError, match="precision: Precision counts padding"):
        scores.sums(labels, outputs)
    weights = tf.cast(outputs._keras_mask, tf.float32)
    assert scores.figures(scores.sums(labels, outputs, weights)) == {"precision": 1.0}
    scores = metrics.KerasMetrics(right=keras.metrics.BinaryAccuracy())
    assert scores.figures(scores.sums(labels, outputs)) == {"right": 1.0}


def test_a_mask_that_operations_lost_counts_too():
    """An LSTM's outputs are of the positions of the mask; what is pooled over these is not."""
    words = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(9, 4, mask_zero=True)(words)
    tags = keras.layers.Dense(1)(keras.layers.LSTM(3, return_sequences=True)(embedded))
    model = keras.Model(words, [tags, keras.layers.GlobalAveragePooling1D()(embedded)])

    def sums(metric, of_outputs):
        def traced(ids):
            predictions = of_outputs(*model(ids))
            labels = tf.zeros_like(predictions)
            return metrics.KerasMetrics(one=metric).sums(labels, predictions)

        spec = tf.TensorSpec([None, 5], tf.int32)
        return tf.function(traced, autograph=False).get_concrete_function(spec)

    for metric in (keras.metrics.Precision(), keras.metrics.BinaryAccuracy()):
        with pytest.raises(ValueError, match="counts padding: give the weights"):
            sums(metric, lambda tags, pooled: tf.sigmoid(tags))
        with pytest.raises(ValueError, match="counts padding: give the weights"):
            sums(metric, lambda tags, pooled: tf.squeeze(tf.sigmoid(tags), -1))
        sums(metric, lambda tags, pooled: tf.sigmoid(pooled))
    sums(keras.metrics.BinaryAccuracy(), lambda tags, pooled: tags)
    # It leaves out padding by the labels.
    by_labels = keras.metrics.MeanIoU(2, ignore_class=-1)
    sums(by_labels, lambda tags, pooled: tf.round(tf.squeeze(tf.sigmoid(tags), -1)))


@pytest.mark.parametrize(
    "metric",
    [
        keras.metrics.AUC(),
        keras.metrics.AUC(multi_label=True, num_labels=1),
        keras.metrics.PrecisionAtRecall(0.5),
        keras.metrics.RecallAtPrecision(0.5),
        keras.metrics.SensitivityAtSpecificity(0.5),
        keras.metrics.SpecificityAtSensitivity(0.5),
    ],
)
def test_probabilities_are_asked_for_where_keras_clips_to_them(metric):
    labels, probabilities = BINARY
    scores = metrics.KerasMetrics(one=metric)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"one: .*tf.sigmoid"):
        scores.sums(labels, probabilities * 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"takes probabilities"):
        scores.sums(labels, -probabilities)
    # NaN and rounding are of other causes.
    scores.sums(labels, tf.constant([[math.nan], [1.004]]))
    # A weight of 0 leaves a prediction out.
    scores.sums(labels, tf.constant([[9.0], [0.5]]), tf.constant([0.0, 1.0]))


class OfLogits(keras.metrics.AUC):
    """Makes its own probabilities."""

    def update_state(self, labels, logits, sample_weight=None):
        return super().update_state(labels, tf.sigmoid(logits), sample_weight)


def test_a_metric_of_ones_own_may_make_its_probabilities():
    scores = metrics.KerasMetrics(auc=OfLogits())
    labels, probabilities = BINARY
    scores.sums(labels, probabilities * 10)


def test_an_auc_of_logits_says_so():
    labels = tf.constant([1.0, 0.0, 1.0, 0.0])
    logits = tf.constant([9.0, 3.0, 5.0, -2.0])
    scores = metrics.KerasMetrics(auc=keras.metrics.AUC(from_logits=True))
    assert scores.figures(scores.sums(labels, logits))["auc"] > 0.99


def test_r2_has_its_digits_where_the_targets_have_a_large_mean():
    rng = np.random.default_rng(0)
    near = rng.normal(size=(4, 50, 2))
    errors = rng.normal(scale=0.3, size=near.shape)
    expected = []
    for feature in range(2):
        expected.append(
            r2_score(near[..., feature].ravel(), (near + errors)[..., feature].ravel())
        )
    for mean in (0.0, 1e4):
        labels = tf.constant(near + mean, tf.float32)
        outputs = tf.constant(near + errors + mean, tf.float32)
        metric = keras.metrics.R2Score(class_aggregation=None, name="of_each")
        scores = metrics.KerasMetrics(r2=metric)
        batches = [scores.sums(*batch) for batch in zip(labels, outputs)]
        totals = {name: sum(b[name].numpy() for b in batches) for name in batches[0]}
        figures = scores.figures(totals)
        np.testing.assert_allclose([*figures.values()], expected, atol=1e-3)


def test_a_keras_metric_that_is_none_for_rows_of_one_number_is_taken():
    labels = tf.constant([[1.0, 2.0, 4.0], [3.0, 1.0, 0.0]])
    metric = metrics.KerasMetrics(one=keras.metrics.PearsonCorrelation())
    sums = metric.sums(labels, 2 * labels)
    assert all(np.isfinite(value).all() for value in sums.values())
