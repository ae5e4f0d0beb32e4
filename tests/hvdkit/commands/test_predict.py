"""hvdkit predict and export on trained runs, and on files that are no pictures."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hvdkit.commands import predict
from hvdkit.commands.export import Exported
from hvdkit.data.shipped import Digits
from hvdkit.evaluate import metrics
from ranks import PROJECT, TINY_FLAGS, last_lines, launch, train

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
    source, labels = Digits(None, "val"), []
    for number in range(count):
        sample = source.read(number)
        Image.fromarray(sample["image"].numpy()).save(folder / f"{number:03d}.png")
        labels.append(int(sample["label"]))
    return labels


@pytest.fixture(scope="module")
def predicted(digits, tmp_path_factory):
    """Labels of all validation scans, and what 2 ranks predict: output, rows of the table."""
    folder = tmp_path_factory.mktemp("predicted")
    labels = save_digits(folder / "in", 359)
    run = folder / "run"
    shutil.copytree(digits, run)
    names, counts = metrics.read_confusion(run / "confusion.csv")
    metrics.write_confusion(run / "confusion.csv", [f"digit {name}" for name in names], counts)
    ended = command("predict", run, f"--out={folder}/out", str(folder / "in"), ranks=2)
    assert ended.code == 0, last_lines(ended.output)
    with (folder / "out" / "predictions.csv").open() as file:
        return folder / "in", labels, ended.output, list(csv.reader(file))


def test_a_table_of_named_classes_agrees_with_the_runs_score(digits, predicted):
    _, labels, output, (head, *rows) = predicted
    assert head[:3] == ["file", "class_1", "p_1"] and len(head) == 11
    assert [row[0] for row in rows] == [f"{n:03d}.png" for n in range(359)]
    hits = np.mean([row[1] == f"digit {label}" for row, label in zip(rows, labels)])
    records = [json.loads(line) for line in (digits / "metrics.jsonl").read_text().splitlines()]
    best = max(r["eval_accuracy"] for r in records if "eval_accuracy" in r)
    assert hits == pytest.approx(best, abs=1e-12) and best > 0.3
    chances = np.array([row[2::2] for row in rows], float)
    assert (np.diff(chances, axis=1) <= 0).all() and (chances.sum(1) <= 1 + 1e-9).all()
    assert f"000.png: {rows[0][1]} " in output


def test_the_likeliest_classes_come_first_with_their_probabilities(tmp_path):
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32)) + 50
    (row,) = predict.write(tmp_path, "a.png", image=np.zeros((2, 2, 3), np.uint8), outputs=logits)
    assert row[0] == "a.png" and row[1::2] == [1, 2, 0]
    np.testing.assert_allclose(row[2::2], [0.6, 0.3, 0.1], rtol=1e-5)


def test_earlier_predictions_in_a_folder_of_pictures_are_left_out(tmp_path):
    for name in ("a.png", "labels.png", "out/labels/a.png.png", "out/predictions.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "away" / ".." / "out"
    assert list(predict.listed([tmp_path], out)) == ["a.png", "labels.png"]
    assert len(predict.listed([tmp_path], tmp_path / "other")) == 4


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
    inputs = [str(tmp_path / name) for name in ("in", "pipe.png")]
    ended = command("predict", digits, f"--out={tmp_path}/out", *inputs, ranks=2)
    assert ended.code == 1, last_lines(ended.output)
    names = ["pipe.png", "text.png", "torn.png", "deep.png", "wide.tiff", "away.png"]
    for name in (*names, "odd\\udcff.txt", "head.ppm", "kind.dds"):
        (line,) = [line for line in ended.output.splitlines() if name in line]
        assert "skipped: " in line
    (error,) = ended.errors()
    assert "9 of 13 files were skipped" in error
    with (tmp_path / "out" / "predictions.csv").open(errors="surrogateescape") as file:
        names = [row[0] for row in csv.reader(file)]
    assert names == ["file", "000.png", "001.png", "002.png", os.fsdecode(b"odd\xff.png")]


def test_pictures_that_are_not_there_are_refused_in_one_sentence(digits, tmp_path):
    ended = command("predict", digits, f"--out={tmp_path}/out", "/no/such.png")
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert "/no/such.png does not exist" in error and "Traceback" not in ended.output
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files in"):
        predict.listed([tmp_path / "empty"], tmp_path / "out")


def test_ranks_with_different_pictures_are_refused(digits, tmp_path):
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
for file in sys.argv[2:]:
    out = loaded.signatures["serving_default"](image=tf.constant([open(file, "rb").read()]))
    print("file", int(out["classes"][0]), float(tf.reduce_max(out["probabilities"])))
"""


@pytest.mark.parametrize("kind", ["digits", "scenes"])
def test_an_export_is_served_without_this_code(kind, tmp_path, request):
    run = request.getfixturevalue(kind)
    ended = command("export", run, f"--out={tmp_path}/out")
    assert ended.code == 0, last_lines(ended.output)
    assert "without this code: equal outputs" in ended.output
    words = [sys.executable, "-I", "-c", SERVED, tmp_path / "out" / "saved_model"]
    if kind == "digits":  # its probabilities are those of `hvdkit predict`
        folder, _, _, (_, (name, first, chance, *_), *_) = request.getfixturevalue("predicted")
        words.append(folder / name)
    served = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    shapes = {"digits": "(3,) (3, 10)", "scenes": "(3, 24, 40) (3, 24, 40, 11)"}
    assert f"shapes {shapes[kind]}" in served.stdout, served.stderr[-2000:]
    if kind == "digits":
        _, number, probability = served.stdout.splitlines()[-1].split()
        assert f"digit {number}" == first
        assert float(probability) == pytest.approx(float(chance), abs=1e-6)
    # The .keras alone: digits' dropout is a layer of this project, which a note says.
    note = "not Keras's own, hvdkit.train.dropout.SampleDropout: import their modules"
    assert (note in ended.output) == (kind == "digits"), ended.output
    modules = "keras, sys" + ", hvdkit.train.dropout" * (kind == "digits")
    script = f"import {modules}; keras.saving.load_model(sys.argv[1])"
    words = [sys.executable, "-c", script, tmp_path / "out" / "model.keras"]
    place = PROJECT if kind == "digits" else tmp_path
    assert not subprocess.run(words, cwd=place, capture_output=True).returncode


@pytest.mark.parametrize(
    ("flag", "words"), [("", "File exists"), ("--check={in}", "no JPEG or PNG that can be decoded")]
)
def test_an_export_that_cannot_be_made_is_refused(digits, tmp_path, flag, words):
    """Into a file; checked with an empty file."""
    (tmp_path / "file").touch()
    flags = [flag.replace("{in}", str(tmp_path / "file"))] if flag else []
    out = tmp_path / ("out" if flag else "file")
    ended = command("export", digits, f"--out={out}", *flags)
    assert ended.code == 2, last_lines(ended.output)
    (error,) = ended.errors()
    assert words in error and "export.py, line" not in error
    assert "Traceback" not in ended.output and not out.is_dir()


def test_probabilities_of_an_export_are_of_the_tasks_inputs():
    """A model that gives back its input as logits; the task divides pictures by 255."""
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Activation("linear")(x))
    task = SimpleNamespace(picture_inputs=lambda image: tf.cast(image[0, 0], tf.float32) / 255.0)
    pictures = tf.constant([[[[255, 0, 0]]], [[[0, 0, 255]]]], tf.uint8)
    found = Exported(task, model).of_pictures(pictures)
    high, low = np.e / (np.e + 2), 1 / (np.e + 2)
    np.testing.assert_allclose(found["probabilities"], [[high, low, low], [low, low, high]])
    np.testing.assert_array_equal(found["classes"], [0, 2])
