"""Packed samples: TFRecord shards with an index, so that any record takes one read.

ROOT/SPLIT/pack.json                    what is packed, and the shards with their sizes
ROOT/SPLIT/index.bin                    PLACE of each record
ROOT/SPLIT/SPLIT-00000-of-00016.tfrecord ...

`hvdkit pack` writes them. A record is a tf.train.Example of "image" (bytes of a PNG, JPEG or WebP)
and "label" (bytes of a grey PNG, or an int64). Sample ids are those of the packed source.

Shards and the index stay open and on the disk, in pages that all ranks of a host share: memory, and
the time to open a set, do not depend on its size, but on rank 0, which compares checksums.
"""

import functools
import hashlib
import json
import operator
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.data import shared_listing, source
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures, remote
from hvdkit.logs import join

META = "pack.json"
INDEX = "index.bin"
VERSION = 5
BEFORE = 12  # bytes of a TFRecord before its data: the length, and the length's CRC
AFTER = 4  # bytes after its data: the data's CRC
# The data of a record, little-endian: place of the first byte in the shard, bytes, CRC-32.
PLACE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")])
_threads = ThreadPoolExecutor(32)  # they wait for the disk
_OPEN = 512  # shards are open at a time: a process may have 1,024 files
_INDEX = -1  # stands for the index among the shards
_AGAIN = "copy it again, or pack again"


class Records(source.ReadAhead):
    """One packed split, as a `source.Source`.

    Reads to {"image": uint8 [H, W, 3], "label": ..., "file": the picture's bytes}; the label is
    uint8 [H, W, 1] where `kind` is "map" and an int32 scalar where it is "class".

    Raises ValueError, naming the files, if some are missing or changed. Rank 0 compares sizes of
    all shards, and the checksums of pack.json and the index; a rank of each other host pack.json,
    the index's size, and at most 1,000 shards; each rank the checksums of the records that it
    reads, so a shard of another pack is noticed then, if its size fits.

    `root` may be a URL (remote.py): then each host fetches the index, whose checksum each rank
    compares, and compares the checksums of all records of a shard when it fetches it.
    """

    def __init__(self, root: Path | str, split: str, _: int = 0):
        url = remote.url_of(root)
        self.folder = f"{url or Path(root)}/{split}"
        self._server = remote.Server(self.folder) if url else None
        self.is_remote = bool(url)
        meta = shared_listing.found(("pack", self.folder), self._checked, self._compare)
        self.kind: str = meta["kind"]
        self.num_classes: int = meta["num_classes"]
        self.class_names: list[str] = meta.get("class_names", [])
        # True where hvdkit made the samples itself.
        self.is_demo: bool = meta.get("is_demo", False)
        # True where nothing says whether a mirrored picture is still one of its class.
        self.asks_mirror: bool = meta.get("asks_mirror", False)
        self.is_shuffled: bool = meta.get("is_shuffled", False)
        self._index_sha256: str = meta["index_sha256"]
        self._shards = [(shard["name"], shard["bytes"]) for shard in meta["shards"]]
        self.shard_sizes = [shard["records"] for shard in meta["shards"]]
        self._ends = np.cumsum(self.shard_sizes)
        self.form = {
            "data": tf.TensorSpec([], tf.string),
            "fault": tf.TensorSpec([], tf.string),
        }
        self.shard_bytes = [size for _, size in self._shards]
        self.index_bytes = PLACE.itemsize * len(self)
        self.bytes_each = sum(self.shard_bytes) / len(self)
        self._cache = (
            remote.Cache(self._server, meta["checksum"]) if self._server else None
        )
        # Whether the index had the right checksum when it was opened first.
        self._index_is_sound = False
        self._opens_index = threading.Lock()  # many threads may open it at once
        self.keep_open(_OPEN)

    def keep_open(self, files: int) -> None:
        """How many shards are open at a time, at most; the index is too."""
        self._open = functools.lru_cache(files)(self._opened)
        self._index = functools.lru_cache(1)(self._opened)

    def fetch_shard(self, shard: int) -> None:
        """Of a remote set: has a shard on this host's disk, used just now."""
        self._opened(shard).close()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        """Records, and what is wrong with each, or ""."""
        fetched = _threads.map(self._fetch, indices.tolist())
        return [np.array(part, object) for part in zip(*fetched)]

    def _fetch(self, index: int) -> tuple[bytes, str]:
        try:
            return self._data(index), ""
        except (ValueError, OSError, OverflowError) as error:
            return b"", f"{self.where(index)} {error}"

    def _data(self, index: int) -> bytes:
        """A record's data. Raises ValueError for a damaged one; OSError."""
        try:
            offset, length, crc = self._place(index)
            file = self._open(self._shard(index))
            data = os.pread(file.fileno(), length, offset)
        except OSError:
            self._open.cache_clear()  # a file server may have forgotten an open file
            self._index.cache_clear()
            raise
        if len(data) != length or zlib.crc32(data) != crc:
            name = self._shards[self._shard(index)][0]
            if self._cache and self._cache.fetch_again(name, file):
                self._open.cache_clear()
                return self._data(index)
            raise ValueError(f"does not match its checksum; {_AGAIN}")
        return data

    def _place(self, index: int) -> tuple[int, int, int]:
        """PLACE of a record; read, not mapped: a mapped file that is cut ends the process."""
        # The variable keeps the file open until it is read.
        file = self._index(_INDEX)
        place = os.pread(file.fileno(), PLACE.itemsize, PLACE.itemsize * index)
        if len(place) < PLACE.itemsize:
            raise ValueError(f"is not in {self._path(INDEX)}, which was cut; {_AGAIN}")
        return np.frombuffer(place, PLACE)[0].item()

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, "right"))

    def _opened(self, shard: int) -> remote.File:
        """Closed when nothing reads from it and newer ones took its place."""
        name = INDEX if shard == _INDEX else self._shards[shard][0]
        if not self._cache:
            return open(self._path(name), "rb")
        if shard == _INDEX:
            with self._opens_index:
                return self._opened_index(self._cache)
        fault = functools.partial(self._fault_of_shard, shard)
        return self._cache.open(name, self.shard_bytes[shard], fault)

    def _opened_index(self, cache: remote.Cache) -> remote.File:
        file = cache.open(INDEX, self.index_bytes, self._fault_of_index)
        # The checksums of records say nothing about the index's bytes.
        fault = "" if self._index_is_sound else self._fault_of_index(file)
        if not fault:
            cache.server.allowed = True
            return file
        if not cache.fetch_again(INDEX, file):
            raise ValueError(
                f"{self._path(INDEX)} {fault}; the disk of this host spoils it"
            )
        return self._opened_index(cache)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _fault_of_index(self, file: remote.File) -> str:
        file.seek(0)  # it may have been read before
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        self._index_is_sound = sha == self._index_sha256
        return "" if self._index_is_sound else f"does not match its checksum in {META}"

    def _fault_of_shard(self, shard: int, file: remote.File) -> str:
        end = int(self._ends[shard])
        for index in range(end - self.shard_sizes[shard], end):
            offset, length, crc = self._place(index)
            if zlib.crc32(os.pread(file.fileno(), length, offset)) != crc:
                return (
                    f"has a record (of sample {index}) that does not match its checksum"
                )
        return ""

    def decode(self, parts: source.Parts) -> source.Parts:
        label_dtype = tf.string if self.kind == "map" else tf.int64
        features = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], label_dtype),
        }
        sample = tf.io.parse_single_example(source.sound(parts, "data"), features)
        if self.kind == "map":
            label = tf.io.decode_png(pictures.fit(sample["label"]), channels=1)
        else:
            label = tf.cast(sample["label"], tf.int32)
        file = sample["image"]
        return {"image": pictures.decode_image(file), "label": label, "file": file}

    def explain(self, index: int) -> str | None:
        where = self.where(index)
        try:
            record = tf.train.Example.FromString(self._data(index))
            for feature in record.features.feature.values():
                for data in feature.bytes_list.value:
                    if fault := pictures.refused(data):
                        return f"{where} holds a picture that {fault}"
            self.read(tf.constant(index, tf.int64))
        except (ValueError, OSError, OverflowError) as error:
            return f"{where}: {error}"
        except tf.errors.OpError as error:
            return f"{where} cannot be read: {reason_of(error)}; {_AGAIN}"
        return None

    def where(self, index: int) -> str:
        """File and bytes that hold sample `index`, as text."""
        path = self._path(self._shards[self._shard(index)][0])
        try:
            offset, length, _ = self._place(index)
        except (ValueError, OSError):
            return f"{path}, record of sample {index}"
        return f"{path}, record of sample {index} (bytes {offset} to {offset + length})"

    def fingerprint(self) -> str:
        """SHA-256 over shards' names and sizes, the index with its checksums, and `is_demo`."""
        parts = [*self._shards, (self._index_sha256, len(self))]
        if self.is_demo:
            parts.append(("is_demo", 0))
        return source.digest(parts)

    def _checked(self) -> dict[str, Any]:
        """What pack.json says, once all files fit it."""
        if self._server:
            data = self._server.read(META, 0, whole_files.TABLE_BYTES)
            return _parsed(self._path(META), data)
        folder = Path(self.folder)
        meta = _read_meta(folder)
        _check_shards(folder, meta, range(len(meta["shards"])))
        _check_index(folder / INDEX, meta)
        return meta

    def _compare(self, meta: dict[str, Any]) -> None:
        if self._server:
            return  # each host takes from the server what fits rank 0's pack.json
        folder = Path(self.folder)
        local_meta = _read_meta(folder)
        if local_meta != meta:
            raise ValueError(
                f"{self.folder} on {os.uname().nodename} is another pack than on rank 0's host "
                f"({local_meta['packed_from']}): copy it to every host again"
            )
        _check_shards(folder, meta, source.sampled(len(meta["shards"])))
        _check_size(folder / INDEX, sum(shard["records"] for shard in meta["shards"]))


def write_meta(folder: Path, meta: dict[str, Any], index: np.ndarray) -> None:
    """Writes index.bin and pack.json; `index`: PLACE [n], in the order of samples.

    `meta`: kind ("map" or "class"), num_classes, packed_from (for people), shards (a list of
    {name, records, bytes}); class_names (a list), is_demo, asks_mirror and is_shuffled (True)
    where the source has them.
    """
    index.tofile(folder / INDEX)
    sha256 = hashlib.sha256(index.tobytes()).hexdigest()
    meta = {"version": VERSION, **meta, "index_sha256": sha256}
    meta["checksum"] = _checksum(meta)
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def _checksum(meta: dict[str, Any]) -> str:
    """SHA-256 (hex digits) of everything else in pack.json."""
    rest = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        splits = sorted(
            meta.parent.name for meta in folder.parent.glob(f"[!.]*/{META}")
        )
        raise ValueError(
            f"{path} is missing; pack the split with hvdkit pack, or choose another (packed in "
            f"{folder.parent}: {join(splits) or 'none'})"
        )
    return _parsed(path, whole_files.read(path, whole_files.TABLE_BYTES, links=True))


def _parsed(path: object, data: bytes) -> dict[str, Any]:
    """What pack.json holds; ValueError where it is not as `write_meta` writes it."""
    try:
        meta = whole_files.from_json(data, path)
        if meta["version"] != VERSION:
            raise ValueError(f"its version is not {VERSION} but {meta['version']}")
        if meta["checksum"] != _checksum(meta):
            raise ValueError("its checksum differs")
        _check_types(meta)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {_AGAIN}") from None
    return meta


def _check_types(meta: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for what is not as `write_meta` has it."""
    # join raises TypeError for what is no text, range and index for what is no whole number.
    "".join([meta["kind"], meta["packed_from"], *meta.get("class_names", [])])
    range(meta["num_classes"])
    for shard in meta["shards"]:
        count = operator.index(shard["records"])
        size = operator.index(shard["bytes"])
        if "/" in shard["name"] or not 0 <= count * (BEFORE + AFTER) <= size < 2**60:
            raise ValueError(f"shard {shard}")
    if not sum(shard["records"] for shard in meta["shards"]):
        raise ValueError("no record")


def _check_shards(folder: Path, meta: dict[str, Any], numbers: range) -> None:
    def fault_of(number: int) -> str:
        shard = meta["shards"][number]
        path = folder / shard["name"]
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != shard["bytes"]:
            return f"{path} has {size} bytes where {shard['bytes']} were written"
        return ""

    faults = [fault for fault in _threads.map(fault_of, numbers) if fault]
    if faults:
        raise ValueError(f"{join(faults)}; {_AGAIN}")


def _check_size(path: Path, records: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; {_AGAIN}")
    size = path.stat().st_size
    if size != PLACE.itemsize * records or not size:
        raise ValueError(
            f"{path} has {size} bytes, not {PLACE.itemsize} for each of {records}; {_AGAIN}"
        )


def _check_index(path: Path, meta: dict[str, Any]) -> None:
    counts = [shard["records"] for shard in meta["shards"]]
    _check_size(path, sum(counts))
    has_outside = False
    sha = hashlib.sha256()
    with path.open("rb") as file:
        # The places of one shard at a time are in memory.
        for count, shard in zip(counts, meta["shards"]):
            places = np.fromfile(file, PLACE, count)
            sha.update(places.tobytes())
            # An end that overflows is less than its offset.
            ends = places["offset"] + places["length"]
            if (places["offset"] > ends).any() or (ends > shard["bytes"]).any():
                has_outside = True
    if sha.hexdigest() != meta["index_sha256"]:
        raise ValueError(f"{path} does not match its checksum in {META}; {_AGAIN}")
    if has_outside:
        raise ValueError(f"{path} has a record outside its shard; {_AGAIN}")
