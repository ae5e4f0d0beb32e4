"""Settings of the data: where they are, and how samples are read and augmented."""

from __future__ import annotations

import math

from hvdkit.settings.fields import Room, setting

FORMATS = ("", "folders", "voc", "cityscapes", "class_folders", "cifar10", "cifar100", "digits")
FORMATS += ("records",)


class DataSettings(Room):
    """Data"""

    data_dir: str = setting("datasets/demo", "folder of the data set", path=True)
    data_format: str = setting("", "layout of data_dir; empty: the task's own", choices=FORMATS)
    train_split: str = setting("train", "split of data_dir to train on")
    val_split: str = setting("val", "split of data_dir to evaluate")
    synthetic_data: bool = setting(False, "random samples instead of data_dir")
    image_size: int = setting(64, "height and width of a training crop, in pixels", low=8)
    mirror: str = setting(
        "auto",
        "mirror half of the training pictures, left-right; auto: on, except for digits and the "
        "demo (segmentation, classification)",
        choices=("auto", "on", "off"),
    )
    scale_range: str = setting(
        "",
        "smallest and largest random scale of a training picture; empty: 0.5,2, for the demo "
        "0.8,1.25 (segmentation)",
    )
    crop_area: float = setting(
        0.0,
        "smallest share of a picture's area in a random crop (long narrow pictures, where none "
        "fits: their centre); 0: 0.08, or below 64 pixels only a shift (classification)",
        low=0,
        below=1,
    )
    data_workers: int = setting(
        0, "threads that read and augment a rank's data; 0: its share of the cores", low=0
    )

    def check(self) -> None:
        for name in ("train_split", "val_split"):
            if not getattr(self, name):
                raise ValueError(f"--{name}= is empty: name a split of --data_dir")
        _ = self.scale_limits

    @property
    def scale_limits(self) -> tuple[float, float] | None:
        """Least and largest factor of a random scale; None where the task chooses."""
        if not self.scale_range:
            return None
        try:
            low, high = (float(part) for part in self.scale_range.split(","))
        except ValueError:
            low, high = math.nan, math.nan
        # A factor of 0.1 reads a window of 100 times the crop's pixels.
        if not 0.1 <= low <= high <= 10:
            raise ValueError(
                f"--scale_range={self.scale_range!r} must be two numbers from 0.1 to 10, the lower "
                "one first, with a comma between them: 0.5,2"
            )
        return low, high

    def notes(self) -> list[str]:
        if self.train_split != self.val_split or self.synthetic_data:
            return []
        return [
            f"--train_split and --val_split are both {self.train_split}: the score is measured "
            "on the training data"
        ]

    def without_effect(self) -> dict[str, str]:
        if not self.synthetic_data:
            return {}
        return {"train_split": "--synthetic_data", "val_split": "--synthetic_data"}
