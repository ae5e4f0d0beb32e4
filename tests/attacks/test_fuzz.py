"""Parsers of foreign bytes, given what nobody wrote: make fuzz tries 200,000 inputs."""

import collections
import contextlib
import hashlib
import io
import json
import os
import struct
import time
from pathlib import Path

import hypothesis
import numpy as np
import psutil
import pytest
import readers
import tensorflow as tf
from hypothesis import strategies as st
from PIL import Image

from hvdkit import settings
from hvdkit.checkpoint import files, run_folder
from hvdkit.data.readers import idx as idx_files
from hvdkit.data.readers import listing, pictures, records
from hvdkit.evaluate import metrics
from hvdkit.observe import compare, report
from hvdkit.observe import records as run_records
from hvdkit.ranks import encoding

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))  # of all parsers together
LINE = {
    "step": 1,
    "time": 1.0,
    "loss": 2.0,
    "eval_loss": 1.0,
    "eval_miou": 0.5,
    "eval_iou_1": 0,
}
RUN = {
    "config.cfg": b"--num_steps=9\n--nojit\n",
    "metrics.jsonl": LINE,
    "bad_samples.jsonl": {"step": 1, "sample": 2, "by": 3, "why": "torn"},
    "starts.jsonl": {"step": 0, "time": 1.0, "score": "miou", "score_mode": "min"},
    "summary.json": {
        "step": 1,
        "exit_reason": "",
        "weights_sha256": "",
        "fingerprint": {},
        "samples_per_second": 1.0,
        "skipped_steps": 1,
        "samples_passed_over": 1,
        "best_score": 0.5,
        "best_step": 1,
    },
}
MANIFEST = {
    "step": 1,
    "config": {},
    "ranks": 1,
    "tensorflow": "",
    "sha256": "",
    "dtypes": {},
    "score": 0.5,
    "evaluated": True,
    "fingerprint": {},
    "measure": {},
    "format": 4,
    "loss": 1.0,
    "since": 1,
    "samples": 32,
    "passed_over": 0,
    "card": {"train": {"fingerprint": "a", "samples": 9}, "class_names": ["b"]},
    "figures": {"data": "a", "samples": {"its outputs": [0.0, 0.5, 1.0, 3.0, 0.0]}},
}


def raw(content: bytes | dict) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def of_a_run(name: str):
    """A parser that computes of a run's records all that compare and report compute."""

    def parse(file: Path) -> None:
        for record, content in (RUN | {name: file.read_bytes()}).items():
            (file.parent / record).write_bytes(raw(content))
        run_folder._drop_lines(file, 1, True)
        run = run_records.read(file.parent)
        report.about(run), report.faults(run)
        compare.printed(compare.side_by_side([run, run], None))
        compare.check_ended(run)
        compare.verdict(run, run._replace(folder=file.parent.parent))

    return parse


def manifest(file: Path) -> None:
    """With its checksum, which an author can compute."""
    data = file.read_bytes()
    folder = file.parent / "step-00000001"
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        record = json.loads(data)
        data = raw(
            record | {"checksum": files.checksum_of(record, record.get("format"))}
        )
    folder.mkdir(exist_ok=True)
    (folder / files.MANIFEST).write_bytes(data)
    files.best(files.scored([folder, folder]), {"main_metric": "miou"})
    files.read_manifest(folder)


def index(file: Path) -> None:
    data = file.read_bytes()[:48]
    shards = [{"bytes": 5000, "records": len(data) // 16}]
    meta = {"shards": shards, "index_sha256": hashlib.sha256(data).hexdigest()}
    file.write_bytes(data)
    records._check_index(file, meta)


def idx(file: Path) -> None:
    idx_files._values(file.parent, file.name, dimensions=1)


def image(file: Path) -> None:
    data = tf.constant(file.read_bytes())
    with contextlib.suppress(tf.errors.OpError, UnicodeDecodeError):
        assert (
            1 <= pictures.orientation(data) <= 8
            and pictures.decode_image(data).shape[-1] == 3
        )
    pictures.check_decodes(file)


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    Image.fromarray(readers.noise(1)).save(file, kind, exif=exif)
    return file.getvalue()


def message(file: Path) -> None:
    encoding.unpack(np.frombuffer(file.read_bytes(), np.uint8))


# By name: the parser, and its sound input: bytes, or values by name, which are changed.
PARSERS = {
    "flagfile": (
        lambda file: settings.parse(["", f"--flagfile={file}"]),
        b"--seed=1\n--nojit\n",
    ),
    "list": (listing.read_names, b"a\nb/c\n"),
    "index": (index, struct.pack("<4Q", 0, 1000, 1016, 2000)),
    "png": (image, picture("PNG")),
    "jpeg": (image, picture("JPEG")),
    "idx": (idx, readers.idx(np.arange(9, dtype=np.uint8))),
    "manifest": (manifest, MANIFEST),
    "confusion": (metrics.read_confusion, b"label,a,b\na,1,2\nb,3,4\n"),
    "message": (
        message,
        encoding.pack([np.ones(2), listing.packed(["b"])], "x").tobytes(),
    ),
    **{name: (of_a_run(name), content) for name, content in RUN.items()},
}
FOUND = [
    b"",
    b"[" * 100_000,
    b'{"step": 1e999, "time": NaN}',
    b"9" * 5000,
    b"\xff\xfe\0",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)


def inputs(whole: bytes | dict) -> st.SearchStrategy[bytes]:
    if isinstance(whole, dict):
        changes = st.dictionaries(
            st.sampled_from([*whole]) | st.text(max_size=3), JSON, max_size=3
        )
        return changes.map(lambda found: raw(whole | found))

    def edited(edits: list) -> bytes:
        data = whole
        for at, length, new in edits:
            data = data[:at] + new + data[at + length :]
        return data

    places = st.tuples(
        st.integers(0, len(whole)), st.integers(0, 9), st.binary(max_size=9)
    )
    return st.lists(places, max_size=4).map(edited)


@pytest.mark.parametrize("name", PARSERS)
def test_foreign_bytes_are_read_or_refused_by_name(name: str, tmp_path: Path):
    """ValueError or OSError in one line, within a second, and memory does not grow."""
    parse, whole = PARSERS[name]
    file = tmp_path / f"{name}-file"
    process = psutil.Process()
    tried: collections.deque[bytes] = collections.deque(maxlen=1000)

    def attempt(data: bytes) -> None:
        file.write_bytes(data)
        tried.append(data)
        before = process.memory_info().rss
        start = time.process_time()
        try:
            parse(file)
        except (ValueError, OSError) as error:
            said = f" {error}"  # hvdkit/ranks/messages.py names a message
            is_named = str(tmp_path) in said or " --" in said or name == "message"
            assert is_named and "\n" not in said, said
        assert process.memory_info().rss - before < 2**27
        assert time.process_time() - start < 1

    # The first file that a process reads traces the reader's graph.
    file.write_bytes(raw(whole))
    parse(file)
    for data in [*FOUND, raw(whole)]:
        attempt(data)
    settings_of_tests = hypothesis.settings(
        max_examples=-(-INPUTS // len(PARSERS)),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize="FUZZ_INPUTS" not in os.environ,
    )
    attempt_many = hypothesis.given(inputs(whole))(attempt)
    settings_of_tests(attempt_many)()
    # Hypothesis keeps its draws in memory, so memory is measured with the same inputs once more.
    before = process.memory_info().rss
    for data in list(tried):
        attempt(data)
    assert process.memory_info().rss - before < 2**24
