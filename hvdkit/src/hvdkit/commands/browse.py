"""A sheet of training samples as the model gets them: read, cropped, mirrored, coloured.

    hvdkit browse --flagfile=configs/demo.cfg --out=sheet.png [--count=32]

It shows the first samples of the run that `train.py` would make with the same flags: labels of
pixels in colours beside their picture, a class below it. The task's inputs must hold pictures,
uint8 or float32 of 0 to 255.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
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
from hvdkit.data.sampler import Sampler, shards_of
from hvdkit.ranks import world as world_lib
from hvdkit.settings.typed import path_argument
from hvdkit.stop import DONE
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks

SIGN = "hvdkit browse"  # written as the Software of a sheet's PNG file
_COLUMNS = 16  # of the smallest tiles, at most so many stand in a row
_SIDE = 96  # a tile's longer side has at least so many pixels
_TEXT_HEIGHT = 18  # pixels of the line below a tile
_LARGEST_NORMALIZED = 10.0  # pixels of mean 0 are below it; of 0 to 255, some are above


def samples(
    config: settings_lib.Settings, count: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The first `count` examples of a run on one rank, as arrays, and the names of the classes."""
    world_lib.set_numbers(config)
    with task_checks.user_code_errors("opening the data"):
        task = tasks.load_task(config)
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
    examples = []
    for index, key in itertools.islice(_draws(sampler, config.num_steps), count):
        examples.append(reader.read_one(index, key))
    arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), examples)
    return arrays, classes.of(source)


def _draws(sampler: Sampler, num_steps: int) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields number and random key of each sample of a run, in the run's order."""
    for step in range(num_steps):
        indices, keys = sampler.local_samples(step)
        for index, key in zip(indices, keys):
            yield int(index), key


def sheet(examples: Sequence[dict[str, Any]], names: Sequence[str]) -> np.ndarray:
    """All tiles in rows, uint8 [height, width, 3].

    Raises ValueError: an example holds no picture, or none has values of 0 to 255.
    """
    _check_range(examples)
    tiles = [tile(example, names) for example in examples]
    height, width = np.max([part.shape[:2] for part in tiles], axis=0)
    columns = max(1, min(_COLUMNS * _SIDE // width, len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    canvas = np.full((rows * height, columns * width, 3), 30, np.uint8)
    for number, part in enumerate(tiles):
        row, column = divmod(number, columns)
        top = row * height
        left = column * width
        canvas[top : top + part.shape[0], left : left + part.shape[1]] = part
    return canvas


def _check_range(examples: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError where all pictures are scaled to 0 to 1, or normalized."""
    pictures = [_first_picture(example["inputs"]) for example in examples]
    lowest = min(float(picture.min()) for picture in pictures)
    highest = max(float(picture.max()) for picture in pictures)
    is_float = any(picture.dtype == np.float32 for picture in pictures)
    is_normalized = lowest < -1 and highest <= _LARGEST_NORMALIZED
    if is_float and (is_normalized or 0 < highest <= 1):
        raise ValueError(
            f"the task's pictures have values from {lowest:.3g} to {highest:.3g}: browse shows "
            "those of 0 to 255, so scale them in the model, as layers.Rescaling does"
        )


def write(file: Path, image: np.ndarray) -> None:
    """Writes a sheet as PNG, in the place of an older sheet.

    Raises ValueError: another file has the name. OSError.
    """
    whole_files.refuse_other(file, SIGN)
    text = PngInfo()
    text.add_text("Software", SIGN)
    with whole_files.written(file) as partial:
        Image.fromarray(image).save(partial, "PNG", pnginfo=text)


def _drawn(label: np.ndarray) -> list[np.ndarray]:
    """A label [height, width, ...]: classes in colours, a picture as it is; [] for others."""
    if _is_picture(label) and label.shape[-1] == 3:
        return [_picture(label)]
    is_flat = label.ndim == 2 or label.shape[2:] == (1,)
    if is_flat and label.dtype.kind in "iu" and 0 <= label.min() <= label.max() < 256:
        return [COLOURS[np.reshape(label, label.shape[:2])]]
    return []


def tile(example: dict[str, Any], names: Sequence[str]) -> np.ndarray:
    """One sample: picture and label, or picture and the name of its class below."""
    image = _picture(example["inputs"])
    targets = example["targets"]
    if not isinstance(targets, dict):
        targets = {"label": targets}
    label = targets.get("label")

    caption = ""
    parts = [image]
    if label is not None and np.shape(label)[:2] == image.shape[:2]:
        parts += _drawn(np.asarray(label))
    elif label is not None and np.shape(label) == ():
        caption = _caption(targets, names)

    scale = math.ceil(_SIDE / max(image.shape[:2]))
    pixels = np.hstack(parts).repeat(scale, 0).repeat(scale, 1)
    height, width = pixels.shape[:2]
    text_height = _TEXT_HEIGHT if caption else 0
    framed = Image.new("RGB", (width + 2, height + 2 + text_height))
    framed.paste(Image.fromarray(pixels), (1, 1))
    if caption:
        ImageDraw.Draw(framed).text(
            (3, height + 1), caption, fill="white", font_size=13
        )
    return np.asarray(framed)


def _caption(targets: dict[str, Any], names: Sequence[str]) -> str:
    """The class, or both classes of a picture that is mixed of two."""
    name_of = dict(enumerate(names))
    label = targets["label"]
    name = str(name_of.get(int(label), label))
    if "other" not in targets or "share" not in targets:
        return name
    percent = round(100 * float(targets["share"]))  # the share of the first class
    other = name_of.get(int(targets["other"]), targets["other"])
    return f"{percent}% {name}, {100 - percent}% {other}"


def _is_picture(part: Any) -> bool:
    return (
        np.ndim(part) == 3
        and part.shape[-1] in (1, 3)
        and part.dtype in (np.uint8, np.float32)
    )


def _picture(inputs: Any) -> np.ndarray:
    """The first of an example's inputs that looks like a picture, uint8 [height, width, 3]."""
    image = np.clip(np.rint(_first_picture(inputs)), 0, 255).astype(np.uint8)
    return image if image.shape[-1] == 3 else image.repeat(3, -1)


def _first_picture(inputs: Any) -> np.ndarray:
    for part in tf.nest.flatten(inputs):
        if _is_picture(part):
            return part
    raise ValueError(
        "the task's inputs hold no picture: browse shows uint8 or float32 "
        "[height, width, 1 or 3], of 0 to 255"
    )


@logs.explained
def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use."""
    parser = logs.parser(__doc__)
    parser.add_argument(
        "--out", type=path_argument, required=True, help="PNG for the sheet"
    )
    parser.add_argument("--count", type=int, default=32, help="samples")
    arguments, flags = parser.parse_known_args(argv[1:])
    if arguments.count < 1:
        parser.error(f"--count={arguments.count}: give 1 or more")
    config = settings_lib.from_command_line(
        [argv[0], *flags], settings_lib.of_project()
    )
    whole_files.refuse_other(arguments.out, SIGN)
    examples, names = samples(config.untrained().for_ranks(1), arguments.count)
    write(arguments.out, sheet(examples, names))
    print(logs.printable(f"{len(examples)} samples: {arguments.out}"))
    return DONE
