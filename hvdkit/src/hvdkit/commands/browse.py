"""A sheet of training samples as the model gets them: read, cropped, mirrored, coloured.

    hvdkit browse --flagfile=configs/demo.cfg --out=sheet.png [--count=32]

It shows the first samples of the run that `train.py` would make with the same flags: labels of
pixels in colours beside their picture, a class below it. The task's inputs must hold pictures,
uint8 or float32 of 0 to 255.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from hvdkit import logs, whole_files
from hvdkit import settings as settings_lib
from hvdkit.data import classes
from hvdkit.data.labels import COLOURS
from hvdkit.data.pipeline import read_one
from hvdkit.data.sampler import Sampler, shards_of
from hvdkit.ranks import world as world_lib
from hvdkit.settings.typed import path_argument
from hvdkit.stop import DONE
from hvdkit.train import task as tasks
from hvdkit.train import task_checks

_COLUMNS, _SIDE = 16, 96  # tiles in a row, at most; pixels a side, at least
SIGN = "hvdkit browse"  # what a sheet's file begins with, as its Software
_TEXT = 18  # pixels: height of the text


def samples(config: settings_lib.Settings, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The first `count` examples of a run on one rank, as arrays, and the names of the classes."""
    world_lib.set_numbers(config)
    with task_checks.user_code_errors("opening the data"):
        task = tasks.load(config)
        if prepare := tasks.optional(task, "prepare"):
            prepare()
        source, _ = task.sources()
    reader = task_checks.reader(task, source, training=True)
    sampler = Sampler(
        num_samples=len(source),
        global_batch_size=config.global_batch_size,
        micro_batches=config.accumulation_steps,
        seed=config.seed,
        rank=0,
        size=1,
        virtual_ranks=config.virtual_ranks,
        shards=shards_of(source, config.shuffle_shards),
    )
    batches = map(sampler.local_samples, range(config.num_steps))
    drawn = ((int(index), key) for ids, keys in batches for index, key in zip(ids, keys))
    found = [read_one(reader, source, *one) for one in itertools.islice(drawn, count)]
    return tf.nest.map_structure(lambda part: part.numpy(), found), classes.of(source)


def sheet(examples: Sequence[dict[str, Any]], names: Sequence[str]) -> np.ndarray:
    """All tiles in rows, uint8 [height, width, 3]."""
    tiles = [tile(example, names) for example in examples]
    height, width = np.max([part.shape[:2] for part in tiles], axis=0)
    columns = max(1, min(_COLUMNS * _SIDE // width, len(tiles)))
    rows = -(-len(tiles) // columns)
    whole = np.full((rows * height, columns * width, 3), 30, np.uint8)
    for place, part in enumerate(tiles):
        top, left = place // columns * height, place % columns * width
        whole[top : top + part.shape[0], left : left + part.shape[1]] = part
    return whole


def write(file: Path, image: np.ndarray) -> None:
    """Writes a sheet as PNG, in the place of an older sheet.

    Raises ValueError: another file has the name. OSError.
    """
    whole_files.refuse_other(file, SIGN)
    text = PngInfo()
    text.add_text("Software", SIGN)
    with whole_files.written(file) as partial:
        Image.fromarray(image).save(partial, "PNG", pnginfo=text)


def tile(example: dict[str, Any], names: Sequence[str]) -> np.ndarray:
    """One sample: picture and label, or picture and the name of its class below."""
    image = _picture(example["inputs"])
    targets = example["targets"] if isinstance(example["targets"], dict) else {}
    label = targets.get("label") if targets else example["targets"]
    parts, words, called = [image], "", dict(enumerate(names))
    if label is not None and np.shape(label)[:2] == image.shape[:2]:
        parts.append(COLOURS[np.reshape(label, image.shape[:2])])
    elif label is not None and np.shape(label) == ():
        words = str(called.get(int(label), label))
        if {"other", "share"} <= targets.keys():  # mixed of two, by the first one's share
            share = round(100 * float(targets["share"]))
            other = called.get(int(targets["other"]), targets["other"])
            words = f"{share}% {words}, {100 - share}% {other}"
    times = -(-_SIDE // max(image.shape[:2]))
    drawn = Image.fromarray(np.hstack(parts).repeat(times, 0).repeat(times, 1))
    framed = Image.new("RGB", (drawn.width + 2, drawn.height + 2 + (_TEXT if words else 0)))
    framed.paste(drawn, (1, 1))
    if words:
        ImageDraw.Draw(framed).text((3, drawn.height + 1), words, fill="white", font_size=13)
    return np.asarray(framed)


def _picture(inputs: Any) -> np.ndarray:
    """The first of an example's inputs that looks like a picture, uint8 [height, width, 3]."""
    for part in tf.nest.flatten(inputs):
        if np.ndim(part) == 3 and part.shape[-1] in (1, 3) and part.dtype in (np.uint8, np.float32):
            image = np.clip(np.rint(part), 0, 255).astype(np.uint8)
            return image if image.shape[-1] == 3 else image.repeat(3, -1)
    shown = "browse shows uint8 or float32 [height, width, 1 or 3], of 0 to 255"
    raise ValueError(f"the task's inputs hold no picture: {shown}")


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use."""
    made = logs.parser(__doc__)
    made.add_argument("--out", type=path_argument, required=True, help="PNG for the sheet")
    made.add_argument("--count", type=int, default=32, help="samples")
    own, flags = made.parse_known_args(argv[1:])
    if own.count < 1:
        made.error(f"--count={own.count}: give 1 or more")
    config = settings_lib.from_command_line([argv[0], *flags], settings_lib.of_project())
    whole_files.refuse_other(own.out, SIGN)
    examples, names = samples(config.for_ranks(1), own.count)
    write(own.out, sheet(examples, names))
    print(logs.printable(f"{len(examples)} samples: {own.out}"))
    return DONE
