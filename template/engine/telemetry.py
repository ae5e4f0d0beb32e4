"""What a person and their tools see of a run; only rank 0 writes any of it.

One progress line a logged step, metrics.jsonl (an object a line), TensorBoard scalars and
pictures, summary.json at the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from engine.world import World, say

_MUCH_WAITING = 0.1  # share of a step's time


class Telemetry:
    """The run folder's records. On ranks other than 0 every method does nothing.

    A record that cannot be written (a full disk) is told once, and the run goes on: what counts
    is in checkpoints. For `with`: its files are closed at the end; a summary may come after it.
    """

    def __init__(self, run_dir: Path, world: World, first_step: int, num_steps: int) -> None:
        """Raises OSError or ValueError, on rank 0, when the records cannot be opened."""
        self._dir, self._world, self._num_steps = run_dir, world, num_steps
        self._clock = _Clock(first_step)
        self._rates: list[float] = []
        self._failed: set[str] = set()
        self._told_of_waiting = False
        if world.is_chief:
            self._lines = (run_dir / "metrics.jsonl").open("a")
            try:
                self._board = tf.summary.create_file_writer(str(run_dir / "tensorboard"))
            except tf.errors.OpError as error:
                raise ValueError(f"{run_dir / 'tensorboard'}: {error.message}") from None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._world.is_chief:
            with self._told_once("metrics.jsonl"):
                self._lines.close()
            with self._told_once("TensorBoard's files"):
                self._board.close()

    @contextlib.contextmanager
    def not_training(self) -> Iterator[None]:
        """What happens inside (evaluation, saving) does not count as training time."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._clock.leave_out(time.monotonic() - start)

    def step(
        self,
        step: int,
        samples: int,
        figures: Mapping[str, float],
        losses: Sequence[float],
        waited: float,
        times: Mapping[str, float],
    ) -> None:
        """A logged step.

        Args:
          samples: samples a step, over all ranks.
          figures: loss, lr, grad_norm, ... by name.
          losses: each rank's own mean loss.
          waited: seconds that this rank waited for its data since the last logged step.
          times: of all ranks, see engine/pace.py.
        """
        if not self._world.is_chief:
            return
        steps, seconds = self._clock.since_last(step)
        rate, wait = samples * steps / seconds, min(waited / seconds, 1.0)
        self._rates.append(rate)
        record = {"step": step, **figures, "samples_per_second": round(rate, 1)}
        record |= {"data_wait": round(wait, 3), **times}
        self._write(record)
        by_rank = {f"loss_by_rank/{rank}": loss for rank, loss in enumerate(losses)}
        self._show(step, {f"train/{name}": value for name, value in record.items()} | by_rank)
        added = f" + {figures['keras_loss']:.4f}" if "keras_loss" in figures else ""
        eta = _minutes((self._num_steps - step) * samples / rate)
        say(
            self._world,
            f"step {step}/{self._num_steps}  loss {figures['loss']:.4f}{added}  "
            f"lr {figures['lr']:.3g}  {rate:.0f} samples/s  ETA {eta}",
        )
        # Not at the first step that is logged, for which nothing could be read ahead.
        if wait > _MUCH_WAITING and len(self._rates) > 1 and not self._told_of_waiting:
            self._told_of_waiting = True
            say(
                self._world,
                f"note: input-bound: rank 0 waited for data {wait:.0%} of the time; give it more "
                "cores or --data_workers, or smaller pictures (data/pack.py)",
            )

    def median_speed(self) -> float | None:
        """Samples a second, over all ranks: median of the logged intervals but the first."""
        return statistics.median(self._rates[1:]) if self._rates[1:] else None

    def gradients(self, step: int, layers: Sequence[str], figures: np.ndarray) -> None:
        """Sum, norm and share of non-finite values of each layer's gradient, float [n, 3]."""
        if not self._world.is_chief:
            return
        names = ("sum", "norm", "nonfinite")
        record = {
            path: _finite(dict(zip(names, map(float, row)))) for path, row in zip(layers, figures)
        }
        norm = float(np.linalg.norm(figures[:, 1]))
        line = json.dumps({"step": step, "global_norm": norm, "layers": record}) + "\n"
        with self._told_once("gradients.jsonl"), (self._dir / "gradients.jsonl").open("a") as file:
            file.write(line)
        self._show(
            step,
            {
                f"gradient_{name}/{path}": value
                for path, row in zip(layers, figures)
                for name, value in zip(names, row)
            },
        )

    def evaluation(
        self,
        step: int,
        figures: Mapping[str, float],
        main_metric: str,
        pictures: np.ndarray | None,
    ) -> None:
        """Figures by name, and pictures (see `_pictures`) where there are any."""
        if not self._world.is_chief:
            return
        self._write({"step": step} | {f"eval_{name}": value for name, value in figures.items()})
        self._show(step, {f"eval/{name}": value for name, value in figures.items()})
        with self._told_once("TensorBoard's files"):
            self._board.flush()
        if pictures is not None:
            with self._told_once("predictions.png"):
                self._pictures(step, pictures)
        say(
            self._world,
            f"step {step}/{self._num_steps}  evaluated: loss {figures['loss']:.4f}  "
            f"{main_metric} {figures[main_metric]:.4f}",
        )

    def _pictures(self, step: int, pictures: np.ndarray) -> None:
        """Pictures, uint8 [n, height, width, 3], to TensorBoard and, below each other, to a PNG."""
        with self._board.as_default(step):
            tf.summary.image("predictions", pictures, max_outputs=len(pictures))
        sheet = Image.fromarray(np.concatenate(list(pictures)))
        scale = max(1, 640 // sheet.width)
        sheet.resize((sheet.width * scale, sheet.height * scale), Image.NEAREST).save(
            self._dir / "predictions.png"
        )

    def summary(self, record: Mapping[str, Any]) -> None:
        if self._world.is_chief:
            text = json.dumps(_finite(record), indent=1) + "\n"
            partial = self._dir / ".summary.json.partial"
            with self._told_once("summary.json"):
                partial.write_text(text)
                partial.rename(self._dir / "summary.json")

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._told_once("metrics.jsonl"):
            self._lines.write(json.dumps(_finite(record)) + "\n")
            self._lines.flush()

    def _show(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._told_once("TensorBoard's files"), self._board.as_default(step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)

    @contextlib.contextmanager
    def _told_once(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            if what not in self._failed:
                say(self._world, f"note: {what} cannot be written, the run goes on: {error}")
            self._failed.add(what)


class _Clock:
    def __init__(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()

    def leave_out(self, seconds: float) -> None:
        self._time += seconds

    def since_last(self, step: int) -> tuple[int, float]:
        """Steps and seconds since the last call; above 0."""
        now = time.monotonic()
        steps, seconds = max(step - self._step, 1), max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return steps, seconds


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: null stands for it."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _minutes(seconds: float) -> str:
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    clock = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{clock.zfill(5)}" if hours else clock
