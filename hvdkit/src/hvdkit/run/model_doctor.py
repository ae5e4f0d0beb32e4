"""The model doctor: notes on a model, data or a rate with which little will be learned.

Some are seen in the graph and in a few samples, others in the first steps; a dry run also learns
one batch by heart. Nothing here changes a bit of a run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdkit.data import classes
from hvdkit.logs import join, one_line
from hvdkit.ranks.messages import heartbeat
from hvdkit.ranks.world import say, weights_sha256
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.run.parts import RunParts
from hvdkit.stop import PREEMPTED
from hvdkit.train.optim import groups, schedule
from hvdkit.train.step import calls, objective
from hvdkit.train.step.step import Result
from hvdkit.train.task import outputs

# At most so many samples are looked at, and for so many seconds.
_SAMPLES = 64
_SECONDS = 1.0
# Initializers of weights are made for inputs of a mean size of about 1.
_LARGE_INPUTS = 30.0
_LARGE_GRADIENT = 1e3
_GUESSES = 3.0  # A first loss may be so many times the loss of a guess, plus 1.
_MOVED_AFTER = 20  # After so many steps each weight should have changed.
_JUDGED_AFTER = 100  # So many steps behind the warm-up the loss should have fallen.
_FALL = 0.01  # This share of the loss's scale is a fall.
# So many steps are made on one batch, or as many as fit into these seconds.
_BY_HEART = 50
_BY_HEART_SECONDS = 30.0
# Shares of the loss's scale: what should fall then, and what may be left.
_LEARNED = 0.3
_LEFT = 0.5
# A gradient of so many times the median has exploded; the inverse has vanished.
_APART = 1e5
_TRY_RATE = "try --find_lr, or a --base_lr ten times"


def notes(parts: RunParts) -> list[str]:
    """What can be seen before the first step; without collectives."""
    logits = _logits(parts)
    names = classes.of(parts.context.train_source)
    texts = []
    narrow_types = {outputs.narrow(tensor) for tensor in logits} - {""}
    for narrow_type in sorted(narrow_types):
        texts.append(
            f"the last layer gives {narrow_type}, in which near logits are equal: give it "
            "dtype=hvdkit.train.preprocessing.wide()"
        )
    width = max((tensor.shape[-1] or 0 for tensor in logits), default=0)
    if names and width > len(names):
        texts.append(
            f"the last layer has {width} units and the data have {len(names)} classes"
        )
    spellings = [one_line(name.casefold()) for name in names]
    counts = Counter(spellings)
    alike = [name for name, spelling in zip(names, spellings) if counts[spelling] > 1]
    if alike:
        texts.append(
            f"classes {join(alike)} differ by case or blanks alone: are they one class?"
        )
    return texts + _of_samples(parts, logits)


def _logits(parts: RunParts) -> list[tf.Tensor]:
    """Symbolic logits [..., classes] of the softmax losses in the evaluation's graph."""
    return outputs.softmax_logits(parts.evaluator.graph)


def _some_samples(parts: RunParts) -> Iterator[dict]:
    """Samples from all over the training data, up to the first that cannot be read.

    That one is reported when a step needs it.
    """
    places = np.random.default_rng(0).permutation(
        min(len(parts.context.train_source), 2**24)
    )
    end = math.inf
    with contextlib.suppress(ValueError):
        for place in places[:_SAMPLES].tolist():
            sample = parts.feed.sample(place)
            if end == math.inf:  # The first call took longer, as it made what reads.
                end = time.monotonic() + _SECONDS
            yield sample
            if time.monotonic() > end:
                break


def _of_samples(parts: RunParts, logits: Sequence[tf.Tensor]) -> list[str]:
    """Notes on the inputs and targets of samples from all over the training data."""
    width = 0
    if len(logits) == 1:
        width = logits[0].shape[-1] or parts.config.num_classes
    count = 0
    total_size = 0.0
    highest = -1
    first_targets = None
    are_same = True
    for sample in _some_samples(parts):
        count += 1
        total_size += _size_of_inputs(sample)
        targets = tf.nest.flatten(sample["targets"])
        for target in targets:
            highest = max(highest, _highest_label(target, width))
        first_targets = first_targets or targets
        pairs = zip(first_targets, targets)
        are_same = are_same and all(
            np.array_equal(first, other) for first, other in pairs
        )

    texts = []
    size = total_size / max(count, 1)
    if size > _LARGE_INPUTS and _weighs_inputs(parts.context.model):
        texts.append(
            f"inputs are {size:.3g} in size on average and no layer scales them: begin the model "
            "with keras.layers.Normalization or Rescaling, or scale them in the task"
        )
    # By chance alone, classes that are as frequent as others would be missed once in a thousand.
    if 1 <= highest < width - 1 and ((highest + 1) / width) ** count < 1e-3:
        texts.append(
            f"the model tells {width} classes apart, and the highest label of {count} samples from "
            f"all over the data is {highest}: give --num_classes={highest + 1}, unless the others "
            "are rare"
        )
    if logits and count > _SAMPLES // 4 and are_same and first_targets:
        texts.append(
            f"{count} samples from all over the data have the same targets: are labels read as "
            "they should be, or are other classes that rare?"
        )
    return texts


def _size_of_inputs(sample: dict) -> float:
    """The mean size of the largest of a sample's inputs that are floats."""
    sizes = [0.0]
    for tensor in tf.nest.flatten(sample["inputs"]):
        if tensor.dtype.is_floating:
            sizes.append(float(tf.reduce_mean(tf.abs(tensor))))
    return max(sizes)


def _highest_label(target: tf.Tensor, width: int) -> int:
    """The highest class below `width` in a sample's target; -1 where it may hold anything else."""
    is_one_hot = target.shape.rank and target.shape[-1] == width
    if not target.dtype.is_integer or is_one_hot:
        return -1
    labels = target.numpy()
    labels = labels[labels < width]  # Higher labels are ignored.
    return int(labels.max()) if labels.size else -1


def _weighs_inputs(model: keras.Model) -> bool:
    """Whether a layer with a kernel takes an input as it is, as far as the model's graph shows."""
    model = getattr(model, "_functional", model)  # A Sequential holds its graph there.
    if not hasattr(model, "_inputs_struct"):  # A subclassed model has no graph.
        return False
    input_ids = {id(tensor) for tensor in model.inputs}
    for operation in model.operations:
        if not hasattr(operation, "kernel"):
            continue
        for node in operation._inbound_nodes:
            if any(id(tensor) in input_ids for tensor in node.input_tensors):
                return True
    return False


class FirstSteps:
    """Judges the first steps of a run, by figures that steps return anyway."""

    settles = False

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._losses: list[tf.Tensor] = []
        self._rates: list[tf.Tensor] = []
        self._moved = parts.config.warmup_steps + _MOVED_AFTER
        self._last = parts.config.warmup_steps + _JUDGED_AFTER
        self._digests = _digests(parts.context) if self.due(1) else {}

    def due(self, step: int) -> bool:
        return self._parts.start.source == "new" and step <= self._last

    def ends_call(self, step: int) -> bool:
        """It needs the figures of every step, and the weights only after some."""
        return step in (1, self._moved, self._last)

    def __call__(self, step: int, result: Result) -> None:
        parts = self._parts
        run = parts.context
        texts = []
        for of_step in calls.each(result):
            self._losses.append(of_step["loss"])
            self._rates.append(of_step["lr"])
        if step == 1:
            texts = _first_step(
                parts, float(result["loss"]), float(result["grad_norm"])
            )
        should_have_moved = step == self._moved
        if should_have_moved and any(float(rate) for rate in self._rates):
            texts = _unmoved(run, self._digests, step)
        if step == self._last and not parts.step.own_losses:
            highest_rate, _ = _highest(run)
            if float(result["lr"]) > highest_rate / 10:
                texts = trend([float(loss) for loss in self._losses], _scale(parts))
        for text in texts:
            say(run.world, f"note: {text}")


def _scale(parts: RunParts) -> float:
    """ln(classes), the softmax cross-entropy of a guess; 0 where there is none."""
    return math.log(
        max((tensor.shape[-1] or 1 for tensor in _logits(parts)), default=1)
    )


def _first_step(parts: RunParts, loss: float, grad_norm: float) -> list[str]:
    """Notes on the first step's figures."""
    texts = []
    guess = _scale(parts)
    # Other terms of the loss may be large too.
    if guess and loss > _GUESSES * guess + 1:
        guess = _loss_of_zeros(parts)
    if guess and loss > _GUESSES * guess + 1:
        texts.append(
            f"the loss begins at {loss:.3g}, and is {guess:.3g} where all logits are 0: inputs or "
            "the last layer's first weights are too large, or labels are other ones than its units"
        )
    # A step with an infinite gradient is skipped, as float16's first may be.
    if _LARGE_GRADIENT < grad_norm < math.inf:
        texts.append(
            f"the first gradient has the norm {grad_norm:.3g}: scale inputs and targets to a size "
            "of about 1, or limit it by --clip_norm"
        )
    return texts


def _loss_of_zeros(parts: RunParts) -> float:
    """The task's loss of one sample if the model's outputs were 0; 0 where it takes none."""
    # All ranks try the same sample, so it fails on all of them.
    with contextlib.suppress(Exception):
        batch, model_outputs = parts.evaluator.one(0)
        zeros = tf.nest.map_structure(tf.zeros_like, model_outputs)
        terms = objective.loss(parts.context.task, zeros, batch["targets"])
        total = 0.0
        for values, weights in terms.values():
            total += float(tf.reduce_sum(values * weights) / tf.reduce_sum(weights))
        return total
    return 0.0


def _digests(run: RunContext) -> dict[str, str]:
    """SHA-256 of each weight that the optimizer moves, by its path."""
    at_rest = {id(variable) for variable in groups.weights_at_rest(run.optimizer)}
    digests = {}
    for variable in run.model.trainable_variables:
        if id(variable) not in at_rest:
            digests[variable.path] = weights_sha256([variable])
    return digests


def _unmoved(run: RunContext, before: dict[str, str], steps: int) -> list[str]:
    """A note where weights are as they were `before`, by `_digests`."""
    same = [path for path, digest in _digests(run).items() if before[path] == digest]
    if not same:
        return []
    return [
        f"{join(same, 4)} did not change in {steps} steps: the gradient is 0 or vanishes (is what "
        "they compute used by the loss, and often enough? are units of ReLU dead?)"
    ]


def _of_layers(
    run: RunContext, before: dict[str, str], figures: np.ndarray
) -> list[str]:
    """Notes on kernels whose gradient is far from the median one.

    `before`: by the paths of weights that the optimizer moves; `figures`: the step's "layers".
    """
    norms = {}
    for variable, norm in zip(run.model.trainable_variables, figures[:, 1].tolist()):
        # A bias of attention's keys has two axes, and rightly no gradient: softmax does not see it.
        is_kernel = variable.ndim > 1 and variable.name != "bias"
        if is_kernel and variable.path in before:
            norms[variable.path] = norm
    if not norms:
        return []
    median = float(np.median(list(norms.values())))
    if not math.isfinite(median):
        return []
    large = [path for path, norm in norms.items() if norm > _APART * median > 0]
    small = [path for path, norm in norms.items() if norm * _APART < median]
    texts = []
    for size, paths in (("large", large), ("small", small)):
        if paths:
            texts.append(
                f"the gradient of {join(paths, 4)} is over {_APART:.0e} times as {size} as that of "
                "the median layer: is what they compute used, scaled, normalized?"
            )
    return texts


def trend(losses: Sequence[float], scale: float) -> list[str]:
    """A note where the loss stands still and its noise is too small to hide a fall; else [].

    `losses`: of each step. `scale`: the loss of a guess, in shares of which a fall is measured; 0
    where it is not known: shares of the first loss then. A rise gets no note: telemetry has one.
    """
    first = float(np.median(losses[:5]))
    last = float(np.median(losses[-20:]))
    least_fall = _FALL * (scale or abs(first))
    noise = np.median(np.abs(np.diff(losses)))
    stands_still = abs(first - last) < least_fall and noise < least_fall
    if not stands_still:  # NaN does not either.
        return []
    return [
        f"the loss did not fall in {len(losses)} steps ({first:.4g}, now {last:.4g}): {_TRY_RATE} "
        "higher; --dry_run tries whether one batch can be learned"
    ]


def _highest(run: RunContext) -> tuple[float, int]:
    """The highest rate of the schedule, and a step that has it."""
    rate_at = schedule.of_run(run.task, run.config, run.world.size)
    steps = np.linspace(0, run.config.num_steps - 1, 50).astype(int).tolist()
    return max((float(rate_at(tf.constant(step, tf.int64))), step) for step in steps)


def by_heart(parts: RunParts) -> Ending | None:
    """Learns one batch by heart and says how far it came; all ranks. Weights are spoilt by it.

    Returns an ending after a stop signal.
    """
    run = parts.context
    _, step_of_highest_rate = _highest(run)
    before = _digests(run)
    batch = parts.feed.next()
    losses: list[float] = []
    count = _BY_HEART
    start = time.monotonic()
    while len(losses) < count:
        run.state.step.assign(step_of_highest_rate)
        heartbeat.enter_step()
        result = parts.traced_step(batch, parts.health.votes())
        losses.append(float(result["loss"]))
        ending = parts.health.after_step(result, at_once=True)
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
    texts = _of_layers(run, before, result["layers"].numpy())
    texts += _unmoved(run, before, len(losses))
    scale = _scale(parts) or abs(losses[0])
    fell = losses[0] - losses[-1] >= _LEARNED * min(scale, losses[0])
    is_whole = len(losses) == _BY_HEART or not math.isfinite(losses[-1])
    if is_whole and not fell and not losses[-1] <= _LEFT * scale:
        texts.append(
            f"one batch was not learned by heart: {_TRY_RATE} higher or lower; are labels right, "
            "and is the loss made of the model's outputs?"
        )
    for text in texts:
        say(run.world, f"note: {text}")
    return None
