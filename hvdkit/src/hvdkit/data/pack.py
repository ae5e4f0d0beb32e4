"""Packs a data set into a few large files (TFRecord shards), which records.py reads.

Sample ids and pixels stay the same, so a run on the packed set gives the same batches. PNG and JPEG
files are stored unchanged; labels as PNGs of class ids (255: ignored), or as numbers. With
--short_side larger pictures are scaled down once, here: another data set, faster to read.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.data import image_ops, pipeline
from hvdkit.data.labels import IGNORE
from hvdkit.data.open import reader_of
from hvdkit.data.readers import pictures, records
from hvdkit.data.source import Source, digest
from hvdkit.settings import of_project
from hvdkit.settings.data import READERS


class _Packed(NamedTuple):
    data: bytes  # a tf.train.Example
    pixels: int  # CRC-32 of image and label, compared when read back
    label: int  # its highest class


def pack(source: Source, out: Path, split: str, *, shards: int = 16, packed_from: str = "") -> Path:
    """Writes OUT/SPLIT, whole or not at all; reads all of it back before renaming it into place.

    `packed_from`: a description for people, kept in pack.json. Returns the folder. Raises
    ValueError, or OSError or tf.errors.OpError where writing failed.
    """
    if shards < 1:
        raise ValueError(f"--shards={shards}: give at least 1")
    if not split or split.startswith(".") or "/" in split:  # hidden ones are unfinished packs
        raise ValueError(
            f"{split!r} cannot be the name of a packed split: it must be a folder's name that does "
            "not begin with '.'; give another --as"
        )
    out.mkdir(parents=True, exist_ok=True)
    with hidden_folder(out, split) as work:
        if (out / split).exists():
            raise ValueError(f"{out / split} is there already; remove it, or give another --out")
        folder = work / split
        folder.mkdir()
        pixels = _write(source, folder, min(shards, len(source)), packed_from=packed_from)
        _verify(records.Records(work, split), pixels)
        for path in folder.iterdir():
            whole_files.flush(path)
        folder.rename(out / split)  # onto nothing, or it fails
    return out / split


def _write(source: Source, folder: Path, shards: int, *, packed_from: str) -> list[int]:
    """Writes all files of a split; returns the CRC-32 of each sample's pixels."""
    samples, content = _packed(source), hashlib.sha256()
    pixels, index, listed, highest = [], [], [], 0
    for shard in range(shards):
        path = folder / f"{folder.name}-{shard:05d}-of-{shards:05d}.tfrecord"
        offset, first = 0, len(index)
        with tf.io.TFRecordWriter(os.fsencode(path)) as writer:
            while len(index) < len(source) * (shard + 1) // shards:
                sample = next(samples)
                writer.write(sample.data)
                content.update(sample.data)
                index.append((offset, len(sample.data)))
                offset += len(sample.data) + records.FRAMING
                pixels.append(sample.pixels)
                highest = max(highest, sample.label)
                logs.progress("packed", len(index), len(source))
        listed.append({"name": path.name, "records": len(index) - first})
    _mark(folder, listed, content.hexdigest())
    meta = {"packed_from": packed_from, "kind": _kind(source), "num_classes": highest + 1}
    if names := getattr(source, "class_names", ()):
        meta["class_names"] = list(names)
    if getattr(source, "is_demo", False):
        meta["is_demo"] = True
    meta |= {"content": content.hexdigest(), "shards": listed}
    records.write_meta(folder, meta, index)
    return pixels


def _mark(folder: Path, listed: list[dict[str, Any]], content: str) -> None:
    """Ends each shard with the record that names the pack, its checksum; adds sizes to the list."""
    last = folder / "mark"
    for number, shard in enumerate(listed):
        with tf.io.TFRecordWriter(os.fsencode(last)) as writer:
            writer.write(records.mark(content, number, len(listed)))
        with (folder / shard["name"]).open("ab") as file:
            file.write(last.read_bytes())
            shard["bytes"] = file.tell()
    last.unlink()


def _packed(source: Source) -> Iterator[_Packed]:
    """The samples in order; ValueError says what is wrong with one that cannot be read."""
    is_map = _kind(source) == "map"

    def encoded(index: tf.Tensor) -> dict[str, tf.Tensor]:
        sample = source.read(index)
        if not {"image", "label"} <= sample.keys():
            raise ValueError(f"samples need an image and a label to be packed: {[*sample]}")
        # Sources that do not read files have none.
        file = sample["file"] if "file" in sample else tf.io.encode_png(sample["image"])
        ids = tf.io.encode_png(sample["label"]) if is_map else b""
        return {**sample, "file": file, "ids": ids}

    def feature(value: bytes | int) -> tf.train.Feature:
        if isinstance(value, int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    for sample in _samples(source, encoded):
        label = sample["label"]
        kept = {"image": sample["file"], "label": sample["ids"] if is_map else int(label)}
        features = tf.train.Features(feature={name: feature(part) for name, part in kept.items()})
        data = tf.train.Example(features=features).SerializeToString()
        counted = label != IGNORE if is_map else True  # in class folders, 255 is an ordinary class
        yield _Packed(data, _pixels(sample), int(np.max(label, initial=0, where=counted)))


def _verify(packed: records.Records, pixels: list[int]) -> None:
    for index, sample in enumerate(_samples(packed, packed.read)):
        if _pixels(sample) != pixels[index]:
            raise ValueError(
                f"sample {index} read back from {packed.folder} differs from what was packed: its "
                "file changed meanwhile, or the disk is faulty; pack again"
            )
        logs.progress("verified", index + 1, len(packed))


def _samples(source: Source, read: Callable[[tf.Tensor], Any]) -> Iterator[dict[str, Any]]:
    """`read(i)` for i in 0 .. len - 1, as NumPy values, read on several threads."""
    read = pipeline.as_written(read)
    samples = tf.data.Dataset.range(len(source)).map(read, tf.data.AUTOTUNE, deterministic=True)
    done = 0
    try:
        for sample in samples.as_numpy_iterator():
            yield sample
            done += 1
    except tf.errors.OpError as error:
        raise ValueError(pipeline.explain(source, [done], error)) from None


def _kind(source: Source) -> str:
    spec = tf.data.Dataset.range(1).map(pipeline.as_written(source.read)).element_spec
    return "map" if spec["label"].shape.rank == 3 else "class"


def _pixels(sample: dict[str, Any]) -> int:
    label = np.asarray(sample["label"])
    label = label if label.ndim else np.int64(label)  # a class, of whatever dtype it is
    return zlib.crc32(label.tobytes(), zlib.crc32(sample["image"].tobytes()))


class Smaller:
    """Another source's samples, with the shorter side of pictures at most `short_side` pixels.

    Larger pictures are scaled with antialiasing and stored as JPEG of `quality` (1 to 100); labels
    of pixels take the nearest pixel. Smaller ones are unchanged, and so are sample ids. ValueError
    for an invalid side or quality.
    """

    def __init__(self, larger: Source, short_side: int, quality: int) -> None:
        if short_side < 1 or not 1 <= quality <= 100:
            raise ValueError(
                f"--short_side={short_side} --quality={quality}: give at least 1 pixel, and a "
                "quality of 1 to 100"
            )
        self._source, self._side, self._quality = larger, short_side, quality

    def __getattr__(self, name: str) -> Any:  # explain, class_names, is_demo
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        sample = self._source.read(index)
        image, label = sample["image"], sample["label"]
        shape = tf.shape(image)[:2]
        shorter = tf.reduce_min(shape)
        # Integer arithmetic, so that the shorter side is exact.
        scaled = tf.maximum((2 * shape * self._side + shorter) // (2 * shorter), 1)

        def encoded() -> tf.Tensor:
            small = tf.image.resize(image, scaled, antialias=True)
            return tf.io.encode_jpeg(tf.cast(small + 0.5, tf.uint8), quality=self._quality)

        def as_it_was() -> tf.Tensor:
            return sample["file"] if "file" in sample else tf.io.encode_png(image)

        file = tf.cond(shorter > self._side, encoded, as_it_was)
        if label.shape.rank == 3:
            label = image_ops.nearest(label, tf.where(shorter > self._side, scaled, shape))
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def fingerprint(self) -> str:
        return digest([(self._source.fingerprint(), self._side), ("", self._quality)])


@contextlib.contextmanager
def hidden_folder(out: Path, name: str) -> Iterator[Path]:
    """An empty folder in `out` for what becomes OUT/NAME, of one process; removed at the end."""
    work = out / f".{name}.packing"  # in the same folder: only then a rename is atomic
    work.mkdir(exist_ok=True)
    lock = os.open(work, os.O_RDONLY | os.O_NOFOLLOW)  # the lock ends with the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(
            f"{out / name} is being written by another process: wait until it ends, or give "
            "another --as"
        ) from None
    except OSError:
        pass  # some file systems have no locks
    try:
        _clear(work)
        yield work
    finally:
        _clear(work)
        work.rmdir()
        os.close(lock)


def _clear(work: Path) -> None:
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def main(argv: list[str]) -> int:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes what is half done
    try:
        return _main(argv)
    finally:
        signal.signal(signal.SIGTERM, before)


def _main(argv: list[str]) -> int:
    of_project()  # it may add readers
    formats = [name for name in READERS if name != "records"]
    parser = argparse.ArgumentParser(description="Packs one split of a data set into shards.")
    parser.add_argument("--from", dest="layout", choices=formats, required=True)
    parser.add_argument("--root", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--split", required=True, help="which split to pack")
    parser.add_argument("--out", type=Path, required=True, help="writes the folder OUT/SPLIT")
    parser.add_argument("--as", dest="name", help="another name for the folder: OUT/AS")
    parser.add_argument("--shards", type=int, default=16, help="number of files (default: 16)")
    parser.add_argument("--short_side", type=int, help="scale larger pictures down, pixels")
    parser.add_argument("--quality", type=int, help="JPEG quality of scaled pictures (default: 90)")
    parser.add_argument("--max_pixels", type=int, default=pictures.most_pixels)
    args = parser.parse_args(argv[1:])
    pictures.limit(args.max_pixels)
    if args.quality is not None and args.short_side is None:
        parser.error("--quality is that of pictures which --short_side scales: give both, or none")
    sys.stdout.reconfigure(errors="backslashreplace")  # names of folders may not be text
    name = args.split if args.name is None else args.name
    try:
        source = reader_of(args.layout)(args.root, args.split, 0)
        packed_from = f"{args.layout}: {args.root.name}, split {args.split}"
        if args.short_side is not None:
            quality = 90 if args.quality is None else args.quality
            source = Smaller(source, args.short_side, quality)
            packed_from += f", short side {args.short_side}, quality {quality}"
        folder = pack(source, args.out, name, shards=args.shards, packed_from=packed_from)
    except (ValueError, OSError, tf.errors.OpError) as error:
        parser.exit(2, f"\n{logs.printable(error)}\n")
    packed = records.Records(args.out, name)
    ignored = f" ({IGNORE} is ignored)" if packed.kind == "map" else ""
    what = f"{len(source)} samples, labels below {packed.num_classes}{ignored}"
    print(f"{folder}: {what}, read back and found the same")
    return 0
