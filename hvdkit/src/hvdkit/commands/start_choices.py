"""The flags that `hvdkit start` writes, each with its reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from hvdkit.data.check import Counts
from hvdkit.data.labels import IGNORE
from hvdkit.settings import project, typed

Choice = tuple[str, str]  # reason, flag
_MANY = 2000  # pictures: with fewer a large network learns little
_OF = {"segmentation": "pixel", "classification": "picture"}


class Data(NamedTuple):
    """The folder and layout to read, about its splits, what was read of the one to train on."""

    folder: Path
    layout: str
    about: str
    task: str
    classes: int
    read: Counts
    white: bool = False  # label pictures hold 0 and 255 only


class Measured(NamedTuple):
    """Choices that were measured; by default what is usual."""

    batch: int = 0  # of a device
    speeds: str = ""
    rate: float | None = None


def devices() -> int:
    """GPUs of this host; without one, two ranks share its cores."""
    return len(tf.config.list_physical_devices("GPU")) or 2


def most(data: Data) -> int:
    """Samples in the largest batch of a device, a power of 2: a quarter of all in a step."""
    gpu = bool(tf.config.list_physical_devices("GPU"))
    limit = 256 if gpu else 16 if data.task == "segmentation" else 32
    share = max(16, len(data.read.sizes)) // 4
    return 1 << min(limit, max(share // devices(), 1)).bit_length() - 1


def choices(name: str, data: Data, measured: Measured, *, mirror: bool) -> Iterator[Choice]:
    """Reason and flag of each choice."""
    count, of, own = len(data.read.sizes), _OF[data.task], project.folder()
    where = data.folder.relative_to(own) if data.folder.is_relative_to(own) else data.folder
    yield f"A label for each {of}", f"--task={data.task}"
    data_dir = typed.written(where, is_path=True)
    yield f"{count:,} pictures to train on; {data.about}", f"--data_dir={data_dir}"
    yield "How they lie there", f"--data_format={data.layout}"
    if data.white:
        yield "The masks hold 0 and 255, which would mean ignored", f"--label_map={IGNORE}:1"
    yield "Results; given again, the run resumes", f"--run_dir=runs/{name}"
    yield "The highest label, from 0, and 1 more", f"--num_classes={data.classes}"
    side = sorted(map(min, data.read.sizes))[count // 2]
    large = yield from _of_pictures(data.task, count, side=side, mirror=mirror)
    usual = 8 if data.task == "segmentation" else 16
    batch = devices() * (measured.batch or min(most(data), usual))
    tried = f"; by a device's batch, samples/s here: {measured.speeds}" if measured.batch else ""
    yield f"Samples a step, over all ranks{tried}", f"--global_batch_size={batch}"
    epochs = max(30, 400 * batch // count)
    yield "Passes over the data; at least 400 steps", f"--epochs={epochs}"
    yield "Forgives a rate that is not tuned", "--optimizer=adam"
    tried = "a range test suggests none" if measured.batch else "--find_lr suggests another"
    rate, why = 0.001 if large else 0.003, f"Usual with it; {tried}"
    if measured.rate:
        rate, why = measured.rate, "Where the loss falls steeply in a range test (--find_lr)"
    yield why, f"--base_lr={rate:g}"
    yield "Adam's first steps are rough", f"--warmup_steps={epochs / 10:g}epochs"
    yield "Against learning by heart", "--weight_decay=0.0001"
    yield "Between evaluations", f"--eval_every={epochs / 5:g}epochs"
    yield "Between checkpoints", f"--checkpoint_every={epochs / 5:g}epochs"
    yield "Without its first #, rare classes count as much as others", f"# {data.read.weights()}"


def _of_pictures(task: str, count: int, *, side: int, mirror: bool) -> Iterator[Choice]:
    """Returns whether the network is a large one; `side`: pixels that half of all have."""
    maps, gpu = task == "segmentation", bool(tf.config.list_physical_devices("GPU"))
    large = gpu and count >= _MANY and side > 64 and not maps
    crop = min(side, (256 if gpu else 128) if maps else 224 if large else 56)
    why = "Many photographs and a GPU" if large else "Large ones need many photographs and a GPU"
    yield why, f"--model={'resnet50' if large else 'small'}"
    yield "Whether a mirrored picture keeps its label", f"--mirror={'on' if mirror else 'off'}"
    yield f"Pixels of a crop; half of all have {side} or more", f"--image_size={max(8, crop & ~7)}"
    return large
