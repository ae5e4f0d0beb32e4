"""Samples a second of the input pipeline against those that people know, in turn in one run.

    python benchmarks/input.py [--sets=photos,pairs,demo] [--cores=1,2] [--torch=PYTHON] [--slow]

The sets are made here: "photos" are 500 x 375 JPEG of about 66 KB in class folders, cropped at
random to 224; "pairs" 500 x 375 JPEG with label PNGs, scaled by 0.5 to 2 and cropped to 512; "demo"
the demo's, to 64. "packed" are the same files from `hvdkit pack`. It prints medians over rounds and
the ratio of ours to the others, with the smallest and largest of a round. --torch: a Python with
requirements-peers.txt, for PyTorch's column.

Batches have 32 samples. "template" is this project's pipeline, "tf.data" the plain one of
TensorFlow's model garden (draws depend on the order of threads, a shuffle buffer), "torch" a
DataLoader with torchvision, "webdataset" (photos; where PYTHON has it) one that reads 4 tars. With
--slow each open of a file of the set takes 20 ms more and each read 5 ms, as on a far file server,
but for "packed, near", which is "packed" without that. FFCV's own figure, not run here, for JPEGs
of 512 pixels in memory: 31,278/s on a p3dn.24xlarge (https://docs.ffcv.io/benchmarks.html).

    python benchmarks/input.py --remote --sets=photos --cores=1    # needs requirements-remote.txt

compares a packed set on a server of S3's protocol (moto, on the last core) with the same one on the
disk: 60 shards (photos: 192 samples, 13 MB), by --shuffle_shards=6 in 10 windows. Each GET waits
20 ms; each 20th gets a 503, each 33rd is cut off in its middle. A process reads the first epoch,
which is timed from its request for the first batch to the last batch. "filling" begins with an
empty cache; "full" begins with the cache that "filling" left, which holds all shards.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "template"))
PICTURES, WIDTH, HEIGHT = 192, 500, 375
BATCH = 32  # samples
WARM_UP = 3  # batches before the clock starts
# Pipelines of --remote, with so many shards at this address.
REMOTE = ["local", "filling", "full"]
SHARDS, WINDOW, URL = 60, 6, "s3://bucket/set"
SIZES = {"photos": 224, "pairs": 512, "demo": 64}  # pixels a side of the samples
SLOW_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static char far[65536];
static int opened(int file, const char *path) {
    int is_far = strstr(path, getenv("SLOW_DISK")) != 0;
    if (is_far) usleep(20000);
    if (file >= 0 && file < 65536) far[file] = is_far;
    return file;
}
static void wait_for(int file) { if (file >= 0 && file < 65536 && far[file]) usleep(5000); }
#define OPEN(name) int name(const char *path, int flags, ...) { \\
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); \\
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \\
    return opened(real(path, flags, mode), path); }
#define PREAD(name) ssize_t name(int file, void *to, size_t bytes, off_t at) { \\
    ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \\
    wait_for(file); return real(file, to, bytes, at); }
OPEN(open) OPEN(open64) PREAD(pread) PREAD(pread64)
ssize_t read(int file, void *to, size_t bytes) {
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    wait_for(file); return real(file, to, bytes);
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default="photos,pairs,demo")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of each measurement"
    )
    parser.add_argument(
        "--torch", metavar="PYTHON", help="interpreter that has PyTorch"
    )
    far = parser.add_mutually_exclusive_group()
    far.add_argument(
        "--slow", action="store_true", help="opens and reads take long; needs cc"
    )
    far.add_argument(
        "--remote", action="store_true", help="packed sets on a server of S3's"
    )
    args = parser.parse_args()
    if args.remote:
        args.seconds = np.inf
        names = REMOTE
        pairs = [("filling", "local"), ("full", "local")]
    else:
        others = other_pipelines(args.torch, args.slow)
        names = ["template", "packed", *others]
        pairs = []
        for name in others:
            pairs += [("template", name), ("packed", name)]

    head = ["set", "cores", *names]
    head += [f"{ours} / {other}" for ours, other in pairs]
    print(f"| {' | '.join(head)} |")
    print(f"| {' | '.join('---' for _ in head)} |")
    with tempfile.TemporaryDirectory() as folder:
        slow = slow_disk(folder) if args.slow else {}
        for kind in args.sets.split(","):
            data = Path(folder) / kind
            make(kind, data, 1 if args.remote else 4)
            environment = served(data) if args.remote else contextlib.nullcontext(slow)
            with environment as env:
                for cores in args.cores.split(","):
                    rates = measure(
                        kind, data, names, env=env, cores=int(cores), args=args
                    )
                    print(f"| {kind} | {cores} | {row(rates, pairs)} |", flush=True)


def other_pipelines(torch: str | None, slow: bool) -> list[str]:
    """The pipelines that ours are compared with; `torch`: a Python that has it."""
    names = ["tf.data"]
    if torch:
        names.append("torch")
    if slow:
        names.append("packed, near")
    if torch:
        command = [torch, "-c", "import webdataset"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0:
            names.append("webdataset")
    return names


def slow_disk(folder: str) -> dict[str, str]:
    """The environment of a process in which opening and reading files in `folder` takes long."""
    library = f"{folder}/slow.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
    subprocess.run(command, input=SLOW_DISK.encode(), check=True)
    return {"LD_PRELOAD": library, "SLOW_DISK": folder}


def measure(
    kind: str,
    data: Path,
    names: list[str],
    *,
    env: dict[str, str],
    cores: int,
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    """Samples a second of each pipeline, in turn, by round."""
    folder_of = {"local": f"{data}-packed", "filling": URL, "full": URL}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            if name == "filling":
                shutil.rmtree(data.parent / ".cache", ignore_errors=True)
            if name == "webdataset" and kind != "photos":
                continue
            python = args.torch if name in ("torch", "webdataset") else sys.executable
            pipeline = name.removesuffix(", near")
            words = [python, __file__, "--worker", pipeline, kind]
            words += [folder_of.get(name, data), args.seconds]
            rates[name].append(
                rate(words, cores, {} if name == "packed, near" else env)
            )
    return rates


def row(rates: dict[str, list[float]], pairs: list[tuple[str, str]]) -> str:
    cells = []
    for measured in rates.values():
        cells.append(f"{statistics.median(measured):.0f}" if measured else "")
    for our_name, other_name in pairs:
        ours = rates[our_name]
        others = rates[other_name]
        if not ours or not others:
            cells.append("")
            continue
        ratios = [our_rate / other_rate for our_rate, other_rate in zip(ours, others)]
        whole = statistics.median(ours) / statistics.median(others)
        cells.append(f"{whole:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return " | ".join(cells)


@contextlib.contextmanager
def served(data: Path) -> Iterator[dict[str, str]]:
    """Serves the packed set, its shard SHARDS times; yields the environment of its readers."""
    from hvdkit.data.readers import records

    train = data.with_name(f"{data.name}-packed") / "train"
    meta = json.loads((train / records.META).read_text())
    index = np.fromfile(train / records.INDEX, records.PLACE)
    (shard,) = meta["shards"]
    meta["shards"] = [
        shard | {"name": f"{number}.tfrecord"} for number in range(SHARDS)
    ]
    for copy in meta["shards"]:
        (train / copy["name"]).hardlink_to(train / shard["name"])
    records.write_meta(train, meta, np.tile(index, SHARDS))

    last_core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", train.parent],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, [last_core]),
    ) as server:
        try:
            url = server.stdout.readline().strip()
            if not url:
                raise SystemExit("pip install -r benchmarks/requirements-remote.txt")
            yield {
                "AWS_ACCESS_KEY_ID": "some",
                "AWS_SECRET_ACCESS_KEY": "some",
                "AWS_ENDPOINT_URL": url,
                "HOME": str(data.parent),  # holds the cache
            }
        finally:
            server.kill()


def serve(folder: str) -> None:
    """A server of S3's protocol that holds the folder as bucket/set, then prints its URL."""
    import s3fs
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    numbers = itertools.count(1)

    def far(request: dict[str, object], answer: Callable[..., object]) -> list[bytes]:
        if request["REQUEST_METHOD"] != "GET":
            return app(request, answer)
        number = next(numbers)
        time.sleep(0.02)
        if number % 20 == 0:
            answer("503 Slow Down", [("Content-Length", "0")])
            return []
        data = b"".join(app(request, answer))
        if number % 33 == 0:
            data = data[: len(data) // 2]
        return [data]

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = make_server("127.0.0.1", 0, far, threaded=True)
    threading.Thread(target=server.serve_forever).start()
    url = f"http://127.0.0.1:{server.port}"
    files = s3fs.S3FileSystem(key="some", secret="some", endpoint_url=url)
    files.mkdir("bucket")
    files.put(folder, "bucket/set", recursive=True)
    print(url, flush=True)


def rate(words: list[object], cores: int, env: dict[str, str]) -> float:
    """Samples a second of one pipeline, in a process of its own on the first `cores`."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    ended = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        env=os.environ | env | {"CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        timeout=300,
    )
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return float(ended.stdout.split()[-1])


def make(kind: str, root: Path, shards: int) -> None:
    """The set's files in `root`, and the set packed beside it."""
    from hvdkit.data.open import reader_of
    from hvdkit.data.prepare import pack, scenes

    if kind == "demo":
        scenes.ensure_demo(root, scenes.Settings(train=320, val=4))
    elif kind == "photos":
        _photos(root)
    else:
        _pairs(root)
    layout = "class_folders" if kind == "photos" else "folders"
    out = root.with_name(f"{root.name}-packed")
    for split in ("train", "val"):
        with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bar
            source = reader_of(layout)(root, split, 0)
            pack.pack(source, out, split, shards=shards, packed_from=kind)


def _photos(root: Path) -> None:
    rng = np.random.default_rng(1)
    for split, count in (("train", PICTURES), ("val", 4)):
        for number in range(count):
            path = root / split / f"class{number % 4}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_jpeg(rng))
            with tarfile.open(
                root.with_name(f"{split}{number // 4 % 4}.tar"), "a"
            ) as tar:
                tar.add(path, f"{number % 4}-{number}.jpg")


def _pairs(root: Path) -> None:
    rng = np.random.default_rng(1)
    for name in ("images", "labels", "splits"):
        (root / name).mkdir(parents=True)
    for split, count in (("train", PICTURES), ("val", 4)):
        names = [f"{split}{number}" for number in range(count)]
        (root / "splits" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            (root / "images" / f"{name}.jpg").write_bytes(_jpeg(rng))
            classes = Image.fromarray(rng.integers(0, 21, (6, 8), np.uint8))
            areas = classes.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)
            areas.save(root / "labels" / f"{name}.png")


def _jpeg(rng: np.random.Generator) -> bytes:
    """A photograph's size and detail: smooth areas and some noise, about 66 KB."""
    areas = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(
        areas.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32
    )
    noisy = smooth + rng.normal(0, 11, (HEIGHT, WIDTH, 1))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=83)
    return file.getvalue()


# Pipelines: (set, its folder, threads or processes) -> batches.
def template(
    kind: str, folder: Path, workers: int, *, layout: str = "", window: int = 0
) -> Iterator[object]:
    """This project's, as a run has it; with a `window` (--shuffle_shards) None, then an epoch."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import tensorflow as tf

    from hvdkit.data.pipeline import TrainingFeed, reader
    from hvdkit.data.readers import remote
    from hvdkit.data.sampler import Sampler, shards_of
    from hvdkit.settings import Settings
    from tasks import classification, segmentation

    is_photos = kind == "photos"
    settings = Settings(
        num_classes=4 if is_photos else 21,
        data_dir=str(folder),
        data_format=layout or ("class_folders" if is_photos else "folders"),
        image_size=SIZES[kind],
        # As the other pipelines, also of the demo.
        colour_range="0,0,0",
        mirror="on",
        scale_range="" if is_photos else "0.5,2",
    )
    task = (classification if is_photos else segmentation).Task(settings)
    source, _ = task.sources()
    order = Sampler(
        len(source),
        BATCH,
        micro_batches=1,
        seed=1,
        rank=0,
        size=1,
        shards=shards_of(source, window),
    )
    read = reader(source, task.training_example, keyed=True)
    step = 0
    steps = tf.int64.max // BATCH
    ahead = contextlib.nullcontext()
    if getattr(source, "is_remote", False):
        ahead = remote.fetched_ahead(source, lambda: order.coming_shards(step))
    with TrainingFeed(order, read, num_steps=steps, workers=workers) as feed:
        if window:
            yield None
            steps = len(source) // BATCH
        with ahead:
            for step in range(steps):
                yield feed.next()
                if feed.error:
                    raise SystemExit(f"batch {step}: {feed.error}")


def packed(kind: str, folder: Path, workers: int) -> Iterator[object]:
    return template(
        kind, folder.with_name(f"{folder.name}-packed"), workers, layout="records"
    )


def plain(kind: str, folder: Path, workers: int) -> Iterator[object]:
    """TensorFlow's, as the model garden's input pipelines are written."""
    import tensorflow as tf

    if kind == "photos":
        read = _plain_photo
        files = sorted(str(path) for path in folder.glob("train/*/*"))
        labels = [ord(Path(name).parent.name[-1]) for name in files]
    else:
        read = functools.partial(_plain_pair, SIZES[kind])
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
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=(0.75, 1.33),
        area_range=(0.08, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.decode_and_crop_jpeg(
        data, tf.concat([begin[:2], size[:2]], 0), channels=3
    )
    image = tf.image.resize(image, [SIZES["photos"]] * 2)
    return tf.image.random_flip_left_right(image), label


def _plain_pair(side: int, image_path, label_path):
    import tensorflow as tf

    image = tf.io.decode_image(
        tf.io.read_file(image_path), channels=3, expand_animations=False
    )
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
        steps = [
            v2.RandomResizedCrop(SIZES[kind]),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
        data = torchvision.datasets.ImageFolder(folder / "train", v2.Compose(steps))
    else:
        data = _Pairs(folder, SIZES[kind])
    # Epochs of many batches, as sets have that are not made for a benchmark.
    data = torch.utils.data.ConcatDataset([data] * 50)
    loader = torch.utils.data.DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def web_tars(kind: str, folder: Path, workers: int) -> Iterator[object]:
    """WebDataset's: tars one after the other, mixed in a buffer of 1,000, then as in "torch"."""
    import torch
    import webdataset
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    steps = [
        v2.RandomResizedCrop(SIZES[kind]),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
    ]
    tars = [str(folder.with_name(f"train{number}.tar")) for number in range(4)]
    data = webdataset.WebDataset(tars, resampled=True, shardshuffle=False).shuffle(1000)
    data = data.decode("pil").to_tuple("jpg", "__key__")
    data = data.map_tuple(v2.Compose(steps), lambda name: int(name[0]))
    return iter(
        torch.utils.data.DataLoader(data.batched(BATCH), None, num_workers=workers)
    )


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
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms import functional as f

        image = Image.open(self._images[index]).convert("RGB")
        label = Image.open(self._labels[index])
        side = self._side
        scale = 2.0 ** random.uniform(-1.0, 1.0)
        height = max(round(image.height * scale), 1)
        width = max(round(image.width * scale), 1)
        image = f.resize(image, [height, width], InterpolationMode.BILINEAR)
        label = f.resize(label, [height, width], InterpolationMode.NEAREST)
        padding = [0, 0, max(side - width, 0), max(side - height, 0)]
        image = f.pad(image, padding, 127)
        label = f.pad(label, padding, 255)
        top = random.randint(0, max(height - side, 0))
        left = random.randint(0, max(width - side, 0))
        image = f.crop(image, top, left, side, side)
        label = f.crop(label, top, left, side, side)
        if random.random() < 0.5:
            image = f.hflip(image)
            label = f.hflip(label)
        return f.pil_to_tensor(image), f.pil_to_tensor(label)


in_windows = functools.partial(template, layout="records", window=WINDOW)
PIPELINES = {
    "template": template,
    "packed": packed,
    "tf.data": plain,
    "torch": torch_loader,
    "webdataset": web_tars,
    "local": in_windows,
    "filling": in_windows,
    "full": in_windows,
}


def worker(pipeline: str, kind: str, folder: str, seconds: str) -> None:
    """Reads batches for some seconds, on the cores that this process has; prints their rate."""
    workers = len(os.sched_getaffinity(0))
    batches = iter(PIPELINES[pipeline](kind, Path(folder), workers))
    for _ in range(1 if pipeline in REMOTE else WARM_UP):
        next(batches)
    samples = 0
    start = time.perf_counter()
    for _ in batches:
        samples += BATCH
        taken = time.perf_counter() - start
        if taken > float(seconds):
            break
    if hasattr(batches, "close"):
        batches.close()
    print(f"samples/s: {samples / taken:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
