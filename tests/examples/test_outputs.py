"""examples/multilabel and regression on 1 and 2 ranks, by each command, against scikit-learn."""

import json
import shutil

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


def expected(name, images, digits, found):
    if name == "multilabel":
        labels = np.stack([digits % 2 == 0, digits > 4, np.isin(digits, (2, 3, 5, 7))], 1)
        auc = keras.metrics.AUC(multi_label=True, num_labels=3, dtype="float64")
        auc.update_state(labels, found["probabilities"])
        precision = average_precision_score(labels, found["probabilities"])
        return {"average_precision": precision, "auc": float(auc.result())}
    ink, place = images[..., 0].astype(float), np.arange(8)
    y, x = ((ink.sum(axis) * place).sum(1) / ink.sum((1, 2)) for axis in (2, 1))
    pairs = np.stack([x, y], 1), np.stack([found["x"], found["y"]], 1)
    errors = root_mean_squared_error(pairs[0].ravel(), pairs[1].ravel())
    return {"r2": r2_score(*pairs), "rmse": errors}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multilabel", "regression"])
def test_weights_and_figures_on_one_and_two_ranks_then_every_command(name, tmp_path, monkeypatch):
    monkeypatch.setattr(project, "_folder", [tmp_path])
    (tmp_path / "tasks").mkdir()
    shutil.copy(PROJECT / "examples" / name / "task.py", tmp_path / "tasks" / f"{name}.py")
    for file in ("train.py", "settings.py"):
        shutil.copy(PROJECT / file, tmp_path)
    weights, figures = [], []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        launch_well(ranks, ["train.py", f"--task={name}", f"--run_dir={run}", *USUAL])
        with np.load(run / "checkpoints" / "step-00000040" / "state.npz") as file:
            weights.append([file[n] for n in sorted(file.files) if n.startswith("model/")])
        summary = json.loads((run / "summary.json").read_text())
        figures.append({n[5:]: x for n, x in summary.items() if n.startswith("eval_")})
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)
    val = Digits(None, "val")
    both = [val.read(tf.constant(n)) for n in range(len(val))]
    images, digits = (np.stack([x[part] for x in both]) for part in ("image", "label"))
    Image.fromarray(images[0]).save(tmp_path / "first.png")
    ended = launch_well(1, ["-c", COMMANDS, run, tmp_path / "first.png"])
    assert "equal outputs" in ended.output, last_lines(ended.output)
    served = tf.saved_model.load(str(run / "saved_model")).signatures["pictures"]
    found = {n: x.numpy() for n, x in served(image=tf.constant(images)).items()}
    about = json.loads((run / "evaluation" / "step-00000040-val" / "evaluation.json").read_text())
    for figure, value in expected(name, images, digits, found).items():
        for theirs in (*figures, about["figures"]):
            assert theirs[figure] == pytest.approx(value, abs=2e-6), figure
    line = json.loads((run / "predictions.jsonl").read_text())
    assert line.pop("file") == "first.png" and line.keys() == found.keys()
    for part, value in line.items():
        np.testing.assert_allclose(value, found[part][0], rtol=1e-5, err_msg=part)
