"""Run on real ranks by test_small_runs.py: data that changed since, and samples that are bad."""

import contextlib
import dataclasses
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf
from file_server import FileServer
from PIL import Image
from small_runs import USUAL, fit_config, folder, on_chief, same

from hvdkit.commands.evaluate import evaluate
from hvdkit.commands.export import CARD, export
from hvdkit.data import contents
from hvdkit.data.prepare import pack
from hvdkit.data.readers.class_folders import ClassFolders
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.stop import DONE, WRONG_USE
from tasks import classification
from tasks.classification import Task

NAMES = ("ape", "bee", "cat")
ABOUT = {"task": "classification", "data_format": "class_folders", "image_size": 8}
ABOUT |= {"model": "one_layer"}
ABOUT |= {"eval_every": 0, "checkpoint_every": 2, "num_steps": 2, "lr_policy": "constant"}


def one_layer(size: int, classes: int, dropout: float) -> keras.Model:
    image = keras.Input((size, size, 3), dtype="uint8", name="image")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    return keras.Model({"image": image}, keras.layers.Dense(classes)(flat))


classification.MODELS["one_layer"] = one_layer


def pictures(world) -> Path:
    """Class folders of 3 classes: 6 pictures of each in train, 4 in val."""
    root, draw = folder(world), np.random.default_rng(0)

    def make() -> None:
        for split, count in (("train", 6), ("val", 4)):
            for name in NAMES:
                (root / "data" / split / name).mkdir(parents=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (8, 8, 3), np.uint8)
                    Image.fromarray(pixels).save(root / "data" / split / name / f"{number}.png")

    on_chief(world, make)
    return root


def trained(world, root: Path, *words: str, code: int = DONE, task: type = Task, **settings):
    about = USUAL | ABOUT | {"data_dir": str(root / "data"), "run_dir": str(root / "run")}
    config = dataclasses.replace(Settings(), **about | settings)
    return fit_config(config, world, task, *words, code=code)


def check_a_resume_on_changed_data_says_what_changed(world):
    """Before: nothing was said, and a renamed folder moved all classes after it by one."""
    root = pictures(world)
    train = root / "data" / "train"
    trained(world, root)
    on_chief(world, lambda: (train / "bee").rename(train / "zebra"))
    words = ("split train", "has zebra", "it lacks bee", "name its classes as the model does")
    trained(world, root, *words, code=WRONG_USE, num_steps=4)
    on_chief(world, lambda: (train / "zebra").rename(train / "bee"))

    def change():
        (train / "ape" / "3.png").unlink()
        (train / "cat" / "0.png").unlink()
        (train / "bee" / "5.png").rename(train / "bee" / "new.png")

    on_chief(world, change)
    what = "18 samples then, 16 now: 3 gone (ape/3.png, bee/5.png, cat/0.png), 1 added (bee/new.png"
    words = ("since step-00000002", what, "--accept_changed_data")
    trained(world, root, *words, code=WRONG_USE, num_steps=4)
    ended = trained(world, root, num_steps=4, accept_changed_data=True)
    assert what in ended.printed or not world.is_chief
    trained(world, root, num_steps=6)  # the checkpoint of step 4 is of the data as they are


def check_a_set_with_fewer_classes_in_another_order_is_scored_by_name(world):
    """And where there is no training split: the figures are NumPy's from the model's outputs."""
    root = pictures(world)
    ended = trained(world, root, num_steps=4)

    def change():
        (root / "test" / "some").mkdir(parents=True)
        for name in ("cat", "bee"):
            (root / "data" / "val" / name).rename(root / "test" / "some" / name)

    on_chief(world, change)
    flags = [f"--data_dir={root / 'test'}", "--val_split=some"]
    own = {"checkpoint": "last", "ema": True, "worst": 0, "out": root / "scores"}
    with contextlib.redirect_stdout(io.StringIO()):
        config = load_run.settings(root / "run", flags).for_ranks(world.size)
        stop = SimpleNamespace(asked=False)
        evaluate(config, world, stop, arguments=SimpleNamespace(**own))
    files = sorted((root / "test" / "some").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    labels = np.array([NAMES.index(file.parent.name) for file in files])
    logits = np.asarray(ended.model({"image": images}, training=False))
    hits = np.mean(logits.argmax(-1) == labels)
    if world.is_chief:
        scores = json.loads((root / "scores" / "evaluation.json").read_text())
        assert scores["figures"]["accuracy"] == hits and scores["samples"] == 8
        rows = (root / "scores" / "classes.csv").read_text().splitlines()[1:]
        found = {name: float(count) for name, count, *_ in (row.split(",") for row in rows)}
        assert found == {"ape": 0, "bee": 4, "cat": 4}
    if world.size == 1:
        own |= {"out": root, "check": None, "onnx": False}
        with contextlib.redirect_stdout(io.StringIO()):
            export(config, world, stop, arguments=SimpleNamespace(**own))
        for file in (root / CARD, root / "saved_model" / "assets.extra" / CARD):
            assert json.loads(file.read_text())["class_names"] == [*NAMES]


def slow_check_an_order_by_shards_is_another_one(world):
    root = pictures(world)
    assert not trained(world, root, "--shuffle_shards=2", code=WRONG_USE, shuffle_shards=2).model

    for split in ("train", "val"):  # all ranks share the work
        pack.pack(ClassFolders(root / "data", split), root / "packed", split, shards=5)
    on_chief(world, lambda: None)
    about = {"data_dir": str(root / "packed"), "data_format": "records", "global_batch_size": 4}
    ended = []
    for shards in (0, 2):
        how = about | {"shuffle_shards": shards, "run_dir": str(root / f"run-{shards}")}
        run = trained(world, root, num_steps=6, **how)
        assert ("pack with --shuffle=1" in run.printed) == (world.is_chief and shards > 0)
        ended.append(run.weights())
    assert max(np.abs(one - other).max() for one, other in zip(*ended)) > 1e-3


def slow_check_a_remote_set_trains_as_a_local_one_also_while_its_server_is_away(world):
    root = pictures(world)
    for split in ("train", "val"):
        pack.pack(ClassFolders(root / "data", split), root / "packed", split, shards=5)
    on_chief(world, lambda: None)
    server, ended = FileServer(root / "packed"), []
    about = {"data_format": "records", "global_batch_size": 4, "num_steps": 30, "shuffle_shards": 1}
    about["data_dir"] = str(root / "packed")
    files = [file for file in (root / "packed").glob("*/*") if file.suffix != ".json"]
    whole = sum(file.stat().st_size for file in files)
    for name, away, bound in (("local", 0, 1), ("remote", 0, whole), ("away", 5, whole * 0.6)):
        with server.up(away) if world.is_chief else contextlib.nullcontext():
            if name != "local":
                about["data_dir"] = world.broadcast_object(server.url, f"checks_data.{name}")
            cache, begun = root / f"cache {name}", time.monotonic()
            how = {"run_dir": str(root / name), "cache_dir": str(cache), "cache_gb": bound / 1e9}
            ended.append(trained(world, root, **about | how).weights())
            assert time.monotonic() - begun > away
        if world.is_chief and name != "local":
            shards = {f"{s}-0000{n}-of-00005.tfrecord" for s in ("train", "val") for n in range(5)}
            once = dict.fromkeys(shards, 1) | {"pack.json": 2, "index.bin": 2}
            assert (server.asked == once) == (not away), server.asked
            assert server.asked.keys() == once.keys(), server.asked
            assert sum(file.stat().st_size for file in cache.glob("*/*")) <= bound
    for other in ended[1:]:
        assert all((one == its).all() for one, its in zip(ended[0], other))


def slow_check_a_picture_replaced_by_one_of_its_size_is_noticed_by_its_hash(world):
    root = pictures(world)
    file = root / "data" / "train" / "cat" / "2.png"

    def hashed(words: str = "18 files") -> None:
        file.write_bytes(file.read_bytes().ljust(999, b"\0"))
        assert words in contents.write(ClassFolders(root / "data", "train"), "train")

    def replace():
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
        hashed("1 of 18 files")

    on_chief(world, hashed)
    trained(world, root, num_steps=4)
    on_chief(world, replace)  # names and sizes are as before
    words = ("since step-00000004", "18 samples have files of other contents")
    trained(world, root, *words, code=WRONG_USE, num_steps=6)
    trained(world, root, num_steps=6, accept_changed_data=True)


def slow_check_a_run_that_mixes_says_so_in_its_card_and_its_loss_is_tried(world):
    root = pictures(world)
    how = {"mixup": 0.5, "cutmix": 1.0, "label_smoothing": 0.1, "accumulation_steps": 2}
    ended = trained(world, root, **how)
    file = ended.folder / "checkpoints" / "step-00000002" / "manifest.json"
    assert json.loads(file.read_text())["card"]["augmentation"]["cutmix"] == 1.0

    class OneShare(Task):  # of a whole batch: only a loss of mixed targets shows it
        def loss(self, outputs, targets):
            if isinstance(targets, dict):
                targets = targets | {"share": tf.reduce_mean(targets["share"])}
            return super().loss(outputs, targets)

    trained(world, root, "one by one", task=OneShare, code=WRONG_USE, num_steps=5, **how)


def slow_check_bad_samples_are_replaced_listed_and_counted_over_a_resume(world):
    root = pictures(world)
    train = root / "data" / "train"

    def spoil():
        (train / "ape" / "0.png").write_bytes(b"")  # the first of all
        file = train / "cat" / "0.png"
        file.write_bytes(file.read_bytes()[:-40])

    on_chief(world, spoil)
    trained(
        world, root, "0.png", "zero bytes", code=WRONG_USE, num_steps=6, run_dir=str(root / "no")
    )
    whole = trained(world, root, num_steps=6, max_bad_samples="12%")  # 2 of 18
    text = (whole.folder / "bad_samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["sample"] for line in lines} == {0, 12} and len(lines) > 4
    assert "zero bytes" in text and "cat/0.png cannot be decoded" in text
    twice = {"run_dir": str(root / "twice"), "max_bad_samples": "2"}
    trained(world, root, num_steps=2, **twice)
    again = trained(world, root, num_steps=6, **twice)
    same(whole.weights(), again.weights())
    assert (again.folder / "bad_samples.jsonl").read_text() == text
    few = {"run_dir": str(root / "few"), "max_bad_samples": "1", "num_steps": 6}
    words = ("2 bad training samples, more than --max_bad_samples=1", "lists them")
    for _ in range(2):  # it is no way out to start again
        trained(world, root, *words, code=WRONG_USE, **few)
