"""Files of examples, for models that do not take pictures, and of predictions on them.

.npz: an array [examples, ...] for each input, by its name. .jsonl: a JSON object a line, with a
number, a text or nested lists for each input. Predictions are in a file of the same kind, in the
same order.
"""

import contextlib
import heapq
import itertools
import json
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.checkpoint import files
from hvdkit.launcher import launch_rank
from hvdkit.logs import join, say
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World
from hvdkit.stop import PREEMPTED, Stop
from hvdkit.train.task.inputs import Inputs, describe_input

# Types that NumPy's files lack, and what they are written as.
KINDS = {"object": "S", "bfloat16": "f4"}
SUFFIXES = (".npz", ".jsonl")
LINES = "predictions.jsonl"
ARRAYS = "predictions.npz"
NO_CLASS = "the model's outputs are no numbers (NaN), so it has no class"
_NOISE_SIZE = 16  # size of an axis of noise, where the input takes any
_NOISE_EXAMPLES = 2  # batch size of noise, where the model takes any
_MORE_BYTES = 2**30  # most bytes of a file's arrays, beyond the file's size

# By name of an input: arrays [...] of all examples, or one array [examples, ...].
Columns = Mapping[str, Sequence[np.ndarray] | np.ndarray]
Batch = dict[str, np.ndarray]  # arrays [batch, ...] by name


def read(file: Path, inputs: Inputs) -> Columns:
    """The examples of a file, checked, in the types of the inputs.

    Raises ValueError or OSError, naming the line or array, and what the input takes.
    """
    columns = (
        _of_arrays(file, inputs) if file.suffix == ".npz" else _of_lines(file, inputs)
    )
    if not count(columns):
        raise ValueError(f"{file} holds no example")
    return columns


def count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _of_arrays(file: Path, inputs: Inputs) -> Columns:
    try:
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            files.check_zip(archive.zip, opened, more=_MORE_BYTES)
            arrays = {name: archive[name] for name in archive.files}
    except OSError:
        raise
    except Exception as error:  # zipfile and NumPy raise anything at damaged bytes
        raise ValueError(f"{file} is no file of arrays by np.savez: {error}") from None
    _check_names(arrays, str(file), inputs)
    columns = {}
    for name, spec in inputs.specs.items():
        array = arrays[name]
        column = f"{file}: {name}"
        if not array.ndim:
            raise ValueError(
                f"{file}: {name} is one value, not an array with an entry an example"
            )
        shape = _shape(array.shape[1:], column, spec)
        columns[name] = _converted(array.reshape([len(array), *shape]), column, spec)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{file}: arrays must be of one length, an entry an example: {lengths}"
        )
    return columns


def _of_lines(file: Path, inputs: Inputs) -> Columns:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in inputs.names}
    unread: set[str] = set()
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            example = whole_files.from_json(line, f"{file}, line {number}")
            if not isinstance(example, dict):
                raise ValueError(
                    f"{file}, line {number} is no JSON object: write {{...}} with {inputs}"
                )
            unread |= _check_names(
                example, f"{file}, line {number}", inputs, told=unread
            )
            for name, spec in inputs.specs.items():
                value = f"{file}, line {number}: {name}"
                array = _array(example[name], value)
                shape = _shape(array.shape, value, spec)
                columns[name].append(_converted(array.reshape(shape), value, spec))
    return columns


def _check_names(
    names: Collection[str], where: str, inputs: Inputs, *, told: Set[str] = frozenset()
) -> set[str]:
    """Names that are no inputs, which a note says once; ValueError where an input is lacking."""
    for name in inputs.names:
        if name not in names:
            raise ValueError(f"{where} has no {name}; the model takes {inputs}")
    unread = set(names) - set(inputs.names)
    new = sorted(unread - told)
    if new and launch_rank() == 0:
        say(f"note: {where} has {join(new)}, no input of the model: not read")
    return unread


def _array(value: Any, where: str) -> np.ndarray:
    """A value of JSON as an array of numbers, of bools or of texts."""
    try:
        array = np.array(value)
    except ValueError:
        raise ValueError(f"{where} holds lists of different lengths") from None
    # Of numbers beside a text NumPy makes texts.
    is_mixed = array.dtype.kind == "U" and not _is_text(value)
    if array.dtype == object or is_mixed:
        raise ValueError(
            f"{where} is {json.dumps(value):.60}: write numbers (NaN for a missing one) or texts "
            "alone"
        )
    return array


def _is_text(value: Any) -> bool:
    """Whether a value is text, or all values in nested lists are."""
    if isinstance(value, list):
        return all(_is_text(part) for part in value)
    return isinstance(value, str)


def _shape(shape: Sequence[int], where: str, spec: tf.TensorSpec) -> list[int]:
    """The shape of an example, checked; a number may stand for a list of one."""
    shape = list(shape)
    taken = spec.shape[1:]
    if taken.is_compatible_with(shape):
        return shape
    if taken.rank and taken[-1] == 1 and taken[:-1].is_compatible_with(shape):
        return [*shape, 1]
    raise ValueError(
        f"{where} has examples of shape {shape}; the model takes {describe_input(spec)}"
    )


def _converted(array: np.ndarray, where: str, spec: tf.TensorSpec) -> np.ndarray:
    """The array in the input's type; ValueError where that would change a value."""
    if spec.dtype == tf.string:
        if array.size and array.dtype.kind not in "US":
            raise ValueError(
                f"{where} holds {array.dtype}, not texts; the model takes {describe_input(spec)}"
            )
        texts = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
        return texts.astype(object)
    if array.size and array.dtype.kind not in "biuf":
        raise ValueError(
            f"{where} holds {array.dtype}, not numbers; the model takes {describe_input(spec)}"
        )
    with np.errstate(all="ignore"):
        converted = array.astype(spec.dtype.as_numpy_dtype)
    if spec.dtype.is_floating:  # rounding is allowed
        is_kept = np.array_equal(np.isinf(converted), np.isinf(array))
    else:
        is_kept = np.array_equal(converted, array)
    if not is_kept:
        raise ValueError(
            f"{where} holds a value that {spec.dtype.name} cannot; the model takes "
            f"{describe_input(spec)}"
        )
    return converted


def some(file: Path | None, inputs: Inputs) -> Batch:
    """A batch to try the model with: the first example of a file twice, or noise."""
    if file:
        return batch(read(file, inputs), [0, 0])
    random = np.random.default_rng(0)
    arrays = {}
    for name, spec in inputs.specs.items():
        sizes = [_NOISE_SIZE if size is None else size for size in spec.shape[1:]]
        shape = [spec.shape[0] or _NOISE_EXAMPLES, *sizes]
        if spec.dtype == tf.string:
            arrays[name] = np.full(shape, b"", object)
        elif spec.dtype.is_floating:
            arrays[name] = random.normal(size=shape).astype(spec.dtype.as_numpy_dtype)
        else:
            # Zeros are valid for any integer input: as an index, a class or a flag.
            arrays[name] = np.zeros(shape, spec.dtype.as_numpy_dtype)
    return arrays


def batches(columns: Columns, indices: range, most: int) -> Iterator[range]:
    """Yields ranges of at most `most` neighbours whose inputs have the same shapes."""
    start = indices.start
    for stop in range(start + 1, indices.stop + 1):
        is_full = stop - start == most
        is_last = stop == indices.stop
        if is_full or is_last or _shapes(columns, stop) != _shapes(columns, start):
            yield range(start, stop)
            start = stop


def _shapes(columns: Columns, index: int) -> list[tuple[int, ...]]:
    return [np.shape(column[index]) for column in columns.values()]


def batch(columns: Columns, indices: Iterable[int]) -> Batch:
    """The examples of these numbers, stacked."""
    return {
        name: np.stack([column[index] for index in indices])
        for name, column in columns.items()
    }


def kept(array: np.ndarray) -> np.ndarray:
    """The array in a type that NumPy's files hold."""
    return array.astype(KINDS.get(array.dtype.name, array.dtype))


def class_names(checkpoint: Path) -> list[str]:
    """Names of the classes in the checkpoint's data card; [] where they have none."""
    return files.read_manifest(checkpoint).card.get("class_names", [])


def check_stopped(world: World, stop_signal: StopSignal) -> None:
    """Raises Stop, on all ranks, where one was asked to stop."""
    if any(world.gather_objects(bool(stop_signal.asked), "predict.stopped")):
        raise Stop(PREEMPTED, "stopped before the end: nothing was written")


def plain(value: Any) -> Any:
    """Numbers and texts, in lists; NaN and infinity become null, as in the run's records."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray) and value.ndim:
        return [plain(part) for part in value]
    return whole_files.without_nan(value.item() if hasattr(value, "item") else value)


def write_lines(
    file: Path, batches: Sequence[Batch], class_names: Sequence[str]
) -> None:
    """Predictions as JSON, an object a line; with the class's name where it has one."""
    with open(file, "w", encoding="utf-8") as lines:
        for values in batches:
            for place in range(count(values)):
                record = {name: plain(value[place]) for name, value in values.items()}
                number = record.get("classes")
                if isinstance(number, int) and 0 <= number < len(class_names):
                    record.setdefault("class_name", class_names[number])
                lines.write(json.dumps(record) + "\n")


def write_arrays(file: Path, batches: Sequence[Batch]) -> None:
    """Predictions as .npz, an array [examples, ...] by name.

    Raises ValueError where they are of different shapes.
    """
    arrays = {}
    for name in batches[0]:
        arrays[name] = _joined(
            name, [arrays_of_batch[name] for arrays_of_batch in batches]
        )
    _save(file, arrays)


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(
            f"{name} has other shapes from example to example: give them as .jsonl"
        )
    return np.concatenate(parts)


def _save(file: Path, arrays: Batch) -> None:
    """As np.savez, which would take an array named "file" for its own argument."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, kept(array), allow_pickle=False)


def without_class(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where the output "classes" means nothing, as its "probabilities" are no numbers.

    Bools of the shape of "classes"; of size 0 without both, or where there is no axis of classes.
    """
    if not {"classes", "probabilities"} <= outputs.keys():
        return np.zeros([0], bool)
    probabilities = np.asarray(outputs["probabilities"])
    if probabilities.shape[:-1] != np.shape(outputs["classes"]):
        return np.zeros([0], bool)
    is_nan = np.asarray(probabilities != probabilities)  # NaN differs from itself.
    return np.asarray(is_nan.any(axis=-1))


def merge_parts(file: Path, parts: Sequence[Path]) -> None:
    """Puts predictions on pictures, lines that each rank has sorted by file, into one file.

    Prints the beginning of each; removes the parts, and writes no file without lines.
    """
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(part, encoding="utf-8")) for part in parts]
        lines = heapq.merge(*files, key=_file_of)
        first = next(lines, None)
        if first is not None:
            joined = opened.enter_context(open(file, "w", encoding="utf-8"))
            for line in itertools.chain([first], lines):
                joined.write(line)
                print(logs.printable(f"{line:.200}".rstrip("\n")))
    for part in parts:
        part.unlink()


def _file_of(line: str) -> str:
    """The file of a picture's line, which it begins with."""
    name, _ = json.JSONDecoder().raw_decode(line, len('{"file": '))
    return str(name)  # A task's own output may be named so, and hold anything.


def join_parts(file: Path, parts: Sequence[Path]) -> None:
    """Puts the predictions of all ranks, in their order, into one file; removes the parts."""
    if file.suffix == ".jsonl":
        with open(file, "wb") as joined:
            for part in parts:
                with open(part, "rb") as lines:
                    shutil.copyfileobj(lines, joined)
    else:
        with contextlib.ExitStack() as opened:
            archives = [opened.enter_context(np.load(part)) for part in parts]
            arrays = {}
            for name in archives[0].files:
                arrays[name] = _joined(name, [archive[name] for archive in archives])
            _save(file, arrays)
    for part in parts:
        part.unlink()
