"""Weights of .keras files, as arrays by name: no model in such a file is ever made.

Keras writes a layer's variables to PATH/vars/0, PATH/vars/1, ..., where PATH says how the layer is
reached, and the layer's name to an attribute of PATH/vars. The model here is written the same way,
so that one reader gives both sides their names.
"""

import contextlib
import io
import math
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import h5py
import keras
import ml_dtypes
import numpy as np

from hvdkit import whole_files
from hvdkit.checkpoint import files
from hvdkit.train.step.state import to_snake_case

# Parts of a .keras file: the weights, and what describes the model.
_WEIGHTS = "model.weights.h5"
_CONFIG = "config.json"
_MOST_PACKED = 1_100  # One stored byte unpacks to at most so many: gzip reaches 1,032.
_DEEPEST = 100  # Groups may lie in each other so deep.
_FILTERS = {
    h5py.h5z.FILTER_DEFLATE,
    h5py.h5z.FILTER_SHUFFLE,
    h5py.h5z.FILTER_FLETCHER32,
}
# Parts of a saved model that are no weights of it, by the attribute that leads to them.
_NO_WEIGHTS = ("optimizer", "seed_generator", "metrics", "_metrics")
_PLAIN_MODELS = ("functional", "sequential")
_CLASSES = {to_snake_case(name) for name in dir(keras.layers)}


class Entry(NamedTuple):
    """A variable in a file: its layer's name as Keras gave it, and its number in the layer."""

    layer: str
    number: int
    values: h5py.Dataset


def read(path: Path) -> dict[str, np.ndarray]:
    """Weights of a .keras file by name, as `entries` names them.

    Raises ValueError, in one line, where it is damaged.
    """
    with _opened(path, _WEIGHTS) as archive:
        weights = io.BytesIO(archive.read(_WEIGHTS))
        check_values(weights)
        with h5py.File(weights) as file:
            return {
                name: array_of(entry.values) for name, entry in entries(file).items()
            }


def tables(path: Path) -> set[str]:
    """Vocabularies, special words and boundaries of Keras's layers in a .keras file, as texts.

    Raises ValueError, in one line, where it is damaged.
    """
    texts = set()
    with _opened(path, _CONFIG) as archive:
        for name in archive.namelist():
            # Keras writes a vocabulary so that a layer was not given when it was made.
            if name.startswith("assets/") and name.endswith("/vocabulary.txt"):
                texts.add(archive.read(name).decode())
        left = [whole_files.from_json(archive.read(_CONFIG), _CONFIG)]
        while left:
            part = left.pop()
            if isinstance(part, list):
                left += part
            if not isinstance(part, dict):
                continue
            left += part.values()
            # What a project's own layer calls its vocabulary may be part of one.
            if part.get("module") == "keras.layers" and isinstance(
                part["config"], dict
            ):
                texts |= _texts_of_config(part["config"])
    return texts


def _texts_of_config(config: dict[str, Any]) -> set[str]:
    texts = special_words(config)
    if isinstance(config.get("vocabulary"), list):
        texts.add(_lines(config["vocabulary"]))
    if isinstance(config.get("bin_boundaries"), list):
        texts.add(_lines(np.array(config["bin_boundaries"], np.float32)))
    return texts


def special_words(config: Mapping[str, Any]) -> set[str]:
    """A text of what a lookup layer puts before its vocabulary; none for other layers."""
    if "num_oov_indices" not in config:
        return set()
    names = ("num_oov_indices", "mask_token", "oov_token")
    return {_lines(f"{name}: {config.get(name)}" for name in names)}


def texts_of_table(layer: keras.Layer) -> set[str]:
    """What `tables` gives of a file with this layer: its words may include special ones, or not."""
    boundaries = getattr(layer, "bin_boundaries", None)
    if boundaries is not None:
        return {_lines(np.array(boundaries, np.float32))}
    texts = {_lines(layer.get_vocabulary())}
    # A project's own layer may know no special ones.
    with contextlib.suppress(TypeError):
        texts.add(_lines(layer.get_vocabulary(include_special_tokens=False)))
    return texts


def _lines(entries: Iterable[Any]) -> str:
    return "\n".join(str(entry) for entry in entries)


@contextlib.contextmanager
def _opened(path: Path, part: str) -> Iterator[zipfile.ZipFile]:
    """A .keras file with this part; whatever fails becomes a ValueError of one line."""
    try:
        with path.open("rb") as content, zipfile.ZipFile(content) as archive:
            files.check_zip(archive, content)
            if part not in archive.namelist():
                raise ValueError(f"it holds no {part}")
            yield archive
    except Exception as error:
        # zipfile and h5py raise errors of many kinds for a damaged file.
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be read: {lines[0]}") from None


def entries(file: h5py.File) -> dict[str, Entry]:
    """Weights by the names of their layers, outermost first, and their number in the layer.

    A layer that Keras named, by its class and a number, is numbered anew among its neighbours; a
    name that a person gave stays. Functional and sequential models do not appear in names. Of
    variables that share a name the second gets " #2".
    """
    pairs: list[tuple[str, Entry]] = []

    def visit(group: h5py.Group, prefix: str, counts: Counter[str]) -> None:
        for part, child in _children(group):
            name = _layer_name(child)
            # Lists and plain models do not appear in names.
            if not name or _without_number(part) in _PLAIN_MODELS:
                visit(child, prefix, counts)
                continue
            layer_prefix = f"{prefix}{_renumbered(name, part, counts)}/"
            for number in _numbers(child["vars"]):
                entry = Entry(name, number, child["vars"][str(number)])
                pairs.append((f"{layer_prefix}{number}", entry))
            visit(child, layer_prefix, Counter())

    visit(file, "", Counter())
    return unique(pairs)


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by name; where several share a name, the second gets " #2"."""
    seen: Counter[str] = Counter()
    values = {}
    for name, value in pairs:
        seen[name] += 1
        values[name if seen[name] == 1 else f"{name} #{seen[name]}"] = value
    return values


def _numbers(variables: h5py.Group) -> list[int]:
    """The numbers of a layer's variables. Raises ValueError where one is no number or no array."""
    places = {str(number) for number in range(len(variables))}
    for name, values in variables.items():
        if name not in places:
            raise ValueError(
                f"{variables.name}/{name} is not named by its place in the layer"
            )
        if not _is_of_numbers(values):
            raise ValueError(f"{variables.name}/{name} is no array of numbers")
    return list(range(len(variables)))


def _is_of_numbers(values: h5py.Group | h5py.Dataset) -> bool:
    if not isinstance(values, h5py.Dataset):
        return False
    if values.attrs.get("dtype") == "bfloat16":
        return values.dtype.itemsize == 2
    return values.dtype.kind in "biuf"


def _children(group: h5py.Group) -> list[tuple[str, h5py.Group]]:
    """Layers and lists of layers, in the order in which Keras numbered their names."""
    children = []
    for part, child in group.items():
        holds_weights = part != "vars" and _without_number(part) not in _NO_WEIGHTS
        if holds_weights and isinstance(child, h5py.Group):
            children.append((part, child))

    def order(item: tuple[str, h5py.Group]) -> tuple[str, int]:
        part, child = item
        name = _layer_name(child) or part
        number = re.search(r"_(\d+)$", name)
        return _without_number(name), int(number[1]) if number else 0

    return sorted(children, key=order)


def _layer_name(group: h5py.Group) -> str:
    """A layer's name; empty for a list of layers."""
    return str(group["vars"].attrs.get("name", "")) if "vars" in group else ""


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _renumbered(name: str, part: str, counts: Counter[str]) -> str:
    base = _without_number(name)
    # keras.layers.Bidirectional names its two copies of a layer so.
    class_name = re.sub("^(forward|backward)_", "", base)
    if class_name not in _CLASSES and class_name != _without_number(part):
        return name
    counts[base] += 1
    return base if counts[base] == 1 else f"{base}_{counts[base] - 1}"


def array_of(values: h5py.Dataset) -> np.ndarray:
    """The values as an array; HDF5 has no bfloat16, so Keras notes that type in an attribute."""
    array = np.asarray(values)
    return (
        array.view(ml_dtypes.bfloat16)
        if values.attrs.get("dtype") == "bfloat16"
        else array
    )


@contextlib.contextmanager
def written(model: keras.Model) -> Iterator[h5py.File]:
    """The model's weights as Keras writes them; what is changed inside is then the model's.

    Keras writes a LoRA layer's kernel merged. When it reads one, it makes both factors zeros, of
    which training never comes away: they keep their values.
    """
    factors = [
        variable for variable in model.variables if variable.name.startswith("lora_")
    ]
    before = [variable.numpy() for variable in factors]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        model.save_weights(path)
        with h5py.File(path, "r+") as file:
            yield file
        model.load_weights(path)
    for variable, value in zip(factors, before):
        variable.assign(value)


def assign(values: h5py.Dataset, array: np.ndarray) -> None:
    """Writes an array of the same shape and any type of numbers."""
    if values.attrs.get("dtype") == "bfloat16":
        array = array.astype(ml_dtypes.bfloat16).view(values.dtype)
    values[...] = array.astype(values.dtype)


def check_values(path: Path | IO[bytes]) -> None:
    """Raises ValueError where HDF5 would read from another file, or values that are not stored,
    or would unpack more than a file claims, or would go round in circles."""
    with h5py.File(path) as file:
        seen = {_address(file)}

        def fault(name: str, link: object) -> str | None:
            if isinstance(link, h5py.ExternalLink):
                return f"{name} is in another file, which is not allowed"
            if not isinstance(link, h5py.HardLink):
                return f"{name} is a link, which is not allowed"
            if name.count("/") > _DEEPEST:
                return f"{name[:100]}... lies more than {_DEEPEST} groups deep"
            item = file.get(name)
            if _address(item) in seen:
                return f"{name} is another name of what is in the file once"
            seen.add(_address(item))
            return (
                _fault_of_values(name, item) if isinstance(item, h5py.Dataset) else None
            )

        # It stops at the first fault, and would lose an exception.
        if first_fault := file.visititems_links(fault):
            raise ValueError(first_fault)


def _address(item: h5py.Group | h5py.Dataset | h5py.Datatype) -> int:
    return h5py.h5o.get_info(item.id).addr


def _fault_of_values(name: str, values: h5py.Dataset) -> str | None:
    """Why values cannot be read as they are stored in this file."""
    if values.external or values.is_virtual:
        return f"{name} is in another file, which is not allowed"
    stored = values.id.get_storage_size()
    if values.nbytes > _MOST_PACKED * stored:
        return f"{name} claims {values.nbytes:,} bytes, of which {stored:,} are stored"
    if not values.chunks:
        return None
    chunk = math.prod(values.chunks)
    # HDF5 unpacks whole chunks, also for one value.
    if chunk > 2 * values.size + 2**20:
        return f"{name} holds {values.size:,} values in a chunk of {chunk:,}"
    settings = values.id.get_create_plist()
    filters = [
        settings.get_filter(number)[0] for number in range(settings.get_nfilters())
    ]
    if len(set(filters)) < len(filters) or not _FILTERS.issuperset(filters):
        return (
            f"{name} is packed otherwise than once by gzip (filters of HDF5: {filters})"
        )
    # HDF5 unpacks as much as a chunk's stored bytes say, whatever the chunk's size.
    largest = 2 * chunk * values.dtype.itemsize + 2**16

    def fault_of_chunk(stored: h5py.h5d.StoreInfo) -> str | None:
        if stored.size > largest:
            return f"{name} has a chunk of {stored.size:,} bytes, which holds less"
        return None

    return values.id.chunk_iter(fault_of_chunk)
