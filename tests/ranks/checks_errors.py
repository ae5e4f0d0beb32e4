"""Holds World.fail_together and hvdkit.run.context on real ranks: one message for bad folders."""

import os
import shutil
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from small_runs import (
    FEATURES,
    Small,
    classifier,
    fit,
    fit_config,
    folder,
    on_chief,
    task_with,
)

from hvdkit import settings as settings_lib
from hvdkit.data.prepare import scenes
from hvdkit.run import context as run_lib
from hvdkit.settings import Settings
from hvdkit.stop import BUG, NOT_NOW, WRONG_USE
from ranks import TINY_FLAGS
from tasks.segmentation import Task


def folder_with_scenes(world) -> Path:
    """A folder whose folder data holds scenes; rank 0 has made it."""
    root = folder(world)
    settings = scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3))
    on_chief(world, lambda: scenes.ensure_demo(root / "data", settings))
    return root


def config(root: Path, *flags: str) -> Settings:
    return settings_lib.parse(
        [
            "train.py",
            "--flagfile=configs/demo.cfg",
            *TINY_FLAGS,
            f"--data_dir={root / 'data'}",
            f"--run_dir={root / 'run'}",
            *flags,
        ]
    )


def check_what_cannot_be_used_is_refused_with_the_same_words_on_all_ranks(world):
    root = folder_with_scenes(world)
    splits = root / "data" / "splits"
    first_train = (splits / "train.txt").read_text().split()[0]
    first_val = (splits / "val.txt").read_text().split()[0]

    def refused(word: str, *flags: str) -> None:
        ended = fit_config(config(root, *flags), world, Task, word, code=WRONG_USE)
        assert len(set(world.gather_objects(ended.message, "errors.message"))) == 1

    on_chief(world, lambda: (root / "file").write_text("in the way"))
    refused("file", f"--run_dir={root}/file/run")
    picture = root / "data" / "images" / f"{first_val}.png"
    on_chief(world, lambda: picture.write_bytes(b"not a picture"))
    refused(picture.name, "--num_steps=1")
    on_chief(world, lambda: (splits / "train.txt").write_text(first_train))
    refused(f"1 training samples are fewer than the {world.size} ranks")


def check_data_that_are_away_are_waited_for(world):
    root = folder_with_scenes(world)
    fit_config(config(root, "--num_steps=1"), world, Task)
    on_chief(world, lambda: (root / "data").rename(root / "away"))
    fit_config(
        config(root), world, Task, "the data of the run in", "are away", code=NOT_NOW
    )


def check_synthetic_data_need_no_folder(world):
    settings = config(
        folder(world), "--synthetic_data", "--data_dir=/nowhere", "--num_steps=1"
    )
    fit_config(settings, world, Task)


def check_ranks_that_see_different_data_are_named(world):
    root = folder_with_scenes(world)
    settings = config(root)
    if world.rank == 1:
        other = shutil.copytree(root / "data", root / "other")
        names = other / "splits" / "train.txt"
        names.write_text("\n".join(names.read_text().split()[1:]))
        settings = config(root, f"--data_dir={other}")
    fit_config(settings, world, Task, "the data on rank 1", code=BUG)


def check_ranks_with_different_settings_are_named_and_leave_nothing(world):
    """As where hosts hold different versions of a flagfile; of a mode that has another folder."""
    ended = fit(
        world,
        Small,
        "--dry_run (True; False)",
        "give every rank the same flags",
        code=WRONG_USE,
        dry_run=world.is_chief,
    )
    assert not ended.folder.exists()


def check_rank_0_alone_lists(world):
    task = Task(config(folder_with_scenes(world)))
    with mock.patch.object(os, "scandir", wraps=os.scandir) as scandir:
        train, val = run_lib.open_sources(world, task)
    assert scandir.called == world.is_chief, scandir.call_args_list
    assert (len(train), len(val)) == (26, 10)
    assert train.explain(25) is None and train.picture_file(25).is_file()


def check_ranks_that_make_something_else_of_a_sample_are_named(world):
    """As the order of a Python set does, and numbers drawn without a seed."""
    order = [0, 1, 2] if world.is_chief else [1, 2, 0]

    def with_classes(task, sample, key=None):
        return {"inputs": sample["x"], "targets": tf.gather(order, sample["y"])}

    OtherClasses = task_with(training_example=with_classes)
    fit(world, OtherClasses, "its targets on rank 1", "Python set", code=BUG)
    OtherScores = task_with(evaluation_example=with_classes)
    fit(world, OtherScores, "validation sample 0", "its targets", code=BUG)

    class Features(keras.layers.Layer):
        def call(self, x):
            draws = np.random.default_rng(world.rank).normal(size=(FEATURES, 8))
            return tf.sin(x @ tf.constant(draws, x.dtype))

    OtherModel = task_with(lambda: classifier(Features()))
    words = ("step of rank 1", "without a seed")
    fit(world, OtherModel, *words, code=BUG)

    class InTraining(keras.layers.Layer):
        """Another loss on each rank; evaluation shows nothing of it."""

        def call(self, x, training=False):
            if training:
                draws = np.random.default_rng(world.rank).normal(size=FEATURES)
                weights = tf.constant(draws, x.dtype)
                size = tf.reduce_sum(x * weights, -1)
                self.add_loss(tf.reduce_mean(tf.square(size)))
            return x

    fit(world, task_with(lambda: classifier(InTraining())), *words, code=BUG)

    class OnOneRank(keras.layers.Layer):
        """One rank has a table more than others."""

        def call(self, x):
            return x * tf.constant([0.5, 1.0] * 3, x.dtype) if world.rank else x

    fit(world, task_with(lambda: classifier(OnOneRank())), *words, code=BUG)

    class Columns(keras.layers.Layer):
        """Its columns come in another order on each rank; its head begins with zeros."""

        def call(self, x):
            return tf.reverse(x, [-1]) if world.rank else x

    zeros = task_with(lambda: classifier(Columns(), kernel_initializer="zeros"))
    fit(world, zeros, "its outputs on rank 1", "Python set", code=BUG)

    class Rounded(keras.layers.Layer):
        """A device of another kind."""

        def call(self, x):
            return x * (1 + 0.02 * world.rank)

    fit(world, task_with(lambda: classifier(Rounded(), units=3)))

    class Scaled(keras.layers.Layer):
        def call(self, x):
            return x * tf.constant([0.5, 1.0] * 3, x.dtype)

    # Rank 0 has the shares of two virtual ranks, of two sizes, and traces its step twice.
    uneven = {"virtual_ranks": 3, "global_batch_size": 10, "precision": "float32"}
    fit(world, task_with(lambda: classifier(Scaled())), **uneven)


def check_a_rate_that_grows_with_the_ranks_alone_is_told(world):
    words = "give --batch_per_rank, or --lr_scaling=none"
    fixed = fit(world, lr_scaling="linear")
    assert not world.is_chief or words in fixed.printed


def check_batch_renorm_needs_statistics_of_all_ranks(world):
    Renormed = task_with(
        lambda: classifier(keras.layers.BatchNormalization(renorm=True))
    )
    fit(world, Renormed, "has renorm=True", "--bn_sync=full", code=WRONG_USE)
    fit(world, Renormed, bn_sync="full")


def check_what_a_rank_draws_by_numpy_is_told(world):
    """Every rank has samples of its own, but no run can be repeated."""
    generator = np.random.default_rng(world.rank)

    def noisy(task, sample, key):
        def draw():
            return generator.normal(size=FEATURES).astype(np.float32)

        noise = tf.ensure_shape(tf.numpy_function(draw, [], tf.float32), [FEATURES])
        return {"inputs": sample["x"] + noise, "targets": sample["y"]}

    Noisy = task_with(training_example=noisy)
    words = "training_example gives other inputs each time"
    ended = fit(world, Noisy)
    assert not world.is_chief or f"note: {words}" in ended.printed
    fit(world, Noisy, words, "promise the same bits", code=WRONG_USE, virtual_ranks=2)
