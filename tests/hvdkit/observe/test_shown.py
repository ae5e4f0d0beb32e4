"""What evaluate.py, predict.py, export.py and report.py make of numbers that a person can check."""

from __future__ import annotations

import json
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from hvdkit.commands import evaluate, predict
from hvdkit.commands.export import Exported
from hvdkit.evaluate import evaluator, metrics
from hvdkit.observe import records, report

# Of 10 labels of class 0, 8 were told right; of 5 of class 1, one.
CONFUSION = np.array([[8, 2, 0], [4, 1, 0], [0, 0, 0]])


def test_figures_of_each_class():
    found = metrics.class_figures(CONFUSION)
    assert found["labels"] == [10, 5, 0]
    assert found["recall"][:2] == [0.8, 0.2] and np.isnan(found["recall"][2])
    np.testing.assert_allclose(found["precision"][:2], [8 / 12, 1 / 3])
    np.testing.assert_allclose(found["iou"][:2], [8 / 14, 1 / 7])


def test_labels_are_counted_in_full(tmp_path, capsys):
    counts = np.array([[1_234_567, 0], [0, 89]])
    found = evaluator.Evaluation({"loss": 1.0}, {"confusion": counts}, None)
    run = SimpleNamespace(val_source=SimpleNamespace(class_names=["sky", "car"]))
    evaluate.write(run, tmp_path, {}, found, [])
    assert "sky    1234567  " in capsys.readouterr().out


def test_the_matrix_is_drawn_as_shares_of_each_label():
    """From light, nothing, to dark, all of a label's; each cell as many pixels."""
    drawn = evaluate.drawn(CONFUSION, side=9)
    light, dark = np.array([245, 247, 250]), np.array([20, 40, 90])
    assert drawn.shape == (9, 9, 3)
    for row, column, share in ((0, 0, 0.8), (1, 0, 0.8), (1, 1, 0.2), (2, 2, 0.0)):
        cell = drawn[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        expected = light + share * (dark - light)
        np.testing.assert_allclose(cell, np.broadcast_to(expected, (3, 3, 3)), atol=1)


def test_the_likeliest_classes_come_first_with_their_probabilities(tmp_path):
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32)) + 50
    (row,) = predict.write(tmp_path, "a.png", np.zeros((2, 2, 3), np.uint8), logits)
    assert row[0] == "a.png" and row[1::2] == [1, 2, 0]
    np.testing.assert_allclose(row[2::2], [0.6, 0.3, 0.1], rtol=1e-5)


def test_what_was_written_into_a_folder_of_pictures_is_not_predicted_on(tmp_path):
    for name in ("a.png", "labels.png", "out/labels/a.png.png", "out/predictions.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "away" / ".." / "out"
    assert list(predict.listed([tmp_path], out)) == ["a.png", "labels.png"]
    assert len(predict.listed([tmp_path], tmp_path / "other")) == 4


def test_what_is_exported_gives_probabilities():
    """A model that gives back its input as logits; the task divides pictures by 255."""
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Activation("linear")(x))
    task = SimpleNamespace(picture_inputs=lambda image: tf.cast(image[0, 0], tf.float32) / 255.0)
    found = Exported(task, model).of_pictures(
        tf.constant([[[[255, 0, 0]]], [[[0, 0, 255]]]], tf.uint8)
    )
    high, low = np.e / (np.e + 2), 1 / (np.e + 2)
    np.testing.assert_allclose(found["probabilities"], [[high, low, low], [low, low, high]])
    np.testing.assert_array_equal(found["classes"], [0, 2])


def test_the_loss_is_drawn_of_training_and_validation(tmp_path):
    lines = [
        {"step": 10, "time": 1.0, "loss": 2.0, "lr": 0.1},
        {"step": 10, "time": 1.5, "eval_loss": 2.5, "eval_accuracy": 0.1},
        {"step": 20, "time": 2.0, "loss": 1.0, "lr": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "config.cfg").write_text("--num_steps=20\n")
    text = report.training(records.read(tmp_path))[0]
    assert "Loss" in text and "training" in text and "validation" in text
