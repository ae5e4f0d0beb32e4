"""Packed samples: TFRecord shards with an index, so that any record takes one read.

ROOT/SPLIT/pack.json                    what is packed, and the shards with their sizes
ROOT/SPLIT/index.bin                    (offset, length) of each record, little-endian uint64 pairs
ROOT/SPLIT/SPLIT-00000-of-00016.tfrecord ...

`hvdkit pack` writes them. A record is a tf.train.Example of "image" (bytes of a PNG or JPEG) and
"label" (bytes of a grey PNG, or an int64). Sample ids are those of the packed source. The last
record of a shard is its mark: it names the pack and the shard, so that a shard of another pack is
noticed when the set is opened, even if its size fits.
"""

import hashlib
import json
import operator
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.data import source
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.logs import join

META, INDEX = "pack.json", "index.bin"
VERSION = 3
FRAMING = 16  # bytes of a TFRecord besides its data: length, CRC of the length, CRC of the data
_AGAIN = "copy it again, or pack again"


class Records:
    """One packed split, as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": ..., "file": the picture's bytes}; the label is
    uint8 [H, W, 1] where `kind` is "map" and an int32 scalar where it is "class".

    Raises ValueError, naming the files, if some are missing or changed: it compares sizes and marks
    of shards, and the checksums of pack.json and the index. A record's own checksum is compared
    when it is read.
    """

    def __init__(self, root: Path, split: str, _: int = 0):
        self.folder = Path(root) / split
        meta = _read_meta(self.folder)
        self.kind: str = meta["kind"]
        self.num_classes: int = meta["num_classes"]
        self.class_names: list[str] = meta.get("class_names", [])
        self.is_demo: bool = meta.get("is_demo", False)  # packed from hvdkit/data/scenes.py's
        self._content: str = meta["content"]
        self._shards = [(shard["name"], shard["bytes"]) for shard in meta["shards"]]
        _check_shards(self.folder, meta)
        counts = [shard["records"] for shard in meta["shards"]]
        self._index = _read_index(self.folder / INDEX, meta)
        self._shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        with tf.device("CPU:0"):  # where files are read
            self._files = tf.constant([os.fsencode(self.folder / n) for n, _ in self._shards])
            self._places = tf.constant(np.column_stack([self._shard_of, self._index]), tf.int64)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Raises tf.errors.DataLossError (when it runs) for a damaged record."""
        sample = self._read_parts(index)
        if self.kind == "map":
            label = tf.io.decode_png(pictures.fit(sample["label"]), channels=1)
        else:
            label = tf.cast(sample["label"], tf.int32)
        file = sample["image"]
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        where, place = self.where(index), tf.constant(index, tf.int64)
        try:
            for part in self._read_parts(place).values():
                if part.dtype == tf.string and (fault := pictures.refused(part.numpy())):
                    return f"{where} holds a picture that {fault}"
            self.read(place)
        except tf.errors.DataLossError as error:
            return f"{where} does not match its checksum ({reason_of(error)}); {_AGAIN}"
        except tf.errors.OpError as error:
            return f"{where} cannot be read: {reason_of(error)}; {_AGAIN}"
        return None

    def check_lengths(self) -> None:
        """ValueError where a length is not the index's; too slow for each start of a run."""
        for number, (name, _) in enumerate(self._shards):
            with (self.folder / name).open("rb") as file:
                for index in np.flatnonzero(self._shard_of == number).tolist():
                    offset, length = self._index[index].tolist()
                    if os.pread(file.fileno(), 8, offset) != length.to_bytes(8, "little"):
                        raise ValueError(f"{self.where(index)} has another length; {_AGAIN}")

    def where(self, index: int) -> str:
        """File and bytes that hold sample `index`, as text."""
        offset, length = self._index[index].tolist()
        path = self.folder / self._shards[self._shard_of[index]][0]
        return f"{path}, record of sample {index} (bytes {offset} to {offset + length + FRAMING})"

    def fingerprint(self) -> str:
        """SHA-256 over shards' names and sizes, the packer's checksum of records, and `is_demo`."""
        about = [("is_demo", 0)] if self.is_demo else []
        return source.digest([*self._shards, (self._content, len(self)), *about])

    def _read_parts(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
        """Image and label of one record as they are stored, scalars.

        Uses TensorFlow's reader of TFRecords, starting at the record and fetching only it: one
        read, both CRC32C of the record checked, no Python. See `check_lengths` for what crashes it.
        """
        shard, offset, length = tf.unstack(self._places[index])
        how = {"compression_type": "", "buffer_size": length + FRAMING, "byte_offsets": [offset]}
        records = tf.raw_ops.TFRecordDatasetV2(filenames=[self._files[shard]], **how)
        one = {"output_types": [tf.string], "output_shapes": [[]]}
        first = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **one)
        record = tf.raw_ops.DatasetToSingleElement(dataset=first, **one)[0]
        kinds = {"image": tf.string, "label": tf.string if self.kind == "map" else tf.int64}
        features = {name: tf.io.FixedLenFeature([], kind) for name, kind in kinds.items()}
        return tf.io.parse_single_example(record, features)


def mark(content: str, shard: int, shards: int) -> bytes:
    """Data of a shard's last record; content: the pack's, hex digits."""
    return f"pack {content}, shard {shard} of {shards}".encode()


def write_meta(folder: Path, meta: dict[str, Any], index: list[tuple[int, int]]) -> None:
    """Writes index.bin and pack.json; the index has (offset, length) in the order of samples.

    `meta`: kind ("map" or "class"), num_classes, content (hex digits), packed_from (for people),
    shards (a list of {name, records, bytes}); class_names (a list) and is_demo (True) where the
    source has them.
    """
    data = np.array(index, "<u8").tobytes()
    (folder / INDEX).write_bytes(data)
    meta = {"version": VERSION, **meta, "index_sha256": hashlib.sha256(data).hexdigest()}
    meta["checksum"] = _checksum(meta)
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def _checksum(meta: dict[str, Any]) -> str:
    """SHA-256 (hex digits) of everything else in pack.json."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        there = sorted(found.parent.name for found in folder.parent.glob(f"[!.]*/{META}"))
        raise ValueError(
            f"{path} is missing; pack the split with hvdkit pack, or choose another "
            f"(packed in {folder.parent}: {join(there) or 'none'})"
        )
    try:
        meta = json.loads(whole_files.read(path, whole_files.TABLE_BYTES, links=True))
        version, whole = meta["version"], meta.get("checksum") == _checksum(meta)
        if version == VERSION:
            _check_types(meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {_AGAIN}") from None
    if version != VERSION:
        raise ValueError(f"{path} has version {version!r}, not {VERSION}; pack again")
    if not whole:
        raise ValueError(f"{path} does not match its own checksum; {_AGAIN}")
    return meta


def _check_types(meta: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for what is not as `write_meta` has it."""
    "".join([meta["kind"], meta["content"], *meta.get("class_names", [])])
    range(meta["num_classes"])
    for shard in meta["shards"]:
        count, size = operator.index(shard["records"]), operator.index(shard["bytes"])
        if "/" in shard["name"] or not 0 <= count * FRAMING <= size < 2**60:
            raise ValueError(f"shard {shard}")


def _check_shards(folder: Path, meta: dict[str, Any]) -> None:
    listed = meta["shards"]

    def problem(number: int) -> str:
        path, size = folder / listed[number]["name"], listed[number]["bytes"]
        if not path.is_file():
            return f"{path} is missing"
        end = mark(meta["content"], number, len(listed))
        with path.open("rb") as file:
            if (found := file.seek(0, os.SEEK_END)) != size:
                return f"{path} has {found} bytes where {size} were written"
            file.seek(max(0, size - len(end) - 4))  # a record ends with a CRC of 4 bytes
            fits = file.read(len(end)) == end
        return "" if fits else f"{path} belongs to another pack or place, or its end is damaged"

    with ThreadPoolExecutor(16) as pool:  # waiting for a file server, not computing
        if problems := [*filter(None, pool.map(problem, range(len(listed))))]:
            raise ValueError(f"{join(problems)}; {_AGAIN}")


def _read_index(path: Path, meta: dict[str, Any]) -> np.ndarray:
    """(offset, length) of each record, int64 [records, 2]."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; {_AGAIN}")
    counts = [shard["records"] for shard in meta["shards"]]
    if (size := path.stat().st_size) != 16 * sum(counts):
        raise ValueError(f"{path} has {size} bytes, not 16 for each of {sum(counts)}; {_AGAIN}")
    data = whole_files.read(path, 2**32, links=True)
    if hashlib.sha256(data).hexdigest() != meta["index_sha256"]:
        raise ValueError(f"{path} does not match its checksum in {META}; {_AGAIN}")
    index = np.frombuffer(data, "<u8").reshape(-1, 2)
    ends = np.repeat([shard["bytes"] for shard in meta["shards"]], counts).astype(np.uint64)
    if (index > ends[:, None]).any() or (index.sum(1) + FRAMING > ends).any():
        raise ValueError(f"{path} has a record outside its shard; {_AGAIN}")
    return index.astype(np.int64)
