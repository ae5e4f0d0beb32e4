r"""Time series: the next day of an hourly curve, from the two weeks before it.

    hvdkit example forecast
    horovodrun -np 2 python train.py --task=forecast --run_dir=runs/forecast --data_dir=series \
        --optimizer=adam --base_lr=0.002 --num_steps=600 --eval_every=0
    hvdkit predict --run_dir=runs/forecast --out=predicted past.npz    # an array past, [n, 336]
    hvdkit export --run_dir=runs/forecast --out=exported
    python -c 'import hvdkit; hvdkit.load("runs/forecast").summary()'

Seen on two busy cores: MASE 0.65, the absolute error as a share of that of the same hours a week
before.

It reads DATA_DIR/series.npy, float [hours] without gaps; where it is missing, one is made up: days,
weeks, a trend, and noise that decays over half a day. The last fifth of the hours is held out.
"""

import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data.source import Arrays
from hvdkit.train.preprocessing import wide

DAY, WEEK = 24, 168
PAST, NEXT = 2 * WEEK, DAY
HELD_OUT = 0.2


class Task:
    main_metric = "mase"
    main_metric_mode = "min"

    def __init__(self, config):
        self.config = config
        self._file = Path(config.data_dir) / "series.npy"

    def prepare(self):
        if self._file.exists():
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f".{os.getpid()}.npy")  # whole or not there
        np.save(partial, made_up(hours=60 * WEEK))
        partial.rename(self._file)

    def sources(self):
        series = np.load(self._file, mmap_mode="r")
        if series.ndim != 1 or not np.isfinite(series).all():
            raise ValueError(
                f"{self._file} must be one series, [hours], without gaps or infinity"
            )
        end = int(len(series) * (1 - HELD_OUT))
        if min(end, len(series) - end) < PAST + NEXT:
            raise ValueError(
                f"{self._file} has {len(series)} hours, too few to hold some out"
            )
        windows = np.lib.stride_tricks.sliding_window_view
        train = windows(series[:end], PAST + NEXT)
        # What is to be forecast lies behind the end; what a forecast looks at may lie before.
        val = windows(series[end - PAST :], PAST + NEXT)[::NEXT]
        return Arrays(window=train), Arrays(window=val)

    def training_example(self, sample, key):
        return self.evaluation_example(sample)

    def evaluation_example(self, sample):
        window = sample["window"]
        week_before = window[PAST - WEEK : PAST - WEEK + NEXT]
        targets = {"next": window[PAST:], "week_before": week_before}
        return {"inputs": {"past": window[:PAST]}, "targets": targets}

    def build_model(self):
        """Past [PAST] -> next [NEXT], in the series's own unit.

        Each window is scaled by its own mean and spread, so that a trend does not matter; the
        network corrects what was seen a week before.
        """
        past = keras.Input((PAST,), name="past")
        mean = keras.ops.mean(past, axis=-1, keepdims=True)
        spread = keras.ops.std(past, axis=-1, keepdims=True) + 1e-6
        x = (past - mean) / spread
        week_before = x[:, PAST - WEEK : PAST - WEEK + NEXT]
        for _ in range(2):
            x = keras.layers.Dense(128, activation="gelu")(x)
        change = keras.layers.Dense(NEXT, kernel_initializer="zeros", dtype=wide())(x)
        return keras.Model({"past": past}, (week_before + change) * spread + mean)

    def loss(self, outputs, targets):
        """The absolute error of each hour."""
        losses = tf.abs(outputs - tf.cast(targets["next"], outputs.dtype))
        return losses, tf.ones_like(losses)

    def decode(self, outputs):
        return {"next": outputs}

    def sums(self, outputs, targets):
        truth = tf.cast(targets["next"], tf.float64)
        error = tf.reduce_sum(tf.abs(tf.cast(outputs, tf.float64) - truth))
        naive = tf.reduce_sum(
            tf.abs(tf.cast(targets["week_before"], tf.float64) - truth)
        )
        return {"error": error, "naive": naive, "hours": tf.size(truth)}

    def metrics(self, sums):
        """Mean absolute error, alone and over that of the week before (Hyndman, Koehler 2006)."""
        error = float(sums["error"] / sums["hours"])
        return {"mase": float(sums["error"] / sums["naive"]), "mae": error}


def made_up(hours):
    """Float32 [hours]: like the load of a town."""
    rng = np.random.default_rng(0)
    hour = np.arange(hours)
    day = np.sin(2 * np.pi * hour / DAY) + 0.5 * np.sin(4 * np.pi * hour / DAY)
    workday = np.where(hour // DAY % 7 < 5, 1.0, 0.6)
    noise = np.zeros(hours)
    shocks = rng.normal(scale=0.1, size=hours)
    for now in range(1, hours):
        noise[now] = 0.95 * noise[now - 1] + shocks[now]
    return (50 + 10 * workday * (2 + day) + 5 * noise + 0.001 * hour).astype(np.float32)
