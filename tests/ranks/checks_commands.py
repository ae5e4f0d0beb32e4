"""Holds hvdkit.commands (evaluate, predict, export) on 2 real ranks, on runs that they trained.

Runs lie in $COMMANDS; test_commands.py starts the ranks.
"""

import contextlib
import csv
import functools
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from PIL import Image
from small_runs import fit_config, on_chief

from hvdkit import settings as settings_lib
from hvdkit.commands.evaluate import evaluate
from hvdkit.commands.export import export
from hvdkit.commands.predict import predict
from hvdkit.data.shipped import Digits
from hvdkit.ranks import world as world_lib
from hvdkit.settings import Settings
from hvdkit.stop import BUG, DONE, PREEMPTED, WRONG_USE, Stop
from ranks import TINY_FLAGS, json_lines
from tasks import blank, classification, segmentation

FOLDER = Path(os.environ.get("COMMANDS", "."))
DIGITS = FOLDER / "digits"
SCENES = FOLDER / "scenes"
NUMBERS = FOLDER / "numbers"
STEPS = ["--num_steps=40", "--eval_every=20", "--log_every=20", "--checkpoint_every=20"]
WORDS = {
    DIGITS: [
        "--flagfile=configs/digits.cfg",
        *STEPS,
        "--global_batch_size=32",
        "--ema_decay=0.9",
        "--warmup_steps=0",
    ],
    SCENES: [
        "--flagfile=configs/demo.cfg",
        *TINY_FLAGS,
        f"--data_dir={os.environ.get('TINY')}",
    ],
    NUMBERS: ["--flagfile=configs/blank.cfg", *STEPS],
}
TASKS = {DIGITS: classification.Task, SCENES: segmentation.Task, NUMBERS: blank.Task}


@functools.cache
def train(world, run: Path) -> None:
    world_lib.set_up(world, Settings())  # before ranks exchange anything, as in a run
    config = settings_lib.parse(["train.py", *WORDS[run], f"--run_dir={run}"])
    # Kept by the checkpoint's data card.
    names = [f"digit {number}" for number in range(10)]
    with mock.patch.object(Digits, "class_names", names, create=True):
        fit_config(config, world, TASKS[run])
    if run is DIGITS:
        on_chief(world, scans)


def scans() -> None:
    """The first validation pictures as PNG files."""
    for count in (3, 359):
        (FOLDER / f"in-{count}").mkdir(exist_ok=True)
        for number in range(count):
            image = Digits(None, "val").read(number)["image"].numpy()
            Image.fromarray(image).save(FOLDER / f"in-{count}" / f"{number:03d}.png")


def call(command, world, *flags, run=DIGITS, code=DONE, stop=False, **arguments) -> str:
    """What rank 0 printed, and the Stop's message; the command must end with `code`."""
    train(world, run)
    words = [
        "",
        f"--flagfile={run / 'config.cfg'}",
        f"--run_dir={run}",
        "--resume=auto",
        *flags,
    ]
    config = settings_lib.parse(words).for_ranks(world.size)
    namespace = SimpleNamespace(checkpoint="best", ema=True, out=None, worst=0)
    for name, value in arguments.items():
        setattr(namespace, name, value)
    its_code = DONE
    message = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            command(config, world, SimpleNamespace(asked=stop), arguments=namespace)
        except Stop as ended:
            its_code = ended.code
            message = str(ended)
    assert its_code == code and "\n" not in message, (
        its_code,
        message,
        printed.getvalue(),
    )
    return message + world.broadcast_object(printed.getvalue(), "commands.printed")


def logged(step):
    lines = json_lines(DIGITS / "metrics.jsonl")
    (record,) = [line for line in lines if line["step"] == step and "eval_loss" in line]
    figures = {}
    for name, value in record.items():
        if name.startswith("eval_"):
            figures[name.removeprefix("eval_")] = value
    return figures


def table(file):
    with file.open(errors="surrogateescape") as opened:
        head, *rows = csv.reader(opened)
    return head, rows


def check_each_class_and_the_worst_samples(world):
    out = FOLDER / "evaluated"
    said = call(evaluate, world, checkpoint="last", out=out, worst=3)
    figures = logged(40)
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["figures"] == figures
    assert evaluation["step"] == 40 and evaluation["samples"] == 359
    assert evaluation["measure"]["--eval_flip"] is False
    head, rows = table(out / "confusion.csv")
    confusion = np.array([row[1:] for row in rows], int)
    assert head[1:] == [str(n) for n in range(10)] == [row[0] for row in rows]
    assert np.trace(confusion) / 359 == figures["accuracy"] and confusion.sum() == 359
    assert f"{'0':>16}  {confusion[0].sum():9d}  " in said
    _, rows_of_classes = table(out / "classes.csv")
    recall = [float(row[2]) for row in rows_of_classes]
    np.testing.assert_allclose(recall, np.diag(confusion) / confusion.sum(1))
    worst = evaluation["worst"]
    assert len({sample["sample"] for sample in worst}) == 3
    assert worst[0]["loss"] >= worst[1]["loss"] >= worst[2]["loss"] > 0.5
    sheets = sorted((out / "worst").iterdir())
    assert len(sheets) == 3 and f"sample-{worst[0]['sample']}-" in sheets[0].name
    assert Image.open(sheets[0]).size[0] >= 96

    # Another evaluation replaces these files; weights as trained are not the averaged ones.
    said = call(evaluate, world, "--val_split=train", out=out, ema=False)
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert not evaluation["chose_checkpoint"] and "chose this checkpoint" not in said
    assert not evaluation["averaged"] and evaluation["samples"] == 1438
    assert evaluation["figures"]["loss"] != figures["loss"]
    assert not (out / "worst").exists()


def persons_files(folder: Path) -> None:
    """Files of a person, in folders that commands write too."""
    for name in ("worst", "labels"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text("a person's own")


def check_what_cannot_be_evaluated_is_refused_in_one_sentence(world):
    said = call(evaluate, world, "--num_classes=12", code=WRONG_USE)
    assert "has 10 classes" in said
    said = call(evaluate, world, out=Path("/dev/null/x"), code=WRONG_USE)
    assert "writing /dev/null" in said
    persons = FOLDER / "persons"
    on_chief(world, lambda: persons_files(persons))
    for command, name in ((evaluate, "worst/a.txt"), (predict, "labels/a.txt")):
        said = call(
            command, world, out=persons, pictures=[FOLDER / "in-3"], code=WRONG_USE
        )
        assert f"{name} was put there or changed by somebody else" in said
    assert sorted(path.name for path in persons.rglob("*.txt")) == ["a.txt", "a.txt"]
    call(evaluate, world, out=FOLDER / "none", stop=True, code=PREEMPTED)
    assert not (FOLDER / "none").exists()
    if world.is_chief:
        (DIGITS / "evaluation").symlink_to(FOLDER)
    said = call(evaluate, world, out=None, code=WRONG_USE)
    if world.is_chief:
        (DIGITS / "evaluation").unlink()
    assert "evaluation is a link, which is not followed" in said


def check_a_table_of_named_classes_agrees_with_the_runs_score(world):
    out = FOLDER / "predicted"
    said = call(predict, world, out=out, pictures=[FOLDER / "in-359"])
    head, rows = table(out / "predictions.csv")
    assert head[:3] == ["file", "class_1", "p_1"] and len(head) == 11
    assert [row[0] for row in rows] == [f"{n:03d}.png" for n in range(359)]
    labels = [int(Digits(None, "val").read(number)["label"]) for number in range(359)]
    hits = np.mean([row[1] == f"digit {label}" for row, label in zip(rows, labels)])
    best = max(logged(step)["accuracy"] for step in (20, 40))
    assert abs(hits - best) < 1e-12
    probabilities = np.array([row[2::2] for row in rows], float)
    assert (np.diff(probabilities, axis=1) <= 0).all()
    assert (probabilities.sum(1) <= 1 + 1e-9).all()
    assert f"000.png: {rows[0][1]} " in said


def bad_files(folder: Path) -> None:
    shutil.copytree(FOLDER / "in-3", folder / "in")
    (folder / "in" / "text.png").write_text("no picture")
    whole = (folder / "in" / "001.png").read_bytes()
    (folder / "in" / "torn.png").write_bytes(whole[: len(whole) // 2])
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(deep).save(folder / "in" / "deep.png")
    Image.fromarray(deep.astype(np.int32)).save(folder / "in" / "wide.tiff")
    (folder / "in" / "away.png").symlink_to("nowhere.png")
    os.mkfifo(folder / "pipe.png")
    # Pillow's ValueError does not name the file.
    (folder / "in" / "head.ppm").write_bytes(b"P6")
    odd = os.fsencode(folder / "in") + b"/odd\xff"
    shutil.copy(os.fsencode(folder / "in" / "001.png"), odd + b".png")
    shutil.copy(os.fsencode(folder / "in" / "text.png"), odd + b".txt")


def check_bad_files_are_named_and_the_others_predicted(world):
    folder = FOLDER / "bad"
    train(world, DIGITS)
    on_chief(world, lambda: bad_files(folder))
    pictures = [folder / "in", folder / "pipe.png"]
    said = call(predict, world, out=folder / "out", pictures=pictures, code=BUG)
    names = ["pipe.png", "text.png", "torn.png", "deep.png", "wide.tiff", "away.png"]
    for name in (*names, r"odd\udcff.txt", "head.ppm"):
        (line,) = [line for line in said.splitlines() if name in line]
        assert "skipped: " in line
    assert "8 of 12 files were skipped" in said
    _, rows = table(folder / "out" / "predictions.csv")
    names = [row[0] for row in rows]
    assert names == ["000.png", "001.png", "002.png", os.fsdecode(b"odd\xff.png")]


def check_examples_are_shared_and_stay_in_order(world):
    out = FOLDER / "of-numbers"
    file = FOLDER / "x.npz"
    train(world, NUMBERS)
    source = blank.numbers("val", 400, 3)
    samples = [source.read(number) for number in range(45)]
    labels = np.array([sample["label"] for sample in samples])
    x = np.stack([sample["numbers"] for sample in samples])
    on_chief(world, lambda: np.savez(file, numbers=x, label=np.zeros(3)))
    said = call(predict, world, run=NUMBERS, out=out, pictures=[file])
    assert "has label, no input of the model: not read" in said
    with np.load(out / "predictions.npz") as predictions:
        hits = predictions["classes"] == labels
        assert predictions["probabilities"].shape == (45, 3) and np.mean(hits) > 0.6
    on_chief(world, lambda: lines(FOLDER / "x.jsonl", x))
    call(predict, world, run=NUMBERS, out=out, pictures=[FOLDER / "x.jsonl"])
    assert [path.name for path in out.glob("[!.]*")] == ["predictions.jsonl"]
    its_output = [out / "predictions.jsonl"]
    said = call(
        predict, world, run=NUMBERS, out=out, pictures=its_output, code=WRONG_USE
    )
    assert "predictions.jsonl is read, and " in said
    classes = [line["classes"] for line in json_lines(out / "predictions.jsonl")]
    assert np.mean(classes == labels) == np.mean(hits)


def lines(file: Path, x: np.ndarray) -> None:
    file.write_text("".join(json.dumps({"numbers": one.tolist()}) + "\n" for one in x))


def check_ranks_with_different_pictures_are_refused(world):
    pictures = [FOLDER / ("in-3", "in-359")[world.rank]]
    said = call(predict, world, out=FOLDER / "out", pictures=pictures, code=BUG)
    assert "the names of the pictures on rank 1 differ" in said
    said = call(export, world, check=None, out=FOLDER / "out", code=WRONG_USE)
    assert "start it on one rank" in said


def check_labels_and_overlays_at_the_pictures_own_size(world):
    folder = FOLDER / "shapes"
    rng = np.random.default_rng(1)
    shapes = {
        "a.png": (50, 71),
        "b.webp": (33, 20),
        "deep/c.bmp": (64, 64),
        "d.gif": (40, 90),
    }
    train(world, SCENES)
    if world.is_chief:
        (folder / "deep").mkdir(parents=True)
        for name, shape in shapes.items():
            Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(
                folder / name
            )
    world.gather_objects(None, "commands.shapes")
    call(
        predict,
        world,
        "--eval_crop=0",
        run=SCENES,
        out=FOLDER / "drawn",
        pictures=[folder],
    )
    for name, shape in shapes.items():
        label = Image.open(FOLDER / "drawn" / "labels" / f"{name}.png")
        assert label.size == shape[::-1] and label.mode == "P"
        assert np.asarray(label).max() < 11
        over = Image.open(FOLDER / "drawn" / "overlays" / f"{name}.png")
        assert over.size == shape[::-1] and over.mode == "RGB"
