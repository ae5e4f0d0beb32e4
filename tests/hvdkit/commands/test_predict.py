"""hvdkit predict and export on trained runs, and on files that are no pictures."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tiny_runs import TINY_FLAGS

from hvdkit.data.readers.digits import Digits
from hvdkit.evaluate import metrics
from ranks import PROJECT, last_lines, launch, train

DIGITS = ["--flagfile=configs/digits.cfg", "--num_steps=40", "--eval_every=20", "--log_every=20"]
DIGITS += ["--checkpoint_every=20", "--global_batch_size=32", "--warmup_steps=0"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    run = tmp_path_factory.mktemp("predict") / "run"
    ended = launch(1, ["train.py", *DIGITS, f"--run_dir={run}"], "alone")
    assert ended.code == 0, last_lines(ended.output)
    return run


@pytest.fixture(scope="module")
def scenes(tmp_path_factory, tiny_data):
    run = tmp_path_factory.mktemp("predict") / "run"
    ended = train(1, *TINY_FLAGS, f"--data_dir={tiny_data}", f"--run_dir={run}")
    assert ended.code == 0, last_lines(ended.output)
    return run


def command(name, run, *words, ranks=1):
    words = ["-m", "hvdkit", name, f"--run_dir={run}", *words]
    return launch(ranks, words, "gloo" if ranks > 1 else "alone")


def save_digits(folder, count):
    """The first validation scans as PNG files; returns their labels."""
    folder.mkdir()
    source, labels = Digits("val"), []
    for number in range(count):
        sample = source.read(number)
        Image.fromarray(sample["image"].numpy()).save(folder / f"{number:03d}.png")
        labels.append(int(sample["label"]))
    return labels


def test_a_table_of_classes_agrees_with_the_runs_score(digits, tmp_path):
    labels = save_digits(tmp_path / "in", 359)
    ended = command("predict", digits, f"--out={tmp_path}/out", str(tmp_path / "in"), ranks=2)
    assert ended.code == 0, last_lines(ended.output)
    with (tmp_path / "out" / "predictions.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head[:3] == ["file", "class_1", "p_1"] and len(head) == 11
    assert [row[0] for row in rows] == [f"{n:03d}.png" for n in range(359)]
    hits = np.mean([int(row[1]) == label for row, label in zip(rows, labels)])
    records = [json.loads(line) for line in (digits / "metrics.jsonl").read_text().splitlines()]
    best = max(r["eval_accuracy"] for r in records if "eval_accuracy" in r)
    assert hits == pytest.approx(best, abs=1e-12) and best > 0.3
    chances = np.array([row[2::2] for row in rows], float)
    assert (np.diff(chances, axis=1) <= 0).all() and (chances.sum(1) <= 1 + 1e-9).all()


def test_classes_have_the_names_of_the_runs_own_evaluation(digits, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(digits, run)
    names, counts = metrics.read_confusion(run / "confusion.csv")
    metrics.write_confusion(run / "confusion.csv", [f"digit {name}" for name in names], counts)
    save_digits(tmp_path / "in", 2)
    ended = command("predict", run, f"--out={tmp_path}/out", str(tmp_path / "in"))
    assert ended.code == 0, last_lines(ended.output)
    with (tmp_path / "out" / "predictions.csv").open() as file:
        _, *rows = csv.reader(file)
    assert all(name.startswith("digit ") for row in rows for name in row[1::2])
    assert f"000.png: {rows[0][1]} " in ended.output


def test_labels_and_overlays_at_the_pictures_own_size(scenes, tmp_path):
    rng, folder = np.random.default_rng(1), tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    shapes = {"a.png": (50, 71), "b.webp": (33, 20), "deep/c.bmp": (64, 64), "d.gif": (40, 90)}
    for name, shape in shapes.items():
        Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(folder / name)
    ended = command("predict", scenes, f"--out={tmp_path}/out", str(folder))
    assert ended.code == 0, last_lines(ended.output)
    for name, shape in shapes.items():
        label = Image.open(tmp_path / "out" / "labels" / f"{name}.png")
        assert label.size == shape[::-1] and label.mode == "P"
        assert np.asarray(label).max() < 11
        over = Image.open(tmp_path / "out" / "overlays" / f"{name}.png")
        assert over.size == shape[::-1] and over.mode == "RGB"


def test_bad_files_are_named_and_the_others_predicted(digits, tmp_path):
    save_digits(tmp_path / "in", 3)
    (tmp_path / "in" / "text.png").write_text("no picture")
    whole = (tmp_path / "in" / "001.png").read_bytes()
    (tmp_path / "in" / "torn.png").write_bytes(whole[: len(whole) // 2])
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(deep).save(tmp_path / "in" / "deep.png")
    Image.fromarray(deep.astype(np.int32)).save(tmp_path / "in" / "wide.tiff")
    (tmp_path / "in" / "away.png").symlink_to("nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    # At these Pillow raises what does not name the file: a ValueError, a NotImplementedError.
    (tmp_path / "in" / "head.ppm").write_bytes(b"P6")
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "kind.dds")
    with (tmp_path / "in" / "kind.dds").open("r+b") as file:
        file.seek(80)
        file.write(bytes(4))  # the flags that say how pixels are stored
    odd = [os.fsencode(tmp_path / "in") + name for name in (b"/odd\xff.png", b"/odd\xff.txt")]
    shutil.copy(os.fsencode(tmp_path / "in" / "001.png"), odd[0])
    shutil.copy(os.fsencode(tmp_path / "in" / "text.png"), odd[1])
    ended = command(
        "predict",
        digits,
        f"--out={tmp_path}/out",
        str(tmp_path / "in"),
        str(tmp_path / "pipe.png"),
        ranks=2,
    )
    assert ended.code == 1, last_lines(ended.output)
    names = [
        "pipe.png",
        "text.png",
        "torn.png",
        "deep.png",
        "wide.tiff",
        "away.png",
        "odd\\udcff.txt",
    ]
    for name in (*names, "head.ppm", "kind.dds"):
        (said,) = [line for line in ended.output.splitlines() if name in line]
        assert "skipped: " in said
    (error,) = ended.errors()
    assert "9 of 13 files were skipped" in error
    with (tmp_path / "out" / "predictions.csv").open(errors="surrogateescape") as file:
        names = [row[0] for row in csv.reader(file)]
    assert names == ["file", "000.png", "001.png", "002.png", os.fsdecode(b"odd\xff.png")]


@pytest.mark.parametrize(
    "words, said",
    [
        (["/no/such.png"], "/no/such.png does not exist"),
        (["{empty}"], "no files in"),
        (["{empty}", "--checkpoint=7"], "none of step 7"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_one_sentence(digits, tmp_path, words, said):
    (tmp_path / "empty").mkdir()
    words = [word.format(empty=tmp_path / "empty") for word in words]
    ended = command("predict", digits, f"--out={tmp_path}/out", *words)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert said in error and "Traceback" not in ended.output


def test_ranks_that_would_predict_other_pictures_are_told(digits, tmp_path):
    save_digits(tmp_path / "in", 3)
    script = (
        "import os, sys; from hvdkit.commands import predict\n"
        f"own = '{tmp_path}/in' + ['', '/000.png'][int(os.environ['OMPI_COMM_WORLD_RANK'])]\n"
        "sys.exit(predict.main([*sys.argv, own]))"
    )
    ended = launch(2, ["-c", script, f"--run_dir={digits}", f"--out={tmp_path}/out"], "mpirun")
    assert ended.code == 1, last_lines(ended.output)
    (error,) = ended.errors()
    assert "the names of the pictures on rank 1 differ" in error


SERVED = """
import sys, numpy as np, tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
for name, kind in (("serving_default", tf.string), ("pictures", tf.uint8)):
    spec = loaded.signatures[name].structured_input_signature[1]["image"]
    assert spec.dtype == kind and spec.shape[0] is None, spec
pictures = np.random.default_rng(2).integers(0, 256, (3, 24, 40, 3), np.uint8)
one = loaded.signatures["pictures"](image=tf.constant(pictures))
files = tf.constant([tf.io.encode_png(p).numpy() for p in pictures])
other = loaded.signatures["serving_default"](image=files)
for name in ("classes", "probabilities"):
    assert np.array_equal(one[name], other[name]), name
print("shapes", one["classes"].shape, one["probabilities"].shape)
"""


@pytest.mark.parametrize("kind", ["digits", "scenes"])
def test_an_export_is_served_without_this_code(kind, tmp_path, request):
    run = request.getfixturevalue(kind)
    ended = command("export", run, f"--out={tmp_path}/out")
    assert ended.code == 0, last_lines(ended.output)
    assert "without this code: equal outputs" in ended.output
    words = [sys.executable, "-I", "-c", SERVED, tmp_path / "out" / "saved_model"]
    served = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    shapes = {"digits": "(3,) (3, 10)", "scenes": "(3, 24, 40) (3, 24, 40, 11)"}
    assert f"shapes {shapes[kind]}" in served.stdout, served.stderr[-2000:]
    # The .keras alone: digits' dropout is a layer of this project, which a note says.
    told = "not Keras's own, hvdkit.train.dropout.SampleDropout: import their modules before you load it"
    assert (told in ended.output) == (kind == "digits"), ended.output
    modules = "keras, sys" + ", hvdkit.train.dropout" * (kind == "digits")
    script = f"import {modules}; keras.saving.load_model(sys.argv[1])"
    words = [sys.executable, "-c", script, tmp_path / "out" / "model.keras"]
    place = PROJECT if kind == "digits" else tmp_path
    assert not subprocess.run(words, cwd=place, capture_output=True).returncode


def test_an_export_into_a_file_is_refused(digits, tmp_path):
    (tmp_path / "out").touch()
    ended = command("export", digits, f"--out={tmp_path}/out")
    (error,) = ended.errors()
    assert ended.code == 2 and "File exists" in error and "export.py, line" not in error


@pytest.mark.parametrize("content", [b"no picture", b""])
def test_an_export_refuses_a_picture_that_is_none(digits, tmp_path, content):
    (tmp_path / "in.png").write_bytes(content)
    ended = command("export", digits, f"--out={tmp_path}/out", f"--check={tmp_path}/in.png")
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "in.png holds no JPEG or PNG that can be decoded" in error
    assert "Traceback" not in ended.output and not (tmp_path / "out").exists()


def test_an_export_says_what_predict_says(digits, tmp_path):
    save_digits(tmp_path / "in", 1)
    picture = tmp_path / "in" / "000.png"
    ended = command("export", digits, f"--out={tmp_path}/out", f"--check={picture}")
    assert ended.code == 0, last_lines(ended.output)
    assert command("predict", digits, f"--out={tmp_path}/p", str(picture)).code == 0
    with (tmp_path / "p" / "predictions.csv").open() as file:
        _, (_, first, chance, *_) = csv.reader(file)
    script = (
        "import sys, tensorflow as tf\n"
        "loaded = tf.saved_model.load(sys.argv[1]).signatures['serving_default']\n"
        "out = loaded(image=tf.constant([open(sys.argv[2], 'rb').read()]))\n"
        "print('out', int(out['classes'][0]), float(tf.reduce_max(out['probabilities'])))"
    )
    words = [sys.executable, "-I", "-c", script, tmp_path / "out" / "saved_model", picture]
    said = subprocess.run(words, capture_output=True, text=True).stdout.split()
    assert said[:2] == ["out", first]
    assert float(said[2]) == pytest.approx(float(chance), abs=1e-6)
