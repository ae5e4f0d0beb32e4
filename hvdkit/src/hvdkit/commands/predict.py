"""Predicts on pictures, or on a file of examples, with the model of a trained run.

    hvdkit predict --run_dir=runs/demo --out=predicted photo.jpg folder_of_photos
    hvdkit predict --run_dir=runs/table --out=predicted people.jsonl

Segmentation: for each picture, OUT/labels has a PNG of its classes, at the picture's own size, and
OUT/overlays the picture with the classes drawn over it. Classification: OUT/predictions.csv has the
five most probable classes of each picture, by name where the checkpoint's data card has names. What
else a task's `decode` returns is in OUT/predictions.jsonl, a line a picture.
Pictures can be PNG, JPEG, BMP, GIF, JPEG 2000, PPM, TGA, TIFF or WebP. Files that cannot be read
are listed and skipped, and the exit code is 1.

Examples are what the model takes, by the names of its inputs: a JSON object a line (.jsonl), or
arrays of numpy.savez (.npz), an entry an example. OUT/predictions.jsonl or .npz has what the task's
`decode` returns for each, in their order; without it "probabilities" and "classes" where the loss
is softmax cross-entropy ("class_name" too, in .jsonl, where classes have names), else the model's
outputs. A file with a wrong line or array is refused.

With horovodrun, the ranks share the work, and OUT must be a folder that all of them see. What an
earlier call left in OUT is replaced at the end, and stays where this one fails or is stopped; what
somebody else put there under these names is refused. Flags of train.py may follow (--eval_flip,
...).
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdkit import logs, whole_files
from hvdkit.commands import examples, predict_examples
from hvdkit.data.labels import COLOURS
from hvdkit.data.pipeline import reason_of
from hvdkit.data.readers import pictures
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, Stop, passes
from hvdkit.train import task_checks
from hvdkit.train.task import Task

_OTHERS = ("BMP", "GIF", "JPEG2000", "PPM", "TGA", "TIFF")  # EPS would start Ghostscript
CSV = "predictions.csv"
WRITTEN = ("labels", "overlays", CSV, examples.LINES, examples.ARRAYS)  # in --out
# Of predictions.csv: file, then classes and probabilities in turn; of predictions.jsonl: file, dict
Row = list[Any]
Drawn = tuple[Image.Image, Image.Image]  # classes, overlay
OutputsOf = Callable[[np.ndarray], dict[str, np.ndarray]]  # of a picture


def predict(config: Settings, world: World, stop_signal: StopSignal, *, own: Any) -> None:
    """Every rank must call it. Raises Stop, on all ranks, where not all was predicted."""
    of_examples = any(path.suffix in examples.SUFFIXES for path in own.pictures)
    kind = predict_examples.Work if of_examples else Pictures
    with contextlib.ExitStack() as replacing:
        made = ""
        with world.fail_together(f"writing {own.out}"):  # known before the work
            if world.is_chief:
                replaced = whole_files.replaced(own.out, WRITTEN, inputs=own.pictures)
                made = replacing.enter_context(replaced)
        work = kind(config, world, own)
        folder = Path(world.broadcast_object(os.path.abspath(made), "predict.folder"))
        with world.fail_together(f"writing {own.out}"):
            if not folder.is_dir():
                raise ValueError("it is not the folder of rank 0: give one that all ranks see")
        faults = work.predict_into(folder, stop_signal)
        with world.fail_together(f"writing {own.out}"):
            replacing.pop_all().close()
    for fault in faults:
        say(world, f"skipped: {fault}")
    say(world, f"written: {own.out}")
    if faults:
        raise Stop(BUG, f"{len(faults)} of {work.count} files were skipped, see above")


class Pictures:
    """Predicts on pictures; every rank must make it, and call its methods."""

    def __init__(self, config: Settings, world: World, own: Any) -> None:
        self._world = world
        with world.fail_together("looking for pictures"):
            self._found = listed(own.pictures, own.out)
            self.count = len(self._found)
        with world.fail_together("making the model"):
            task, model, path, decode = load_run.model_of(config, own.checkpoint, own.ema)
            self._class_names = examples.class_names(path)
        world.check_same(world_lib.weights_sha256(model.variables), f"the weights of {path.name}")
        world.check_same(repr(list(self._found)), "the names of the pictures")
        self._outputs_of = of_picture(task, model, decode)
        say(world, f"{self.count} pictures, by {path}")

    def predict_into(self, folder: Path, stop_signal: StopSignal) -> list[str]:
        """Returns a sentence for each file that cannot be predicted on."""
        world = self._world
        found_rows: list[Row] = []
        faults: list[str] = []
        failure = None
        mine = list(self._found.items())[world.rank :: world.size]
        for done, (name, file) in enumerate(mine, start=1):
            if stop_signal.asked or failure:
                break
            try:  # an error ends no rank here: the others wait for it below
                image = load(file)
                found_rows += write(folder, name, image=image, outputs=self._outputs_of(image))
            except tf.errors.ResourceExhaustedError:
                faults.append(
                    f"{file} does not fit into memory; for segmentation try --eval_window"
                )
            except tf.errors.OpError as error:
                faults.append(f"{file}: {reason_of(error)}")
            except (ValueError, OSError) as error:
                if passes(error):  # a full disk, not a bad file
                    failure = error
                faults.append(str(error))
            if world.is_chief:
                logs.progress("pictures", done, len(mine))
        with world.fail_together("predicting"):
            if failure:
                raise failure
        examples.check_stopped(world, stop_signal)
        everyone = world.gather_objects((found_rows, faults), "predict.rows")
        rows = sorted((row for theirs, _ in everyone for row in theirs), key=lambda row: row[0])
        with world.fail_together(f"writing {folder.parent}"):
            if world.is_chief:
                record(folder, rows, self._class_names)
        return [fault for _, theirs in everyone for fault in theirs]


def of_picture(task: Task, model: keras.Model, decode: load_run.Decode) -> OutputsOf:
    """The function from a picture, uint8 [height, width, 3], to what its outputs mean, by name."""

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3], tf.uint8)], autograph=False)
    def outputs_of(image: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = tf.nest.map_structure(lambda part: part[None], task.picture_inputs(image))
        decoded = decode(task_checks.outputs(task, model, inputs))
        return {name: value[0] for name, value in decoded.items()}

    return lambda image: {n: x.numpy() for n, x in outputs_of(tf.constant(image)).items()}


def listed(named: Sequence[Path], out: Path) -> dict[str, Path]:
    """The files to predict on by the name of their output; of folders all but what is in `out`."""
    found: dict[str, Path] = {}
    written = tuple(f"{os.path.realpath(out / name)}/" for name in WRITTEN)
    for path in named:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        inside = [path]
        if path.is_dir():
            inside = [p for p in _inside(path) if not f"{os.path.realpath(p)}/".startswith(written)]
        for file in inside:
            name = str(file.relative_to(path) if path.is_dir() else Path(file.name))
            if found.setdefault(name, file) != file:
                raise ValueError(f"{found[name]} and {file} would both be written as {name}")
    if not found:
        raise ValueError(f"no files in {', '.join(map(str, named))}")
    return found


def _inside(path: Path, above: tuple[str, ...] = ()) -> list[Path]:
    """All but hidden files, in linked folders too; with dead links, which are reported later."""
    real, found = os.path.realpath(path), []
    for inner in sorted(path.iterdir()) if real not in above else ():  # links may lead in a circle
        if not inner.name.startswith("."):
            found += _inside(inner, (*above, real)) if inner.is_dir() else [inner]
    return found


def load(file: Path) -> np.ndarray:
    """The picture as viewers show it, uint8 [H, W, 3]; what training takes is decoded as there.

    Raises ValueError or OSError, naming the file and what is wrong with it.
    """
    return decoded(whole_files.read(file, pictures.MOST_BYTES, links=True), file)


def decoded(data: bytes, file: object) -> np.ndarray:
    """The picture in a file's bytes, as `load` returns it; `file` is named where it raises."""
    fault = pictures.refused(data)
    try:
        if not fault and (tf.io.is_jpeg(data) | pictures.is_webp(data) or data[:4] == b"\x89PNG"):
            return pictures.decode_image(tf.constant(data)).numpy()
        if not fault:
            with Image.open(io.BytesIO(data), formats=_OTHERS) as picture:
                fault = pictures.too_large(*picture.size)
                # Of a TIFF's colours of 16 bits Pillow would keep the high 8.
                bits = picture.tag_v2.get(258, (1,)) if picture.format == "TIFF" else (1,)
                if not fault and picture.mode[0] not in "IF" and max(bits) <= 8:
                    return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
            fault = fault or "has more than 8 bits a channel: convert it to 8 bits"
    except tf.errors.OpError:
        fault = "is damaged: it cannot be decoded"
    except UnidentifiedImageError:
        fault = "is no picture in a format that is read"
    except Image.DecompressionBombError:  # of twice the limit, before its size is known here
        fault = f"has more pixels than --max_pixels={pictures.most_pixels}"
    # Whatever Pillow raises at damaged files: RuntimeError, struct.error, ZeroDivisionError, ...
    except Exception as error:
        fault = f"cannot be read: {error}"
    raise ValueError(f"{file} {fault}")


def write(out: Path, name: str, *, image: np.ndarray, outputs: dict[str, Any]) -> list[Row]:
    """Writes what can be drawn; returns the rows of anything else."""
    pictures_of = drawn(name, image=image, outputs=outputs)
    for folder, picture in zip(("labels", "overlays"), pictures_of or ()):
        file = out / folder / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file, "PNG")
    return rows(name, outputs, drawn=bool(pictures_of))


def drawn(name: str, *, image: np.ndarray, outputs: dict[str, Any]) -> Drawn | None:
    """ "classes" [height, width] at the picture's size, and drawn over it; None: there are none."""
    classes, chances = outputs.get("classes"), outputs.get("probabilities")
    if classes is not None and chances is not None and np.any(chances != chances):
        raise ValueError(f"{name}: the model's outputs are no numbers (NaN), so it has no class")
    if np.ndim(classes) != 2:
        return None
    if classes.max(initial=0) >= len(COLOURS) or np.shape(chances)[2:] > (len(COLOURS),):
        raise ValueError(f"{name}: more than {len(COLOURS)} classes: a PNG of labels holds 256")
    classes = Image.fromarray(classes.astype(np.uint8), "P")
    classes = classes.resize(image.shape[1::-1], Image.Resampling.NEAREST)
    classes.putpalette(COLOURS.tobytes())
    return classes, Image.blend(Image.fromarray(image), classes.convert("RGB"), 0.5)


def rows(name: str, outputs: dict[str, Any], *, drawn: bool) -> list[Row]:
    """The five most probable classes, unless they are `drawn`; then the other outputs by name."""
    classes, chances, found = outputs.get("classes"), outputs.get("probabilities"), []
    if np.ndim(classes) == 0 and classes is not None and np.ndim(chances) == 1:
        first = np.argsort(-chances, kind="stable")[:5]
        found = [[name, *(x for c in first for x in (int(c), float(chances[c])))]]
    told = ("classes", "probabilities") if drawn or found else ()
    others = {part: examples.plain(value) for part, value in outputs.items() if part not in told}
    return found + [[name, others]] * bool(others)


def record(out: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Writes and prints the rows; `names` of the classes, if any."""
    if listed := [row for row in rows if not isinstance(row[1], dict)]:
        table(out / CSV, listed, names)
    if others := [row for row in rows if isinstance(row[1], dict)]:
        with whole_files.written(out / examples.LINES) as partial:
            partial.write_text("".join(json.dumps({"file": n} | x) + "\n" for n, x in others))
    for name, found in others:
        print(logs.printable(f"{name}: {json.dumps(found):.200}"))


def table(out: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Writes and prints the rows; `names` of the classes may be empty."""
    name_of = {str(number): name for number, name in enumerate(names)}
    named = [[file, *(name_of.get(str(x), x) for x in pairs)] for file, *pairs in rows]
    head = [f"{x}_{i + 1}" for i in range(len(rows[0]) // 2) for x in ("class", "p")]
    whole_files.write_csv(out, [["file", *head], *named])
    for file, *pairs in named:
        likeliest = (f"{c} {p:.1%}" for c, p in zip(pairs[::2], pairs[1::2]))
        print(logs.printable(f"{file}: {'  '.join(likeliest)}"))


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 files were skipped, 2 wrong use, 75 stopped."""
    made = load_run.parser(__doc__)
    made.add_argument("--out", type=path_argument, required=True, help="output folder")
    made.add_argument(
        "pictures",
        nargs="+",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="pictures and folders of them; or one file of examples, .npz or .jsonl",
    )
    own, flags = made.parse_known_args(argv[1:])
    config = load_run.settings(own.run_dir, ["--eval_crop=0", *flags])
    return load_run.on_ranks(config, own, predict)
