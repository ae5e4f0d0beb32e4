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
outputs. A file with a wrong line or array is refused. Where probabilities are no numbers (NaN), the
class is -1, and an example that has none is listed, with exit code 1.

With horovodrun, the ranks share the work, and OUT must be a folder that all of them see. What an
earlier call left in OUT is replaced at the end, and stays where this one fails or is stopped; what
somebody else put there under these names is refused. Flags of train.py may follow (--eval_flip,
...).
"""

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdkit import logs, whole_files
from hvdkit.commands import example_files, predict_examples
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
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import outputs as outputs_lib
from hvdkit.train.task.protocol import Task

# Pillow would start Ghostscript for EPS, so EPS is not among them.
_BY_PILLOW = ("BMP", "GIF", "JPEG2000", "PPM", "TGA", "TIFF")
_BITS_PER_SAMPLE = 258  # number of the TIFF tag
_MARKER = b"\xff\x4f\xff\x51"  # of sizes; JPEG 2000's codestream begins with it
_SHOWN_FAULTS = 1000
_SHOWN_CLASSES = 5  # so many of the most probable classes are written
CSV = "predictions.csv"
# Names in --out.
WRITTEN = ("labels", "overlays", CSV, example_files.LINES, example_files.ARRAYS)
# Takes a picture and returns the model's outputs by name.
OutputsOf = Callable[[np.ndarray], dict[str, np.ndarray]]


class Drawing(NamedTuple):
    """A segmented picture, drawn."""

    classes: Image.Image  # the classes' numbers, with a palette
    overlay: Image.Image


class Prediction(NamedTuple):
    """What is predicted of a picture, but for drawings."""

    # Classes with their probabilities; [] for a segmented picture.
    likeliest: list[tuple[int, float]]
    others: dict[str, Any]  # other outputs by name, as JSON takes them


class Classified(NamedTuple):
    """A picture of one class."""

    file: str
    likeliest: list[tuple[int, float]]


def predict(
    config: Settings, world: World, stop_signal: StopSignal, *, arguments: Any
) -> None:
    """Every rank must call it. Raises Stop, on all ranks, where not all was predicted."""
    predictor_class: type[PicturePredictor] | type[predict_examples.ExamplePredictor]
    predictor_class = PicturePredictor
    if any(path.suffix in example_files.SUFFIXES for path in arguments.pictures):
        predictor_class = predict_examples.ExamplePredictor
    replaced = whole_files.replaced(arguments.out, WRITTEN, inputs=arguments.pictures)
    with load_run.written_by_chief(world, arguments.out, replaced) as folder_of_chief:
        predictor = predictor_class(config, world, arguments)
        folder = world.broadcast_object(
            os.path.abspath(folder_of_chief), "predict.folder"
        )
        with world.fail_together("writing ", path=arguments.out):
            if not Path(folder).is_dir():
                raise ValueError(
                    "it is not the folder of rank 0: give one that all ranks see"
                )
        faults = predictor.predict_into(Path(folder), stop_signal)
    for fault in faults[:_SHOWN_FAULTS]:
        say(world, f"{predictor.fault}: {fault}")
    say(world, f"written: {arguments.out}")
    if faults:
        raise Stop(
            BUG, f"{len(faults)} of {predictor.count} {predictor.faults}, see above"
        )


class PicturePredictor:
    """Predicts on pictures; every rank must make it, and call its methods."""

    fault = "skipped"
    faults = "files were skipped"

    def __init__(self, config: Settings, world: World, arguments: Any) -> None:
        self._world = world
        with world.fail_together("looking for pictures"):
            # By name, as the parts of all ranks are merged.
            self._files = dict(
                sorted(listed(arguments.pictures, arguments.out).items())
            )
            self.count = len(self._files)
        with world.fail_together("making the model"):
            task, model, path, decode = load_run.model_of(
                config, arguments.checkpoint, arguments.ema
            )
            self._class_names = example_files.class_names(path)
        world.check_same(
            world_lib.weights_sha256(model.variables), f"the weights of {path.name}"
        )
        world.check_same(repr(list(self._files)), "the names of the pictures")
        self._outputs_of = of_picture(task, model, decode)
        say(world, f"{self.count} pictures, by {path}")

    def predict_into(self, folder: Path, stop_signal: StopSignal) -> list[str]:
        """Returns a sentence for each file that cannot be predicted on."""
        world = self._world
        parts = [
            folder / f"{rank:06d}-{example_files.LINES}" for rank in range(world.size)
        ]
        with world.fail_together("predicting"):
            own = self._predict_own(folder, parts[world.rank], stop_signal)
        example_files.check_stopped(world, stop_signal)

        classified: list[Classified] = []
        faults: list[str] = []
        for rank_classified, rank_faults in world.gather_objects(own, "predict.rows"):
            classified += [Classified(*fields) for fields in rank_classified]
            faults += rank_faults
        classified.sort(key=lambda picture: picture.file)
        what = f"writing {folder.parent}"
        world.from_chief(what, record, folder, classified, self._class_names)
        world.from_chief(
            what, example_files.merge_parts, folder / example_files.LINES, parts
        )
        return faults

    def _predict_own(
        self, folder: Path, part: Path, stop_signal: StopSignal
    ) -> tuple[list[Classified], list[str]]:
        """Predicts on this rank's pictures: their classes, and a sentence for each that is skipped.

        Other outputs, which may be large, go to the file `part` as they come.
        """
        classified: list[Classified] = []
        faults: list[str] = []
        own_files = list(self._files.items())[self._world.rank :: self._world.size]
        with open(part, "w", encoding="utf-8") as lines:
            for done, (name, file) in enumerate(own_files, start=1):
                if stop_signal.asked:
                    break
                try:
                    image = load(file)
                    outputs = self._outputs_of(image)
                    prediction = write(folder, name, image=image, outputs=outputs)
                    if prediction.others:
                        record = {"file": name} | prediction.others
                        lines.write(json.dumps(record) + "\n")
                    if prediction.likeliest:
                        classified.append(Classified(name, prediction.likeliest))
                except tf.errors.ResourceExhaustedError:
                    faults.append(
                        f"{file} does not fit into memory; for segmentation try --eval_window"
                    )
                except tf.errors.OpError as error:
                    faults.append(f"{file}: {reason_of(error)}")
                except (ValueError, OSError) as error:
                    if passes(error):  # the disk is full: not the picture's fault
                        raise
                    faults.append(str(error))
                if self._world.is_chief:
                    logs.progress("pictures", done, len(own_files))
        return classified, faults


def of_picture(task: Task, model: keras.Model, decode: load_run.Decode) -> OutputsOf:
    """The function from a picture, uint8 [height, width, 3], to what its outputs mean, by name."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, None, 3], tf.uint8)], autograph=False
    )
    def tensors_of(image: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = tf.nest.map_structure(
            lambda part: part[None], task.picture_inputs(image)
        )
        return outputs_lib.one_each(decode(task_checks.outputs(task, model, inputs)), 1)

    def outputs_of(image: np.ndarray) -> dict[str, np.ndarray]:
        tensors = tensors_of(tf.constant(image))
        return {name: value[0].numpy() for name, value in tensors.items()}

    return outputs_of


def listed(named: Sequence[Path], out: Path) -> dict[str, Path]:
    """The files to predict on by the name of their output; of folders all but what is in `out`."""
    file_of: dict[str, Path] = {}
    written = tuple(f"{os.path.realpath(out / name)}/" for name in WRITTEN)
    for path in named:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        is_folder = path.is_dir()
        for file in _inside(path) if is_folder else [path]:
            if is_folder and f"{os.path.realpath(file)}/".startswith(written):
                continue
            name = str(file.relative_to(path)) if is_folder else path.name
            if file_of.setdefault(name, file) != file:
                raise ValueError(
                    f"{file_of[name]} and {file} would both be written as {name}"
                )
    if not file_of:
        raise ValueError(f"no files in {', '.join(str(path) for path in named)}")
    return file_of


def _inside(folder: Path, above: tuple[str, ...] = ()) -> list[Path]:
    """All but hidden files, in linked folders too; with dead links, which are reported later.

    `above`: real paths of the folders that hold this one, as links may lead in a circle.
    """
    real = os.path.realpath(folder)
    if real in above:
        return []
    files = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        files += _inside(path, (*above, real)) if path.is_dir() else [path]
    return files


def load(file: Path) -> np.ndarray:
    """The picture as viewers show it, uint8 [H, W, 3]; what training takes is decoded as there.

    Raises ValueError or OSError, naming the file and what is wrong with it.
    """
    return decoded(whole_files.read(file, pictures.MOST_BYTES, links=True), file)


def decoded(data: bytes, file: object) -> np.ndarray:
    """The picture in a file's bytes, as `load` returns it; `file` is named where it raises."""
    fault = pictures.refused(data)
    if fault:
        raise ValueError(f"{file} {fault}")
    try:
        if tf.io.is_jpeg(data) or pictures.is_webp(data) or data[:4] == b"\x89PNG":
            return pictures.decode_image(tf.constant(data)).numpy()
        with Image.open(io.BytesIO(data), formats=_BY_PILLOW) as picture:
            fault = pictures.too_large(*picture.size) or _unlike_training(picture, data)
            if not fault:
                return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except tf.errors.OpError:
        raise ValueError(f"{file} is damaged: it cannot be decoded") from None
    except UnidentifiedImageError:
        raise ValueError(f"{file} is no picture in a format that is read") from None
    except Image.DecompressionBombError:
        # Pillow raises it at twice its limit, on opening.
        limit = pictures.most_pixels
        raise ValueError(f"{file} has more pixels than --max_pixels={limit}") from None
    # Damaged files make Pillow raise RuntimeError, struct.error, ZeroDivisionError and others.
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    raise ValueError(f"{file} {fault}")


def _unlike_training(picture: Image.Image, data: bytes) -> str:
    """Why a file's pictures or colours are refused; "" for one picture of at most 8 bits."""
    if getattr(picture, "n_frames", 1) > 1:
        return f"holds {picture.n_frames} pictures: write each into a file of its own"
    bits: tuple[int, ...] = (1,)
    if picture.format == "PPM":  # its highest value, which may have 16 bits
        settings = picture.tile[0].args
        largest = settings[1] if isinstance(settings, tuple) else 255
        bits = (int(largest).bit_length(),)
    if picture.format == "TIFF":  # Pillow would keep the high 8 of 16 bits
        bits = picture.tag_v2.get(_BITS_PER_SAMPLE, bits)
    if picture.format == "JPEG2000":  # as of TIFF
        bits = _bits_of_jpeg2000(data)
    if picture.mode[0] in "IF" or max(bits) > 8:
        return "has more than 8 bits a channel: convert it to 8 bits"
    return ""


def _bits_of_jpeg2000(data: bytes) -> tuple[int, ...]:
    """Bits of each component, by the marker of sizes (ISO/IEC 15444-1, A.5.1)."""
    # Behind the marker are two lengths of 2 bytes, and eight numbers of 4.
    place = data.find(_MARKER) + len(_MARKER) + 36
    count = int.from_bytes(data[place : place + 2])
    components = data[place + 2 : place + 2 + 3 * count]
    if not components:
        raise ValueError("its header is cut off")
    # The highest bit is a sign.
    return tuple((depth & 0x7F) + 1 for depth in components[::3])


def write(
    folder: Path, name: str, *, image: np.ndarray, outputs: dict[str, Any]
) -> Prediction:
    """Writes what can be drawn; returns anything else."""
    drawing = drawn(name, image=image, outputs=outputs)
    if drawing:
        for kind, picture in (
            ("labels", drawing.classes),
            ("overlays", drawing.overlay),
        ):
            file = folder / kind / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file, "PNG")
    return prediction(outputs, is_drawn=bool(drawing))


def drawn(name: str, *, image: np.ndarray, outputs: dict[str, Any]) -> Drawing | None:
    """The output "classes" [height, width], at the picture's size; None where it is another."""
    classes = outputs.get("classes")
    probabilities = outputs.get("probabilities")
    if example_files.without_class(outputs).any():
        raise ValueError(f"{name}: {example_files.NO_CLASS}")
    if classes is None or np.ndim(classes) != 2:
        return None
    most = len(COLOURS)
    if classes.min(initial=0) < 0:
        raise ValueError(
            f"{name}: class {classes.min()}, which a PNG of labels cannot hold: give classes from "
            "0 on in the task's decode"
        )
    has_more = probabilities is not None and np.shape(probabilities)[2:] > (most,)
    if has_more or classes.max(initial=0) >= most:
        raise ValueError(f"{name}: more than {most} classes: a PNG of labels holds 256")
    labels = Image.fromarray(classes.astype(np.uint8), "P")
    labels = labels.resize(image.shape[1::-1], Image.Resampling.NEAREST)
    labels.putpalette(COLOURS.tobytes())
    overlay = Image.blend(Image.fromarray(image), labels.convert("RGB"), 0.5)
    return Drawing(labels, overlay)


def prediction(outputs: dict[str, Any], *, is_drawn: bool) -> Prediction:
    """The most probable classes, where the picture has one class; other outputs by name."""
    classes = outputs.get("classes")
    probabilities = outputs.get("probabilities")
    likeliest = []
    has_one_class = classes is not None and np.ndim(classes) == 0
    if has_one_class and probabilities is not None and np.ndim(probabilities) == 1:
        for number in np.argsort(-probabilities, kind="stable")[:_SHOWN_CLASSES]:
            likeliest.append((int(number), float(probabilities[number])))
    others = dict(outputs)
    if is_drawn or likeliest:
        others.pop("classes", None)
        others.pop("probabilities", None)
    plain_others = {
        output: example_files.plain(value) for output, value in others.items()
    }
    return Prediction(likeliest, plain_others)


def class_name(number: int, names: Sequence[str]) -> str:
    """The name of a class; its number where it has none."""
    return names[number] if number < len(names) else str(number)


def record(
    folder: Path, classified: Sequence[Classified], names: Sequence[str]
) -> None:
    """Writes and prints the classes of pictures, if any; `names` of the classes, if any."""
    if not classified:
        return
    heads = ["file"]
    for place in range(1, len(classified[0].likeliest) + 1):
        heads += [f"class_{place}", f"p_{place}"]
    rows = []
    for picture in classified:
        row: list[Any] = [picture.file]
        words = []
        for number, probability in picture.likeliest:
            name = class_name(number, names)
            row += [name, probability]
            words.append(f"{name} {probability:.1%}")
        rows.append(row)
        print(logs.printable(f"{picture.file}: {'  '.join(words)}"))
    whole_files.write_csv(folder / CSV, [heads, *rows])


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 files were skipped, 2 wrong use, 75 stopped."""
    parser = load_run.parser(__doc__)
    parser.add_argument(
        "--out", type=path_argument, required=True, help="output folder"
    )
    parser.add_argument(
        "pictures",
        nargs="+",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="pictures and folders of them; or one file of examples, .npz or .jsonl",
    )
    arguments, flags = parser.parse_known_args(argv[1:])
    config = load_run.settings(arguments.run_dir, ["--eval_crop=0", *flags])
    return load_run.on_ranks(config, arguments, predict)
