"""Holds hvdkit.data on real ranks: data that changed since, remote data, samples that are bad."""

import contextlib
import dataclasses
import io
import json
import time
from functools import partial
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
SETTINGS = USUAL | {
    "task": "classification",
    "data_format": "class_folders",
    "image_size": 8,
    "model": "one_layer",
    "eval_every": 0,
    "checkpoint_every": 2,
    "num_steps": 2,
    "lr_policy": "constant",
}


def one_layer(size: int, classes: int, dropout: float) -> keras.Model:
    image = keras.Input((size, size, 3), dtype="uint8", name="image")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    return keras.Model({"image": image}, keras.layers.Dense(classes)(flat))


classification.MODELS["one_layer"] = one_layer


def pictures(world) -> Path:
    """Class folders of 3 classes: 6 pictures of each in train, 4 in val."""
    root = folder(world)
    draw = np.random.default_rng(0)

    def make() -> None:
        for split, count in (("train", 6), ("val", 4)):
            for name in NAMES:
                (root / "data" / split / name).mkdir(parents=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (8, 8, 3), np.uint8)
                    Image.fromarray(pixels).save(
                        root / "data" / split / name / f"{number}.png"
                    )

    on_chief(world, make)
    return root


def trained(
    world, root: Path, *words: str, code: int = DONE, task: type = Task, **settings
):
    folders = {"data_dir": str(root / "data"), "run_dir": str(root / "run")}
    config = dataclasses.replace(Settings(), **SETTINGS | folders | settings)
    return fit_config(config, world, task, *words, code=code)


def check_a_resume_on_changed_data_says_what_changed(world):
    """Before: nothing was said, and a renamed folder moved all classes after it by one."""
    root = pictures(world)
    train = root / "data" / "train"
    trained(world, root)
    on_chief(world, lambda: (train / "bee").rename(train / "zebra"))
    trained(
        world,
        root,
        "split train",
        "has zebra",
        "it lacks bee",
        "name its classes as the model does",
        code=WRONG_USE,
        num_steps=4,
    )
    on_chief(world, lambda: (train / "zebra").rename(train / "bee"))

    def change():
        (train / "ape" / "3.png").unlink()
        (train / "cat" / "0.png").unlink()
        (train / "bee" / "5.png").rename(train / "bee" / "new.png")

    on_chief(world, change)
    change_in_words = "18 samples then, 16 now: 3 gone (ape/3.png, bee/5.png, cat/0.png), 1 added (bee/new.png"
    trained(
        world,
        root,
        "since step-00000002",
        change_in_words,
        "--accept_changed_data",
        code=WRONG_USE,
        num_steps=4,
    )
    ended = trained(world, root, num_steps=4, accept_changed_data=True)
    assert change_in_words in ended.printed or not world.is_chief
    # The checkpoint of step 4 is of the data as they are.
    trained(world, root, num_steps=6)


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
    stop = SimpleNamespace(asked=False)
    with contextlib.redirect_stdout(io.StringIO()):
        config = load_run.settings(root / "run", flags).for_ranks(world.size)
        evaluate(
            config,
            world,
            stop,
            arguments=SimpleNamespace(
                checkpoint="last", ema=True, worst=0, out=root / "scores"
            ),
        )
    files = sorted((root / "test" / "some").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    labels = np.array([NAMES.index(file.parent.name) for file in files])
    logits = np.asarray(ended.model({"image": images}, training=False))
    hits = np.mean(logits.argmax(-1) == labels)
    if world.is_chief:
        scores = json.loads((root / "scores" / "evaluation.json").read_text())
        assert scores["figures"]["accuracy"] == hits and scores["samples"] == 8
        count_of = {}
        for row in (root / "scores" / "classes.csv").read_text().splitlines()[1:]:
            name, count, *_ = row.split(",")
            count_of[name] = float(count)
        assert count_of == {"ape": 0, "bee": 4, "cat": 4}
    if world.size == 1:
        with contextlib.redirect_stdout(io.StringIO()):
            export(
                config,
                world,
                stop,
                arguments=SimpleNamespace(
                    checkpoint="last",
                    ema=True,
                    worst=0,
                    out=root,
                    check=None,
                    onnx=False,
                ),
            )
        for file in (root / CARD, root / "saved_model" / "assets.extra" / CARD):
            assert json.loads(file.read_text())["class_names"] == [*NAMES]


def slow_check_an_order_by_shards_is_another_one(world):
    root = pictures(world)
    assert not trained(
        world, root, "--shuffle_shards=2", code=WRONG_USE, shuffle_shards=2
    ).model

    for split in ("train", "val"):  # all ranks share the work
        pack.pack(ClassFolders(root / "data", split), root / "packed", split, shards=5)
    on_chief(world, lambda: None)
    weights = {}
    for shards in (0, 2):
        run = trained(
            world,
            root,
            data_dir=str(root / "packed"),
            data_format="records",
            global_batch_size=4,
            num_steps=6,
            shuffle_shards=shards,
            run_dir=str(root / f"run-{shards}"),
        )
        assert ("pack with --shuffle=1" in run.printed) == (
            world.is_chief and shards > 0
        )
        weights[shards] = run.weights()
    assert (
        max(np.abs(one - other).max() for one, other in zip(weights[0], weights[2]))
        > 1e-3
    )


def slow_check_a_remote_set_trains_as_a_local_one_also_while_its_server_is_away(world):
    root = pictures(world)
    for split in ("train", "val"):
        pack.pack(ClassFolders(root / "data", split), root / "packed", split, shards=5)
    on_chief(world, lambda: None)
    server = FileServer(root / "packed")
    files = [file for file in (root / "packed").glob("*/*") if file.suffix != ".json"]
    whole = sum(file.stat().st_size for file in files)
    once = {"pack.json": 2, "index.bin": 2}
    for shard in range(5):
        once[f"train-0000{shard}-of-00005.tfrecord"] = 1
        once[f"val-0000{shard}-of-00005.tfrecord"] = 1
    weights = {}
    for name, away, bound in (
        ("local", 0, 1),
        ("remote", 0, whole),
        ("away", 5, whole * 0.6),
    ):
        cache = root / f"cache {name}"
        with server.up(away) if world.is_chief else contextlib.nullcontext():
            data_dir = str(root / "packed")
            if name != "local":
                data_dir = world.broadcast_object(server.url, f"checks_data.{name}")
            start = time.monotonic()
            ended = trained(
                world,
                root,
                data_dir=data_dir,
                data_format="records",
                global_batch_size=4,
                num_steps=30,
                shuffle_shards=1,
                run_dir=str(root / name),
                cache_dir=str(cache),
                cache_gb=bound / 1e9,
            )
            assert time.monotonic() - start > away
            weights[name] = ended.weights()
        if world.is_chief and name != "local":
            assert (server.asked == once) == (not away), server.asked
            assert server.asked.keys() == once.keys(), server.asked
            assert sum(file.stat().st_size for file in cache.glob("*/*")) <= bound
    same(weights["remote"], weights["local"])
    same(weights["away"], weights["local"])


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
    change_in_words = "18 samples have files of other contents"
    trained(
        world, root, "since step-00000004", change_in_words, code=WRONG_USE, num_steps=6
    )
    trained(world, root, num_steps=6, accept_changed_data=True)


def slow_check_a_run_that_mixes_says_so_in_its_card_and_its_loss_is_tried(world):
    root = pictures(world)
    train = partial(
        trained,
        world,
        root,
        mixup=0.5,
        cutmix=1.0,
        label_smoothing=0.1,
        accumulation_steps=2,
    )
    ended = train()
    file = ended.folder / "checkpoints" / "step-00000002" / "manifest.json"
    assert json.loads(file.read_text())["card"]["augmentation"]["cutmix"] == 1.0

    class OneShare(Task):
        """One share for the whole batch: only a loss of mixed targets shows that."""

        def loss(self, outputs, targets):
            if isinstance(targets, dict):
                targets = targets | {"share": tf.reduce_mean(targets["share"])}
            return super().loss(outputs, targets)

    train("two parts", task=OneShare, code=WRONG_USE, num_steps=5)


def slow_check_bad_samples_are_replaced_listed_and_counted_over_a_resume(world):
    root = pictures(world)
    train = root / "data" / "train"

    def spoil():
        (train / "ape" / "0.png").write_bytes(b"")  # the first of all
        file = train / "cat" / "0.png"
        file.write_bytes(file.read_bytes()[:-40])

    on_chief(world, spoil)
    trained(
        world,
        root,
        "0.png",
        "zero bytes",
        code=WRONG_USE,
        num_steps=6,
        run_dir=str(root / "no"),
    )
    whole = trained(world, root, num_steps=6, max_bad_samples="12%")  # 2 of 18
    text = (whole.folder / "bad_samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["sample"] for line in lines} == {0, 12} and len(lines) > 4
    assert "zero bytes" in text and "cat/0.png cannot be decoded" in text
    several = trained(
        world,
        root,
        num_steps=6,
        run_dir=str(root / "several"),
        max_bad_samples="12%",
        steps_per_call=3,
    )
    same(whole.weights(), several.weights())
    assert (several.folder / "bad_samples.jsonl").read_text() == text
    trained(world, root, num_steps=2, run_dir=str(root / "twice"), max_bad_samples="2")
    again = trained(
        world, root, num_steps=6, run_dir=str(root / "twice"), max_bad_samples="2"
    )
    same(whole.weights(), again.weights())
    assert (again.folder / "bad_samples.jsonl").read_text() == text
    for _ in range(2):  # it is no way out to start again
        trained(
            world,
            root,
            "2 bad training samples, more than --max_bad_samples=1",
            "lists them",
            code=WRONG_USE,
            num_steps=6,
            run_dir=str(root / "few"),
            max_bad_samples="1",
        )
