"""Settings of the task: its model, its classes and its loss."""

from __future__ import annotations

import math

from hvdkit.settings.fields import Room, setting


class TaskSettings(Room):
    """Task, model and loss"""

    task: str = setting("segmentation", "name of a file in tasks/")
    model: str = setting("", "one of the task's models; empty: the first")
    num_classes: int = setting(11, "number of classes, background included", low=2)
    dropout: float = setting(0.0, "dropout rate, if the model has dropout", low=0, below=1)
    label_smoothing: float = setting(
        0.0, "share of the target spread evenly over all classes", low=0, below=1
    )
    class_weights: str = setting(
        "", "weight of each class in the loss, comma-separated; empty: all 1"
    )

    def check(self) -> None:
        _ = self.class_weight_list

    @property
    def class_weight_list(self) -> list[float]:
        """Each class's weight in the loss; an empty list where all count alike."""
        if not self.class_weights:
            return []
        try:
            weights = [float(part) for part in self.class_weights.split(",")]
        except ValueError:
            weights = [math.nan]
        if not all(0 <= w < math.inf for w in weights) or not any(weights):
            raise ValueError(
                f"--class_weights={self.class_weights!r} must be numbers from 0 up, not all 0, "
                "with commas between them: 1,2.5,1"
            )
        if len(weights) != self.num_classes:
            raise ValueError(
                f"--class_weights={self.class_weights!r} has {len(weights)} weights for "
                f"--num_classes={self.num_classes}"
            )
        return weights
