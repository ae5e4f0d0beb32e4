"""Hostile files: links in a run's folder, records that lie, pictures and weights that claim
much."""

import contextlib
import dataclasses
import io
import json
import os
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import memory
import numpy as np
import pyarrow
import pytest
import readers
import tensorflow as tf
from hosts import NOBODY, PYTHON, require
from PIL import Image
from pyarrow import parquet
from refusals import refused
from small_checkpoints import ALONE, save, variables

from hvdkit import whole_files
from hvdkit.checkpoint import run_folder, writing
from hvdkit.commands import example_files, predict
from hvdkit.commands.start import tables
from hvdkit.data import source
from hvdkit.data.place import Place
from hvdkit.data.prepare import check, pack
from hvdkit.data.readers import pictures, records, remote
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.sampler import Sampler
from hvdkit.evaluate import metrics
from hvdkit.observe import compare, report
from hvdkit.observe.telemetry import Telemetry
from hvdkit.settings import Settings
from hvdkit.train.task.inputs import Inputs

SECRET = "the victim's own, 5073"
RECORDS = ("config.cfg", "metrics.jsonl", "starts.jsonl", "summary.json", "confusion.csv",
           "predictions.png")  # fmt: skip
# Puts links to a file in the place of all that is in a folder, and of what a run writes.
LINKS = """
import contextlib, os, sys
folder, target, *names = sys.argv[1:]
print("ready", flush=True)
while True:
    for name in {*os.listdir(folder), *names, *(f".{name}.partial" for name in names)}:
        with contextlib.suppress(OSError):
            os.symlink(target, f"{folder}/link")
            os.rename(f"{folder}/link", f"{folder}/{name}")
"""


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """The process's peak is less than 150 MB above what it has before."""
    before = memory.start()
    yield
    assert memory.peak() - before < 150e6


def a_run(folder: Path, reason: str = "done") -> Path:
    """A folder with the records of a run that ended for this reason."""
    folder.mkdir()
    texts = (
        f"--own=<script>\x1b{folder.name}\n",
        '{"step": 1, "loss": 1.0, "eval_loss": 1.0, "time": 2.0}\n',
        '{"step": 0, "time": 1.0}\n',
        json.dumps({"step": 1, "exit_reason": reason}),
    )
    for name, text in zip(RECORDS, texts):
        (folder / name).write_text(text)
    metrics.write_confusion(
        folder / "confusion.csv", [reason, "b"], np.ones([2, 2], np.int64)
    )
    readers.save(folder / "predictions.png", readers.noise(1))
    return folder


def test_links_raced_into_a_runs_folder_change_and_copy_nothing(tmp_path: Path):
    """Nobody may write there, and makes links while a run writes its records, over and over."""
    require("setpriv")
    run = tmp_path / "run"
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    config = Settings(run_dir=str(run), num_steps=9, trackers="")
    run_folder.begin(run, None, config, evaluates_first=False)
    sampler = Sampler(9, 9, micro_batches=1, seed=0, rank=0, size=1)
    telemetry = Telemetry(config, ALONE, sampler)
    ones = np.ones([1, 1], np.int64)
    writes = [
        lambda: run_folder.begin(run, None, config, evaluates_first=False),
        lambda: telemetry.started(1, {}),
        lambda: telemetry.summary({"step": 1}),
        lambda: telemetry.confusion(["a"], ones),
        lambda: telemetry._pictures(1, readers.noise(1)[None]),
        lambda: report.write(run),
    ]
    run.chmod(0o777)
    words = [
        *NOBODY,
        PYTHON,
        "-c",
        LINKS,
        run,
        secret,
        *RECORDS,
        "report.html",
        ".lock",
        ".lease",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout.readline() == b"ready\n"
        for write in writes * 60:
            with contextlib.suppress(OSError, ValueError):
                write()
        assert stranger.poll() is None
        stranger.kill()
    assert any(path.is_symlink() for path in run.iterdir())
    assert secret.read_text() == SECRET
    kept = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert kept and not any(SECRET.encode() in path.read_bytes() for path in kept)


# Locks each file of its arguments, and prints those that it could lock.
LOCKS = """
import contextlib, fcntl, sys
for path in sys.argv[1:]:
    with contextlib.suppress(OSError):
        fcntl.flock(open(path), fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(path)
"""


def test_nobody_locks_what_a_run_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody may read the folders; a lock that they could take would end a run, or hold it up."""
    require("setpriv")
    run = tmp_path / "run"
    packed = tmp_path / "packed"
    for folder in (run, packed):
        folder.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (run / "summary.json").write_text("{}")
    (packed / "shard").write_bytes(b"five!")
    monkeypatch.setattr(remote, "_folder", str(tmp_path / "cache"))
    cache = remote.Cache(remote.Server(f"file://{packed}"), "checksum")
    cache.open("shard", 5, lambda file: "").close()
    whole_files.lock(run / ".lock").close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {".lock", ".shard.lock", "shard"} <= {path.name for path in files}
    words = [*NOBODY, PYTHON, "-c", LOCKS, *files]
    locked = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    # Not every file is locked by a run: these are here to show that the stranger can lock some.
    assert locked == [
        str(path) for path in files if path in (packed / "shard", run / "summary.json")
    ]


@pytest.mark.parametrize("when", ["between saves", "in a save"])
def test_a_link_that_takes_the_place_of_the_checkpoints_harms_no_other_run(
    when: str, kept
):
    other = kept.folder.parent / "other"
    elsewhere = dataclasses.replace(kept, folder=other, keep=9)
    before = {}
    for step in (1, 2, 7):
        path = save(elsewhere, step)
        before[path] = (path / "manifest.json").read_bytes()
    save(kept, 5)

    class Swapping(dict):
        def items(self):
            if not kept.folder.is_symlink():
                kept.folder.rename(kept.folder.with_name("moved"))
                kept.folder.symlink_to(other)
            return super().items()

    copy = kept.copy(Place(7), variables(2.0), Settings())
    copy = copy._replace(arrays=Swapping(copy.arrays))
    if when == "between saves":
        copy.arrays.items()
        with pytest.raises(OSError, match="Not a directory"):
            writing.write(kept.folder, 7, copy.arrays)
    else:
        kept.write(copy)
        assert (kept.folder.with_name("moved") / "step-00000007/manifest.json").exists()
    assert sorted(other.iterdir()) == sorted(before)
    for path, manifest in before.items():
        assert (path / "manifest.json").read_bytes() == manifest


def many_scores() -> str:
    record = {"step": 1, "loss": 1, "eval_loss": 2}
    for number in range(40_000):
        record[f"eval_{number}"] = 1
    return json.dumps(record)


def losses_of_both_signs() -> str:
    lines = []
    for step in range(9):
        lines.append(json.dumps({"step": step, "loss": 1.7e308 * (-1) ** step}) + "\n")
    return "".join(lines)


HUGE = "x," * (2**21 - 1) + "x\n"


@pytest.mark.timeout(120)  # some took hours
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("confusion.csv", HUGE + "0,", id="a huge head"),
        pytest.param("confusion.csv", "l," + HUGE * 7, id="huge rows"),
        pytest.param(
            "metrics.jsonl",
            json.dumps({"step": 1, "loss": 1.0, "eval_loss": 2.0, "x": "y" * 2**25}),
            id="a huge text",
        ),
        pytest.param("metrics.jsonl", many_scores(), id="many scores"),
        pytest.param(
            "metrics.jsonl", losses_of_both_signs(), id="losses of both signs"
        ),
        pytest.param(
            "starts.jsonl",
            '{"step": 1, "time": 1.0}\n' * 20_000,
            id="many starts",
        ),
    ],
)
def test_records_that_are_hard_to_show_are_shown_or_one_sentence(
    name, text, tmp_path, capsys
):
    run = a_run(tmp_path / "run")
    other = a_run(tmp_path / "other")
    report.main(["", str(other)])  # loads what drawing itself needs
    (run / name).write_text(text)
    with little_memory():
        code = report.main(["", str(run)])
        compare.main(["", str(other), str(run), f"--html={run}/page.html"])
    assert code == 0 or name in capsys.readouterr().err


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", ["link", "large"])
def test_a_hostile_record_is_one_sentence(kind: str, name: str, tmp_path: Path, capsys):
    run = a_run(tmp_path / "run")
    other = a_run(tmp_path / "other")
    (run / name).unlink()
    (tmp_path / "secret").write_text(f"--task={SECRET}\n")
    if kind == "link":
        (run / name).symlink_to(tmp_path / "secret")
    else:
        (run / name).touch()
        os.truncate(run / name, 2**42)
    with little_memory():
        codes = [report.main(["", str(run)]), compare.main(["", str(other), str(run)])]
    out, err = capsys.readouterr()
    page = run / "report.html"
    shown = page.read_text() if page.exists() else ""
    is_told = 2 in codes and f"{name}'" in err
    assert is_told or f"{name} is not shown" in shown, err
    assert SECRET not in out + err + shown


def test_what_runs_say_is_text_for_a_terminal(tmp_path: Path, capsys):
    reason = "\x1b]0;mine\x07\u202e\udc80"
    a = a_run(tmp_path / "a", reason)
    b = a_run(tmp_path / "b", reason)
    compare.main(["", str(a), str(b)])
    shown = "".join(capsys.readouterr())
    report.main(["", str(a_run(tmp_path / "\x1b]0;c", reason))])
    shown += "".join(capsys.readouterr())
    assert r"\x1b]0;mine\x07\u202e\udc80" in shown and r"/\x1b]0;c/report" in shown
    assert "\x1b" not in shown and "\u202e" not in shown


def test_pictures_that_claim_much_are_not_decoded(tmp_path: Path, monkeypatch):
    pictures.limit(64_000_000)
    claim = "13,000 x 13,000 pixels, more than --max_pixels=64000000"
    readers.write_pairs(
        tmp_path, {"x": (readers.noise(1), readers.noise(2)[..., 0] % 3)}
    )
    pairs = ImageLabelFolder(tmp_path, "train", 3)
    pack.pack(pairs, tmp_path / "packed", "train")
    for name, kind in (
        ("labels", "PNG"),
        ("images", "PNG"),
        ("images", "JPEG"),
        ("images", "BMP"),
    ):
        file = tmp_path / name / "x.png"
        Image.new("1", (13_000, 13_000)).save(file, kind)
        assert kind != "PNG" or file.stat().st_size < 40_000
        reason = refusal = claim
        if kind == "BMP":
            reason = "no PNG, JPEG or WebP"
            refusal = "more pixels than --max_pixels=64000000"
        with little_memory():  # 507 MB of pixels
            readers.explained(pairs, 0, file, reason)
            refused(lambda file=file: predict.load(file), file, refusal)
        # Decoders pass over a chunk before the header, which then is at another place.
        content = file.read_bytes()
        chunk = struct.pack(">I4s4xI", 4, b"noNe", zlib.crc32(b"noNe\0\0\0\0"))
        file.write_bytes(content[:8] + chunk + content[8:])
        with little_memory():
            readers.explained(pairs, 0, file, "header" if kind == "PNG" else "")
    head = b"RIFF\x16\0\0\0WEBPVP8X\x0a" + bytes(7) + (12_999).to_bytes(3, "little") * 2
    file.write_bytes(head)
    readers.explained(pairs, 0, file, claim)
    scans = io.BytesIO()
    Image.new("RGB", (16, 16)).save(scans, "JPEG")
    jpeg = scans.getvalue()
    more_scans = jpeg[:-2] + b"\xff\xda\0\2\1" * 100 + jpeg[-2:]
    (tmp_path / "images/x.png").write_bytes(more_scans)
    refused(lambda: predict.load(tmp_path / "images/x.png"), "more than 100 scans")
    # A phone's film follows the picture.
    (tmp_path / "images/x.png").write_bytes(jpeg + b"\xff\xda" * 200)
    assert predict.load(tmp_path / "images/x.png").shape == (16, 16, 3)
    os.mkfifo(tmp_path / "pipe")
    refused(
        lambda: predict.load(tmp_path / "pipe"), "pipe", "no regular file", kind=OSError
    )
    monkeypatch.setattr(pictures, "most_pixels", 100)
    readers.explained(
        records.Records(tmp_path / "packed", "train"), 0, "sample 0", "16 x 12"
    )


def test_records_that_lie_about_lengths_and_names_are_refused(tmp_path: Path):
    readers.write_pairs(
        tmp_path, {"x": (readers.noise(1), readers.noise(2)[..., 0] % 3)}
    )
    folder = pack.pack(
        ImageLabelFolder(tmp_path, "train", 3), tmp_path / "packed", "train"
    )
    meta = json.loads((folder / "pack.json").read_text())
    index = np.fromfile(folder / "index.bin", records.PLACE)
    (shard,) = meta["shards"]
    written = {name: meta[name] for name in meta if name not in ("version", "checksum")}
    start, length, crc = index[0].tolist()
    for lie, claimed_start, claimed_length in (
        ({}, 2**63, length),
        ({}, 2**64 - 9, length),
        ({}, start, length + 999),
        ({"name": "../x"}, start, length),
        ({"records": 99}, start, length),
    ):
        place = np.array([(claimed_start, claimed_length, crc)], records.PLACE)
        records.write_meta(folder, written | {"shards": [shard | lie]}, place)
        refused(lambda: records.Records(folder.parent, "train"), folder, "shard")


def test_pictures_that_have_no_end_or_are_no_files_are_named_and_not_read(
    tmp_path: Path, capsys, monkeypatch
):
    readers.write_classes(tmp_path)
    (folder, *_) = sorted(
        path for path in (tmp_path / "train").iterdir() if path.is_dir()
    )
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    ends = {  # their names come after those of the others
        "~zero": "/dev/zero",
        "~pipe": tmp_path / "pipe",
        "~large": tmp_path / "large",
        "~dead": tmp_path / "none",
        "~folder": tmp_path,
    }

    def checked() -> str:
        with little_memory():
            assert check.main(["check", f"--data_dir={tmp_path}", "--split=train"]) == 1
        return capsys.readouterr().out

    for name, end in ends.items():
        (folder / f"{name}.png").symlink_to(end)
        refused(
            lambda name=name: predict.load(folder / f"{name}.png"), name, kind=OSError
        )
    # A run too looks at some files before it reads.
    refused(
        lambda: ClassFolders(tmp_path, "train"), f"{folder}/~dead.png: No such file"
    )
    assert f"{folder}/~dead.png: No such file" in checked()
    monkeypatch.setattr(source, "_MOST_SAMPLED", 1)
    printed = checked()
    for name in ("~zero", "~pipe", "~folder"):
        assert (
            f"{folder}/{name}.png leads to what is no regular file; remove it"
            in printed
        )
    assert (
        f"{folder}/~large.png has 1,099,511,627,776 bytes, more than 1,073,741,824"
        in printed
    )
    assert f"{folder}/~dead.png: No such file" in printed and "5 fault(s)" in printed, (
        printed
    )
    for name, make in (("x.jpg", os.mkdir), ("y.jpg", os.mkfifo)):
        make(folder / name)
        assert f"{folder}/{name} is a folder or no regular file" in checked()
        (folder / name).rename(tmp_path / name)


def test_what_is_packed_small_and_grows_is_named_and_not_unpacked(
    tmp_path: Path, monkeypatch
):
    """A table with 4 KB of text that every row has, and zeros, which compress to a thousandth."""
    for module in (tables, example_files):
        assert module._MORE_BYTES == 2**30  # in a test a smaller one
        monkeypatch.setattr(module, "_MORE_BYTES", 2**24)
    text = pyarrow.array(["x" * 2**12], pyarrow.string())
    rows = pyarrow.DictionaryArray.from_arrays(np.zeros(2**17, np.int32), text)
    parquet.write_table(
        pyarrow.table({"file": rows, "label": rows}), tmp_path / "of.parquet"
    )
    np.savez_compressed(tmp_path / "x.npz", age=np.zeros(2**22))
    assert all(path.stat().st_size < 2**18 for path in tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    inputs = Inputs(tf.TensorSpec([None], tf.float64), ["age"])

    def table(name: str) -> list:
        return tables.understood(tmp_path / name, "", tmp_path)

    with little_memory():  # 1 GB of text
        refused(
            lambda: table("of.parquet"), "of.parquet", "its values need more than 16,9"
        )
    refused(
        lambda: example_files.read(tmp_path / "x.npz", inputs),
        "x.npz",
        "parts claim 33,554,",
    )
    for name in ("pipe.csv", "zero.csv"):
        refused(lambda name=name: table(name), name, "it is no regular file")
