"""Values that ranks send each other, as JSON and the arrays that it names.

| value | in the JSON |
| --- | --- |
| None, bool, int, float (NaN too), str (any file name), list | itself |
| tuple, NamedTuple | a list, and it arrives as one |
| dict with str keys | `{"dict": {...}}` |
| NumPy array of a type in DTYPES | `{"array": [type, shape]}`; its bytes follow the JSON |
| bytes, and classes marked `sendable` | `{name: [arrays]}` |

Any other type is a TypeError where it would be sent. Nothing that arrives is run as code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

DTYPES = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
MOST_TEXT = 2**28  # bytes of a message's JSON
MOST_ARRAYS = 2**36  # bytes of its arrays
_LENGTH = 8  # bytes of a number before the JSON

T = TypeVar("T", bound=type)


class _Sendable(NamedTuple):
    kind: type
    arrays: Callable[[Any], Iterable[np.ndarray]]
    made_of: Callable[..., Any]


_SENDABLE = {
    "bytes": _Sendable(
        bytes, lambda value: [np.frombuffer(value, np.uint8)], lambda array: array.tobytes()
    )
}


class Form(NamedTuple):
    """Of an array."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def sendable(name: str) -> Callable[[T], T]:
    """Marks a class: x.arrays() gives a few arrays, and kind.made_of(*arrays) makes x again."""

    def mark(kind: T) -> T:
        _SENDABLE[name] = _Sendable(kind, kind.arrays, kind.made_of)
        return kind

    return mark


def encode(value: Any, name: str) -> tuple[bytes, list[np.ndarray]]:
    """The value's JSON, and its arrays in the order in which the JSON names them.

    Raises:
      TypeError: part of it is of another type than those above; names the exchange `name`.
    """
    arrays: list[np.ndarray] = []
    try:
        return json.dumps(_plain(value, arrays)).encode(), arrays
    except TypeError as error:
        raise TypeError(f"{name!r} cannot be sent to other ranks: {error}") from None


def read(text: bytes) -> tuple[Any, list[Form]]:
    """Checks the JSON of a message: what `build` takes, and the forms of the arrays that follow.

    Raises:
      ValueError: it is not as `encode` writes it, or too large.
    """
    if len(text) > MOST_TEXT:
        raise ValueError(f"{len(text):,} bytes of JSON, more than {MOST_TEXT:,}")
    forms: list[Form] = []
    try:
        plain = json.loads(text.decode("ascii"))
        _walk(plain, forms.append, lambda name, parts: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if (size := sum(form.nbytes for form in forms)) > MOST_ARRAYS:
        raise ValueError(f"{size:,} bytes of arrays, more than {MOST_ARRAYS:,}")
    return plain, forms


def build(plain: Any, arrays: Iterable[np.ndarray]) -> Any:
    """The value again, from what `read` returned and the arrays.

    Raises:
      ValueError: a class does not take its arrays.
    """
    waiting = iter(arrays)

    def make(name: str, parts: list[np.ndarray]) -> Any:
        try:
            return _SENDABLE[name].made_of(*parts)
        except TypeError as error:
            raise ValueError(f"{name!r}: {error}") from None

    return _walk(plain, lambda form: next(waiting).reshape(form.shape), make)


def pack(value: Any, name: str) -> np.ndarray:
    """A whole message, uint8 [n]: length of the JSON, JSON, arrays. Raises TypeError: `encode`."""
    text, arrays = encode(value, name)
    parts = [len(text).to_bytes(_LENGTH, "big"), text, *(array.tobytes() for array in arrays)]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack(message: np.ndarray) -> Any:
    """The value of a `pack`ed message. Raises ValueError where it is not as `pack` writes it."""
    data, start = message.tobytes(), _LENGTH
    end = start + int.from_bytes(data[:start], "big")
    plain, forms = read(data[start:end])
    if end + sum(form.nbytes for form in forms) != len(data):
        raise ValueError(f"{len(data):,} bytes are not those that it declares")
    arrays = []
    for form in forms:
        start, end = end, end + form.nbytes
        arrays.append(np.frombuffer(data[start:end], form.dtype))
    return build(plain, arrays)


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict has the key {odd[0]!r}, and keys must be str")
        return {"dict": {key: _plain(item, arrays) for key, item in value.items()}}
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise TypeError(f"an array of {value.dtype.name}")
        arrays.append(np.ascontiguousarray(value, value.dtype.newbyteorder("=")))
        return {"array": [value.dtype.name, list(value.shape)]}
    for name, known in _SENDABLE.items():
        if type(value) is known.kind:
            return {name: [_plain(array, arrays) for array in known.arrays(value)]}
    raise TypeError(f"{type(value)} is neither JSON nor an array")


def _walk(item: Any, take: Callable[[Form], Any], make: Callable[[str, list], Any]) -> Any:
    """The item anew, with take(form) in place of arrays and make(name, arrays) of other objects."""
    if isinstance(item, list):
        return [_walk(part, take, make) for part in item]
    if not isinstance(item, dict):
        return item
    if len(item) != 1:
        raise ValueError(f"an object with {len(item)} names")
    ((name, content),) = item.items()
    if name == "dict" and isinstance(content, dict):
        return {key: _walk(part, take, make) for key, part in content.items()}
    if name == "array":
        return take(_form(content))
    if name not in _SENDABLE or not isinstance(content, list):
        raise ValueError(f"unknown object {name!r:.100}")
    if not all(isinstance(part, dict) and [*part] == ["array"] for part in content):
        raise ValueError(f"{name!r} is not made of arrays")
    return make(name, [take(_form(part["array"])) for part in content])


def _form(content: Any) -> Form:
    match content:
        case [str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 32:
            if all(type(length) is int and 0 <= length <= MOST_ARRAYS for length in shape):
                return Form(np.dtype(dtype), tuple(shape))
    raise ValueError(f"unknown array {content!r:.100}")
