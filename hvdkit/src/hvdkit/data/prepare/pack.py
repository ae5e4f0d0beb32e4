"""Packs a data set into a few large files (TFRecord shards), which records.py reads.

Sample ids and pixels stay the same, so a run on the packed set gives the same batches. PNG, JPEG
and WebP files are stored unchanged; labels as PNGs of class ids (255: ignored), or as numbers. With
--short_side larger pictures are scaled down once, here: another data set, faster to read.

With mpirun or srun each rank packs some of the shards. OUT/.SPLIT.packing holds a finished shard as
a packed split of its own, until all are there; after a kill or an error the next try goes on.
"""

import argparse
import contextlib
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.data import pipeline
from hvdkit.data.augment import image_ops
from hvdkit.data.classes import doubt_of_files
from hvdkit.data.labels import IGNORE
from hvdkit.data.open import check_once, kind_of, reader_of, some_values
from hvdkit.data.readers import pictures, records
from hvdkit.data.sampler import permuted, share
from hvdkit.data.source import Parts, Source, Wrapper, digest, sampled
from hvdkit.launcher import launch_fault, launch_rank, launched_ranks
from hvdkit.settings import of_project
from hvdkit.settings.data import PACK_ONLY, READERS
from hvdkit.settings.typed import path_argument

_SHARD_BYTES = 2**28
_AT_ONCE = 32  # records are read back at a time
_LOCK = ".lock"  # a file in the folder of an unfinished pack


def pack(
    source: Source, out: Path, split: str, *, shards: int = 0, packed_from: str = ""
) -> Path:
    """Writes OUT/SPLIT, whole or not at all; all of it is read back before it gets its name.

    `shards`: their number, 0: as many as make about 256 MB each. `packed_from`: a description for
    people, kept in pack.json. Returns the folder, which is there once rank 0 returns. Raises
    ValueError, or OSError or tf.errors.OpError where writing failed.
    """
    if shards < 0:
        raise ValueError(f"--shards={shards}: give at least 1")
    # A hidden folder is an unfinished pack.
    if not split or split.startswith(".") or "/" in split:
        raise ValueError(
            f"{split!r} cannot be the name of a packed split: it must be a folder's name that does "
            "not begin with '.'; give another --as"
        )
    out.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(out / split):
        raise ValueError(
            f"{out / split} is there already; remove it, or give another --out"
        )
    encoder = _Encoder(source)
    if not shards:
        sizes = [len(data) for data, _ in encoder.examples(sampled(len(source), 32))]
        # The product of the number of samples and their mean size is rounded up.
        shards = -(-len(source) * sum(sizes) // (len(sizes) * _SHARD_BYTES))
    shards = min(shards, len(source))
    fault = launch_fault()
    if fault:
        raise ValueError(fault)
    rank = launch_rank()
    ranks, _ = launched_ranks()
    if rank >= ranks:
        raise ValueError(
            f"the launcher gives rank {rank}, and not of how many: use mpirun or srun"
        )
    key = digest([(f"{source.fingerprint()} {packed_from} {records.VERSION}", shards)])
    with _unfinished(out, split, key, rank=rank) as work:
        for number in range(rank, shards, ranks):
            indices = range(*share(len(source), number, shards))
            _pack_shard(encoder, work / f"{number:05d}", indices)
        if not rank:
            _join(source, work, shards, split=split, packed_from=packed_from)
            # `rename` fails where something has that name already.
            (work / "whole").rename(out / split)
            # Without the key, the next pack uses nothing of the rest if this one is killed here.
            (work / key).unlink()
    if not rank:
        # The lock is closed by now: on NFS a file that is open stays.
        shutil.rmtree(work, ignore_errors=True)
    return out / split


def _pack_shard(encoder: "_Encoder", folder: Path, indices: range) -> None:
    """A shard by itself, as a packed split in `folder`, once it is read back."""
    if folder.exists():  # an earlier try packed it
        return
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()

    places = []
    highest = 0
    path = partial / "shard"
    offset = records.BEFORE
    with tf.io.TFRecordWriter(os.fsencode(path)) as writer:
        for index, (data, label) in zip(indices, encoder.examples(indices)):
            writer.write(data)
            places.append((offset, len(data), zlib.crc32(data)))
            offset += len(data) + records.AFTER + records.BEFORE
            highest = max(highest, label)
            logs.progress("packed", index + 1, encoder.count)
    shard = {"name": path.name, "records": len(places), "bytes": path.stat().st_size}
    meta = {
        "packed_from": "",
        "kind": encoder.kind,
        "num_classes": highest + 1,
        "shards": [shard],
    }
    records.write_meta(partial, meta, np.array(places, records.PLACE))
    _flush(partial)

    _verify(records.Records(partial.parent, partial.name), indices, encoder.count)
    partial.rename(folder)


def _verify(packed: records.Records, indices: range, count: int) -> None:
    """Reads all records back; `indices`: those of their samples, of `count` samples in all."""
    for first in range(0, len(indices), _AT_ONCE):
        _, faults = packed.fetch(np.arange(len(indices))[first : first + _AT_ONCE])
        for index, fault in zip(indices[first:], faults):
            if fault:
                raise ValueError(
                    f"what was read back differs from what was packed: {fault}"
                )
            logs.progress("verified", index + 1, count)


def _flush(folder: Path) -> None:
    """Has a folder and its files on the disk, so that they outlast a power cut."""
    for path in (*folder.iterdir(), folder):
        whole_files.flush(path)


def _join(
    source: Source, work: Path, shards: int, *, split: str, packed_from: str
) -> None:
    """Makes WORK/whole of all shards; if it is cut off, the next try goes on."""
    parts = [work / f"{number:05d}" for number in range(shards)]
    _wait_for(parts)
    folder = work / "whole"
    folder.mkdir(exist_ok=True)

    places = []
    listed = []
    num_classes = 0
    for number, part in enumerate(parts):
        file = part / records.META
        part_meta = whole_files.from_json(file.read_text(), file)
        num_classes = max(num_classes, part_meta["num_classes"])
        places.append(np.fromfile(part / records.INDEX, records.PLACE))
        (shard,) = part_meta["shards"]
        name = f"{split}-{number:05d}-of-{shards:05d}.tfrecord"
        if (part / shard["name"]).exists():
            (part / shard["name"]).rename(folder / name)
        listed.append(shard | {"name": name})

    meta = {
        "packed_from": packed_from,
        "kind": part_meta["kind"],
        "num_classes": num_classes,
    }
    class_names = getattr(source, "class_names", ())
    if class_names:
        meta["class_names"] = list(class_names)
    for name in ("is_demo", "asks_mirror", "is_shuffled"):
        if getattr(source, name, False):
            meta[name] = True
    meta["shards"] = listed
    records.write_meta(folder, meta, np.concatenate(places))
    try:
        records.Records(work, folder.name)
    except ValueError as error:
        raise ValueError(f"{error}; before that, remove {work}") from None
    _flush(folder)


def _wait_for(parts: list[Path]) -> None:
    """Returns once all ranks have packed their shards."""
    reported = 0
    while missing := [part.name for part in parts if not part.exists()]:
        if len(missing) != reported:
            print(
                f"waits for other ranks' shards {logs.join(missing)}", file=sys.stderr
            )
        reported = len(missing)
        time.sleep(0.2)


class _Encoder:
    """Makes records of a source's samples; `kind`: "map" or "class"."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.count = len(source)
        encode = tf.function(self._encoded, autograph=False)
        self._encode = encode.get_concrete_function(tf.TensorSpec([], tf.int64))
        is_map = self._encode.structured_outputs["label"].shape.rank == 3
        self.kind = "map" if is_map else "class"

    def _encoded(self, index: tf.Tensor) -> Parts:
        sample = self._source.read(index)
        if not {"image", "label"} <= sample.keys():
            raise ValueError(
                f"samples need an image and a label to be packed: {[*sample]}"
            )
        image = sample["image"]
        label = sample["label"]
        _check_kept(image, label)
        file = _file_of(sample)
        # It decodes to the same picture, unless it was replaced since the source decoded it.
        again = pictures.decode_image(file)
        same_shape = tf.reduce_all(tf.shape(again) == tf.shape(image))
        same = tf.cond(same_shape, lambda: tf.reduce_all(again == image), lambda: False)
        ids = tf.io.encode_png(label) if label.shape.rank == 3 else b""
        return {"file": file, "label": label, "ids": ids, "same": same}

    def examples(self, indices: range) -> Iterator[tuple[bytes, int]]:
        """A tf.train.Example of each, and its highest class; ValueError: one cannot be read."""
        ids = tf.data.Dataset.range(indices.start, indices.stop, indices.step)
        samples = ids.map(
            pipeline.as_written(self._encode), tf.data.AUTOTUNE, deterministic=True
        )
        samples = samples.as_numpy_iterator()
        for index in indices:
            try:
                sample = next(samples)
            except tf.errors.OpError as error:
                fault = self._source.explain(index) or pipeline.reason_of(error)
                raise ValueError(fault) from None
            if not sample["same"]:
                raise ValueError(
                    f"sample {index} differs from what was packed of it: its file changed "
                    "meanwhile; pack again"
                )
            example = tf.train.Example()
            features = example.features.feature
            features["image"].bytes_list.value.append(sample["file"])
            label = sample["label"]
            if self.kind == "map":
                features["label"].bytes_list.value.append(sample["ids"])
                highest = int(np.max(label, initial=0, where=label != IGNORE))
            else:
                features["label"].int64_list.value.append(int(label))
                highest = max(int(label), 0)
            yield example.SerializeToString(), highest


def _file_of(sample: Parts) -> tf.Tensor:
    """The sample's file; a PNG of its picture where it was read from none."""
    return sample["file"] if "file" in sample else tf.io.encode_png(sample["image"])


def _check_kept(image: tf.Tensor, label: tf.Tensor) -> None:
    """Raises ValueError for what a record cannot hold as it is."""
    is_picture = (
        image.dtype == tf.uint8
        and image.shape.rank in (3, None)
        and image.shape[-1] in (3, None)
    )
    is_number = label.shape.rank in (0, None) and (
        label.dtype.is_integer or label.dtype.is_bool
    )
    is_map = (
        label.shape.rank == 3
        and label.dtype == tf.uint8
        and label.shape[-1] in (1, None)
    )
    if not is_picture or not (is_number or is_map):
        raise ValueError(
            "a pack holds pictures, uint8 [height, width, 3], with a whole number or a map of "
            f"classes, uint8 [height, width, 1], as label: not {image.dtype.name} {image.shape} "
            f"with {label.dtype.name} {label.shape}"
        )


class Smaller(Wrapper):
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
        super().__init__(larger)
        self._side = short_side
        self._quality = quality

    def read(self, index: tf.Tensor) -> Parts:
        sample = self._source.read(index)
        image = sample["image"]
        label = sample["label"]
        shape = tf.shape(image)[:2]
        shorter = tf.reduce_min(shape)
        # Integer arithmetic makes the shorter side exact.
        scaled = tf.maximum((2 * shape * self._side + shorter) // (2 * shorter), 1)

        def encoded() -> tf.Tensor:
            small = tf.image.resize(image, scaled, antialias=True)
            return tf.io.encode_jpeg(
                tf.cast(small + 0.5, tf.uint8), quality=self._quality
            )

        file = tf.cond(shorter > self._side, encoded, lambda: _file_of(sample))
        if label.shape.rank == 3:
            label = image_ops.nearest(
                label, tf.where(shorter > self._side, scaled, shape)
            )
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def fingerprint(self) -> str:
        return digest([(self._source.fingerprint(), self._side), ("", self._quality)])


class Shuffled(Wrapper):
    """Another source's samples in an order drawn by `seed`, in [0, 2**64): for --shuffle_shards."""

    is_shuffled = True

    def __init__(self, ordered: Source, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"--shuffle={seed}: give a seed of 0 to 2**64 - 1")
        super().__init__(ordered)
        self._seed = seed

    def read(self, index: tf.Tensor) -> Parts:
        return self._source.read(permuted(index, len(self), self._seed))

    def explain(self, index: int) -> str | None:
        ordered_index = permuted(tf.constant(index, tf.int64), len(self), self._seed)
        return self._source.explain(int(ordered_index))

    def fingerprint(self) -> str:
        return digest([(self._source.fingerprint(), self._seed), ("shuffled", 0)])


@contextlib.contextmanager
def _unfinished(out: Path, name: str, key: str, *, rank: int) -> Iterator[Path]:
    """The folder in `out` where the pack with this key grows into OUT/NAME.

    Rank 0 empties what has another key, and holds a lock, so that one pack at a time uses it.
    """
    # It lies in the same folder, because only then a rename is atomic.
    work = out / f".{name}.packing"
    if rank:
        end = time.monotonic() + 60
        while not (work / key).exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"rank 0 has not begun {work} within 60 s: did it fail?"
                )
            time.sleep(0.2)
        yield work
        return
    work.mkdir(exist_ok=True)
    # `held` refuses a link.
    with whole_files.held(work), contextlib.ExitStack() as locks:
        try:
            locks.enter_context(whole_files.lock(work / _LOCK))
        except BlockingIOError:
            raise ValueError(
                f"{out / name} is being written by another process: wait until it ends, or give "
                "another --as"
            ) from None
        except whole_files.NoLocks:
            pass
        if not (work / key).exists():
            # Files come first, as the key of another pack must go before its shards.
            for path in sorted(work.iterdir(), key=lambda path: path.is_dir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != _LOCK:
                    path.unlink()
            (work / key).touch()
        yield work


def main(argv: list[str]) -> int:
    of_project()  # the project may add readers
    formats = [name for name in PACK_ONLY | READERS if name != "records"]
    parser = argparse.ArgumentParser(
        description="Packs one split of a data set into shards."
    )
    parser.add_argument("--from", dest="layout", choices=formats, required=True)
    parser.add_argument(
        "--root", type=path_argument, required=True, help="folder of the data set"
    )
    parser.add_argument("--split", required=True, help="which split to pack")
    parser.add_argument(
        "--out", type=path_argument, required=True, help="writes the folder OUT/SPLIT"
    )
    parser.add_argument("--as", dest="name", help="another name for the folder: OUT/AS")
    parser.add_argument(
        "--shards", type=int, default=0, help="files (default: 256 MB each)"
    )
    parser.add_argument(
        "--short_side", type=int, help="scale larger pictures down, pixels"
    )
    parser.add_argument(
        "--quality", type=int, help="JPEG quality of scaled pictures (default: 90)"
    )
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="mix samples over all shards"
    )
    parser.add_argument("--max_pixels", type=int, default=pictures.most_pixels)
    args = parser.parse_args(argv[1:])
    pictures.limit(args.max_pixels)
    if args.quality is not None and args.short_side is None:
        parser.error(
            "--quality is that of pictures which --short_side scales: give both, or none"
        )
    if not args.root.exists():
        parser.error(f"--root={args.root} does not exist")
    name = args.split if args.name is None else args.name
    try:
        source, packed_from = _opened(args)
        folder = pack(
            source, args.out, name, shards=args.shards, packed_from=packed_from
        )
    except (ValueError, OSError, tf.errors.OpError) as error:
        parser.exit(2, f"\n{logs.printable(error)}\n")
    if not launch_rank():
        packed = records.Records(args.out, name)
        ignored = f" ({IGNORE} is ignored)" if packed.kind == "map" else ""
        print(
            logs.printable(
                f"{folder}: {len(source)} samples, labels below {packed.num_classes}{ignored}, "
                "read back and found the same"
            )
        )
    return 0


def _opened(args: argparse.Namespace) -> tuple[Source, str]:
    """The samples to pack, and what they are, for pack.json."""
    source = reader_of(args.layout)(args.root, args.split, 0)
    check_once(source)
    if kind_of(source) == "map":
        fault = doubt_of_files(source, some_values(source))
        if fault:
            raise ValueError(f"{args.root}: {fault}")
    packed_from = f"{args.layout}: {args.root.name}, split {args.split}"
    if args.short_side is not None:
        quality = 90 if args.quality is None else args.quality
        source = Smaller(source, args.short_side, quality)
        packed_from += f", short side {args.short_side}, quality {quality}"
    if args.shuffle is not None:
        source = Shuffled(source, args.shuffle)
        packed_from += f", shuffled with seed {args.shuffle}"
    return source, packed_from
