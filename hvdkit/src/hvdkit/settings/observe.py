"""Settings of what a run logs."""

from __future__ import annotations

import re

from hvdkit.settings.fields import Room, setting


class ObserveSettings(Room):
    """Logging"""

    log_every: int = setting(20, "steps between log lines", low=1)
    log_gradients: bool = setting(
        False, "log sum and norm of each layer's gradient to gradients.jsonl"
    )
    trackers: str = setting(
        "tensorboard",
        "where figures go besides metrics.jsonl, comma-separated: tensorboard, or MODULE:CLASS of "
        "your own (docs/trackers.md); empty: nowhere",
    )

    def check(self) -> None:
        _ = self.tracker_names

    @property
    def tracker_names(self) -> list[str]:
        """Of --trackers, in order. Raises ValueError for one that cannot be a name."""
        names = [name.strip() for name in self.trackers.split(",") if name.strip()]
        for name in names:
            if name != "tensorboard" and not re.fullmatch(r"[\w.]+:\w+", name):
                raise ValueError(
                    f"--trackers={name} is neither tensorboard nor MODULE:CLASS of yours"
                )
        return names
