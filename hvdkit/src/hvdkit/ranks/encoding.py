"""Values that ranks send each other, as JSON and the arrays that it names.

| value | in the JSON |
| --- | --- |
| None, bool, int, float (NaN too), str (any file name), list | itself |
| tuple, NamedTuple | a list, and it arrives as one |
| dict with str keys | `{"dict": {...}}` |
| NumPy array of a type in DTYPES | `{"array": [type, shape]}`; its bytes follow the JSON |

Any other type is a TypeError where it would be sent. Nothing that arrives is run as code.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_LENGTH = 8  # bytes of a number before the JSON


def pack(value: Any, name: str) -> np.ndarray:
    """A message, uint8 [n]: length of the JSON, JSON, arrays in the order that it names them in."""
    arrays: list[np.ndarray] = []
    try:
        text = json.dumps(_plain(value, arrays)).encode()
    except TypeError as error:
        raise TypeError(f"{name!r} cannot be sent to other ranks: {error}") from None
    parts = [len(text).to_bytes(_LENGTH, "big"), text, *(array.tobytes() for array in arrays)]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack(message: np.ndarray) -> Any:
    """The value of a `pack`ed message. Raises ValueError where it is not as `pack` writes it."""
    end = _LENGTH + int.from_bytes(message[:_LENGTH].tobytes(), "big")
    text = message[_LENGTH:end].tobytes()

    def array(content: Any) -> np.ndarray:
        nonlocal end
        dtype, shape = _form(content)
        start, end = end, end + dtype.itemsize * math.prod(shape)
        return np.frombuffer(message[start:end].tobytes(), dtype).reshape(shape)

    try:
        value = _built(json.loads(text.decode("ascii")), array)
    except (RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if end != message.size:
        raise ValueError(f"{message.size:,} bytes are not those that it declares")
    return value


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
    raise TypeError(f"{type(value)} is neither JSON nor an array")


def _built(item: Any, array: Callable[[Any], np.ndarray]) -> Any:
    """The value that the JSON stands for; `array` reads the next array of the message."""
    if isinstance(item, list):
        return [_built(part, array) for part in item]
    if not isinstance(item, dict):
        return item
    if len(item) != 1:
        raise ValueError(f"an object with {len(item)} names")
    ((name, content),) = item.items()
    if name == "dict" and isinstance(content, dict):
        return {key: _built(part, array) for key, part in content.items()}
    if name == "array":
        return array(content)
    raise ValueError(f"unknown object {name!r:.100}")


def _form(content: Any) -> tuple[np.dtype, list[int]]:
    """Type and shape of an array."""
    match content:
        case [str(dtype), list(shape)] if dtype in DTYPES:
            if all(type(length) is int and length >= 0 for length in shape):
                return np.dtype(dtype), shape
    raise ValueError(f"unknown array {content!r:.100}")
