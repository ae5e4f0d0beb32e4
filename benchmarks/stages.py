"""What a sample of the input pipeline costs, stage by stage, on one core.

    python benchmarks/stages.py [--sets=photos,pairs,demo] [--rounds=3] [--seconds=3]

Each line is a pipeline that ends after one more stage than the line before: the table gives
microseconds a sample, and what the stage adds. Last stands the plain pipeline of TensorFlow's
model garden, cut the same way. Sets as in input.py; medians over rounds, all lines in turn.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "template"))

from input import make
from input_runs import BATCH, SIZES, plain

PHOTOS = ("order and key", "read", "place of the crop", "decode", "resize", "mirror")
PAIRS = ("order and key", "read", "place of the crop", "label", "decode", "resize")
PAIRS += ("mirror, colours, padding",)
STAGES = {"photos": PHOTOS, "pairs": PAIRS, "demo": PAIRS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default="photos,pairs,demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # set and folder
    args = parser.parse_args()
    if args.child:
        return table(args.child[0], Path(args.child[1]), args.rounds, args.seconds)
    print("| set | stage | us a sample | of it the stage |\n| --- | --- | --- | --- |", flush=True)
    core = str(min(os.sched_getaffinity(0)))  # set before TensorFlow counts cores
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.sets.split(","):
            make(kind, Path(folder) / kind)
            times = [f"--rounds={args.rounds}", f"--seconds={args.seconds}"]
            child = [sys.executable, __file__, *times, "--child", kind, Path(folder) / kind]
            subprocess.run(["taskset", "--cpu-list", core, *child], check=True)


def table(kind: str, folder: Path, rounds: int, seconds: float) -> None:
    feeds: dict[str, Callable[[], Iterator[object]]] = {
        stage: functools.partial(up_to, stage, kind, folder) for stage in STAGES[kind]
    }
    feeds["plain tf.data, whole"] = functools.partial(plain, kind, folder)
    found: dict[str, list[float]] = {name: [] for name in feeds}
    for _ in range(rounds):
        for name, start in feeds.items():
            found[name].append(microseconds(start(), seconds))
    before = 0.0
    for name, values in found.items():
        middle = statistics.median(values)
        added = "" if name.startswith("plain") else f"{middle - before:.0f}"
        print(f"| {kind} | {name} | {middle:.0f} | {added} |", flush=True)
        before = middle
    if kind == "photos":
        ours, theirs = areas(1000)
        print(f"| {kind} | decoded of a picture | {ours:.3f} | plain {theirs:.3f} |", flush=True)


def areas(count: int) -> tuple[float, float]:
    """Mean share of a picture's area that is cropped, so decoded: ours, the plain pipeline's."""
    import tensorflow as tf
    from hvdkit.data import crops

    from input_runs import sampled_box

    shape = tf.constant([375, 500])
    ours, theirs = [], []
    for number in range(count):
        draws = tf.random.stateless_uniform([10, 4], [number, 0])
        ours.append(int(tf.reduce_prod(crops.random_part(shape, draws, 0.08)[2:])))
        _, size, _ = sampled_box(tf.concat([shape, [3]], 0))
        theirs.append(int(tf.reduce_prod(size[:2])))
    return statistics.mean(ours) / (375 * 500), statistics.mean(theirs) / (375 * 500)


def microseconds(batches: Iterator[object], seconds: float) -> float:
    for _ in range(3):
        next(batches)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        done += BATCH
    return (time.perf_counter() - start) / done * 1e6


def up_to(stage: str, kind: str, folder: Path) -> Iterator[object]:
    """Batches of this project's pipeline, which ends after a stage."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import tensorflow as tf
    from hvdkit.data.pipeline import TrainingFeed, reader
    from hvdkit.data.sampler import Sampler
    from hvdkit.settings import Settings

    from tasks import classification, segmentation

    class Numbers:
        """Samples that nothing is read of."""

        def read(self, index: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"index": index}

    photos = kind == "photos"
    config = Settings(
        image_size=SIZES[kind],
        num_classes=4 if photos else 21,
        data_dir=str(folder),
        data_format="class_folders" if photos else "folders",
    )
    task = (classification if photos else segmentation).Task(config)
    source, _ = task.sources()
    order = Sampler(len(source), BATCH, 1, seed=1, rank=0, size=1)
    if stage == "order and key":
        source, made = Numbers(), lambda sample, key: {"index": sample["index"], "key": key}
    elif stage == STAGES[kind][-1]:
        made = task.training_example
    else:
        made = functools.partial((_photo if photos else _pair), task, stage)
    read = reader(source, made, keyed=True)
    with TrainingFeed(source, order, read, 0, tf.int64.max // BATCH, workers=1) as feed:
        while True:
            yield feed.next()
            if feed.error:
                raise SystemExit(feed.error)


def _photo(task, stage: str, sample, key):
    """As hvdkit.data.crops.random_resized, up to a stage: a dict of small tensors."""
    import tensorflow as tf
    from hvdkit.data import crops, image_ops

    label = {"label": sample["label"]}
    if stage == "read":
        return label | {"bytes": tf.strings.length(sample["file"])}
    draws = image_ops.uniform(key, 41)
    box = crops.random_part(image_ops.size(sample), tf.reshape(draws[:-1], [10, 4]), 0.08)
    if stage == "place of the crop":
        return label | {"bytes": tf.strings.length(sample["file"]), "box": box}
    image = image_ops.cut(sample, box)
    if stage == "resize":
        image = image_ops.resize(image, [task.config.image_size] * 2)
    return label | {"one": image[0, 0]}


def _pair(task, stage: str, sample, key):
    """As hvdkit.data.augment.training_pair, up to a stage: a dict of small tensors."""
    import tensorflow as tf
    from hvdkit.data import augment, image_ops

    shape = tf.shape(sample["label"])[:2]
    found = {"shape": shape, "bytes": tf.strings.length(sample["file"])}
    if stage == "read":
        return found
    of_window, _ = tf.split(image_ops.uniform(key, 7), [4, 3])
    where = augment.cut(shape, augment.draw_window(shape, of_window, task.how), task.how)
    found |= {"box": where.box, "size": where.size, "beside": where.beside}
    if stage == "place of the crop":
        return found
    found["label"] = augment.cut_label(sample["label"], where, task.how)[0, 0]
    if stage == "decode":
        found["one"] = image_ops.cut(sample, where.box)[0, 0]
    if stage == "resize":
        found["one"] = image_ops.resize_float(image_ops.cut(sample, where.box), where.size)[0, 0]
    return found


if __name__ == "__main__":
    main()
