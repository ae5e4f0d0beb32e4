"""The demo set: reproducible, honest splits, whole or not there."""

from pathlib import Path

import numpy as np
import pytest

from hvdkit.data import shipped
from hvdkit.data.prepare import scenes

SMALL = scenes.Settings(train=12, val=6)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def pictures(root: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in contents(root).items() if name.endswith(".png")
    }


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "set"
    scenes.ensure_demo(root, SMALL)
    return root


def test_a_scene_depends_on_the_seed_alone(demo: Path, tmp_path: Path):
    scenes.ensure_demo(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(demo)
    scenes.ensure_demo(tmp_path / "other", scenes.Settings(train=12, val=6, seed=1))
    other = pictures(tmp_path / "other")
    assert len(other) == 2 * (12 + 6)
    assert not other.items() & contents(demo).items()
    scenes.ensure_demo(tmp_path / "fewer", scenes.Settings(train=3, val=2))
    fewer = pictures(tmp_path / "fewer")
    assert len(fewer) == 10 and fewer.items() <= contents(demo).items()


def test_splits_share_no_scan_and_no_column_of_a_photograph():
    ink, digits = shipped.digits()
    photos = [np.asarray(photo) for photo in shipped.photographs()]
    columns = [*scenes.COLUMNS["train"], *scenes.COLUMNS["val"]]
    assert all(sorted(columns) == list(range(photo.shape[1])) for photo in photos)
    scans = {"train": set(), "val": set()}
    seen_columns = {"train": set(), "val": set()}
    for split in ("train", "val"):
        for index in range(300):
            scene = scenes.scene(SMALL, split, index)
            scans[split].update(scene.scans)
            _, left, _, side = scene.photo
            seen_columns[split].update(range(left, left + side))
            shown = set(np.unique(scene.label)) - {0, scenes.IGNORE}
            assert shown == {digits[scan] + 1 for scan in scene.scans}
    assert len(scans["train"]) > 500 and len(scans["val"]) > 300
    assert not scans["train"] & scans["val"]
    assert not seen_columns["train"] & seen_columns["val"]
    train_pixels = {ink[scan].tobytes() for scan in scans["train"]}
    val_pixels = {ink[scan].tobytes() for scan in scans["val"]}
    assert not train_pixels & val_pixels


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    for root in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match=f"{root} cannot become a demo set"):
            scenes.ensure_demo(root, SMALL)
    assert contents(tmp_path) == {"mine.txt": b"mine"}


def test_who_loses_the_race_takes_the_set_that_is_there(tmp_path: Path, monkeypatch):
    """It appears after this one has looked: the rename must not go over it."""
    root = tmp_path / "demo"
    write = scenes._write_split

    def meanwhile(*arguments: object) -> None:
        monkeypatch.setattr(scenes, "_write_split", write)
        scenes.ensure_demo(root, scenes.Settings(train=1, val=1))
        write(*arguments)

    root.mkdir()  # an empty folder counts as none
    monkeypatch.setattr(scenes, "_write_split", meanwhile)
    scenes.ensure_demo(root, SMALL)
    assert len(contents(root)) == 2 * 2 + 3
    assert list(tmp_path.iterdir()) == [root]
