"""Real data that comes with the project, so that it trains without a download.

digits.png: 1,797 scans of handwritten digits, a row each: 8x8 shares of ink, 0 to 16, then the
    digit. E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0; the rows of scikit-learn's
    load_digits.
china.png, flower.png: photographs by danielbuechele (https://www.flickr.com/photos/danielbuechele)
    and vultilion (https://www.flickr.com/photos/vultilion), CC BY 2.0
    (https://creativecommons.org/licenses/by/2.0), 640x427, the pixels of the JPEG files of
    scikit-learn's load_sample_images.
"""

import functools
from pathlib import Path

import numpy as np
from PIL import Image

from hvdkit.data.source import Arrays

_FOLDER = Path(__file__).parent


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Ink, uint8 [1797, 8, 8], 0 to 16, and the digits, uint8 [1797]; sorted by writer."""
    with Image.open(_FOLDER / "digits.png") as image:
        rows = np.asarray(image)
    return rows[:, :64].reshape(-1, 8, 8), rows[:, 64]


@functools.cache
def photographs() -> tuple[Image.Image, ...]:
    """Two in RGB, each 640 wide and 427 high."""
    return tuple(
        Image.open(_FOLDER / name).convert("RGB")
        for name in ("china.png", "flower.png")
    )


NUM_CLASSES = 10
# They come sorted by writer, so most of val's writers are new to the model:
# a harder and more honest split than a random one.
ROWS = {"train": range(1438), "val": range(1438, 1797)}


class Digits(Arrays):
    """A Source of one split: {"image": uint8 [8, 8, 3], ink is white; "label": int64, 0 to 9}."""

    num_classes = NUM_CLASSES
    is_demo = True

    def __init__(self, _: object, split: str, _classes: int = 0) -> None:
        if split not in ROWS:
            raise ValueError(f"digits: no split {split!r}; there are {sorted(ROWS)}")
        scans, labels = digits()
        rows = list(ROWS[split])
        shades = np.rint(scans[rows] * (255 / 16)).astype(np.uint8)
        images = np.repeat(shades[..., None], 3, axis=-1)
        super().__init__(image=images, label=labels[rows].astype(np.int64))
