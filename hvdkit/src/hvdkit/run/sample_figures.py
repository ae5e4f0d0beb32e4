"""What a run makes of a few samples: the same on all ranks, each time, and after a restart.

Code that orders a Python set, or draws numbers without a seed while a task or a model is made,
differs between processes: each rank would learn other classes, or train another model, and a
checkpoint's weights would not fit the model of the process that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.checkpoint import checkpoints, files
from hvdkit.data.pipeline import Reader
from hvdkit.evaluate.evaluator import Evaluator
from hvdkit.logs import join
from hvdkit.ranks.figures import differ, figures_of
from hvdkit.ranks.world import hostname, say
from hvdkit.run.context import RunContext
from hvdkit.run.parts import RunParts
from hvdkit.settings import Settings, absl_flags
from hvdkit.stop import BUG, Stop
from hvdkit.train.step import graph_checks, objective
from hvdkit.train.step.state import leave_zero, unchanged
from hvdkit.train.task.checks import user_code_errors
from hvdkit.train.task.protocol import Example

_SAMPLES = 4  # of the training set
_EVALUATED = 2  # of the validation set
# Relative to the mean size: outputs may differ so much between devices or types of numbers.
_NEAR = 0.01
# GPUs of several kinds, or with other algorithms, differ by a hundredth after twenty layers;
# another model differs by the size of its outputs.
_NEAR_ON_RANKS = 0.1


# What tensors hold, by "training sample 7 (counted from 0): its targets".
Figures = dict[str, list[float]]


def check(parts: RunParts) -> None:
    """Raises Stop on all ranks where one makes another example or other outputs of a sample.

    Notes what a second reading of a sample gives otherwise; where same bits are promised, that is
    a Stop too.
    """
    world = parts.world
    with world.fail_together("reading a few samples twice"):
        figures, unsteady = _examples(parts)
        note = _unsteady(unsteady, parts.config)
    if note:
        say(world, f"note: {note}")
    if world.size == 1:
        return
    weights = parts.step.weights
    comparing = world.fail_together("comparing a few samples on all ranks")
    errors = user_code_errors("evaluating a few samples")
    with comparing, errors, unchanged(weights):
        leave_zero(weights)
        samples = ValidationSamples(parts.evaluator, parts.val_feed.reader)
        figures |= samples.figures()
    everyone = world.gather_alike(figures, "sample_figures")
    near = objective.nearness(parts.config)
    for rank, others in enumerate(everyone):
        for name, expected in everyone[0].items():
            is_output = name in samples.outputs
            least = max(near, _NEAR_ON_RANKS) if is_output else near
            if name in others and differ(expected, others[name], near=least):
                hosts = world.gather_objects(hostname(), "sample_figures.hosts")
                raise Stop(
                    BUG,
                    f"{name} on rank {rank} ({hosts[rank]}), of mean {others[name][0]:.6g}, differ "
                    f"from rank 0's, of mean {expected[0]:.6g}: each rank would train something "
                    "else. Usual causes are the order of a Python set (use sorted), and numbers "
                    "that are drawn without a seed while the task or the model is made",
                )


class ValidationSamples:
    """Some validation samples, read once, for figures of what the model makes of them."""

    def __init__(self, evaluator: Evaluator, reader: Reader) -> None:
        """Raises ValueError where they cannot be read."""
        self._evaluator = evaluator
        self._data = reader.source.fingerprint()
        self._draws = graph_checks.draws(evaluator.graph)
        self._batches: dict[int, Example] = {}
        self._of_examples: Figures = {}
        for number in _spread(len(reader.source), _EVALUATED):
            batch = _on_cpu(evaluator.batch, number)
            example = _steady(batch, _on_cpu(evaluator.batch, number))
            self._of_examples |= _described(f"validation sample {number}", example)
            if "inputs" in example:
                self._batches[number] = batch
        self.outputs: Figures = {}

    def figures(self) -> Figures:
        """Of the examples, and of the model's outputs now where nothing is drawn: `outputs`."""
        if self._draws or not self._batches:
            return dict(self._of_examples)
        by_sample = []
        for batch in self._batches.values():
            outputs = _tensors(self._evaluator.outputs(batch))
            # A class that is the largest on one device may be the second on another.
            floats = [tensor for tensor in outputs if tensor.dtype.is_floating]
            by_sample.append([tensor.numpy().ravel() for tensor in floats])
        # Of all samples together: of one, a single output may be near 0 beside what it sums up.
        joined = [np.concatenate(arrays) for arrays in zip(*by_sample)]
        samples = f"validation sample {join(self._batches)}"
        self.outputs = _described(samples, {"outputs": joined})
        return self._of_examples | self.outputs

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint keeps; nothing where the model fails, as it is saved all the same."""
        try:
            return {"data": self._data, "samples": self.figures()}
        except Exception:
            return {}

    def note_on_restart(self, checkpoint: Path, config: Settings) -> str:
        """A note where outputs are not those that the checkpoint was saved with; else empty.

        The variables must be the checkpoint's. Other settings of evaluation, or of a project's
        own, may give other outputs.
        """
        manifest = files.read_manifest(checkpoint)
        saved = manifest.figures
        if saved.get("data") != self._data or other_settings(manifest, config):
            return ""
        try:
            now = self.figures()
        except Exception:  # An evaluation says what is wrong, or that memory is short.
            return ""
        for name, figures in now.items():
            old = saved.get("samples", {}).get(name, figures)
            if differ(old, figures, near=max(_NEAR, self._evaluator.near)):
                return (
                    f"{name}, of mean {figures[0]:.6g}, were of mean {old[0]:.6g} when "
                    f"{checkpoint} was saved: the code has changed since then, or it depends on "
                    "the order of a Python set (use sorted), or draws numbers without a seed "
                    "while the task or the model is made. Then these weights do not fit the model"
                )
        return ""


def other_settings(manifest: files.Manifest, config: Settings) -> dict[str, Any]:
    """Settings on which outputs for a sample depend and that differ: the checkpoint's, by name.

    Flags that a fork defines by absl have names with two dashes.
    """
    engine = {field.name for field in dataclasses.fields(Settings)}
    others = {}
    for name, value in dataclasses.asdict(config).items():
        decides = name not in engine or name in (*checkpoints.MEASURE, "precision")
        now = list(value) if isinstance(value, tuple) else value
        saved = manifest.config.get(name, now)
        if decides and saved != now:
            others[name] = saved
    for name, text in absl_flags.values_of_the_fork().items():
        saved = manifest.config.get(name, text)
        if saved != text:
            others[name] = saved
    return others


def say_on_restart(
    context: RunContext, evaluator: Evaluator, *, reader: Reader, checkpoint: Path
) -> None:
    """Rank 0 prints `note_on_restart`; every rank must call it."""
    world = context.world
    with world.fail_together("comparing a few samples with the checkpoint's"):
        if world.is_chief:
            samples = ValidationSamples(evaluator, reader)
            note = samples.note_on_restart(checkpoint, context.config)
            if note:
                say(world, f"note: {note}")


def _unsteady(names: Collection[str], config: Settings) -> str:
    """A note where a second reading of a sample gives something else; else empty.

    Raises ValueError where the settings promise the same bits.
    """
    if not names:
        return ""
    parts_of_example = join(sorted(names))
    if config.virtual_ranks or config.deterministic:
        raise ValueError(
            f"training_example gives other {parts_of_example} each time it reads the same sample "
            "with the same key, and --virtual_ranks and --deterministic promise the same bits: "
            "draw with `key` (tf.random.stateless_uniform, or numpy's default_rng(key))"
        )
    return (
        f"training_example gives other {parts_of_example} each time it reads the same sample "
        "with the same key, as numpy draws in tf.numpy_function, so no run can be repeated, nor "
        "resumed as if nothing had happened: draw with `key` (tf.random.stateless_uniform, or "
        "numpy's default_rng(key))"
    )


def _examples(parts: RunParts) -> tuple[Figures, set[str]]:
    """Figures of training examples, but for parts that a second reading gives otherwise: these."""
    figures: Figures = {}
    unsteady: set[str] = set()
    for number in _spread(len(parts.feed.reader.source), _SAMPLES):
        example = _on_cpu(parts.feed.sample, number)
        steady = _steady(example, _on_cpu(parts.feed.sample, number))
        unsteady |= {*example} - {*steady}
        figures |= _described(f"training sample {number}", steady)
    return figures, unsteady


def _spread(size: int, most: int) -> range:
    return range(0, size, -(-size // most))


def _on_cpu(read: Callable[[int], Example], number: int) -> Example:
    """A sample, read as a pipeline reads it: not on a GPU, where sums may come in any order."""
    with tf.device("/CPU:0"):
        return read(number)


def _tensors(nested: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(nested, expand_composites=True)
    return [tensor for tensor in flat if tf.is_tensor(tensor)]


def _steady(example: Example, again: Example) -> dict[str, list[tf.Tensor]]:
    """The tensors of an example's parts, but for parts that a second reading gives otherwise."""
    steady = {}
    for name, part in example.items():
        tensors = _tensors(part)
        if _contents(tensors) == _contents(_tensors(again[name])):
            steady[name] = tensors
    return steady


def _contents(tensors: Sequence[tf.Tensor]) -> list[Any]:
    """What compares equal where all bytes are the same, also of numbers that are no number."""
    contents = []
    for tensor in tensors:
        values = np.asarray(tensor.numpy())
        is_text = tensor.dtype == tf.string
        contents.append(values.tolist() if is_text else values.tobytes())
    return contents


def _described(sample: str, parts: Mapping[str, Sequence[Any]]) -> Figures:
    """Figures of tensors of numbers; texts, which may be a host's own paths, have none."""
    figures = {}
    for name, tensors in parts.items():
        for place, tensor in enumerate(tensors):
            dtype = tf.as_dtype(tensor.dtype)
            if dtype.is_floating or dtype.is_integer or dtype.is_bool:
                part = f", part {place}" if len(tensors) > 1 else ""
                label = f"{sample} (counted from 0): its {name}{part}"
                figures[label] = figures_of(np.asarray(tensor))
    return figures
