"""Started on real ranks by bits.py: `bits_runs.py OUT_DIR ROW ...` trains each row once.

OUT_DIR/ROW.json is left: what the row is, weights_sha256, and metrics.jsonl without times.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests" / "helpers")]

import hvdkit.ranks.quiet  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf
from small_runs import Small, fit_config

from hvdkit import settings as settings_lib
from hvdkit.data.arrays import Arrays
from hvdkit.data.demo import scenes
from hvdkit.observe import compare
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.stop import DONE
from tasks import classification, segmentation

# As in a run: TensorFlow may join and reorder kernels here, which small_runs leaves out.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})

WORDS, LENGTH, WIDTH = 50, 12, 16


class KerasDropout(classification.Task):
    """The digits' task with ordinary layers: Keras's dropout, a regularizer."""

    def build_model(self) -> keras.Model:
        image = keras.Input((8, 8, 3), name="image")
        l2 = keras.regularizers.L2(1e-3)
        y = keras.layers.Conv2D(16, 3, activation="relu", kernel_regularizer=l2)(image)
        y = keras.layers.SpatialDropout2D(0.2)(keras.layers.BatchNormalization()(y))
        y = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(y))
        y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
        return keras.Model({"image": image}, keras.layers.Dense(10)(y), name="ordinary")


class Transformer(Small):
    """Sequences of words: does the first word come again? Embedding, attention with dropout."""

    def sources(self):
        rng = np.random.default_rng(1)
        x = rng.integers(0, WORDS, (160, LENGTH)).astype(np.int32)
        sources = [Arrays(x=part, y=self._again(part)) for part in (x[:120], x[120:])]
        return tuple(sources)

    def _again(self, x: np.ndarray) -> np.ndarray:
        return (x[:, 1:] == x[:, :1]).any(1).astype(np.int32)

    def build_model(self) -> keras.Model:
        words = keras.Input((LENGTH,), dtype="int32")
        y = keras.layers.Embedding(WORDS, WIDTH)(words)
        for _ in range(2):
            attention = keras.layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.2)
            y = keras.layers.LayerNormalization()(y + attention(y, y))
            inner = keras.layers.Dense(2 * WIDTH, activation="gelu")(y)
            y = y + keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(inner))
        y = keras.layers.GlobalAveragePooling1D()(y)
        return keras.Model(words, keras.layers.Dense(3, dtype="float32")(y), name="transformer")


USUAL = "--virtual_ranks=8 --log_every=1 --checkpoint_every=0 --warmup_steps=0 --eval_batch_size=8"
# Name: what it is, flags, task. Batches of 20 and 44 are uneven over 8 virtual ranks.
ROWS = {
    "unet": (
        "demo U-Net, Adam, float32, clipping, ignored pixels",
        "--flagfile=configs/demo.cfg --num_steps=6 --eval_every=3 --global_batch_size=20 "
        "--clip_norm=1 --data_dir={data}",
        segmentation.Task,
    ),
    "digits": (
        "digits, Keras Dropout, SGD, float32, L2 regularizer, 2 micro-batches",
        "--flagfile=configs/digits.cfg --optimizer=sgd --base_lr=0.05 --dropout=0 --num_steps=12 "
        "--eval_every=6 --global_batch_size=44 --accumulation_steps=2",
        KerasDropout,
    ),
    "transformer": (
        "transformer, attention dropout, LAMB, bfloat16, EMA",
        "--task=transformer --num_classes=3 --optimizer=lamb --base_lr=0.01 --num_steps=8 "
        "--eval_every=4 --global_batch_size=20 --precision=bfloat16 --ema_decay=0.9",
        Transformer,
    ),
    "transformer16": (
        "transformer, attention dropout, Adam, float16",
        "--task=transformer --num_classes=3 --optimizer=adam --base_lr=0.003 --num_steps=8 "
        "--eval_every=4 --global_batch_size=20 --precision=float16 --weight_decay=0.001",
        Transformer,
    ),
    "resnet50": (
        "ResNet-50, 64 pixels, SGD with momentum, float32",
        "--flagfile=configs/imagenet.cfg --synthetic_data --image_size=64 --num_steps=3 "
        "--eval_every=0 --global_batch_size=20",
        classification.Task,
    ),
}


def train(world: World, name: str, out: Path) -> None:
    about, flags, task = ROWS[name]
    words = f"{USUAL} {flags} --run_dir={out}/{name}".format(data=out / "data").split()
    ended = fit_config(settings_lib.parse(["train.py", *words]), world, task)
    assert ended.code == DONE, f"{name}: {ended.message}"
    if world.is_chief:
        found = compare.read(str(ended.folder))
        record = {"about": about, "weights_sha256": found.summary["weights_sha256"]}
        (out / f"{name}.json").write_text(json.dumps(record | {"records": found.records}))


def main(out_dir: str, *names: str) -> None:
    out = Path(out_dir)
    world = world_lib.connect()
    world_lib.set_up(world, settings_lib.parse(["train.py", "--task=none", "--virtual_ranks=8"]))
    if world.is_chief:
        settings = scenes.Settings(train=60, val=12, size=64)
        scenes.make(out / "data", settings)
    world.gather_objects(None, "bits.data")
    for name in names:
        train(world, name, out)
    world_lib.finish(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
