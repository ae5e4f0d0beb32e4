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

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image

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
    return tuple(Image.open(_FOLDER / name).convert("RGB") for name in ("china.png", "flower.png"))
