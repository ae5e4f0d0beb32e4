"""Exports the model of a trained run as a SavedModel, which needs none of this code, and as .keras.

    hvdkit export --run_dir=runs/demo --out=exported [--check=photo.jpg] [--onnx]

OUT/saved_model has two signatures, for any number of pictures of one size:
    serving_default   "image": JPEG, PNG or WebP files, text [B]
    pictures          "image": uint8 [B, height, width, 3]
Both give what the task's `decode` returns; without it "probabilities", float32 [B, classes] or
[B, height, width, classes], and "classes", int64, the most probable class. The SavedModel includes
everything that evaluation does to a picture. To check it, a new process without this code loads it
and predicts a picture; the outputs must equal those of `hvdkit predict`. OUT/model.keras is the
model alone, for use with Keras; if it has layers that are not Keras's own, loading it needs their
code, and a note names them. OUT/card.json and the SavedModel's assets.extra/card.json hold the
checkpoint's data card: class names in the order of the outputs, colour order, sizes, training data.

With --onnx, OUT/model.onnx is the network alone, by tf2onnx: it takes what the task's
`picture_inputs` returns (which may scale a picture; tf2onnx cannot convert TensorFlow's antialiased
resize) and gives what `decode` takes. ONNX Runtime's outputs must be near the model's.
"""

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import files
from hvdkit.data.readers import pictures
from hvdkit.logs import join, printable
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, WRONG_USE, Stop
from hvdkit.train import task_checks
from hvdkit.train.task import Task

CARD = "card.json"  # in --out, and in the SavedModel's assets.extra
_ONNX_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64}  # Keras casts, ONNX not
_NEAR = 1e-3  # of an output, and of the median: other kernels add up in another order
# Runs without the project: it has only what it loads.
_LOADED = """
import sys
import numpy as np
import tensorflow as tf
tf.config.set_visible_devices([], "GPU")
folder, file, found = sys.argv[1:]
data = open(file, "rb").read()
loaded = tf.saved_model.load(folder)
outputs = loaded.signatures["serving_default"](image=tf.constant([data, data]))
found_by_name = {name: value.numpy() for name, value in outputs.items()}
np.savez(found, **{n: x.astype(KINDS.get(x.dtype.name, x.dtype)) for n, x in found_by_name.items()})
"""
# What NumPy's files cannot hold, as what they can.
_KINDS = {"object": "S", "bfloat16": "f4"}


class Exported(tf.Module):
    """What is saved: the model, with the task's processing before and after it."""

    def __init__(self, task: Task, model: keras.Model, decode: load_run.Decode) -> None:
        super().__init__()
        self.model, self._task, self._decode = model, task, decode

    def of_pictures(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """Of pictures of one size, uint8 [B, height, width, 3]."""
        example = self._task.picture_inputs(tf.zeros([8, 8, 3], tf.uint8))
        kinds = tf.nest.map_structure(
            lambda part: tf.TensorSpec([None] * part.shape.rank, part.dtype), example
        )
        inputs = tf.map_fn(self._task.picture_inputs, image, fn_output_signature=kinds)
        outputs = task_checks.outputs(self._task, self.model, inputs)
        with task_checks.user_code_errors("decode"):
            return self._decode(outputs)

    def of_files(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """Of JPEG, PNG or WebP files, text [B], whose pictures are of one size."""
        kind = tf.TensorSpec([None, None, 3], tf.uint8)
        return self.of_pictures(tf.map_fn(pictures.decode_image, image, fn_output_signature=kind))


def export(config: Settings, world: World, stop_signal: StopSignal, *, own: Any) -> None:
    """Raises Stop where it cannot be done, or where what was written gives other outputs."""
    if world.size > 1:
        raise Stop(WRONG_USE, "hvdkit export writes one model: start it on one rank")
    with world.fail_together("exporting"):
        data = _picture(own.check)
        own.out.mkdir(parents=True, exist_ok=True)
        (own.out / "model.onnx").unlink(missing_ok=True)  # of another checkpoint
        task, model, path, decode = load_run.model_of(config, own.checkpoint, own.ema)
        module, folder = Exported(task, model, decode), own.out / "saved_model"
        signatures = {
            "serving_default": _function(module.of_files, [None], tf.string),
            "pictures": _function(module.of_pictures, [None, None, None, 3], tf.uint8),
        }
        with task_checks.user_code_errors("saving the model"):
            tf.saved_model.save(module, str(folder), signatures)
            model.save(own.out / "model.keras")
        card = files.read_manifest(path).card
        (extra := folder / "assets.extra").mkdir(exist_ok=True)
        for file in (own.out / CARD, extra / CARD):
            whole_files.write_json(file, card)
        # As a graph, like the loaded model: eager operations round differently.
        wanted = signatures["serving_default"](tf.constant([data, data]))
        example = task.picture_inputs(pictures.decode_image(tf.constant(data)))
        inputs = tf.nest.map_structure(lambda part: part[None], example)
        shapes_of_network = to_onnx(model, inputs, own.out / "model.onnx") if own.onnx else ""
    print(printable(f"exported {path}: {folder}, {own.out / 'model.keras'}"))
    kinds = {type(layer) for layer in model._flatten_layers()}
    names = sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
    if foreign := [name for name in names if not name.startswith("keras.")]:
        print(
            f"note: model.keras has layers that are not Keras's own, {', '.join(foreign)}: import "
            "their modules before you load it; the SavedModel needs no code"
        )
    found = loaded_elsewhere(folder, data)
    for name, value in wanted.items():
        own_value = (x := value.numpy()).astype(_KINDS.get(x.dtype.name, x.dtype))
        if not np.array_equal(own_value, found[name], equal_nan=own_value.dtype.kind == "f"):
            raise Stop(BUG, f"loaded in a new process {name} differ: do not use it")
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
    print(f"loaded in a new process without this code: equal outputs ({shapes})")
    if own.onnx:
        print(printable(f"{own.out / 'model.onnx'}: the network alone, {shapes_of_network}"))


def to_onnx(model: keras.Model, inputs: Any, file: Path) -> str:
    """Writes the network and runs it on `inputs`, a batch; returns what it takes and gives.

    Raises ValueError: the packages are not there, or tf2onnx cannot convert the model. Stop: its
    outputs are others.
    """
    try:
        import onnxruntime
        import tf2onnx  # noqa: F401  (Keras calls it)
    except ImportError as error:
        how = "pip install tf2onnx onnx onnxruntime"
        raise ValueError(f"--onnx: there is no {error.name}: {how}") from None
    wanted = [np.asarray(x) for x in tf.nest.flatten(model(inputs, training=False))]
    with whole_files.written(file) as partial:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tf2onnx's, of NumPy
                model.export(str(partial), format="onnx", verbose=False)
            session = onnxruntime.InferenceSession(partial.read_bytes())
            takes = session.get_inputs()
            found = session.run(None, _fed(takes, inputs))
        except Exception as error:  # whatever a converter raises
            raise ValueError(f"--onnx: {model.name} cannot be converted: {error!s:.300}") from None
        for ours, theirs in zip(wanted, found, strict=True):
            usual = np.abs(ours[np.isfinite(ours) & (ours != 0)], dtype=np.float64)
            near = _NEAR * np.median(usual) if usual.size else 0.0
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, _NEAR, near, True):
                raise Stop(BUG, f"{file} would have other outputs in ONNX Runtime: not written")
    ends = (*takes, *session.get_outputs())
    shapes = ([n if isinstance(n, int) else "any" for n in x.shape] for x in ends)
    return ", ".join(f"{x.name} {x.type} {shape}" for x, shape in zip(ends, shapes))


def _fed(takes: Sequence[Any], inputs: Any) -> dict[str, np.ndarray]:
    """What ONNX Runtime is given: it casts nothing, and lacks inputs that are not needed."""
    named = dict(zip([x.name for x in takes], tf.nest.flatten(inputs), strict=False))
    if isinstance(inputs, Mapping) and {*named} <= {*inputs}:
        named = inputs
    elif len(takes) != len(tf.nest.flatten(inputs)):
        raise ValueError(f"of its inputs it has only {join(x.name for x in takes)}")
    return {x.name: np.asarray(named[x.name], _ONNX_TYPES.get(x.type)) for x in takes}


def loaded_elsewhere(folder: Path, data: bytes) -> dict[str, np.ndarray]:
    """The SavedModel's outputs for a batch of the picture twice, in a new process."""
    with tempfile.TemporaryDirectory() as scratch:
        picture, found = Path(scratch) / "picture", Path(scratch) / "found.npz"
        picture.write_bytes(data)
        words = [sys.executable, "-I", "-c", f"KINDS = {_KINDS}{_LOADED}"]
        words += [str(folder.absolute()), picture, found]
        ended = subprocess.run(words, cwd=scratch, capture_output=True, text=True, check=False)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise Stop(BUG, f"{folder} cannot be loaded in a new process: {last}")
        with np.load(found) as file:
            return {name: file[name] for name in file.files}


def _function(call: Any, shape: list[int | None], dtype: tf.DType) -> Any:
    spec = tf.TensorSpec(shape, dtype, name="image")
    return tf.function(call, input_signature=[spec], autograph=False)


def _picture(file: Path | None) -> bytes:
    """The file's bytes, or noise; ValueError if the SavedModel could not decode them."""
    if not file:
        noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
        return tf.io.encode_png(noise).numpy()
    data = file.read_bytes()
    try:
        pictures.decode_image(tf.constant(data))
    except tf.errors.OpError:
        raise ValueError(f"--check={file} holds no JPEG, PNG or WebP that can be decoded") from None
    return data


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 what was written is not the same, 2 wrong use."""
    made = load_run.parser(__doc__)
    made.add_argument("--out", type=path_argument, required=True, help="output folder")
    made.add_argument("--check", type=path_argument, help="a picture for the check; default: noise")
    made.add_argument("--onnx", action="store_true", help="the network alone as OUT/model.onnx too")
    own, flags = made.parse_known_args(argv[1:])
    config = load_run.settings(own.run_dir, ["--eval_crop=0", *flags])
    return load_run.on_ranks(config, own, export)
