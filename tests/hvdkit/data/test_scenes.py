"""The demo set: reproducible, honest splits, whole or not there."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdkit.data import scenes, shipped
from ranks import PROJECT

SMALL = scenes.Settings(train=12, val=6)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def command(root: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "hvdkit", "demo-data", str(root), *flags]


def touching(mask: np.ndarray) -> np.ndarray:
    """The mask and its 8 neighbours, told by shifting (the code uses a filter)."""
    padded = np.pad(mask, 1)
    height, width = mask.shape
    shifts = [padded[r : r + height, c : c + width] for r in range(3) for c in range(3)]
    return np.logical_or.reduce(shifts)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "set"
    scenes.make(root, SMALL)
    return root


def test_a_scene_depends_on_the_seed_alone(demo: Path, tmp_path: Path):
    """Not on how many there are."""
    scenes.make(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(demo)
    scenes.make(tmp_path / "other", scenes.Settings(train=12, val=6, seed=1))
    other = contents(tmp_path / "other")
    pictures = [name for name in other if name.endswith(".png")]
    assert len(pictures) == 2 * (12 + 6)
    assert not any(other[name] == contents(demo)[name] for name in pictures)
    scenes.make(tmp_path / "fewer", scenes.Settings(train=3, val=2))
    fewer = {n: pixels for n, pixels in contents(tmp_path / "fewer").items() if n in pictures}
    assert len(fewer) == 10 and fewer.items() <= contents(demo).items()


def test_splits_share_no_scan_and_no_column_of_a_photograph():
    ink, digits = shipped.digits()
    photos = [np.asarray(photo) for photo in shipped.photographs()]
    assert sorted([*scenes.SCANS["train"], *scenes.SCANS["val"]]) == list(range(len(digits)))
    columns = [*scenes.COLUMNS["train"], *scenes.COLUMNS["val"]]
    assert all(sorted(columns) == list(range(photo.shape[1])) for photo in photos)
    used, seen = {}, {}
    for split in ("train", "val"):
        drawn = [scenes.scene(SMALL, split, index) for index in range(300)]
        used[split] = {scan for scene in drawn for scan in scene.scans}
        seen[split] = {
            column for scene in drawn for column in range(scene.photo[1], sum(scene.photo[1::2]))
        }
        for scene in drawn:  # what is told is what is shown
            shown = set(np.unique(scene.label)) - {0, scenes.IGNORE}
            assert shown == {digits[scan] + 1 for scan in scene.scans}
    assert len(used["train"]) > 500 and len(used["val"]) > 300
    assert not used["train"] & used["val"]
    assert not seen["train"] & seen["val"]
    pixels = {split: {ink[scan].tobytes() for scan in used[split]} for split in used}
    assert not pixels["train"] & pixels["val"]


def test_the_crop_told_is_the_crop_shown():
    photos = [np.asarray(photo) for photo in shipped.photographs()]
    for index in range(20):
        drawn = scenes.scene(scenes.Settings(digits=(1, 1)), "val", index)
        which, left, top, side = drawn.photo
        crop = Image.fromarray(photos[which][top : top + side, left : left + side])
        crop = np.asarray(crop.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
        far = ~touching(touching(drawn.label != 0))
        differences = [np.abs(crop[:, ::step] - drawn.image)[far].mean() for step in (1, -1)]
        assert min(differences) < 1


def test_the_ignored_ring_is_one_pixel_around_a_digit():
    settings = scenes.Settings(digits=(1, 1))
    for index in range(60):
        label = scenes.scene(settings, "train", index).label
        digit = (label > 0) & (label != scenes.IGNORE)
        assert digit.any()
        np.testing.assert_array_equal(
            label == scenes.IGNORE, touching(digit) & ~digit, err_msg=f"scene {index}"
        )


def test_no_digit_touches_background_or_another_digit():
    for index in range(100):
        label = scenes.scene(SMALL, "train", index).label
        for class_id in set(np.unique(label)) - {0, scenes.IGNORE}:
            around = label[touching(label == class_id)]
            assert set(np.unique(around)) <= {class_id, scenes.IGNORE}


def test_a_finished_set_is_left_alone_and_quickly(demo: Path):
    stamps = {path: path.stat().st_mtime_ns for path in demo.rglob("*")}
    program = "import sys; from hvdkit.data import scenes; scenes.main(sys.argv);"
    program += "assert not scenes.shipped.digits.cache_info().misses"
    flags = [str(demo), "--train", "12", "--val", "6"]
    subprocess.run([sys.executable, "-c", program, *flags], cwd=PROJECT, check=True, timeout=60)
    assert {path: path.stat().st_mtime_ns for path in demo.rglob("*")} == stamps


def test_other_settings_are_named(demo: Path):
    with pytest.raises(ValueError, match=r"set.*'seed': \(0, 7\).*another folder"):
        scenes.make(demo, scenes.Settings(train=12, val=6, seed=7))
    done = subprocess.run(command(demo), cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert str(demo) in done.stderr and "'train': (12, 6000)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("marker", [None, "{", "[]", '{"train": 12, "unknown": 1}'])
def test_a_folder_of_something_else_is_refused_and_kept(tmp_path: Path, marker: str | None):
    (tmp_path / "mine.txt").write_text("mine")
    if marker is not None:
        (tmp_path / scenes.MARKER).write_text(marker)
    before = contents(tmp_path)
    for call in (scenes.make, scenes.ensure_demo):
        with pytest.raises(ValueError, match=f"{tmp_path} is not empty and not a finished"):
            call(tmp_path, SMALL)
    assert contents(tmp_path) == before


def test_ensure_demo_makes_a_set_or_takes_the_one_there(demo: Path, tmp_path: Path):
    settings = scenes.Settings(train=2, val=1)
    assert scenes.ensure_demo(tmp_path / "new", settings) == settings
    assert json.loads((tmp_path / "new" / scenes.MARKER).read_text())["train"] == 2
    assert scenes.ensure_demo(demo, settings) == SMALL
    (tmp_path / "empty").mkdir()
    assert scenes.ensure_demo(tmp_path / "empty", settings) == settings


def await_pictures(making: subprocess.Popen, root: Path, pattern: str) -> None:
    """Until a set in the making has this file."""
    deadline = time.monotonic() + 60
    while not list(root.glob(f".demo.making-*/labels/{pattern}")):
        assert making.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_making_leaves_nothing_that_is_taken(tmp_path: Path, how: signal.Signals):
    root = tmp_path / "demo"
    # Started in the background of a shell, a process ignores SIGINT unless told otherwise.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hvdkit.data import scenes; scenes.main(sys.argv)"
    )
    making = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], cwd=PROJECT, stderr=subprocess.DEVNULL
    )
    await_pictures(making, tmp_path, "train-00050.png")
    making.send_signal(how)
    assert making.wait(timeout=60) != 0
    assert not root.exists()
    if how == signal.SIGINT:
        assert list(tmp_path.iterdir()) == []
    scenes.make(root, SMALL)
    assert len(contents(root)) == 2 * (12 + 6) + 3


def test_losing_the_race_to_other_settings_is_an_error(tmp_path: Path, demo: Path):
    # The other set appears after this one has looked: the rename must not go over it.
    root = tmp_path / "demo"
    making = subprocess.Popen(
        command(root, "--train", "300", "--val", "1"), cwd=PROJECT,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    await_pictures(making, tmp_path, "train-00005.png")
    scenes.make(root, scenes.Settings(train=1, val=1))
    errors = making.communicate(timeout=60)[1]
    assert making.returncode == 2 and "'train': (1, 300)" in errors
    assert len(contents(root)) == 2 * 2 + 3
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train", 0), ("val", 0), ("size", 4), ("digits", (3, 2)), ("box", (18, 65)),
        ("contrast", (0.0, 0.5)), ("overlap", 1.5), ("seed", -1),
    ],
)  # fmt: skip
def test_impossible_settings_are_named(name: str, value: object):
    with pytest.raises(ValueError) as error:
        scenes.Settings(**{name: value})
    assert f"{name}={value}" in str(error.value)
