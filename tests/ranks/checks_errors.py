"""Run on real ranks by test_errors.py: data and folders that cannot be used, told in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from small_runs import fit_config, folder
from tiny_runs import TINY_FLAGS

from hvdkit import settings as settings_lib
from hvdkit.data import scenes
from hvdkit.data.readers.listing import Names
from hvdkit.run import context as run_lib
from hvdkit.stop import WRONG_USE
from tasks.segmentation import Task


def refused(world, spoil: Callable[[Path], None], *flags: str) -> tuple[str, Path, list[str]]:
    """Trains on scenes that rank 0 has spoilt: message, folder of the scenes, checkpoints."""
    root = folder(world)
    if world.is_chief:
        settings = scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3))
        scenes.make(root / "data", settings)
        spoil(root / "data")
    world.gather_objects(None, "errors.data")
    places = (f"--data_dir={root / 'data'}", f"--run_dir={root / 'run'}")
    words = ["train.py", "--flagfile=configs/demo.cfg", *TINY_FLAGS, *places]
    words += [flag.format(root=root) for flag in flags]
    ended = fit_config(settings_lib.parse(words), world, Task)
    assert ended.code == WRONG_USE, (ended.code, ended.message)
    assert "\n" not in ended.message
    return ended.message, root / "data", ended.checkpoints


def names(root: Path, split: str) -> list[str]:
    return (root / "splits" / f"{split}.txt").read_text().split()


def labels(root: Path) -> list[Path]:
    return sorted((root / "labels").glob("*.png"))


def check_image_without_label(world):
    def spoil(root):
        (root / "labels" / f"{names(root, 'train')[0]}.png").unlink()

    message, root, _ = refused(world, spoil)
    assert names(root, "train")[0] in message, message


def check_corrupt_png_in_mid_run_keeps_what_was_trained(world):
    """The bad image comes up at some step within the first epoch; steps before it are saved."""

    def spoil(root):
        path = root / "images" / f"{names(root, 'train')[9]}.png"  # the first is tried at start
        path.write_bytes(path.read_bytes()[:60])

    message, root, (saved,) = refused(world, spoil, "--num_steps=9")
    assert f"{names(root, 'train')[9]}.png" in message, message
    assert int(saved[5:]) < 4


def check_corrupt_validation_image(world):
    def spoil(root):
        (root / "images" / f"{names(root, 'val')[0]}.png").write_bytes(b"not a picture")

    message, root, _ = refused(world, spoil, "--num_steps=1")
    assert f"{names(root, 'val')[0]}.png" in message, message


def check_label_value_out_of_range(world):
    def spoil(root):
        for path in labels(root):
            label = Image.open(path)
            label.putpixel((3, 4), 99)
            label.save(path)

    message, *_ = refused(world, spoil)
    assert "99" in message and ".png" in message, message


def check_image_and_label_of_different_size(world):
    def spoil(root):
        for path in labels(root):
            Image.open(path).resize((30, 32)).save(path)

    message, *_ = refused(world, spoil)
    assert "30" in message and "32" in message, message


def check_fewer_samples_than_ranks(world):
    def spoil(root):
        listing = root / "splits" / "train.txt"
        listing.write_text(names(root, "train")[0] + "\n")

    message, *_ = refused(world, spoil)
    assert "1 training sample" in message and f"{world.size} ranks" in message, message


def check_unwritable_run_folder(world):
    def spoil(root):
        (root.parent / "file").write_text("in the way")

    message, *_ = refused(world, spoil, "--run_dir={root}/file/run")
    assert "file" in message, message


def check_no_such_data(world):
    message, *_ = refused(world, shutil.rmtree)
    assert "/data" in message, message


def check_dangling_link(world):
    """Rank 0 finds it and the others, which look at no file, end with the same sentence."""

    def spoil(root):
        path = root / "images" / f"{names(root, 'train')[5]}.png"
        path.unlink()
        path.symlink_to("gone.png")

    message, root, _ = refused(world, spoil)
    assert f"{names(root, 'train')[5]}.png is a link to gone.png" in message, message
    assert len(set(world.gather_objects(message, "errors.link"))) == 1


def check_folder_named_as_a_picture(world):
    def spoil(root):
        path = root / "images" / f"{names(root, 'train')[5]}.png"
        path.unlink()
        path.mkdir()

    message, *_ = refused(world, spoil)
    assert "is a folder" in message, message


def check_names_of_several_messages_arrive_whole(world):
    """What holds arrays travels in parts; the rest, nested as readers nest it, beside them."""
    many = [f"{number:06}" for number in range(1_000_000)]  # 6 and 4 MB
    value = {"train": (Names.of(many), ["b"]), "val": (Names.of([]), True)}
    got = world.broadcast_object(value if world.is_chief else {}, "errors.large")
    (names, more), (none, flag) = got["train"], got["val"]
    assert more == ["b"] and flag is True
    assert names.digest() == Names.of(many).digest() and len(none) == 0


def check_rank_0_alone_lists(world):
    """The others ask the disk for nothing, and have the same set."""
    root = folder(world) / "data"
    if world.is_chief:
        scenes.make(root, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3)))
    world.gather_objects(None, "errors.listed")
    config = settings_lib.parse(["train.py", "--flagfile=configs/demo.cfg", f"--data_dir={root}"])
    listed, scandir = [], os.scandir
    os.scandir = lambda path: listed.append(path) or scandir(path)
    try:
        train, val = run_lib.open_sources(world, Task(config))
    finally:
        os.scandir = scandir
    assert bool(listed) == world.is_chief, listed
    assert (len(train), len(val)) == (26, 10)
    assert train.explain(25) is None and train.picture_file(25).is_file()
