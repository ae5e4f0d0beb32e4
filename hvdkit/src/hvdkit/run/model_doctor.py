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
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import classes
from hvdkit.logs import join, one_line
from hvdkit.ranks.world import say, weights_sha256
from hvdkit.run.health import Ending
from hvdkit.stop import PREEMPTED
from hvdkit.train import groups, objective, outputs, schedule
from hvdkit.train.step import Result

if TYPE_CHECKING:
    from hvdkit.run.loop import Run

_SAMPLES, _SECONDS = 64, 1.0  # that are looked at, and for how long at most
_LARGE_INPUTS = 30.0  # their mean size: initializers of weights are made for about 1
_LARGE_GRADIENT = 1e3
_GUESSES = 3.0  # times the loss of a guess, plus 1, that a first loss may be
_MOVED_AFTER = 20  # steps, each weight should have changed
_JUDGED_AFTER = 100  # steps behind the warm-up, the loss should have fallen
_FALL = 0.01  # of the scale of the loss
_BY_HEART, _BY_HEART_SECONDS = 50, 30.0  # steps on one batch
_LEARNED, _LEFT = 0.3, 0.5  # of the scale: what should fall then, and what may be left
_APART = 1e5  # times the median: the gradient of a kernel has exploded or vanished
_RATE = "try --find_lr, or a --base_lr ten times"


def notes(run: Run) -> list[str]:
    """What can be seen before the first step; without collectives."""
    logits = _logits(run)
    names = classes.of(run.context.train_source)
    found = [
        f"the last layer gives {narrow}, in which near logits are equal: give it "
        "dtype=hvdkit.train.preprocessing.wide()"
        for narrow in sorted({*map(outputs.narrow, logits)} - {""})
    ]
    width = max((each.shape[-1] or 0 for each in logits), default=0)
    if names and width > len(names):
        found.append(f"the last layer has {width} units and the data have {len(names)} classes")
    alike = Counter(one_line(name.casefold()) for name in names)
    if twice := [name for name in names if alike[one_line(name.casefold())] > 1]:
        found.append(f"classes {join(twice)} differ by case or blanks alone: are they one class?")
    return found + _of_samples(run, logits)


def _logits(run: Run) -> list[tf.Tensor]:
    """Symbolic logits [..., classes] of the softmax losses in the evaluation's graph."""
    return outputs.softmax_logits(run.evaluator.graph)


def _of_samples(run: Run, logits: Sequence[tf.Tensor]) -> list[str]:
    """Notes on the inputs and targets of samples from all over the training data."""
    places = np.random.default_rng(0).permutation(min(len(run.context.train_source), 2**24))
    sizes = 0.0
    count = 0
    same = True
    first = None
    highest = -1
    end = math.inf
    width = (logits[0].shape[-1] or run.settings.num_classes) if len(logits) == 1 else 0
    with contextlib.suppress(ValueError):  # one that cannot be read is told when it is its turn
        for place in places[:_SAMPLES].tolist():
            sample = run.feed.sample(place)
            floats = [x for x in tf.nest.flatten(sample["inputs"]) if x.dtype.is_floating]
            sizes += max((float(tf.reduce_mean(tf.abs(x))) for x in floats), default=0.0)
            targets = tf.nest.flatten(sample["targets"])
            highest = max([highest, *(_highest_label(target, width) for target in targets)])
            first = first or targets
            same = same and all(map(np.array_equal, first, targets))
            count = count + 1
            if time.monotonic() > end:
                break
            if count == 1:  # which makes what reads
                end = time.monotonic() + _SECONDS
    found = []
    size = sizes / max(count, 1)
    if size > _LARGE_INPUTS and _weighs_inputs(run.model):
        found.append(
            f"inputs are {size:.3g} in size on average and no layer scales them: begin the model "
            "with keras.layers.Normalization or Rescaling, or scale them in the task"
        )
    # By chance alone, classes that are as frequent as others would be missed once in a thousand.
    if 1 <= highest < width - 1 and ((highest + 1) / width) ** count < 1e-3:
        found.append(
            f"the model tells {width} classes apart, and the highest label of {count} samples from "
            f"all over the data is {highest}: give --num_classes={highest + 1}, unless the others "
            "are rare"
        )
    if logits and count > _SAMPLES // 4 and same and first:
        found.append(
            f"{count} samples from all over the data have the same targets: are labels read as "
            "they should be, or are other classes that rare?"
        )
    return found


def _highest_label(target: tf.Tensor, width: int) -> int:
    """The highest class below `width` in a sample's target; -1 where it may hold anything else."""
    is_one_hot = target.shape.rank and target.shape[-1] == width
    if not target.dtype.is_integer or is_one_hot:
        return -1
    labels = target.numpy()
    labels = labels[labels < width]  # higher ones are ignored
    return int(labels.max()) if labels.size else -1


def _weighs_inputs(model: keras.Model) -> bool:
    """Whether a layer with a kernel takes an input as it is, as far as the model's graph shows."""
    model = getattr(model, "_functional", model)  # of a Sequential
    if not hasattr(model, "_inputs_struct"):  # subclassed
        return False
    inputs = {*map(id, model.inputs)}
    nodes = [(op, node) for op in model.operations for node in op._inbound_nodes]
    first = [op for op, node in nodes if inputs & {id(x) for x in node.input_tensors}]
    return any(hasattr(op, "kernel") for op in first)


class FirstSteps:
    """Judges the first steps of a run, by figures that steps return anyway."""

    settles = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses = []
        self._rates = []
        self._last = run.settings.warmup_steps + _JUDGED_AFTER
        self._before = _digests(run) if self.due(1) else {}

    def due(self, step: int) -> bool:
        return self._run.start.source == "new" and step <= self._last

    def __call__(self, step: int, result: Result) -> None:
        run = self._run
        found = []
        self._losses.append(result["loss"])
        self._rates.append(result["lr"])
        if step == 1:
            found = _first_step(run, float(result["loss"]), float(result["grad_norm"]))
        if step == _MOVED_AFTER + run.settings.warmup_steps and any(map(float, self._rates)):
            found = _still(run, self._before, step)
        warm = step == self._last and not run.parts.own_losses
        if warm and float(result["lr"]) > _highest(run)[0] / 10:
            found = trend([float(loss) for loss in self._losses], _scale(run))
        for note in found:
            say(run.world, f"note: {note}")


def _scale(run: Run) -> float:
    """ln(classes), the softmax cross-entropy of a guess; 0 where there is none."""
    return math.log(max((each.shape[-1] or 1 for each in _logits(run)), default=1))


def _first_step(run: Run, loss: float, grad_norm: float) -> list[str]:
    """Notes on the first step's figures."""
    found = []
    guess = _scale(run)
    if guess and loss > _GUESSES * guess + 1:  # also other terms may be large
        guess = _loss_of_zeros(run)
    if guess and loss > _GUESSES * guess + 1:
        found.append(
            f"the loss begins at {loss:.3g}, and is {guess:.3g} where all logits are 0: inputs or "
            "the last layer's first weights are too large, or labels are other ones than its units"
        )
    # Where it is infinite the step is skipped, as float16's first may be.
    if _LARGE_GRADIENT < grad_norm < math.inf:
        found.append(
            f"the first gradient has the norm {grad_norm:.3g}: scale inputs and targets to a size "
            "of about 1, or limit it by --clip_norm"
        )
    return found


def _loss_of_zeros(run: Run) -> float:
    """The task's loss of one sample if the model's outputs were 0; 0 where it takes none."""
    with contextlib.suppress(Exception):  # on all ranks or on none: it is the same sample
        batch, found = run.evaluator.one(0)
        zeros = tf.nest.map_structure(tf.zeros_like, found)
        terms = objective.loss(run.task, zeros, batch["targets"])
        return sum(float(tf.reduce_sum(x * w) / tf.reduce_sum(w)) for x, w in terms.values())
    return 0.0


def _digests(run: Run) -> dict[str, str]:
    """SHA-256 of each weight that the optimizer moves, by its path."""
    still = {id(v) for v in groups.weights_at_rest(run.optimizer)}
    moves = [v for v in run.model.trainable_variables if id(v) not in still]
    return {v.path: weights_sha256([v]) for v in moves}


def _still(run: Run, before: dict[str, str], steps: int) -> list[str]:
    """A note where weights are as they were `before`, by `_digests`."""
    if not (same := [path for path, digest in _digests(run).items() if before[path] == digest]):
        return []
    return [
        f"{join(same, 4)} did not change in {steps} steps: the gradient is 0 or vanishes (is what "
        "they compute used by the loss, and often enough? are units of ReLU dead?)"
    ]


def _of_layers(run: Run, before: dict[str, str], figures: np.ndarray) -> list[str]:
    """A note on kernels whose gradient is far from the median one.

    `before`: by the paths of weights that the optimizer moves; `figures`: the step's "layers".
    """
    norms = {}
    for variable, norm in zip(run.model.trainable_variables, figures[:, 1].tolist()):
        # A bias of attention's keys has two axes, and rightly no gradient: softmax does not see it.
        is_kernel = variable.ndim > 1 and variable.name != "bias"
        if is_kernel and variable.path in before:
            norms[variable.path] = norm
    usual = float(np.median([*norms.values()] or [0]))
    far = {
        "large": [path for path, norm in norms.items() if norm > _APART * usual > 0],
        "small": [path for path, norm in norms.items() if norm * _APART < usual],
    }
    return [
        f"the gradient of {join(paths, 4)} is over {_APART:.0e} times as {what} as that of the "
        "median layer: is what they compute used, scaled, normalized?"
        for what, paths in far.items()
        if paths and math.isfinite(usual)
    ]


def trend(losses: Sequence[float], scale: float) -> list[str]:
    """A note where the loss does not fall though its noise is small; telemetry tells of a rise.

    `scale`: how much it may fall, 0: to 0.
    """
    y = np.array(losses)
    first = float(np.median(y[:5]))
    last = float(np.median(y[-20:]))
    least = _FALL * (scale or abs(first))
    if not (abs(first - last) < least and np.median(np.abs(np.diff(y))) < least):
        return []
    return [
        f"the loss did not fall in {len(y)} steps ({first:.4g}, now {last:.4g}): {_RATE} higher; "
        "--dry_run tries whether one batch can be learned"
    ]


def _highest(run: Run) -> tuple[float, int]:
    """The highest rate of the schedule, and a step that has it."""
    rates = schedule.of_run(run.task, run.context.config, run.world.size)
    places = np.linspace(0, run.settings.num_steps - 1, 50).astype(int).tolist()
    return max((float(rates(tf.constant(step, tf.int64))), step) for step in places)


def by_heart(run: Run) -> Ending | None:
    """Learns one batch by heart and says how far it came; all ranks. Weights are spoilt by it.

    Returns an ending after a stop signal.
    """
    (_, at) = _highest(run)
    before = _digests(run)
    batch = run.feed.next()
    losses = []
    count = _BY_HEART
    start = time.monotonic()
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
    say(
        run.world,
        f"learning by heart: in {len(losses)} steps the loss of one batch went from "
        f"{losses[0]:.4g} to {losses[-1]:.4g}",
    )
    found = _of_layers(run, before, result["layers"].numpy()) + _still(run, before, len(losses))
    scale = _scale(run) or abs(losses[0])
    fell = losses[0] - losses[-1] >= _LEARNED * min(scale, losses[0])
    whole = len(losses) == _BY_HEART or not math.isfinite(losses[-1])
    if whole and not fell and not losses[-1] <= _LEFT * scale:
        found.append(
            f"one batch was not learned by heart: {_RATE} higher or lower; are labels right, and "
            "is the loss made of the model's outputs?"
        )
    for note in found:
        say(run.world, f"note: {note}")
    return None
