"""One input pipeline for some seconds, started by input.py: prints samples a second.

    python benchmarks/input_runs.py PIPELINE SET FOLDER WORKERS SECONDS

Each gives batches of 32 as its users would get them: "template" this project's, "packed" the same
from the set packed by hvdkit.data.pack, "tf.data" the plain pipeline of TensorFlow's model garden
(draws that depend on the order of threads, a shuffle buffer), "torch" a DataLoader with
torchvision.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

BATCH, WARM_UP = 32, 3  # samples; batches before the clock starts
SIZES = {"photos": 224, "pairs": 512, "demo": 64}  # pixels a side of what comes out


def template(kind: str, folder: Path, workers: int, layout: str = "") -> Iterator[object]:
    """This project's: stateless order and draws, threads as a run with --cpu_threads has them."""
    project = Path(__file__).resolve().parent.parent / "template"
    sys.path.insert(0, str(project))
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import tensorflow as tf

    from hvdkit.data.pipeline import TrainingFeed, reader
    from hvdkit.data.sampler import Sampler
    from hvdkit.settings import Settings
    from tasks import classification, segmentation

    task_class = classification if kind == "photos" else segmentation
    layout = layout or {"photos": "class_folders"}.get(kind, "folders")
    config = Settings(
        image_size=SIZES[kind],
        num_classes=4 if kind == "photos" else 21,
        data_dir=str(folder),
        data_format=layout,
    )
    task = task_class.Task(config)
    source, _ = task.sources()
    order = Sampler(len(source), BATCH, 1, seed=1, rank=0, size=1)
    steps = tf.int64.max // BATCH
    read = reader(source, task.training_example, keyed=True)
    feed = TrainingFeed(source, order, read, 0, steps, workers)
    with feed:
        while True:
            yield feed.next()
            if feed.error:
                raise SystemExit(feed.error)


def packed(kind: str, folder: Path, workers: int) -> Iterator[object]:
    return template(kind, folder.with_name(f"{folder.name}-packed"), workers, layout="records")


def plain(kind: str, folder: Path) -> Iterator[object]:
    """TensorFlow's, as the model garden's input pipelines are written."""
    import tensorflow as tf

    read = _plain_photo if kind == "photos" else functools.partial(_plain_pair, SIZES[kind])
    if kind == "photos":
        files = sorted(map(str, folder.glob("train/*/*")))
        labels = [ord(Path(name).parent.name[-1]) for name in files]
    else:
        names = (folder / "splits" / "train.txt").read_text().split()
        files = [str(next((folder / "images").glob(f"{name}.*"))) for name in names]
        labels = [str(folder / "labels" / f"{name}.png") for name in names]
    return iter(
        tf.data.Dataset.from_tensor_slices((files, labels))
        .shuffle(len(files))
        .repeat()
        .map(read, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def _plain_photo(path, label):
    import tensorflow as tf

    data = tf.io.read_file(path)
    begin, size, _ = sampled_box(tf.io.extract_jpeg_shape(data))
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    image = tf.image.resize(image, [SIZES["photos"]] * 2)
    return tf.image.random_flip_left_right(image), label


def sampled_box(shape):
    """Begin and size of a crop as the model garden draws it, and the box, for a picture's shape."""
    import tensorflow as tf

    return tf.image.sample_distorted_bounding_box(
        shape,
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=(0.75, 1.33),
        area_range=(0.08, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )


def _plain_pair(side: int, image_path, label_path):
    import tensorflow as tf

    image = tf.io.decode_image(tf.io.read_file(image_path), channels=3, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    label = tf.io.decode_png(tf.io.read_file(label_path), channels=1)
    scale = 2.0 ** tf.random.uniform([], -1.0, 1.0)  # evenly in its logarithm, as ours
    size = tf.cast(tf.cast(tf.shape(image)[:2], tf.float32) * scale, tf.int32)
    image = tf.image.resize(image, size) / 127.5 - 1.0
    label = tf.image.resize(label, size, "nearest")
    missing = tf.maximum(side - size, 0)
    around = [[0, missing[0]], [0, missing[1]], [0, 0]]
    image = tf.pad(image, around)
    label = tf.pad(label, around, constant_values=255)
    both = tf.concat([image, tf.cast(label, tf.float32)], axis=-1)
    both = tf.image.random_flip_left_right(tf.image.random_crop(both, [side, side, 4]))
    return both[..., :3], tf.cast(both[..., 3:], tf.uint8)


def torch_loader(kind: str, folder: Path, workers: int) -> Iterator[object]:
    """PyTorch's: a DataLoader with a process a core, torchvision's transforms on PIL images."""
    import torch
    import torchvision
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    if kind == "photos":
        turns = [v2.RandomResizedCrop(SIZES[kind]), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        data = torchvision.datasets.ImageFolder(folder / "train", v2.Compose(turns))
    else:
        data = _Pairs(folder, SIZES[kind])
    # Epochs of many batches, as sets have that are not made for a benchmark.
    data = torch.utils.data.ConcatDataset([data] * 50)
    loader = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


class _Pairs:
    """Image and label, as torchvision's reference script for segmentation augments them."""

    def __init__(self, folder: Path, side: int) -> None:
        names = (folder / "splits" / "train.txt").read_text().split()
        self._images = [next((folder / "images").glob(f"{name}.*")) for name in names]
        self._labels = [folder / "labels" / f"{name}.png" for name in names]
        self._side = side

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int):
        from PIL import Image
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms import functional as f

        image = Image.open(self._images[index]).convert("RGB")
        label = Image.open(self._labels[index])
        side, scale = self._side, 2.0 ** random.uniform(-1.0, 1.0)
        size = [max(round(length * scale), 1) for length in (image.height, image.width)]
        image = f.resize(image, size, InterpolationMode.BILINEAR)
        label = f.resize(label, size, InterpolationMode.NEAREST)
        beside = [0, 0, max(side - size[1], 0), max(side - size[0], 0)]
        image, label = f.pad(image, beside, 127), f.pad(label, beside, 255)
        top, left = (random.randint(0, max(length - side, 0)) for length in size)
        image, label = (f.crop(part, top, left, side, side) for part in (image, label))
        if random.random() < 0.5:
            image, label = f.hflip(image), f.hflip(label)
        return f.pil_to_tensor(image), f.pil_to_tensor(label)


def main() -> None:
    pipeline, kind, folder, workers, seconds = sys.argv[1:]
    make = {
        "template": functools.partial(template, workers=int(workers)),
        "packed": functools.partial(packed, workers=int(workers)),
        "tf.data": plain,
        "torch": functools.partial(torch_loader, workers=int(workers)),
    }[pipeline]
    batches = make(kind, Path(folder))
    for _ in range(WARM_UP):
        next(batches)
    start, done, taken = time.perf_counter(), 0, -math.inf
    while taken < float(seconds):
        next(batches)
        done += BATCH
        taken = time.perf_counter() - start
    if isinstance(batches, Generator):
        batches.close()
    print(f"samples/s: {done / taken:.1f}")


if __name__ == "__main__":
    main()
