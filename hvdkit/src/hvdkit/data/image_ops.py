"""Operations on pictures, for a task: `from hvdkit.data import image_ops`."""

from hvdkit.data.augment.image_ops import (
    at_centres,
    cut,
    keys,
    mirrored,
    nearest,
    pick,
    resize,
    resize_float,
    size,
    uniform,
)

__all__ = [
    "at_centres",
    "cut",
    "keys",
    "mirrored",
    "nearest",
    "pick",
    "resize",
    "resize_float",
    "size",
    "uniform",
]
