"""Where a run's figures go besides metrics.jsonl (--trackers); rank 0 alone has trackers.

What a tracker raises is told once by who calls it, and the run goes on.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

_IDS = "trackers.json"  # under which names others know this run
_QUEUED = 1000  # calls, of a server that is slow
_SECONDS_TO_END = 30.0


class Tracker(Protocol):
    name: str

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def pictures(self, step: int, pictures: np.ndarray) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def make(names: Sequence[str], run_dir: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    """Raises ValueError or OSError for one that cannot be had."""
    found: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            found.append(TensorBoard(run_dir))
        elif name == "csv":
            found.append(Csv(run_dir))
        else:
            try:
                package = importlib.import_module(name)
            except ImportError:
                raise ValueError(
                    f"--trackers={name}: the package {name} is not installed: pip install {name}"
                ) from None
            if settings.get("dry_run") or settings.get("find_lr"):
                continue  # what keeps nothing here leaves nothing on a server either
            kind = {"mlflow": MLflow, "wandb": Wandb}[name]
            try:
                found.append(OnThread(kind(package, run_dir, settings)))
            except Exception as error:  # of a package it may be anything
                raise ValueError(f"--trackers={name} cannot be started: {error}") from None
    return found


class TensorBoard:
    name = "TensorBoard's files"

    def __init__(self, run_dir: Path) -> None:
        folder = str(run_dir / "tensorboard")
        try:
            self._board = tf.summary.create_file_writer(folder)
        except tf.errors.OpError as error:
            raise ValueError(f"{folder}: {error.message}") from None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # As arrays: TensorFlow keeps every number of Python's that it ever saw (0.8 kB each).
        with self._board.as_default(np.asarray(step, np.int64)):
            for name, value in values.items():
                tf.summary.scalar(name, np.asarray(value, np.float32))

    def pictures(self, step: int, pictures: np.ndarray) -> None:
        with self._board.as_default(np.asarray(step, np.int64)):
            tf.summary.image("predictions", pictures, max_outputs=len(pictures))

    def flush(self) -> None:
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class _ScalarsOnly:
    """What most trackers need not do."""

    def pictures(self, step: int, pictures: np.ndarray) -> None:
        """They stay in the run's folder."""

    def flush(self) -> None:
        """Nothing is held back."""


class Csv(_ScalarsOnly):
    """metrics.csv at the end of the run: metrics.jsonl for a spreadsheet."""

    name = "metrics.csv"

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """metrics.jsonl has them."""

    def close(self) -> None:
        lines = (self._dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        columns = dict.fromkeys(name for row in rows for name in row)
        with (self._dir / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)


class MLflow(_ScalarsOnly):
    """One run of MLflow, which a resumption goes on with; where: MLFLOW_TRACKING_URI."""

    name = "MLflow"

    def __init__(self, package: Any, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = package.MlflowClient()
        self._id = ""
        self._dir, self._settings = run_dir, settings

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        kind = self._entities.Metric
        metrics = [kind(n, float(v), now, step) for n, v in values.items() if math.isfinite(v)]
        for first in range(0, len(metrics), 1000):  # the most that it takes at once
            self._client.log_batch(self._run(), metrics[first : first + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run())

    def _run(self) -> str:
        """Its number, made or found at the first call: on this thread, which may wait."""
        if self._id:
            return self._id
        self._id = _known(self._dir).get("mlflow", "")
        if self._id:
            self._client.update_run(self._id, "RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(self._settings["task"])
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(experiment, run_name=self._dir.name)
        self._id = made.info.run_id
        _remember(self._dir, "mlflow", self._id)
        texts = {name: str(value)[:500] for name, value in self._settings.items()}
        params = [self._entities.Param(n, v or "(empty)") for n, v in texts.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id


class Wandb(_ScalarsOnly):
    """One run of Weights & Biases, which a resumption goes on with; how: WANDB_* variables."""

    name = "Weights & Biases"

    def __init__(self, package: Any, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._package, self._dir, self._settings = package, run_dir, settings
        self._run: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            known = _known(self._dir).get("wandb")
            self._run = self._package.init(
                dir=str(self._dir),
                name=self._dir.name,
                id=known,
                resume="allow",
                config=dict(self._settings),
            )
            _remember(self._dir, "wandb", self._run.id)
        self._run.log({n: v for n, v in values.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class OnThread:
    """A tracker whose server may be slow or gone: training never waits for it.

    What it raised is raised at the next call, and nothing more is sent.
    """

    def __init__(self, inner: Tracker) -> None:
        self.name = inner.name
        self._inner, self._told, self._lost = inner, False, 0
        self._error: Exception | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        values = dict(values)
        self._later(lambda: self._inner.scalars(step, values))

    def pictures(self, step: int, pictures: np.ndarray) -> None:
        self._later(lambda: self._inner.pictures(step, pictures))

    def flush(self) -> None:
        """What is there is sent as soon as can be."""

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=1.0)
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take the last figures in {_SECONDS_TO_END:.0f} s")
        self._raise()
        if self._lost:
            raise TimeoutError(f"it was too slow for {self._lost} of the figures, which it lacks")

    def _later(self, call: Callable[[], None]) -> None:
        self._raise()
        if self._error is None:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self._lost += 1

    def _raise(self) -> None:
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._error is None:
                try:
                    call()
                except Exception as error:
                    self._error = error
        if self._error is None:
            try:
                self._inner.close()
            except Exception as error:
                self._error = error


def _known(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / _IDS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(run_dir: Path, name: str, number: str) -> None:
    partial = run_dir / f".{_IDS}.partial"
    partial.write_text(json.dumps(_known(run_dir) | {name: number}) + "\n")
    partial.replace(run_dir / _IDS)
