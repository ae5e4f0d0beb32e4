"""examples/multilabel and regression on 1 and 2 ranks, by each command, against scikit-learn."""

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.metrics import average_precision_score, r2_score, root_mean_squared_error

from hvdkit.data.shipped import Digits
from hvdkit.settings import project
from ranks import PROJECT, last_lines, launch_well

COMMANDS = """
import sys
from hvdkit.commands import evaluate, export, predict
run, out, picture = (f"--run_dir={sys.argv[1]}", f"--out={sys.argv[1]}", sys.argv[2])
for command, words in ((evaluate, [run]), (predict, [run, out, picture]), (export, [run, out])):
    assert command.main([command.__name__, *words]) == 0
"""
USUAL = ["--precision=float64", "--optimizer=adam", "--base_lr=0.01", "--num_steps=40"]


def expected(name, images, digits, outputs):
    """The figures of the model's outputs, by scikit-learn and Keras."""
    if name == "multilabel":
        labels = np.stack(
            [digits % 2 == 0, digits > 4, np.isin(digits, (2, 3, 5, 7))], 1
        )
        auc = keras.metrics.AUC(multi_label=True, num_labels=3, dtype="float64")
        auc.update_state(labels, outputs["probabilities"])
        precision = average_precision_score(labels, outputs["probabilities"])
        return {"average_precision": precision, "auc": float(auc.result())}
    ink = images[..., 0].astype(float)
    place = np.arange(8)
    x = (ink.sum(1) * place).sum(1) / ink.sum((1, 2))
    y = (ink.sum(2) * place).sum(1) / ink.sum((1, 2))
    centres = np.stack([x, y], 1)
    predicted = np.stack([outputs["x"], outputs["y"]], 1)
    error = root_mean_squared_error(centres.ravel(), predicted.ravel())
    return {"r2": r2_score(centres, predicted), "rmse": error}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multilabel", "regression"])
def test_weights_and_figures_on_one_and_two_ranks_then_every_command(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(project, "_folder", [tmp_path])
    (tmp_path / "tasks").mkdir()
    shutil.copy(
        PROJECT / "examples" / name / "task.py", tmp_path / "tasks" / f"{name}.py"
    )
    for file in ("train.py", "settings.py"):
        shutil.copy(PROJECT / file, tmp_path)
    for ranks in (1, 2):
        command = ["train.py", f"--task={name}", f"--run_dir={tmp_path / str(ranks)}"]
        launch_well(ranks, [*command, *USUAL])
    run = tmp_path / "2"
    weights_of_one = weights_of(tmp_path / "1")
    weights_of_two = weights_of(run)
    for one, other in zip(weights_of_one, weights_of_two, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)

    val = Digits(None, "val")
    samples = [val.read(tf.constant(number)) for number in range(len(val))]
    images = np.stack([sample["image"] for sample in samples])
    digits = np.stack([sample["label"] for sample in samples])
    Image.fromarray(images[0]).save(tmp_path / "first.png")
    ended = launch_well(1, ["-c", COMMANDS, run, tmp_path / "first.png"])
    assert "equal outputs" in ended.output, last_lines(ended.output)

    served = tf.saved_model.load(str(run / "saved_model")).signatures["pictures"]
    outputs = {}
    for output, value in served(image=tf.constant(images)).items():
        outputs[output] = value.numpy()
    file = run / "evaluation" / "step-00000040-val" / "evaluation.json"
    evaluated = json.loads(file.read_text())["figures"]
    summary_of_one = json.loads((tmp_path / "1" / "summary.json").read_text())
    summary_of_two = json.loads((run / "summary.json").read_text())
    for figure, value in expected(name, images, digits, outputs).items():
        near = pytest.approx(value, abs=2e-6)
        assert summary_of_one[f"eval_{figure}"] == near, figure
        assert summary_of_two[f"eval_{figure}"] == near, figure
        assert evaluated[figure] == near, figure
    line = json.loads((run / "predictions.jsonl").read_text())
    assert line.pop("file") == "first.png" and line.keys() == outputs.keys()
    for output, value in line.items():
        np.testing.assert_allclose(value, outputs[output][0], rtol=1e-5, err_msg=output)


def weights_of(run: Path) -> list[np.ndarray]:
    with np.load(run / "checkpoints" / "step-00000040" / "state.npz") as file:
        return [file[name] for name in sorted(file.files) if name.startswith("model/")]
