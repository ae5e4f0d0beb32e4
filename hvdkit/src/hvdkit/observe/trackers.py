"""Where a run's figures go besides metrics.jsonl (--trackers); rank 0 alone has trackers.

The caller reports a tracker's error once, and the run continues.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdkit.logs import one_line

BUILT_IN = "tensorboard"


class Tracker(Protocol):
    """The methods of a class for --trackers=MODULE:CLASS.

    docs/trackers.md of the engine's repository shows two.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """A run starts, or resumes in the same `run_dir`; `settings` are those of config.cfg."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures by name (train/loss, eval/miou), possibly NaN. Training waits for it."""

    def pictures(self, step: int, pictures: np.ndarray) -> None:
        """Predictions, uint8 [n, height, width, 3], after an evaluation that draws some."""

    def close(self) -> None:
        """The run ends, successfully or not."""


class TensorBoard:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        folder = str(run_dir / "tensorboard")
        self._board = tf.summary.create_file_writer(folder, flush_millis=10_000)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # As arrays: TensorFlow caches every Python number it has seen (0.8 kB each).
        with self._board.as_default(np.asarray(step, np.int64)):
            for name, value in values.items():
                tf.summary.scalar(name, np.asarray(value, np.float32))

    def pictures(self, step: int, pictures: np.ndarray) -> None:
        with self._board.as_default(np.asarray(step, np.int64)):
            tf.summary.image("predictions", pictures, max_outputs=len(pictures))

    def close(self) -> None:
        self._board.close()


def kinds(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """The trackers' classes by name. Raises ValueError, naming the tracker, where there is none."""
    classes: dict[str, type[Tracker]] = {}
    for name in names:
        module, _, attribute = name.partition(":")
        classes[name] = TensorBoard
        if attribute:
            with _named(name):
                classes[name] = getattr(importlib.import_module(module), attribute)
    return classes


def make(
    names: Sequence[str], run_dir: Path, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Starts the trackers. Raises ValueError, naming the tracker, if one cannot be started."""
    trackers: list[Tracker] = []
    for name, kind in kinds(names).items():
        # A run that keeps nothing here must leave nothing on a server either.
        if name == BUILT_IN or not (settings["dry_run"] or settings["find_lr"]):
            with _named(name):
                trackers.append(kind(run_dir, settings))
    return trackers


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a user's class may raise anything
        raise ValueError(
            f"--trackers={name} cannot be started: {one_line(error)}"
        ) from None
