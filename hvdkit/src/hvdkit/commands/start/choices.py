"""The flags that `hvdkit start` writes, each with its reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from hvdkit.data.labels import IGNORE
from hvdkit.data.prepare.check import Counts
from hvdkit.settings import project, typed

Choice = tuple[str, str]  # the reason and the flag
_MANY = 2000  # a large network learns little from fewer pictures


class Data(NamedTuple):
    """A data set as readers take it, and what was read of it."""

    folder: Path
    layout: str
    about: str  # words about its splits
    task: str
    classes: int
    train: Counts
    is_white: bool  # whether label pictures hold 0 and 255 only

    @property
    def has_masks(self) -> bool:
        return self.task == "segmentation"


class Measured(NamedTuple):
    """Choices that were measured; by default what is usual."""

    batch: int = 0  # samples of one device
    speeds: str = ""
    rate: float | None = None


def _gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))


def devices() -> int:
    """GPUs of this host; without one, two ranks share its cores."""
    return _gpus() or 2


def most(data: Data) -> int:
    """Samples in the largest batch of a device, a power of 2: a quarter of all in a step."""
    limit = 16 if data.has_masks else 32
    if _gpus():
        limit = 256
    quarter = max(16, len(data.train.sizes)) // 4
    samples = min(limit, max(quarter // devices(), 1))
    return 1 << (samples.bit_length() - 1)


def choices(name: str, data: Data, measured: Measured, *, mirror: bool) -> list[Choice]:
    """Reason and flag of each choice."""
    sides = sorted(min(size) for size in data.train.sizes)
    side = sides[len(sides) // 2]
    is_large = (
        bool(_gpus()) and len(sides) >= _MANY and side > 64 and not data.has_masks
    )
    return [
        *_data_choices(name, data),
        *_picture_choices(data, side, is_large=is_large, mirror=mirror),
        *_training_choices(data, measured, is_large=is_large),
    ]


def _data_choices(name: str, data: Data) -> Iterator[Choice]:
    part = "pixel" if data.has_masks else "picture"
    yield f"A label for each {part}", f"--task={data.task}"
    folder = data.folder
    if folder.is_relative_to(project.folder()):
        folder = folder.relative_to(project.folder())
    data_dir = typed.written(folder, is_path=True)
    count = len(data.train.sizes)
    yield f"{count:,} pictures to train on; {data.about}", f"--data_dir={data_dir}"
    yield "How they lie there", f"--data_format={data.layout}"
    if data.is_white:
        yield (
            "The masks hold 0 and 255, which would mean ignored",
            f"--label_map={IGNORE}:1",
        )
    yield "Results; given again, the run resumes", f"--run_dir=runs/{name}"
    yield "The highest label, from 0, and 1 more", f"--num_classes={data.classes}"


def _picture_choices(
    data: Data, side: int, *, is_large: bool, mirror: bool
) -> Iterator[Choice]:
    """The network, and what becomes of a picture; `side`: pixels that half of all have."""
    if is_large:
        yield "Many photographs and a GPU", "--model=resnet50"
        largest_crop = 224
    else:
        yield "Large ones need many photographs and a GPU", "--model=small"
        largest_crop = 56
    if data.has_masks:
        largest_crop = 256 if _gpus() else 128
    size = min(side, largest_crop) // 8 * 8
    yield (
        "Whether a mirrored picture keeps its label",
        f"--mirror={'on' if mirror else 'off'}",
    )
    seen = ""
    if not data.has_masks:
        shares = sorted(min(size) / max(size) for size in data.train.sizes)
        seen = f"; of the middle square, {shares[len(shares) // 2]:.0%} of a picture"
    yield (
        f"Pixels of a crop; half of all have {side} or more{seen}",
        f"--image_size={max(8, size)}",
    )


def _training_choices(
    data: Data, measured: Measured, *, is_large: bool
) -> Iterator[Choice]:
    if measured.batch:
        batch = devices() * measured.batch
        yield (
            "Samples a step, over all ranks; by a device's batch, samples/s here: "
            f"{measured.speeds}",
            f"--global_batch_size={batch}",
        )
    else:
        batch = devices() * min(most(data), 8 if data.has_masks else 16)
        yield "Samples a step, over all ranks", f"--global_batch_size={batch}"
    epochs = max(30, 400 * batch // len(data.train.sizes))
    yield "Passes over the data; at least 400 steps", f"--epochs={epochs}"
    yield "Forgives a rate that is not tuned", "--optimizer=adam"
    usual_rate = 0.001 if is_large else 0.003
    if measured.rate:
        reason = "Where the loss falls steeply in a range test (--find_lr)"
        yield reason, f"--base_lr={measured.rate:g}"
    elif measured.batch:
        yield "Usual with it; a range test suggests none", f"--base_lr={usual_rate:g}"
    else:
        yield "Usual with it; --find_lr suggests another", f"--base_lr={usual_rate:g}"
    yield "Adam's first steps are rough", f"--warmup_steps={epochs / 10:g}epochs"
    yield "Against learning by heart", "--weight_decay=0.0001"
    yield "Between evaluations", f"--eval_every={epochs / 5:g}epochs"
    yield "Between checkpoints", f"--checkpoint_every={epochs / 5:g}epochs"
    weights = data.train.weights()
    yield "Without its first #, rare classes count as much as others", f"# {weights}"
