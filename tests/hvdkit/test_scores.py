"""Which of two scores is better, and which metrics need to say it."""

import types

import pytest
from refusals import refused

from hvdkit import scores

ERRORS = [
    "mae",
    "val_mae",
    "MAE",
    "meanAbsoluteError",
    "top1_error",
    "rmse",
    "RMSELog",
    "loss",
]
ERRORS += [
    "loss/box",
    "valLoss",
    "logloss",
    "perplexity",
    "char-ppl",
    "wer",
    "CER",
    "fid",
    "nll",
]
ERRORS += ["rms", "bits_a_byte", "fvd", "min_ADE"]
ERRORS += ["PER", "val_per", "ser", "mean_wQL", "MSIS", "mean_rank", "SQL"]
ERRORS += ["edit distance", "false_positives", "mape2", "l1", "cross_entropy", "nrmse"]
OTHERS = [
    "accuracy",
    "miou",
    "r2",
    "closeness",
    "mAP50",
    "F1Score",
    "auc",
    "recall",
    "psnr",
]
OTHERS += [
    "top5_accuracy",
    "bleu",
    "explained_variance",
    "per_class_recall",
    "rank1_accuracy",
    "rank_correlation",
    "sql_accuracy",
    "val1",
    "reward",
]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_needs_a_mode(name):
    task = types.SimpleNamespace(main_metric=name)
    refused(
        lambda: scores.of_task(task),
        f'main_metric = "{name}" may be an error',
        'main_metric_mode = "min"',
        '"max"',
    )
    for mode in ("min", "max"):
        task.main_metric_mode = mode
        assert scores.of_task(task) == (name, mode)


@pytest.mark.parametrize("name", OTHERS)
def test_of_any_other_the_highest_is_the_best(name):
    metric = scores.of_task(types.SimpleNamespace(main_metric=name))
    assert metric == (name, "max") and metric.is_better(0.2, 0.1)
    assert not metric.is_better(0.1, 0.1)


@pytest.mark.parametrize("mode", ["auto", "MIN", "", None, True, ["min"]])
def test_a_mode_that_is_none_is_refused(mode):
    task = types.SimpleNamespace(main_metric="accuracy", main_metric_mode=mode)
    refused(
        lambda: scores.of_task(task), f"main_metric_mode = {mode!r}", '"min"', '"max"'
    )


def test_of_an_error_the_lowest_is_the_best():
    metric = scores.MainMetric("mae", "min")
    assert metric.is_better(0.1, 0.2) and not metric.is_better(0.2, 0.2)
    assert metric.height(metric.height(0.3)) == 0.3
