"""Classes are matched by name, values of label pictures mapped; NumPy is the reference."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import readers
import tensorflow as tf
from refusals import differ, refused
from small_checkpoints import ALONE

from hvdkit.data import classes
from hvdkit.data import open as open_lib
from hvdkit.data.prepare import check
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.source import Arrays
from hvdkit.run import context
from hvdkit.settings import parse


class Named(Arrays):
    def __init__(self, *names: str) -> None:
        self.class_names = list(names)
        self.num_classes = len(names)
        super().__init__(label=np.arange(len(names), dtype=np.int32))


def labels(source) -> list[int]:
    return [
        int(source.read(tf.constant(i, tf.int64))["label"]) for i in range(len(source))
    ]


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (("cat", "dog", "zo\u00eb"), [0, 1, 2]),
        (("dog", "zo\u00eb", "cat"), [1, 2, 0]),
        (("zo\u00eb",), [2]),
        (("zoe\u0308", "cat"), [2, 0]),  # macOS spells it so
    ],
)
def test_a_models_classes_are_found_by_name(names, numbers):
    with classes.known.set(["cat", "dog", "zo\u00eb"]):
        source = classes.numbered(Named(*names), "split test")
        refused(
            lambda: classes.numbered(Named("owl", "cat"), "split test"),
            "split test has owl,",
            "the model has no such class",
            "it lacks dog, zo",
        )
    assert labels(source) == numbers and source.num_classes == 3
    assert labels(classes.numbered(Named("b", "a"), "anywhere")) == [0, 1], (
        "no model is known"
    )


def test_splits_of_a_tasks_own_are_matched_too():
    task = SimpleNamespace(
        sources=lambda: (Named("cat", "dog", "owl"), Named("owl", "cat"))
    )
    assert labels(context.open_sources(ALONE, task)[1]) == [2, 0]
    task.sources = lambda: (Named("cat"), Named("dog"))
    differ(
        lambda: context.open_sources(ALONE, task),
        "validation split has dog",
        "training split",
    )


def test_a_validation_split_may_lack_a_class_and_one_split_alone_is_scored(
    tmp_path: Path, capsys
):
    readers.write_classes(tmp_path)
    for file in (tmp_path / "val" / "n02").iterdir():
        file.unlink()
    (tmp_path / "val" / "n02").rmdir()
    flags = f"--data_dir={tmp_path} --data_format=class_folders --num_classes=3"
    config = parse(["train.py", *flags.split(), "--task=classification"])
    _, val = open_lib.open_sources(config, "class_folders")
    assert labels(val) == [0, 2] and val.class_counts().tolist() == [1, 0, 1]
    assert check.main(["check", f"--data_dir={tmp_path}"]) == 0
    assert "val: warning: 1 class(es) never occur: n02" in capsys.readouterr().out


MASK = np.repeat([[0, 255, 255, 7]], 4, 0).astype(np.uint8)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("255:1,7:ignore", [0, 1, 1, 255]), ("255:ignore,7:1", [0, 255, 255, 1])],
)
def test_values_of_label_pictures_are_mapped_by_a_flag_or_a_file(
    tmp_path: Path, flag, expected
):
    readers.write_pairs(tmp_path, {"a": (readers.noise(0, 4, 4), MASK)}, "train", "val")
    # As some editors write it.
    (tmp_path / "map.txt").write_text(flag.replace(",", "\r\n") + "\r\n", "utf-8-sig")
    flags = [f"--data_dir={tmp_path}", "--num_classes=2"]
    for label_map in (flag, tmp_path / "map.txt"):
        config = parse(["train.py", *flags, f"--label_map={label_map}"])
        train, _ = open_lib.open_sources(config, "folders")
        assert readers.read_all(train)[0]["label"][..., 0].tolist() == [expected] * 4
        plain = ImageLabelFolder(tmp_path, "train")
        assert train.fingerprint() != plain.fingerprint()
    assert check.main(["check", *flags, f"--label_map={tmp_path / 'map.txt'}"]) == 0
    config = parse(["train.py", *flags, "--label_map=255:1"])  # this map leaves 7 out
    train, _ = open_lib.open_sources(config, "folders")
    readers.explained(
        train, 0, "a.png", "label value 7 is no class of 0 to 1", "--label_map"
    )


def test_masks_of_0_and_255_are_recognized_and_the_map_is_proposed(
    tmp_path: Path, capsys
):
    pairs = {name: (readers.noise(0, 4, 4), MASK * (MASK > 7)) for name in "ab"}
    readers.write_pairs(tmp_path, pairs, "train", "val")
    flags = [f"--data_dir={tmp_path}", "--num_classes=2"]
    config = parse(["train.py", *flags])
    advice = "give --label_map=255:1"
    refused(lambda: open_lib.open_sources(config, "folders"), tmp_path, "255", advice)
    assert check.main(["check", *flags]) == 1
    assert capsys.readouterr().out.count(advice) == 2
    for way_out in ("255:1", "255:ignore"):
        open_lib.open_sources(
            parse(["train.py", *flags, f"--label_map={way_out}"]), "folders"
        )
