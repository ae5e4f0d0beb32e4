"""Handwritten digits of data/shipped: 1,797 real scans, 8x8 pixels, 10 classes; no download."""

from __future__ import annotations

import numpy as np

from hvdkit.data import shipped
from hvdkit.data.arrays import Arrays

NUM_CLASSES = 10
# They come sorted by writer, so most of val's writers are new to the model:
# a harder and more honest split than a random one.
ROWS = {"train": range(1438), "val": range(1438, 1797)}


class Digits(Arrays):
    """A Source of one split: `image`, uint8 [8, 8, 3], ink is white; `label`, int64, 0 to 9.

    Raises:
      ValueError: a split that is neither train nor val, or other than 10 classes.
    """

    def __init__(self, split: str, num_classes: int = NUM_CLASSES) -> None:
        if split not in ROWS:
            raise ValueError(f"digits: no split {split!r}; there are {sorted(ROWS)}")
        if num_classes != NUM_CLASSES:
            raise ValueError(f"--num_classes={num_classes}: the digits have {NUM_CLASSES} classes")
        (scans, digits), rows = shipped.digits(), list(ROWS[split])
        shades = np.rint(scans[rows] * (255 / 16)).astype(np.uint8)
        images = np.repeat(shades[..., None], 3, axis=-1)
        super().__init__(image=images, label=digits[rows].astype(np.int64))
