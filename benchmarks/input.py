"""Samples a second of the input pipeline against those that people know, in turn in one run.

    python benchmarks/input.py [--sets=photos,pairs,demo] [--cores=1,2] [--torch=PYTHON]

Sets, all made here: "photos" are 500 x 375 JPEG of about 66 KB in class folders, cropped at random
to 224; "pairs" 500 x 375 JPEG with label PNGs, scaled by 0.5 to 2 and cropped to 512; "demo" the
demo's, to 64. "packed" are the same from `hvdkit pack`, photos with --short_side=256
--quality=90. Printed are medians over rounds and the ratio of ours to each other one, with the
smallest and largest of a round. --torch is the Python of an environment with
requirements-peers.txt; without it PyTorch's column is left out. Pipelines are in input_runs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "template"))
WORKER = Path(__file__).parent / "input_runs.py"
PICTURES, WIDTH, HEIGHT = 192, 500, 375
SHORT_SIDE, QUALITY = 256, 90  # of the packed set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default="photos,pairs,demo")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch")
    args = parser.parse_args()
    others = ["tf.data"] + ["torch"] * bool(args.torch)
    ratios = [f"{ours} / {name}" for name in others for ours in ("template", "packed")]
    head = ["set", "cores", "template", "packed", *others, *ratios]
    print(f"| {' | '.join(head)} |\n" + "| --- " * len(head) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.sets.split(","):
            data = Path(folder) / kind
            make(kind, data)
            for cores in map(int, args.cores.split(",")):
                row(kind, data, cores, others, args)


def row(kind: str, data: Path, cores: int, others: list[str], args: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ("template", "packed", *others)}
    for _ in range(args.rounds):
        for name, found in rates.items():
            python = args.torch if name == "torch" else sys.executable
            found.append(rate(python, name, kind, data, cores, args.seconds))
    cells = [f"{statistics.median(found):.0f}" for found in rates.values()]
    for other in others:
        for ours in ("template", "packed"):
            ratios = [a / b for a, b in zip(rates[ours], rates[other])]
            middle = statistics.median(rates[ours]) / statistics.median(rates[other])
            cells.append(f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"| {kind} | {cores} | " + " | ".join(cells) + " |", flush=True)


def rate(python: str, name: str, kind: str, data: Path, cores: int, seconds: float) -> float:
    """Samples a second of one pipeline, in a process of its own that has the first `cores`."""
    command = [python, str(WORKER), name, kind, str(data), str(cores), str(seconds)]
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return float(ended.stdout.split()[-1])


def make(kind: str, root: Path) -> None:
    """The set's files in `root`, and the set packed beside it."""
    from hvdkit.data import pack
    from hvdkit.data.demo import scenes
    from hvdkit.data.smaller import Smaller

    if kind == "demo":
        scenes.make(root, scenes.Settings(train=320, val=4))
    else:
        {"photos": _photos, "pairs": _pairs}[kind](root)
    layout = "class_folders" if kind == "photos" else "folders"
    out = root.with_name(f"{root.name}-packed")
    for split in ("train", "val"):
        with contextlib.redirect_stderr(io.StringIO()):  # its bar
            source = pack.READERS[layout](root, split)
            if kind == "photos":
                source = Smaller(source, SHORT_SIDE, QUALITY)
            pack.pack(source, out, split, 4, kind)


def _photos(root: Path) -> None:
    rng = np.random.default_rng(1)
    for split, count in (("train", PICTURES), ("val", 4)):
        for number in range(count):
            path = root / split / f"class{number % 4}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_jpeg(rng))


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


if __name__ == "__main__":
    main()
