"""From a folder of pictures to a run: recognizes the layout, reads every file, writes a flagfile.

    hvdkit start ~/pets [--name=pets] [--yes] [--train]

It takes class folders, pictures with masks (images/ and masks/, labels/, annotations/; splits above
or below, or none), VOC, Cityscapes, CIFAR and packed sets. It writes into the fork:
configs/NAME.cfg, with a reason for each choice; runs/NAME-sheet.png, samples as the model gets
them; and, unless the data set is as the readers need it, datasets/NAME: links to its files, sorted
into splits. The data set is not changed. One question is asked; --yes answers it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image

from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.commands import browse
from hvdkit.data import arrangement, check
from hvdkit.data.labels import IGNORE
from hvdkit.data.open import kind_of
from hvdkit.data.readers.pairs import ImageLabelFolder
from hvdkit.data.source import Source
from hvdkit.logs import complain, printable, refuse
from hvdkit.settings import project
from hvdkit.stop import DONE, WRONG_USE
from hvdkit.train import task as tasks

_TASKS = {"map": "segmentation", "class": "classification"}
_LEAST_STEPS, _EPOCHS = 400, 30
_PHOTOS = 2000  # with fewer pictures a large network learns little
# As make train sets them: Open MPI refuses root, and more ranks than cores.
_RANKS = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
_RANKS |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
_QUESTION = "Does a mirrored picture keep its label (not so: letters, signs, left or right)? [Y/n] "


class _Data(NamedTuple):
    """What was understood: where, how it is read, about its splits, the training split's numbers."""

    folder: Path
    layout: str
    about: str
    source: Source
    count: int
    classes: int
    read: check.Read


def _understood(root: Path, links: Path) -> _Data:
    """Reads all samples; ValueError names what is wrong with them."""
    folder, about = root, "splits as they are"
    layout = check.layout_of(root)
    if layout in ("", "class_folders"):
        items, about = arrangement.with_splits(arrangement.recognized(root))
        is_class = isinstance(items[0].label, str)
        if not is_class or not (layout and (root / "val").is_dir()):
            arrangement.link(items, links)
            folder, layout = links, "class_folders" if is_class else "folders"
    faults: list[str] = []
    others: dict[str, Source] = {}
    reads = [
        check.check(folder, split, layout, classes=0, tell=faults.append, others=others)
        for split in ("train", "val")
    ]
    if faults:
        for fault in (re.sub(rf"{re.escape(str(links))}/\S+", _real, fault) for fault in faults):
            print(printable(fault))
        raise ValueError(f"{root}: {len(faults)} fault(s), listed above: mend them, start again")
    source, counts = others["train"], reads[0].counts + reads[1].counts
    classes = getattr(source, "num_classes", 0)
    if isinstance(source, ImageLabelFolder):
        classes = _values(root, counts)
    return _Data(folder, layout, about, source, len(source), classes, reads[0])


def _real(found: re.Match) -> str:
    return os.path.realpath(found[0])


def _values(root: Path, counts: np.ndarray) -> int:
    """The number of classes of masks; ValueError where their values are no class numbers."""
    used = np.flatnonzero(counts[:IGNORE]).tolist()
    classes = max(used, default=0) + 1
    step = math.gcd(*used)
    if len(used) > 1 and step == 1 and 4 * len(used) >= classes:
        return classes
    shown = [*used, IGNORE] if counts[IGNORE] else used
    raise ValueError(
        f"{root}: the masks hold the values {', '.join(map(str, shown))}, and a value is a class: "
        f"number classes 0, 1, 2, ..., at least two ({IGNORE} is ignored), and save the masks again"
    )


def _choices(name: str, data: _Data, *, mirror: bool, gpus: int) -> Iterator[tuple[str, str]]:
    """Reason and flag of each choice."""
    kind = kind_of(data.source)
    side = sorted(min(size) for size in data.read.sizes)[data.count // 2]
    large = kind == "class" and gpus and data.count >= _PHOTOS and side >= 64
    crop = min(224 if large else 64, side) if kind == "class" else min(256 if gpus else 128, side)
    crop = max(8, crop - crop % 8)
    batch = min(32 if kind == "class" or gpus else 16, max(2, 2 ** int(math.log2(data.count / 4))))
    a_pass = -(-data.count // batch)
    steps = max(_LEAST_STEPS, _EPOCHS * a_pass)
    often = steps // 5
    yield "What a label is: of a picture, or of each pixel", f"--task={_TASKS[kind]}"
    where = data.folder
    if where.is_relative_to(project.folder()):
        where = where.relative_to(project.folder())
    yield f"{data.count:,} pictures to train on; {data.about}", f"--data_dir={where}"
    yield "How they lie there", f"--data_format={data.layout}"
    yield "Results; the same run_dir resumes", f"--run_dir=runs/{name}"
    yield "Highest label and 0", f"--num_classes={data.classes}"
    why = "Many photographs and a GPU" if large else "Few pictures, or no GPU: a small network"
    yield why, "--model=" + ("resnet50" if large else "small")
    yield "Whether mirrored pictures are right samples", f"--mirror={'on' if mirror else 'off'}"
    yield (
        f"Pixels of a training crop; half of all have {side} or more a side",
        f"--image_size={crop}",
    )
    yield "Samples a step, over all ranks", f"--global_batch_size={batch}"
    yield f"{steps * batch / data.count:.0f} passes over the data", f"--num_steps={steps}"
    yield "Forgives a rate that is not tuned", "--optimizer=adam"
    yield "Usual for it; --find_lr suggests one", f"--base_lr={0.001 if large else 0.003}"
    yield "The first steps of Adam are rough", f"--warmup_steps={steps // 10}"
    yield "Against learning by heart", "--weight_decay=0.0001"
    yield "Steps between log lines", f"--log_every={often // 10}"
    yield "Steps between evaluations", f"--eval_every={often}"
    yield "Steps between checkpoints", f"--checkpoint_every={often}"


def start(root: Path, name: str, *, ask: bool) -> list[str]:
    """Writes all files, and returns the command that trains.

    Raises ValueError, and leaves nothing, where `root` does not say how to train on it.
    """
    here = project.folder()
    cfg, links = here / "configs" / f"{name}.cfg", here / "datasets" / name
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the one with the pictures")
    if there := [path for path in (cfg, links) if path.exists() and path != root]:
        raise ValueError(f"{there[0]} exists: give another --name, or remove it")
    gpus = len(tf.config.list_physical_devices("GPU"))
    command = (
        f"launch/hosts.sh --plain -np {gpus or 2} python train.py --flagfile=configs/{name}.cfg"
    )
    with contextlib.ExitStack() as undone:
        if links != root:
            undone.callback(shutil.rmtree, links, ignore_errors=True)
        data = _understood(root, links)
        if (task := _TASKS[kind_of(data.source)]) not in tasks.available():
            raise ValueError(f"{root} needs --task={task}: make a fork that starts from this task")
        mirror = not (ask and _answer(_QUESTION).startswith("n"))
        lines = [f"# {printable(root)}, by hvdkit start. In the project's folder:\n#   {command}"]
        lines += [
            f"# {why}\n{flag}" for why, flag in _choices(name, data, mirror=mirror, gpus=gpus)
        ]
        lines += [f"# Without its #, rare classes count as much as others\n# {data.read.weights}"]
        undone.callback(cfg.unlink, missing_ok=True)
        with whole_files.written(cfg) as partial:
            partial.write_text("\n".join(lines) + "\n", "utf-8")
        config = settings_lib.load(command.split()[-2:], settings_lib.of_project())
        sheet = browse.sheet(*browse.samples(config.for_ranks(1), 32))
        undone.pop_all()
    shown = here / "runs" / f"{name}-sheet.png"
    shown.parent.mkdir(exist_ok=True)
    Image.fromarray(sheet).save(shown)
    print(f"{task}: {data.count:,} pictures to train on, {data.classes} classes; {data.about}")
    print(printable(f"look at {shown}, read {cfg}; then, in {here}:\n  {command}"))
    return command.split()


def _answer(question: str) -> str:
    try:
        return input(question).strip().lower()
    except EOFError:  # nobody is there
        print()
        return ""


def main(argv: list[str]) -> int:
    """Returns the exit code, 0 done or 2 wrong use; with --train that of the run."""
    kind = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    made.error = refuse
    made.add_argument("data", type=Path, help="folder of the pictures")
    made.add_argument("--name", help="of the new files; by default the folder's")
    made.add_argument("--yes", action="store_true", help="ask nothing")
    made.add_argument("--train", action="store_true", help="train, on all GPUs or two ranks")
    own = made.parse_args(argv[1:])
    root = Path(os.path.abspath(own.data))
    name = re.sub(r"\W+", "-", own.name or root.name, flags=re.ASCII).strip("-") or "mine"
    try:
        command = start(root, name, ask=not own.yes)
    except (ValueError, OSError) as error:
        complain(str(error))
        return WRONG_USE
    if own.train:
        os.chdir(project.folder())
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        sys.stdout.flush()
        os.execvpe(command[0], command, os.environ | _RANKS | {"PATH": path})
    return DONE
