"""browse.py: the sheet holds the very samples that training begins with."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from hvdkit import settings as settings_lib
from hvdkit.commands import browse
from ranks import PROJECT


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdkit", "browse", *map(str, words)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(not (PROJECT / "tasks/segmentation.py").exists(), reason="another task")
def test_pictures_and_labels_are_those_of_the_first_step(tiny, tmp_path):
    flags = ["--flagfile=configs/demo.cfg", *tiny, "--accumulation_steps=1", "--num_steps=2"]
    ended = call(*flags, f"--out={tmp_path}/sheet.png", "--count=6")
    assert ended.returncode == 0, ended.stderr
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    config = settings_lib.parse(["train.py", *flags])
    examples, _ = browse.samples(config.for_ranks(1), 6)
    assert len(examples) == 6 and len({e["inputs"]["image"].tobytes() for e in examples}) == 6
    first = examples[0]["inputs"]["image"]
    assert first.shape == (32, 32, 3) and (sheet[1:97:3, 1:97:3] == first).all()
    label = browse.COLOURS[examples[0]["targets"]["label"][..., 0]]
    assert (sheet[1:97:3, 97:193:3] == label).all()


def test_an_own_task_without_pictures_is_refused(tmp_path):
    ended = call("--flagfile=configs/blank.cfg", f"--out={tmp_path}/sheet.png")
    assert ended.returncode == 2 and "inputs hold no picture" in ended.stderr
    assert not (tmp_path / "sheet.png").exists() and "Traceback" not in ended.stderr


def test_a_class_stands_below_its_picture():
    example = {"inputs": {"image": np.full((8, 8, 3), 7, np.uint8)}, "targets": np.int64(1)}
    named, plain = browse.tile(example, ["cat", "dog"]), browse.tile(example, [])
    assert named.shape == (98 + 18, 98, 3) and (named[1:97, 1:97] == 7).all()
    assert (named[98:] != plain[98:]).any()  # "dog", and "1"
