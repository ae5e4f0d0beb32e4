"""Exports the model of a trained run as a SavedModel, which needs none of this code, and as .keras.

    hvdkit export --run_dir=runs/demo --out=exported [--check=photo.jpg] [--onnx]

OUT/saved_model has the signature serving_default. Of a task with `picture_inputs` it takes "image":
JPEG, PNG or WebP files, text [B], of pictures of one size, and there is a second one, "pictures",
which takes "image": uint8 [B, height, width, 3]. Of any other task it takes the model's own inputs
by name; what is no letter, digit or _ in a name becomes _.
They give what the task's `decode` returns; without it "probabilities", float32 [B, ..., classes],
and "classes", int64, the most probable class, where the loss is softmax cross-entropy; else the
model's outputs by name, which of pictures is refused. The SavedModel includes everything that
evaluation does to a picture. To check it, a new process without this code loads it and predicts
the picture or examples of --check, or noise; the outputs must equal those of `hvdkit predict`.
OUT/model.keras is the model alone, for use with Keras. Notes say what it needs to be loaded, or
that Keras cannot write or load it; the SavedModel is written all the same. OUT/card.json and the
SavedModel's assets.extra/card.json hold the checkpoint's data card: class names in the order of the
outputs, colour order, sizes, training data. What an earlier export left in OUT is replaced at the
end, and stays where this one fails; what somebody else put there under these names is refused.

With --onnx, OUT/model.onnx is the network alone, by tf2onnx: it takes what the task's
`picture_inputs` returns (which may scale a picture; tf2onnx cannot convert TensorFlow's antialiased
resize) or the model's inputs, and gives what `decode` takes. ONNX Runtime's outputs must be near
the model's.
"""

import base64
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdkit import whole_files
from hvdkit.checkpoint import files
from hvdkit.commands import example_files
from hvdkit.data.readers import pictures
from hvdkit.logs import join, printable, quiet
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, raw
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import BUG, WRONG_USE, Stop, passes
from hvdkit.train.layers import dropout
from hvdkit.train.step.state import unchanged
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import outputs as outputs_lib
from hvdkit.train.task import protocol as tasks
from hvdkit.train.task.protocol import Task

SAVED_MODEL = "saved_model"
KERAS = "model.keras"
CARD = "card.json"  # written into the SavedModel's assets.extra too
ONNX = "model.onnx"
WRITTEN = (SAVED_MODEL, KERAS, CARD, ONNX)  # names in --out
# ONNX Runtime does not cast its inputs.
_ONNX_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64}
_LONGEST = 300  # characters of a reason; the rest is cut
# Outputs may differ by this share of a value, and of the median: kernels add in another order.
_NEAR = 1e-3
# This program runs in a new process without the project.
_LOADER = """
import base64, json, sys
import numpy as np
import tensorflow as tf
tf.config.set_visible_devices([], "GPU")
folder, names, given, found, fault = sys.argv[1:]
def text(values):
    plain = [base64.b64decode(value) for value in values.ravel()]
    return np.array(plain, object).reshape(values.shape)
with np.load(given) as file:
    arrays = [file[f"arr_{n}"] for n in range(len(file.files))]
arrays = [text(x) if x.dtype.kind == "S" else x for x in arrays]
loaded = tf.saved_model.load(folder + "/saved_model")
serve = loaded.signatures["serving_default"]
specs = serve.structured_input_signature[1]
named = {n: tf.cast(x, specs[n].dtype) if x.dtype != object else tf.constant(x, tf.string)
         for n, x in zip(json.loads(names), arrays)}
outputs = serve(**named)
values = [outputs[name].numpy() for name in sorted(outputs)]
np.savez(found, *[x.astype(KINDS.get(x.dtype.name, x.dtype)) for x in values])
sys.modules["hvdkit"] = None
import keras
try:
    keras.saving.load_model(folder + "/model.keras", compile=False)
except Exception as error:
    open(fault, "w").write(str(error))
"""


_TRACKABLE = (
    tf.saved_model.experimental.TrackableResource,
    tf.Variable,
    tf.Module,
    keras.Layer,
)


def _trackable(value: Any) -> Iterator[Any]:
    """What of a task's attribute a SavedModel can hold, also in lists and dicts."""
    if isinstance(value, keras.random.SeedGenerator):
        value = value.state
    if isinstance(value, keras.Variable):
        value = raw(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _trackable(part)
    elif isinstance(value, _TRACKABLE):
        yield value
        # TensorFlow does not find the seeds of a layer's generators by itself.
        if isinstance(value, keras.Layer):
            yield from _trackable(value.variables)


class Exported(tf.Module):
    """What is saved: the model, with the task's processing before and after it.

    Attributes:
      changing: the variables that a call may change, as seeds of what draws in inference.
    """

    def __init__(self, task: Task, model: keras.Model, decode: load_run.Decode) -> None:
        super().__init__()
        self.of_model = list(_trackable(model))
        self.model = model
        self._task = task
        self._decode = decode
        # The task's functions use its tables, variables and layers; a SavedModel has only what
        # attributes of its module hold.
        self.of_task = list(_trackable(vars(task)))
        self.changing = [
            part
            for part in (*self.of_model, *self.of_task)
            if isinstance(part, tf.Variable) and not part.trainable
        ]

    def of_inputs(self, inputs: Any) -> dict[str, tf.Tensor]:
        """The outputs for a batch of what the model takes."""
        outputs = task_checks.outputs(self._task, self.model, inputs)
        with task_checks.user_code_errors("decode"):
            return self._decode(outputs)

    def of_pictures(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """The outputs for pictures of one size, uint8 [B, height, width, 3]."""
        example = self._task.picture_inputs(tf.zeros([8, 8, 3], tf.uint8))
        specs = tf.nest.map_structure(
            lambda part: tf.TensorSpec([None] * part.shape.rank, part.dtype), example
        )
        inputs = tf.map_fn(self._task.picture_inputs, image, fn_output_signature=specs)
        return outputs_lib.one_each(self.of_inputs(inputs), tf.shape(image)[0])

    def of_files(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """The outputs for JPEG, PNG or WebP files, text [B], whose pictures are of one size."""
        spec = tf.TensorSpec([None, None, 3], tf.uint8)
        return self.of_pictures(
            tf.map_fn(pictures.decode_image, image, fn_output_signature=spec)
        )


class Exports(NamedTuple):
    """What is exported, and inputs to check it with."""

    run: load_run.Trained
    module: Exported
    signatures: dict[str, Any]
    example: Any  # a batch of what the model takes
    arguments: dict[str, np.ndarray]  # arguments of serving_default, by name


def export(
    config: Settings, world: World, stop_signal: StopSignal, *, arguments: Any
) -> None:
    """Writes the model of a checkpoint into --out, and prints where.

    What the outputs mean is said by the task's `decode`, else by hvdkit/train/task/outputs.py.

    Raises Stop where it cannot be done, or where what was written gives other outputs.
    """
    if world.size > 1:
        raise Stop(WRONG_USE, "hvdkit export writes one model: start it on one rank")
    if config.precision == "bfloat16" and arguments.onnx:
        raise Stop(
            WRONG_USE,
            "--onnx: the run has --precision=bfloat16, which tf2onnx and ONNX Runtime do not "
            "compute with: add --precision=float32",
        )
    with world.fail_together("exporting"):
        check: Path | None = arguments.check
        gives_picture = check is not None and check.suffix not in example_files.SUFFIXES
        # A file that is no picture is refused before the model is loaded.
        picture = _picture(check) if gives_picture else None
        inputs = [check] if check else []
        with whole_files.replaced(
            arguments.out.absolute(), WRITTEN, inputs=inputs
        ) as folder:
            run = load_run.trained(
                config, arguments.checkpoint, arguments.ema, for_pictures=gives_picture
            )
            if tasks.optional(run.task, "picture_inputs"):
                if check and not gives_picture:
                    raise Stop(
                        WRONG_USE,
                        f"--check={check}: task {config.task} takes a picture",
                    )
                exports = _of_pictures(run, config, picture)
            else:
                exports = _of_examples(run, config, check)
            notes = _write(exports, folder)
            if arguments.onnx:
                takes = to_onnx(run.model, exports.example, folder / ONNX)
                notes.append(f"{arguments.out / ONNX}: the network alone, {takes}")
    print(printable(f"exported {run.path}: {arguments.out / SAVED_MODEL}"))
    for note in notes:
        print(printable(note))


def _of_pictures(
    run: load_run.Trained, config: Settings, picture: bytes | None
) -> Exports:
    data = picture or _picture(None)
    way_out = ""
    if picture is None:
        way_out = (
            " (with noise of 96 x 128 pixels: --check=FILE gives a picture of a size that the "
            "model takes)"
        )
    with task_checks.user_code_errors("picture_inputs"):
        inputs = run.task.picture_inputs(pictures.decode_image(tf.constant(data)))
    example = tf.nest.map_structure(lambda part: part[None], inputs)
    try:
        task_checks.outputs(run.task, run.model, example)
    except ValueError as error:
        raise ValueError(f"{error}{way_out}") from error
    module = Exported(run.task, run.model, load_run.decoder(run, config, example))
    signatures = {
        "serving_default": _function(module.of_files, [None], tf.string),
        "pictures": _function(module.of_pictures, [None, None, None, 3], tf.uint8),
    }
    return Exports(
        run, module, signatures, example, {"image": np.array([data, data], object)}
    )


def _of_examples(
    run: load_run.Trained, config: Settings, check: Path | None
) -> Exports:
    """The SavedModel takes the model's own inputs."""
    arrays = example_files.some(check, run.inputs)
    example = run.inputs.nested(arrays)
    try:
        decode = load_run.decoder(run, config, example)
    except ValueError as error:
        way_out = (
            ""
            if check
            else " (with noise: --check=FILE gives it examples, .npz or .jsonl)"
        )
        raise ValueError(f"{error}{way_out}") from error
    module = Exported(run.task, run.model, decode)
    specs = run.inputs.arguments()

    def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        return module.of_inputs(run.inputs.nested(dict(zip(specs, tensors))))

    signatures = {
        "serving_default": tf.function(
            serve, input_signature=[*specs.values()], autograph=False
        )
    }
    arguments = {specs[name].name: array for name, array in arrays.items()}
    return Exports(run, module, signatures, example, arguments)


def _write(exports: Exports, folder: Path) -> list[str]:
    """Writes all but ONNX's file into a folder, and checks it; what is to be said of it.

    Raises Stop: the SavedModel cannot be loaded in a new process, or gives other outputs there.
    """
    card = files.read_manifest(exports.run.path).card
    saved = folder / SAVED_MODEL
    with quiet(), task_checks.user_code_errors("saving the model"):
        tf.saved_model.save(exports.module, str(saved), exports.signatures)
    (saved / "assets.extra").mkdir(exist_ok=True)
    for file in (folder / CARD, saved / "assets.extra" / CARD):
        whole_files.write_json(file, card)
    note = _write_keras(exports, folder / KERAS)
    # As a graph, like the loaded model: eager operations round differently.
    tensors = {name: tf.constant(array) for name, array in exports.arguments.items()}
    wanted = exports.signatures["serving_default"].get_concrete_function()(**tensors)
    outputs, fault = loaded_elsewhere(folder, exports.arguments, [*wanted])
    for name, tensor in wanted.items():
        array = example_files.kept(tensor.numpy())
        is_float = array.dtype.kind == "f"
        if not np.array_equal(array, outputs[name], equal_nan=is_float):
            raise Stop(
                BUG, f"loaded in a new process {name} differ: nothing is exported"
            )
    if fault and not note:
        note = f"note: {KERAS} {_needs(exports.run.model, fault)}; the SavedModel needs no code"
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items())
    equal = f"loaded in a new process without this code: equal outputs ({shapes})"
    return [note, equal] if note else [equal]


def _write_keras(exports: Exports, file: Path) -> str:
    """Writes the model as .keras where Keras can, and reads it back; a note on what it cannot do.

    Raises OSError: the disk is full.
    """
    run = exports.run
    try:
        with warnings.catch_warnings():
            # Keras warns of what it may not be able to load; loading is tried here.
            warnings.simplefilter("ignore")
            run.model.save(file)
    except Exception as error:  # layers' own code may raise anything
        if passes(error):
            raise OSError(str(error)) from error
        file.unlink(missing_ok=True)
        return f"note: there is no {KERAS}: Keras cannot write it: {_sentence(error)}"
    loaded, note = _loaded_again(run.model, file)
    if not loaded:
        return note
    if _vocabularies(run.model) != _vocabularies(loaded):
        file.unlink()
        return (
            f"note: there is no {KERAS}: loaded again it has another vocabulary (Keras writes a "
            "word a line: does a word hold a line break, U+0085, U+2028 or a form feed?)"
        )
    # Keras does not save seeds, so that what draws in inference draws other numbers.
    generators = [dropout.generators(x._flatten_layers()) for x in (run.model, loaded)]
    for one, other in zip(*generators):
        other.state.assign(one.state)
    both = []
    for each in (run.model, loaded):
        with unchanged(exports.module.changing):
            model_outputs = task_checks.outputs(run.task, each, exports.example)
        both.append(tf.nest.flatten(model_outputs))
    wanted, outputs = both
    if all(_near(one, other) for one, other in zip(wanted, outputs)):
        return note
    file.unlink()
    return (
        f"note: there is no {KERAS}: loaded again it gives other outputs "
        "(does a layer's get_config leave something out?)"
    )


def _loaded_again(model: keras.Model, file: Path) -> tuple[keras.Model | None, str]:
    """The model in a .keras file, if anybody can load it; a note on what load_model must be given.

    Keras finds classes that are registered, and refuses functions of Python in its safe mode.
    """
    classes = {type(layer).__name__: type(layer) for layer in _foreign(model)}
    # Each way: words of the note, custom_objects, safe_mode.
    ways: list[tuple[str, dict[str, type] | None, bool]] = [("", None, True)]
    if classes:
        names = ", ".join(classes)
        ways.append((f"custom_objects of {names}", classes, True))
        ways.append((f"safe_mode=False, and custom_objects of {names}", classes, False))
    else:
        ways.append(("safe_mode=False", None, False))
    reasons = []
    for words, custom_objects, safe_mode in ways:
        try:
            loaded = keras.saving.load_model(
                file, custom_objects=custom_objects, compile=False, safe_mode=safe_mode
            )
        except Exception as error:  # layers' own code may raise anything
            reasons.append(_sentence(error))
            continue
        if not reasons:
            return loaded, ""
        return loaded, f"note: load_model takes {KERAS} with {words} only: {reasons[0]}"
    return None, f"note: nobody can load {KERAS}: {reasons[-1]}"


def _vocabularies(model: keras.Model) -> list[list[str]]:
    """The words of each layer that has some; the noise by which outputs are compared has none."""
    vocabularies = []
    for layer in model._flatten_layers():
        if hasattr(layer, "get_vocabulary"):
            vocabularies.append([str(word) for word in layer.get_vocabulary()])
    return vocabularies


def _foreign(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers that are not Keras's own."""
    layers = model._flatten_layers()
    return [
        layer for layer in layers if not type(layer).__module__.startswith("keras.")
    ]


def _near(one: tf.Tensor, other: tf.Tensor) -> bool:
    if one.dtype == tf.string or one.shape != other.shape:
        return np.array_equal(one, other)
    array = tf.cast(one, tf.float64).numpy()
    other_array = tf.cast(other, tf.float64).numpy()
    return np.allclose(array, other_array, _NEAR, atol=1e-6, equal_nan=True)


def _needs(model: keras.Model, fault: str) -> str:
    """What whoever loads model.keras needs; `fault`: what Keras says without."""
    classes = {type(layer) for layer in _foreign(model)}
    names = sorted(f"{layer.__module__}.{layer.__name__}" for layer in classes)
    if names:
        return (
            f"has layers that are not Keras's own, {', '.join(names)}: import their modules "
            "before you load it"
        )
    return f"cannot be loaded without this code: {_sentence(fault)}"


def _sentence(error: object) -> str:
    """The first sentence of what Keras says."""
    text = re.split(r"Exception encountered(?: when calling \S+\s|:)", str(error))[-1]
    text = " ".join(text.split()).split(". ")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def to_onnx(model: keras.Model, inputs: Any, file: Path) -> str:
    """Writes the network and runs it on `inputs`, a batch; returns what it takes and gives.

    Raises ValueError: the packages are not there, or tf2onnx cannot convert the model. Stop: its
    outputs are others.
    """
    try:
        import onnxruntime
        import tf2onnx  # noqa: F401  (Keras calls it)
    except ImportError as error:
        raise ValueError(
            f"--onnx: there is no {error.name}: pip install tf2onnx onnx onnxruntime"
        ) from None
    wanted = tf.nest.flatten(model(inputs, training=False))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tf2onnx warns of NumPy's types
            model.export(str(file), format="onnx", verbose=False)
        session = onnxruntime.InferenceSession(file.read_bytes())
        outputs = session.run(None, _fed(session.get_inputs(), inputs))
    except Exception as error:  # a converter may raise anything
        raise ValueError(
            f"--onnx: {model.name} cannot be converted: {error!s:.300}"
        ) from None
    for tensor, output in zip(wanted, outputs, strict=True):
        array = tensor.numpy()
        sizes = np.abs(array[np.isfinite(array) & (array != 0)], dtype=np.float64)
        tolerance = _NEAR * np.median(sizes) if sizes.size else 0.0
        is_shape = array.shape == output.shape
        if not is_shape or not np.allclose(
            array, output, _NEAR, tolerance, equal_nan=True
        ):
            raise Stop(
                BUG,
                f"{file.name} has other outputs in ONNX Runtime: nothing is exported",
            )
    words = []
    for end in (*session.get_inputs(), *session.get_outputs()):
        sizes = [size if isinstance(size, int) else "any" for size in end.shape]
        words.append(f"{end.name} {end.type} {sizes}")
    return ", ".join(words)


def _fed(takes: Sequence[Any], inputs: Any) -> dict[str, np.ndarray]:
    """What ONNX Runtime is given: it casts nothing, and lacks inputs that are not needed."""
    names = [node.name for node in takes]
    tensors = tf.nest.flatten(inputs)
    if isinstance(inputs, Mapping) and {*names} <= {*inputs}:
        tensor_of = inputs
    elif len(names) == len(tensors):
        tensor_of = dict(zip(names, tensors))
    else:
        raise ValueError(f"of its inputs it has only {join(names)}")
    return {
        node.name: np.asarray(tensor_of[node.name], _ONNX_TYPES.get(node.type))
        for node in takes
    }


def loaded_elsewhere(
    folder: Path, arguments: dict[str, np.ndarray], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], str]:
    """In a new process: the SavedModel's outputs by `names`; why Keras cannot load model.keras.

    Raises Stop: the SavedModel cannot be loaded, or called.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch, "inputs.npz")
        outputs = Path(scratch, "outputs.npz")
        fault = Path(scratch, "fault")
        np.savez(inputs, *[_sent(array) for array in arguments.values()])
        program = f"KINDS = {example_files.KINDS}{_LOADER}"
        command = [sys.executable, "-I", "-c", program]
        command += [
            str(folder),
            json.dumps([*arguments]),
            str(inputs),
            str(outputs),
            str(fault),
        ]
        ended = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise Stop(BUG, f"the SavedModel cannot be loaded in a new process: {last}")
        with np.load(outputs) as archive:
            values = [archive[f"arr_{number}"] for number in range(len(names))]
        return dict(
            zip(sorted(names), values)
        ), fault.read_text() if fault.exists() else ""


def _sent(array: np.ndarray) -> np.ndarray:
    """An array as NumPy's files hold it; texts in base64, as they would lose zeros at their end."""
    if array.dtype != object:
        return example_files.kept(array)
    texts = [base64.b64encode(value) for value in array.ravel()]
    return np.array(texts, "S").reshape(array.shape)


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
        raise ValueError(
            f"--check={file} holds no JPEG, PNG or WebP that can be decoded"
        ) from None
    return data


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 what was written is not the same, 2 wrong use."""
    parser = load_run.parser(__doc__)
    parser.add_argument(
        "--out", type=path_argument, required=True, help="output folder"
    )
    parser.add_argument(
        "--check",
        type=path_argument,
        help="picture, or examples, for the check; default: noise",
    )
    parser.add_argument(
        "--onnx", action="store_true", help="the network alone as OUT/model.onnx too"
    )
    arguments, flags = parser.parse_known_args(argv[1:])
    # The outputs are compared with a new process's to the last bit: both compute on CPUs.
    fixed = ["--eval_crop=0", "--device=cpu", "--reduce_backend=auto"]
    config = load_run.settings(arguments.run_dir, [*fixed, *flags])
    return load_run.on_ranks(config, arguments, export)
