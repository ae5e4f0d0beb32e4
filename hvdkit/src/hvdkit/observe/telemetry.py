"""Progress lines and records of a run; only rank 0 writes them.

One progress line a logged step, metrics.jsonl (an object a line), starts.jsonl (likewise),
confusion.csv, what --trackers names (TensorBoard, ...), summary.json at the end.
"""

import collections
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from hvdkit import whole_files
from hvdkit.data.sampler import Sampler
from hvdkit.evaluate import metrics
from hvdkit.observe import trackers
from hvdkit.ranks.world import World, say
from hvdkit.settings import Settings

Figures = Mapping[str, float]  # by name
_MUCH_WAITING = 0.1  # share of a step's time
_HUGE = 1e4  # a loss above it is noted
_RISEN = 3.0  # a loss that is so many times the first logged one is noted
_RATES = 10_000  # logged intervals for the median
# More ranks are not shown one by one: ten figures take a tracker a millisecond.
_RANKS_SHOWN = 16


class Telemetry:
    """The run folder's records. On ranks other than 0 every method does nothing.

    A record that cannot be written (a full disk) is reported once, and the run continues; the next
    one that can is written with those before it, at the latest at the end. Use it in a `with`,
    which closes trackers; a summary may follow.
    """

    def __init__(
        self,
        config: Settings,
        world: World,
        sampler: Sampler,
        *,
        started: Sequence[trackers.Tracker] = (),
    ) -> None:
        """`sampler`: the order of the samples, by which epochs are counted.

        `started`: the user's trackers, which it closes.
        """
        run_dir = Path(config.run_dir)
        self._dir = run_dir
        self._world = world
        self._num_steps = config.num_steps
        self._global_batch_size = config.global_batch_size
        self._sampler = sampler
        self._last_step = sampler.start.step
        self._last_time = time.monotonic()
        self._first_loss = 0.0  # the first loss that this process logged
        self._logged = 0  # steps that this process logged
        self._rates: collections.deque[float] = collections.deque(maxlen=_RATES)
        self._noted: set[str] = set()
        self._unwritten: dict[str, list[str]] = {}  # lines by file
        self._sizes: dict[str, int] = {}  # bytes of files before a failed write
        self._trackers = list(started)
        if world.is_chief:
            whole_files.opened(run_dir / "metrics.jsonl", append=True).close()
            settings = dataclasses.asdict(config)
            built_in = [n for n in config.tracker_names if n == trackers.BUILT_IN]
            self._trackers += trackers.make(built_in, run_dir, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, lines in self._unwritten.items():
            if lines:
                self._flush(name)
            if lines:  # they could not be written
                self._note_once(
                    f"lost {name}", f"the last {len(lines)} lines of {name} are lost"
                )
        for tracker in self._trackers:
            with self._reports_once(type(tracker).__name__):
                tracker.close()

    def started(self, step: int, about: Mapping[str, Any]) -> None:
        """The run starts or resumes at `step`; `about` describes it for people."""
        if self._world.is_chief:
            now = round(time.time(), 2)
            line = {"step": step, "time": now, "ranks": self._world.size, **about}
            self._append("starts.jsonl", line)

    @contextlib.contextmanager
    def not_training(self) -> Iterator[None]:
        """Time spent inside (evaluation, saving) does not count as training time."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._last_time += time.monotonic() - start

    def step(
        self,
        step: int,
        figures: Figures,
        *,
        losses: np.ndarray,
        waited: float,
        times: Figures,
    ) -> None:
        """A logged step: its figures (loss, lr, ...), and each rank's own mean loss.

        `waited`: seconds of this rank for its data, since the last logged step; `times`: of all
        ranks, see hvdkit/ranks/stragglers.py.
        """
        if not self._world.is_chief:
            return
        now = time.monotonic()
        steps = max(step - self._last_step, 1)
        seconds = max(now - self._last_time, 1e-9)
        self._last_step = step
        self._last_time = now
        rate = self._global_batch_size * steps / seconds
        wait = min(waited / seconds, 1.0)
        self._logged += 1
        if self._logged > 1:  # the first interval includes tracing of graphs
            self._rates.append(rate)
        record = {
            "step": step,
            **figures,
            "samples_per_second": round(rate, 1),
            "data_wait": round(wait, 3),
            **times,
        }
        self._write(record)
        scalars = {f"train/{name}": value for name, value in record.items()}
        self._show(step, scalars | _by_rank(losses))

        keras_loss = (
            f" + {figures['keras_loss']:.4f}" if "keras_loss" in figures else ""
        )
        samples_left = (self._num_steps - step) * self._global_batch_size
        eta = timedelta(seconds=int(samples_left / rate))
        epoch = self._sampler.place(step).position / self._sampler.num_samples
        say(
            self._world,
            f"step {step}/{self._num_steps}  loss {figures['loss']:.4f}{keras_loss}  "
            f"lr {figures['lr']:.3g}  {rate:.0f} samples/s  ETA {eta}  epoch {epoch:.1f}",
        )
        self._judge(figures["loss"])
        # The first logged step does not count: nothing could be read ahead for it.
        if wait > _MUCH_WAITING and self._logged > 1:
            self._note_once(
                "input-bound",
                f"input-bound: rank 0 waited for data {wait:.0%} of the time; give it more "
                "cores or --data_workers, or smaller pictures (hvdkit pack)",
            )

    def _judge(self, loss: float) -> None:
        """Notes once each a loss that is huge or has risen."""
        if self._logged == 1:
            self._first_loss = loss
        if abs(loss) > _HUGE:
            self._note_once(
                "huge",
                f"the loss is {loss:.3g}: inputs and targets should be of a scale around 1, "
                "losses one for each example",
            )
        # A rise by less than 1 is noise where the first loss is near 0.
        elif self._logged > 2 and loss > _RISEN * abs(self._first_loss) + 1:
            self._note_once(
                "risen",
                f"the loss has risen from {self._first_loss:.3g} to {loss:.3g}: try a lower "
                "--base_lr (--find_lr suggests one)",
            )

    def median_speed(self) -> float | None:
        """Samples a second, all ranks: median of the newest intervals, without the first."""
        return statistics.median(self._rates) if self._rates else None

    def gradients(self, step: int, layers: Sequence[str], figures: np.ndarray) -> None:
        """Sum, norm and share of non-finite values of each layer's gradient, float [n, 3]."""
        if not self._world.is_chief:
            return
        by_layer = {}
        scalars = {}
        for path, row in zip(layers, figures.tolist()):
            values = dict(zip(("sum", "norm", "nonfinite"), row))
            by_layer[path] = whole_files.without_nan(values)
            for name, value in values.items():
                scalars[f"gradient_{name}/{path}"] = value
        norm = float(np.linalg.norm(figures[:, 1]))
        self._append(
            "gradients.jsonl", {"step": step, "global_norm": norm, "layers": by_layer}
        )
        self._show(step, scalars)

    def evaluation(
        self,
        step: int,
        figures: Figures,
        *,
        main_metric: str,
        pictures: np.ndarray | None,
    ) -> None:
        """An evaluation's figures by name, and pictures (see `_pictures`) if there are any."""
        if not self._world.is_chief:
            return
        self._write(
            {"step": step} | {f"eval_{name}": value for name, value in figures.items()}
        )
        self._show(step, {f"eval/{name}": value for name, value in figures.items()})
        if pictures is not None:
            self._pictures(step, pictures)
        scores = f"loss {figures['loss']:.4f}"
        if main_metric != "loss":
            scores += f"  {main_metric} {figures[main_metric]:.4f}"
        say(self._world, f"step {step}/{self._num_steps}  evaluated: {scores}")

    def _pictures(self, step: int, pictures: np.ndarray) -> None:
        """Pictures, uint8 [n, height, width, 3], to trackers and, below each other, to a PNG."""
        for tracker in self._trackers:
            with self._reports_once(type(tracker).__name__):
                tracker.pictures(step, pictures)
        with self._reports_once("predictions.png"):
            sheet = np.concatenate(list(pictures))
            zoom = max(1, 640 // sheet.shape[1])
            image = Image.fromarray(sheet.repeat(zoom, 0).repeat(zoom, 1))
            with whole_files.written(self._dir / "predictions.png") as partial:
                image.save(partial, "PNG")

    def summary(self, record: Mapping[str, Any]) -> None:
        if self._world.is_chief:
            with self._reports_once("summary.json"):
                whole_files.write_json(self._dir / "summary.json", record)

    def confusion(self, names: Sequence[str], counts: np.ndarray) -> None:
        """The newest evaluation's confusion matrix, integer [n, n], row: label."""
        if self._world.is_chief:
            with self._reports_once("confusion.csv"):
                metrics.write_confusion(self._dir / "confusion.csv", names, counts)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._unwritten.setdefault(name, []).append(json.dumps(record) + "\n")
        self._flush(name)

    def _flush(self, name: str) -> None:
        lines = self._unwritten[name]
        with self._reports_once(name):
            with whole_files.opened(self._dir / name, append=True) as file:
                size = os.fstat(file.fileno()).st_size
                if name in self._sizes:
                    # A failed write may have left a part of a line.
                    size = min(size, self._sizes[name])
                    file.truncate(size)
                self._sizes[name] = size
                file.write("".join(lines))
            # The file is closed by now: a file server may refuse the lines only then.
            lines.clear()
            del self._sizes[name]

    def _write(self, record: Mapping[str, Any]) -> None:
        # The time is in seconds since 1970, comparable between hosts.
        record = whole_files.without_nan(record) | {"time": round(time.time(), 2)}
        self._append("metrics.jsonl", record)

    def _show(self, step: int, scalars: Figures) -> None:
        for tracker in self._trackers:
            with self._reports_once(type(tracker).__name__):
                tracker.scalars(step, scalars)

    @contextlib.contextmanager
    def _reports_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker may raise anything
            reason = str(error) or type(error).__name__
            self._note_once(
                name, f"{name} cannot be written; training continues: {reason}"
            )

    def _note_once(self, key: str, note: str) -> None:
        if key not in self._noted:
            self._noted.add(key)
            say(self._world, f"note: {note}")


def _by_rank(losses: np.ndarray) -> dict[str, float]:
    """The ranks' losses for trackers: statistics, and each if the ranks are few."""
    figures = {
        "least": np.min(losses),
        "median": np.median(losses),
        "most": np.max(losses),
        "worst_rank": np.argmax(losses),  # the first NaN, if any
    }
    if len(losses) <= _RANKS_SHOWN:
        figures |= {str(rank): loss for rank, loss in enumerate(losses)}
    return {f"loss_by_rank/{name}": float(value) for name, value in figures.items()}
