"""Values that ranks send each other, as JSON: nothing that arrives is run as code.

None, bool, int, float (NaN too), str (any file name) and lists of them arrive as they are, a tuple
or NamedTuple as a list, dicts with str keys and NumPy arrays too. Any other type is a TypeError
where it would be sent. A key that is a number would arrive as its text.
"""

import base64
import json
from typing import Any

import numpy as np

_ARRAY = "numpy.ndarray"  # A JSON object with this one name stands for an array.


def pack(value: Any, name: str) -> np.ndarray:
    """A message, uint8 [n]. Raises TypeError, with the exchange's `name`, for another type."""
    try:
        text = json.dumps(value, default=_plain)
    except TypeError as error:
        raise TypeError(f"{name!r} cannot be sent to other ranks: {error}") from None
    return np.frombuffer(text.encode(), np.uint8)


def unpack(message: np.ndarray) -> Any:
    """The value of a `pack`ed message. Raises ValueError where it is not as `pack` writes it."""
    try:
        return json.loads(message.tobytes(), object_hook=_built)
    except (RecursionError, OverflowError, TypeError) as error:
        raise ValueError(str(error)) from None


def _plain(value: Any) -> dict[str, list]:
    """What stands for an array: its type, its shape, and its bytes."""
    if not isinstance(value, np.ndarray) or value.dtype.kind in "OUS":
        raise TypeError(f"{type(value)} is neither JSON nor an array of numbers")
    text = base64.b64encode(
        value.astype(value.dtype.newbyteorder("=")).tobytes()
    ).decode()
    return {_ARRAY: [value.dtype.name, value.shape, text]}


def _built(item: dict[str, Any]) -> Any:
    if _ARRAY not in item:
        return item
    dtype, shape, text = item[_ARRAY]
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape)
