"""The same bits on any number of ranks: the table of --virtual_ranks.

    python benchmarks/bits.py [--columns=NAME,...] [--rows=NAME,...]

A row is one run with 8 virtual ranks; a column is a number of real ranks, over Gloo or MPI, with or
without tensor fusion. Cells are the first 12 digits of weights_sha256; "!" marks figures of
metrics.jsonl that differ from the first column's. Exit code 1 if anything in a row differs.
"""

import argparse
import json
import sys
import tempfile
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
from hvdkit.data.prepare import scenes
from hvdkit.data.source import Arrays
from hvdkit.observe import compare, records
from hvdkit.ranks import world as world_lib
from hvdkit.stop import DONE
from ranks import launch_well
from tasks import classification, segmentation

FUSION = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.1"}
# Name: ranks, backend, variables of Horovod.
COLUMNS: dict[str, tuple[int, str, dict[str, str]]] = {
    "1": (1, "alone", {}),
    "2 Gloo": (2, "gloo", {}),
    "3 Gloo": (3, "gloo", {}),
    "4 Gloo": (4, "gloo", {}),
    "8 Gloo": (8, "gloo", {}),
    "2 MPI": (2, "mpirun", {}),
    "3 MPI": (3, "mpi", {}),
    "3 Gloo unfused": (3, "gloo", FUSION),
}
WORDS = 50
LENGTH = 12
WIDTH = 16


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
        x = np.random.default_rng(1).integers(0, WORDS, (160, LENGTH)).astype(np.int32)
        again = (x[:, 1:] == x[:, :1]).any(1).astype(np.int32)
        return Arrays(x=x[:120], y=again[:120]), Arrays(x=x[120:], y=again[120:])

    def build_model(self) -> keras.Model:
        words = keras.Input((LENGTH,), dtype="int32")
        y = keras.layers.Embedding(WORDS, WIDTH)(words)
        for _ in range(2):
            attention = keras.layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.2)
            y = keras.layers.LayerNormalization()(y + attention(y, y))
            inner = keras.layers.Dense(2 * WIDTH, activation="gelu")(y)
            y = y + keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(inner))
        y = keras.layers.GlobalAveragePooling1D()(y)
        return keras.Model(
            words, keras.layers.Dense(3, dtype="float32")(y), name="transformer"
        )


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--rows", default=",".join(ROWS))
    args = parser.parse_args()
    columns = args.columns.split(",")
    rows = args.rows.split(",")
    unknown = (set(columns) - set(COLUMNS)) | (set(rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown: {sorted(unknown)}")

    cells: dict[tuple[str, str], dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, column in enumerate(columns):
            ranks, backend, knobs = COLUMNS[column]
            print(f"training on {column} ...", file=sys.stderr, flush=True)
            out = Path(folder) / str(number)
            out.mkdir()
            command = [Path(__file__), "--worker", out, *rows]
            launch_well(ranks, command, backend, timeout=3000, env=knobs)
            for row in rows:
                cells[row, column] = json.loads((out / f"{row}.json").read_text())
    return table(rows, columns, cells)


def table(
    rows: list[str], columns: list[str], cells: dict[tuple[str, str], dict]
) -> int:
    """Prints the table; returns the exit code."""
    print(f"| {' | '.join(['run', *columns])} |")
    print(f"| {' | '.join('---' for _ in ['run', *columns])} |")
    code = 0
    for row in rows:
        first = cells[row, columns[0]]
        shown = [ROWS[row][0]]
        for column in columns:
            cell = cells[row, column]
            mark = "" if cell["records"] == first["records"] else "!"
            shown.append(f"`{cell['weights_sha256'][:12]}`{mark}")
            if cell != first:
                code = 1
        print(f"| {' | '.join(shown)} |")
    return code


def worker(out_dir: str, *names: str) -> None:
    """Trains each row on each rank and writes OUT_DIR/ROW.json: weights_sha256 and records."""
    # As in a run; small_runs turns TensorFlow's optimizer of graphs off.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    out = Path(out_dir)
    world = world_lib.connect()
    world_lib.set_up(
        world, settings_lib.parse(["train.py", "--task=none", "--virtual_ranks=8"])
    )
    if world.is_chief:
        scenes.ensure_demo(out / "data", scenes.Settings(train=60, val=12, size=64))
    world.gather_objects(None, "bits.data")
    for name in names:
        _, flags, task = ROWS[name]
        words = f"{USUAL} {flags} --run_dir={out}/{name}".format(
            data=out / "data"
        ).split()
        ended = fit_config(settings_lib.parse(["train.py", *words]), world, task)
        assert ended.code == DONE, f"{name}: {ended.message}"
        if world.is_chief:
            run = records.read(ended.folder)
            cell = {
                "records": compare.figures(run),
                "weights_sha256": run.summary["weights_sha256"],
            }
            (out / f"{name}.json").write_text(json.dumps(cell))
    world_lib.finish(world)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
