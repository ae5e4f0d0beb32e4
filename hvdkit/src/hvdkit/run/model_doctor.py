"""The model doctor: notes on a model, data or a rate with which little will be learned.

Some are seen in the graph and in a few samples, others in the first steps; a dry run also learns
one batch by heart. Nothing here changes a bit of a run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import classes
from hvdkit.logs import join
from hvdkit.ranks.world import raw, say
from hvdkit.run.health import Ending
from hvdkit.stop import PREEMPTED
from hvdkit.train import outputs, preprocessing, schedule
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run

_SAMPLES, _SECONDS = 64, 1.0  # that are looked at, and for how long at most
_LARGE_INPUTS = 30.0  # their mean size: initializers of weights are made for about 1
_LARGE_GRADIENT = 1e3
_GUESSES = 3.0  # times the loss of a guess, plus 1, that a first loss may be
_MOVED_AFTER = 20  # steps, each weight should have changed
_JUDGED_AFTER = 100  # steps behind the warm-up, the loss should have fallen
_FALL = 0.01  # a share of the first losses
_BY_HEART, _BY_HEART_SECONDS = 50, 30.0  # steps on one batch
_LEARNED = 0.7  # of its first loss, or less, is left then


def notes(run: Run) -> list[str]:
    """What can be seen before the first step; without collectives."""
    logits, names = _logits(run), classes.of(run.context.train_source)
    found = [
        f"the last layer gives {narrow}, in which near logits are equal: give it "
        "dtype=hvdkit.train.preprocessing.wide()"
        for narrow in sorted({*map(outputs.narrow, logits)} - {""})
    ]
    width = max((each.shape[-1] or 0 for each in logits), default=0)
    if names and width > len(names):
        found.append(f"the last layer has {width} units and the data have {len(names)} classes")
    alike = Counter(" ".join(name.casefold().split()) for name in names)
    if twice := [name for name in names if alike[" ".join(name.casefold().split())] > 1]:
        found.append(f"classes {join(twice)} differ by case or blanks alone: are they one class?")
    return found + _of_samples(run, bool(logits))


def _logits(run: Run) -> list[tf.Tensor]:
    """Symbolic logits [..., classes] of the softmax losses in the evaluation's graph."""
    return outputs.softmax_logits(run.evaluator.graph)


def _of_samples(run: Run, has_classes: bool) -> list[str]:
    """Notes on the inputs and targets of samples from all over the training data."""
    size, samples = len(run.context.train_source), []
    end = time.monotonic() + _SECONDS
    with contextlib.suppress(ValueError):  # one that cannot be read is told when it is its turn
        for place in range(0, size, -(-size // _SAMPLES)):
            samples.append(run.feed.sample(place))
            if time.monotonic() > end:
                break
    found = []
    if samples and (largest := _unscaled(run.model, [s["inputs"] for s in samples])):
        found.append(
            f"inputs are {largest:.3g} in size on average and no layer scales them: begin the "
            "model with keras.layers.Normalization or Rescaling, or scale them in the task"
        )
    targets = [tf.nest.flatten(s["targets"]) for s in samples]
    same = all(np.array_equal(a, b) for other in targets[1:] for a, b in zip(targets[0], other))
    if has_classes and len(samples) > _SAMPLES // 4 and same and targets[0]:
        found.append(f"{len(samples)} samples from all over the data have the same targets")
    return found


def _unscaled(model: keras.Model, inputs: Sequence[Any]) -> float:
    """The mean size of float inputs that is too large, and that no layer changes; else 0."""
    normalize = (keras.layers.BatchNormalization, keras.layers.LayerNormalization)
    if any(isinstance(x, (*preprocessing.SCALES, *normalize)) for x in model._flatten_layers()):
        return 0.0
    parts = zip(*(tf.nest.flatten(one) for one in inputs))
    sizes = [float(np.mean(np.abs(part))) for part in parts if part[0].dtype.is_floating]
    return max((size for size in sizes if size > _LARGE_INPUTS), default=0.0)


class FirstSteps:
    """Judges the first steps of a run, by figures that steps return anyway."""

    settles = False

    def __init__(self, run: Run) -> None:
        self._run, self._losses, self._guess = run, [], _guess(run)
        self._last = run.settings.warmup_steps + _JUDGED_AFTER
        self._before = _sums(run.model.trainable_variables)

    def due(self, step: int) -> bool:
        return self._run.start.source == "new" and step <= self._last

    def __call__(self, step: int, result: Result) -> None:
        self._losses.append(result["loss"])
        found = []
        if step == 1:
            found = first_step(float(result["loss"]), float(result["grad_norm"]), self._guess)
        if step == _MOVED_AFTER + self._run.settings.warmup_steps:
            found = still(self._run.model.trainable_variables, self._before, len(self._losses))
        if step == self._last and not self._run.parts.own_losses:
            found = trend([float(loss) for loss in self._losses])
        for note in found:
            say(self._run.world, f"note: {note}")


def _guess(run: Run) -> float:
    """The loss of a guess among the classes, ln(classes); 0 where the loss has other terms."""
    widths = [each.shape[-1] for each in _logits(run)]
    return math.log(widths[0]) if len(widths) == 1 and widths[0] else 0.0


def first_step(loss: float, grad_norm: float, guess: float) -> list[str]:
    """Notes on the first step's figures; `guess`: the loss of a guess, 0 where it is not known."""
    found = []
    if guess and loss > _GUESSES * guess + 1:
        found.append(
            f"the loss begins at {loss:.3g}, a guess has {guess:.3g}: inputs or the last layer's "
            "first weights are too large, or labels are other ones than the model's classes"
        )
    if grad_norm > _LARGE_GRADIENT:
        found.append(
            f"the first gradient has the norm {grad_norm:.3g}: scale inputs and targets to a size "
            "of about 1, or limit it by --clip_norm"
        )
    return found


def _sums(weights: Sequence[keras.Variable]) -> list[tuple[float, float]]:
    """Of each, two sums that any change of it changes, but for rare chance."""
    wide = [tf.cast(raw(v), tf.float64) for v in weights]
    return [(float(tf.reduce_sum(v)), float(tf.reduce_sum(v * v))) for v in wide]


def still(weights: Sequence[keras.Variable], before: Sequence, steps: int) -> list[str]:
    """A note where weights are as they were `before`, by `_sums`."""
    same = [v.path for v, old, new in zip(weights, before, _sums(weights)) if old == new]
    if not same:
        return []
    return [
        f"{join(same, 4)} did not change in {steps} steps: their gradient is 0 or vanishes (is "
        "what they compute used by the loss? are units of ReLU dead?)"
    ]


def trend(losses: Sequence[float]) -> list[str]:
    """A note where the loss does not fall though its noise is small; telemetry tells of a rise."""
    y = np.array(losses)
    if not np.isfinite(y).all():
        return []
    first, last = float(np.median(y[:5])), float(np.median(y[-20:]))
    noise = float(np.median(np.abs(np.diff(y)))) / abs(first or 1.0)
    if abs(first - last) < _FALL * abs(first) and noise < _FALL:
        what = f"the loss did not fall in {len(y)} steps ({first:.4g}, now {last:.4g})"
        return [f"{what}: {_RATE} higher; --dry_run tries whether one batch can be learned"]
    return []


_RATE = "try --find_lr, or a --base_lr ten times"


def by_heart(run: Run) -> Ending | None:
    """Learns one batch by heart and says how far it came; all ranks. Weights are spoilt by it.

    Returns an ending after a stop signal.
    """
    rates = schedule.of_run(run.task, run.context.config, run.world.size)
    places = np.linspace(0, run.settings.num_steps - 1, 200).astype(int).tolist()
    at = max(places, key=lambda step: float(rates(tf.constant(step, tf.int64))))
    before, batch = _sums(run.model.trainable_variables), run.feed.next()
    losses, count, start = [], _BY_HEART, time.monotonic()
    while len(losses) < count:
        run.state.step.assign(at)  # where the rate is highest
        result = run.traced_step(batch, run.health.votes())
        losses.append(float(result["loss"]))
        ending = run.health.after_step(result, at_once=True)
        if ending and ending.code == PREEMPTED:
            return ending
        if ending:
            break
        if len(losses) == 3:
            fits = int(_BY_HEART_SECONDS * 3 / (time.monotonic() - start))
            count = run.world.broadcast_object(min(max(fits, 3), count), "by_heart")
    came = f"the loss of one batch went from {losses[0]:.4g} to {losses[-1]:.4g}"
    say(run.world, f"learning by heart: in {len(losses)} steps {came}")
    found = still(run.model.trainable_variables, before, len(losses))
    if not losses[-1] <= _LEARNED * losses[0] and count == _BY_HEART and losses[-1] > 0:
        found.append(
            f"one batch was not learned by heart: {_RATE} higher or lower; are labels "
            "right, and is the loss made of the model's outputs?"
        )
    for note in found:
        say(run.world, f"note: {note}")
    return None
