"""Modules that a fork imports, whatever rooms are inside of train/ and data/."""

import importlib

import pytest

PUBLIC = {
    "data.augment": ["Augmentation", "centred", "random_resized", "training_pair"],
    "data.image_ops": ["keys", "mirrored", "resize", "uniform"],
    "data.mixing": ["mixed"],
    "data.rand_augment": ["applied"],
    "data.scenes": ["ensure_demo", "Settings"],
    "train.across": ["gather", "places"],
    "train.batch_norm": ["SyncBatchNormalization", "fuse"],
    "train.dropout": ["SampleDropout"],
    "train.groups": ["Group"],
    "train.losses": ["cross_entropy", "mixed_cross_entropy", "require_classes"],
    "train.outputs": ["one_logit", "sigmoid", "softmax"],
    "train.preprocessing": ["Preprocess", "scaled", "wide"],
    "train.step": ["Step"],
    "train.task": ["Example", "Task", "load_task"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_fork_imports_what_a_task_may_use(module):
    imported = importlib.import_module(f"hvdkit.{module}")
    assert all(hasattr(imported, name) for name in PUBLIC[module])
