"""Modules of this room that a fork imports, whatever rooms are inside."""

import importlib

import pytest

PUBLIC = {
    "across": ["gather", "places"],
    "batch_norm": ["SyncBatchNormalization", "fuse"],
    "dropout": ["SampleDropout"],
    "groups": ["Group"],
    "losses": ["cross_entropy", "mixed_cross_entropy", "require_classes"],
    "outputs": ["one_logit", "sigmoid", "softmax"],
    "preprocessing": ["Preprocess", "scaled", "wide"],
    "step": ["Step"],
    "task": ["Example", "Task", "load_task"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_fork_imports_what_a_task_may_use(module):
    imported = importlib.import_module(f"hvdkit.train.{module}")
    assert all(hasattr(imported, name) for name in PUBLIC[module])
