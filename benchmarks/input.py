"""Samples a second of the input pipeline against those that people know, in turn in one run.

    python benchmarks/input.py [--sets=photos,pairs,demo] [--cores=1,2] [--torch=PYTHON] [--slow]

The sets are made here: "photos" are 500 x 375 JPEG of about 66 KB in class folders, cropped at
random to 224; "pairs" 500 x 375 JPEG with label PNGs, scaled by 0.5 to 2 and cropped to 512; "demo"
the demo's, to 64. "packed" are the same from `hvdkit pack`, photos with --short_side=256
--quality=90. It prints medians over rounds and the ratio of ours to the others, with the smallest
and largest of a round. --torch: a Python with requirements-peers.txt, for PyTorch's column.

Batches have 32 samples. "template" is this project's pipeline, "tf.data" the plain one of
TensorFlow's model garden (draws depend on the order of threads, a shuffle buffer), "torch" a
DataLoader with torchvision, "webdataset" (photos; where PYTHON has it) one that reads 4 tars. With
--slow each open of a file of the set takes 20 ms more and each read 5 ms, as on a far file server,
but for "packed, near", which is "packed" without that. FFCV's own figure, not run here, for JPEGs
of 512 pixels in memory: 31,278/s on a p3dn.24xlarge (https://docs.ffcv.io/benchmarks.html).

    python benchmarks/input.py --remote --sets=photos --cores=1    # needs requirements-remote.txt

compares a packed set on a server of S3's protocol (moto, on the last core) with the same one on the
disk: 60 shards (photos: 192 samples, 6 MB), by --shuffle_shards=6 in 10 windows. Each GET waits
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
SHORT_SIDE, QUALITY = 256, 90  # of the packed set
BATCH, WARM_UP = 32, 3  # samples; batches before the clock starts
REMOTE = ["local", "filling", "full"]
SHARDS, WINDOW, URL = 60, 6, "s3://bucket/set"  # for these
SIZES = {"photos": 224, "pairs": 512, "demo": 64}  # pixels a side of what comes out
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
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch")
    far = parser.add_mutually_exclusive_group()
    far.add_argument("--slow", action="store_true", help="opens and reads take long; needs cc")
    far.add_argument("--remote", action="store_true", help="packed sets on a server of S3's")
    args = parser.parse_args()
    others = ["tf.data"] + ["torch"] * bool(args.torch) + ["packed, near"] * args.slow
    words = [args.torch or "false", "-c", "import webdataset"]
    if not subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
        others.append("webdataset")
    names = ["template", "packed", *others]
    pairs = [(ours, name) for name in others for ours in names[:2]]
    if args.remote:
        names, pairs, args.seconds = REMOTE, [(name, "local") for name in REMOTE[1:]], np.inf
    head = ["set", "cores", *names, *map(" / ".join, pairs)]
    print(f"| {' | '.join(head)} |\n" + "| --- " * len(head) + "|")
    with tempfile.TemporaryDirectory() as folder:
        slow = {}
        if args.slow:
            words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/slow.so", "-ldl"]
            subprocess.run(words, input=SLOW_DISK.encode(), check=True)
            slow = {"LD_PRELOAD": f"{folder}/slow.so", "SLOW_DISK": folder}
        for kind in args.sets.split(","):
            data = Path(folder) / kind
            make(kind, data, 1 if args.remote else 4)
            with served(data) if args.remote else contextlib.nullcontext(slow) as usual:
                for cores in map(int, args.cores.split(",")):
                    rates: dict[str, list[float]] = {name: [] for name in names}
                    for name in names * args.rounds:
                        if name == "filling":
                            shutil.rmtree(f"{folder}/.cache", ignore_errors=True)
                        if name == "webdataset" and kind != "photos":
                            continue
                        python = args.torch if name in ("torch", "webdataset") else sys.executable
                        where = {"local": f"{data}-packed", "filling": URL, "full": URL}
                        words = [python, __file__, "--worker", name.split(",")[0], kind]
                        words += [where.get(name, data), args.seconds]
                        env = {} if "near" in name else usual
                        rates[name].append(rate(words, cores, env))
                    print(f"| {kind} | {cores} | {row(rates, pairs)} |", flush=True)


def row(rates: dict[str, list[float]], pairs: list[tuple[str, str]]) -> str:
    cells = [f"{statistics.median(found):.0f}" if found else "" for found in rates.values()]
    for ours, other in pairs:
        if ratios := [a / b for a, b in zip(rates[ours], rates[other])]:
            middle = statistics.median(rates[ours]) / statistics.median(rates[other])
        cells.append(f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "")
    return " | ".join(cells)


@contextlib.contextmanager
def served(data: Path) -> Iterator[dict[str, str]]:
    """Serves the packed set, its shard SHARDS times; the environment of who reads it."""
    from hvdkit.data.readers import records

    train = data.with_name(f"{data.name}-packed") / "train"
    meta, index = json.loads((train / records.META).read_text()), train / records.INDEX
    (shard,) = meta["shards"]
    meta["shards"] = [shard | {"name": f"{number}.tfrecord"} for number in range(SHARDS)]
    for copy in meta["shards"]:
        (train / copy["name"]).hardlink_to(train / shard["name"])
    records.write_meta(train, meta, np.tile(np.fromfile(index, records.PLACE), SHARDS))

    words, last = [sys.executable, __file__, "--serve", train.parent], max(os.sched_getaffinity(0))
    place = {"preexec_fn": lambda: os.sched_setaffinity(0, [last])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **place) as server:
        try:
            if not (url := server.stdout.readline().strip()):
                raise SystemExit("pip install -r benchmarks/requirements-remote.txt")
            keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "some")
            yield keys | {"AWS_ENDPOINT_URL": url, "HOME": str(data.parent)}  # HOME: the cache
        finally:
            server.kill()


def serve(folder: str) -> None:
    """A server of S3's protocol that holds the folder as bucket/set, then prints its URL."""
    import s3fs
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app, gets = DomainDispatcherApplication(create_backend_app), itertools.count(1)

    def far(asked: dict[str, object], answer: Callable[..., object]) -> list[bytes]:
        if asked["REQUEST_METHOD"] != "GET":
            return app(asked, answer)
        number = next(gets)
        time.sleep(0.02)
        if number % 20 == 0:
            answer("503 Slow Down", [("Content-Length", "0")])
            return []
        data = b"".join(app(asked, answer))
        return [data[: len(data) // 2] if number % 33 == 0 else data]

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
    how = {"capture_output": True, "text": True, "env": os.environ | env}
    how["env"]["CUDA_VISIBLE_DEVICES"] = ""
    how["preexec_fn"] = lambda: os.sched_setaffinity(0, chosen)
    ended = subprocess.run(list(map(str, words)), timeout=300, **how)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return float(ended.stdout.split()[-1])


def make(kind: str, root: Path, shards: int) -> None:
    """The set's files in `root`, and the set packed beside it."""
    from hvdkit.data.open import reader_of
    from hvdkit.data.prepare import pack, scenes
    from hvdkit.data.prepare.pack import Smaller

    if kind == "demo":
        scenes.ensure_demo(root, scenes.Settings(train=320, val=4))
    else:
        {"photos": _photos, "pairs": _pairs}[kind](root)
    layout = "class_folders" if kind == "photos" else "folders"
    out = root.with_name(f"{root.name}-packed")
    for split in ("train", "val"):
        with contextlib.redirect_stderr(io.StringIO()):  # its bar
            source = reader_of(layout)(root, split, 0)
            if kind == "photos":
                source = Smaller(source, SHORT_SIDE, QUALITY)
            pack.pack(source, out, split, shards=shards, packed_from=kind)


def _photos(root: Path) -> None:
    rng = np.random.default_rng(1)
    for split, count in (("train", PICTURES), ("val", 4)):
        for number in range(count):
            path = root / split / f"class{number % 4}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_jpeg(rng))
            with tarfile.open(root.with_name(f"{split}{number // 4 % 4}.tar"), "a") as tar:
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
    smooth = np.asarray(areas.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
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

    task_class = classification if kind == "photos" else segmentation
    layout = layout or ("class_folders" if kind == "photos" else "folders")
    data = {"data_dir": str(folder), "data_format": layout, "image_size": SIZES[kind]}
    data["colour_range"] = "0,0,0"  # as the others
    task = task_class.Task(Settings(num_classes=4 if kind == "photos" else 21, **data))
    source, _ = task.sources()
    order = Sampler(len(source), BATCH, 1, 1, 0, 1, shards=shards_of(source, window))
    read = reader(source, task.training_example, keyed=True)
    steps, step, ahead = tf.int64.max // BATCH, 0, contextlib.nullcontext()
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
    return template(kind, folder.with_name(f"{folder.name}-packed"), workers, layout="records")


def plain(kind: str, folder: Path, workers: int) -> Iterator[object]:
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
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=(0.75, 1.33),
        area_range=(0.08, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    image = tf.image.resize(image, [SIZES["photos"]] * 2)
    return tf.image.random_flip_left_right(image), label


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


def web_tars(kind: str, folder: Path, workers: int) -> Iterator[object]:
    """WebDataset's: tars one after the other, mixed in a buffer of 1,000, then as in "torch"."""
    import torch
    import webdataset
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    turns = [v2.RandomResizedCrop(SIZES[kind]), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    tars = [str(folder.with_name(f"train{number}.tar")) for number in range(4)]
    data = webdataset.WebDataset(tars, resampled=True, shardshuffle=False).shuffle(1000)
    data = data.decode("pil").to_tuple("jpg", "__key__")
    data = data.map_tuple(v2.Compose(turns), lambda name: int(name[0]))
    return iter(torch.utils.data.DataLoader(data.batched(BATCH), None, num_workers=workers))


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


PIPELINES = {"template": template, "packed": packed, "tf.data": plain, "torch": torch_loader}
WINDOWS = functools.partial(template, layout="records", window=WINDOW)
PIPELINES |= {"webdataset": web_tars, **dict.fromkeys(REMOTE, WINDOWS)}


def worker(pipeline: str, kind: str, folder: str, seconds: str) -> None:
    """Reads batches for some seconds, on the cores that this process has; prints their rate."""
    workers = len(os.sched_getaffinity(0))
    batches, done = iter(PIPELINES[pipeline](kind, Path(folder), workers)), 0
    for _ in range(1 if pipeline in REMOTE else WARM_UP):
        next(batches)
    start = time.perf_counter()
    for _ in batches:
        done += BATCH
        if (taken := time.perf_counter() - start) > float(seconds):
            break
    if hasattr(batches, "close"):
        batches.close()
    print(f"samples/s: {done / taken:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
