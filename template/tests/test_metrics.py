"""IoU and accuracy against counts made by hand."""

import numpy as np
import pytest
import tensorflow as tf

from engine import metrics


def test_confusion_iou_and_accuracy():
    labels = tf.constant([[0, 0, 1, 1, 2, 255]], tf.uint8)
    predictions = tf.constant([[0, 1, 1, 1, 0, 2]], tf.int64)
    matrix = metrics.confusion_matrix(labels, predictions, labels != 255, 4).numpy()
    expected = [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert matrix.tolist() == expected and matrix.dtype == np.int64
    iou = metrics.intersection_over_union(matrix)
    assert iou[:3] == pytest.approx([1 / 3, 2 / 3, 0])
    assert np.isnan(iou[3])  # in neither labels nor predictions
    assert metrics.accuracy(matrix) == pytest.approx(3 / 5)
