"""Files of data sets in their own formats, and checks of readers' errors."""

import contextlib
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hvdkit.data import pipeline
from hvdkit.data.source import Source


def save(path: Path, pixels: np.ndarray, palette: bytes | None = None) -> None:
    """Writes a picture file; with a palette, pixels (uint8 [H, W]) are its indices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels)
    if palette is not None:
        picture.putpalette(palette)
    picture.save(path)


def noise(seed: int, height: int = 12, width: int = 16) -> np.ndarray:
    """A picture, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_pairs(root: Path, pairs: dict[str, tuple], *splits: str) -> None:
    """Folders of images and labels; `pairs` has them by name, as arrays, and each split has all."""
    for name, pair in pairs.items():
        for folder, pixels in zip(("images", "labels"), pair):
            save(root / folder / f"{name}.png", pixels)
    (root / "splits").mkdir(exist_ok=True)
    for split in splits or ("train",):
        (root / "splits" / f"{split}.txt").write_text("\n".join(pairs))


@contextlib.contextmanager
def without(path: Path) -> Iterator[None]:
    path.rename(path.parent / "aside")
    yield
    (path.parent / "aside").rename(path)


def explained(source: Source, index: int, *parts: object) -> None:
    """The sample fails to read, in tf.data too, and the explanation holds the parts."""
    with pytest.raises(tf.errors.OpError):
        source.read(tf.constant(index, tf.int64))
    with pytest.raises(tf.errors.OpError):
        list(
            tf.data.Dataset.range(index, index + 1).map(
                pipeline.as_written(source.read)
            )
        )
    message = source.explain(index)
    assert message is not None and "\n" not in message and "{{" not in message, message
    assert all(str(part) in message for part in parts), message


def read_all(source: Source) -> list[dict[str, np.ndarray]]:
    """All samples, read on two threads; none has an explanation."""
    assert all(source.explain(index) is None for index in range(len(source)))
    read = pipeline.as_written(source.read)
    samples = tf.data.Dataset.range(len(source)).map(read, num_parallel_calls=2)
    return list(samples.as_numpy_iterator())


def same(one: Source, other: Source) -> bool:
    """Both hold the same samples under the same ids, to the last pixel."""
    samples = read_all(one)
    for sample, its_pair in zip(samples, read_all(other), strict=True):
        for name in ("image", "label"):
            if not np.array_equal(sample[name], its_pair[name]):
                return False
    return bool(samples)


def write_voc(root: Path) -> None:
    """VOC's layout: 3 pictures in train, 1 in val; labels as palette PNGs."""
    for number in range(4):
        name = f"2007_00{number:04d}"
        label = np.full((12, 16), number, np.uint8)
        label[0] = 255
        label[1, :3] = 20
        save(root / "JPEGImages" / f"{name}.jpg", noise(number))
        palette = (
            np.random.default_rng(9).integers(0, 256, 768, dtype=np.uint8).tobytes()
        )
        save(root / "SegmentationClass" / f"{name}.png", label, palette)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_000002\n2007_000000\n2007_000001\n")
    (lists / "val.txt").write_text("2007_000003\n")


def write_cityscapes(root: Path) -> None:
    """Cityscapes' layout: 3 pictures of 2 cities in train, 1 in val; test has none."""
    ids = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16) % 34
    for name, label in (
        ("train/bochum/bochum_000000_000313", ids),
        ("train/aachen/aachen_000001_000019", ids),
        ("train/aachen/aachen_000000_000019", ids),
        ("val/lindau/lindau_000000_000019", ids),
        ("test/berlin/berlin_000000_000019", np.full_like(ids, 1)),
    ):
        save(root / "leftImg8bit" / f"{name}_leftImg8bit.png", noise(len(name)))
        start = root / "gtFine" / f"{name}_gtFine"
        for ending, pixels in (
            ("labelIds", label),
            ("instanceIds", np.full((12, 16), 26001, np.uint16)),
            ("color", np.dstack([noise(0), ids])),
        ):
            save(Path(f"{start}_{ending}.png"), pixels)
        Path(f"{start}_polygons.json").write_text("{}")


def write_classes(root: Path) -> None:
    """Class folders: 3 classes; 4 pictures in train (one of them wide), 3 in val."""
    for path, pixels in (
        ("train/n02/b.JPEG", noise(1)),
        ("train/n02/a.png", noise(2, 9, 30)),
        ("train/n01/z.jpg", noise(3)),
        ("train/n10/c.jpeg", noise(4)),
        ("val/n10/v.png", noise(5)),
        ("val/n01/v.png", noise(5)),
        ("val/n02/v.png", noise(5)),
    ):
        save(root / path, pixels)


def write_cifar100(root: Path, count: int = 3) -> np.ndarray:
    """CIFAR-100's two files, 5 * count + count records; their bytes, uint8 [6 * count, 3074]."""
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6 * count, 3074), dtype=np.uint8)
    records[:, 0] = rng.integers(0, 20, len(records))
    records[:, 1] = rng.integers(0, 100, len(records))
    root.mkdir(parents=True, exist_ok=True)
    records[: 5 * count].tofile(root / "train.bin")
    records[5 * count :].tofile(root / "test.bin")
    for kind, names in (("coarse", 20), ("fine", 100)):
        lines = (f"{kind}{number}" for number in range(names))
        (root / f"{kind}_label_names.txt").write_text("\n".join(lines) + "\n")
    return records


def write_cifar10(root: Path, count: int = 3) -> np.ndarray:
    """CIFAR-10's six files with `count` records each; their bytes, uint8 [6, count, 3073]."""
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6, count, 3073), dtype=np.uint8)
    records[..., 0] = rng.integers(0, 10, (6, count))
    root.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for name, part in zip(names, records):
        part.tofile(root / name)
    (root / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    return records


def idx(values: np.ndarray) -> bytes:
    """The IDX file of uint8 values."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def write_idx(root: Path, ending: str = "") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The four files of a set of 4 classes; pictures uint8 [n, 5, 7] and labels [n] by split."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, prefix, count in (("train", "train", 6), ("val", "t10k", 4)):
        images = rng.integers(0, 256, (count, 5, 7), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 4
        written[split] = images, labels
        for kind, values in (("images", images), ("labels", labels)):
            content = idx(values)
            if ending:
                content = gzip.compress(content)
            (root / f"{prefix}-{kind}-idx{values.ndim}-ubyte{ending}").write_bytes(
                content
            )
    return written
