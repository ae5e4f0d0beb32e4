"""`hvdkit predict` on a file of examples: each rank predicts a part, rank 0 joins the parts."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.commands import example_files
from hvdkit.data.pipeline import reason_of
from hvdkit.data.sampler import share
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.train.task import checks as task_checks


class ExamplePredictor:
    """Predicts on a file of examples; every rank must make it, and call its methods."""

    fault = "without a class"
    faults = "examples are without a class"

    def __init__(self, config: Settings, world: World, arguments: Any) -> None:
        self._world = world
        self._batch_size = config.eval_batch_size
        self._file: Path = arguments.pictures[0]
        self._as_lines = self._file.suffix == ".jsonl"
        self._without_class: list[int] = []  # examples of this rank
        with world.fail_together("reading the examples"):
            if len(arguments.pictures) > 1:
                raise ValueError(
                    f"give one file of examples ({' or '.join(example_files.SUFFIXES)})"
                )
            digest = whole_files.sha256(self._file)
            self._run = load_run.trained(config, arguments.checkpoint, arguments.ema)
            self._columns = example_files.read(self._file, self._run.inputs)
            self.count = example_files.count(self._columns)
            # The first example twice: with one alone, outputs that lack the batch's axis may pass.
            batch = self._run.inputs.nested(example_files.batch(self._columns, [0, 0]))
            try:
                self._decode = load_run.decoder(self._run, config, batch)
            except ValueError as error:
                raise ValueError(f"{self._place(0)}: {error}") from error
        weights = world_lib.weights_sha256(self._run.model.variables)
        world.check_same(weights, f"the weights of {self._run.path.name}")
        world.check_same(digest, f"the examples of {self._file}")
        say(world, f"{self.count:,} examples, by {self._run.path}")
        spec = [self._run.inputs.structure]
        self._outputs_of = tf.function(
            self._outputs, input_signature=spec, autograph=False
        )

    def predict_into(self, folder: Path, stop_signal: StopSignal) -> list[str]:
        """Writes predictions.npz or .jsonl; nothing is skipped: what is wrong raises Stop."""
        world = self._world
        name = example_files.LINES if self._as_lines else example_files.ARRAYS
        parts = [folder / f"{rank:06d}-{name}" for rank in range(world.size)]
        own_part = parts[world.rank]
        class_names = example_files.class_names(self._run.path)
        own_indices = range(*share(self.count, world.rank, world.size))
        predictions: list[example_files.Batch] = []
        with world.fail_together("predicting"):
            for indices in example_files.batches(
                self._columns, own_indices, self._batch_size
            ):
                if stop_signal.asked:
                    break
                predictions += self._predicted(indices)
                if world.is_chief:
                    done = indices.stop - own_indices.start
                    logs.progress("examples", done, len(own_indices))
            if predictions and self._as_lines:
                example_files.write_lines(own_part, predictions, class_names)
            elif predictions:
                example_files.write_arrays(own_part, predictions)
        example_files.check_stopped(world, stop_signal)
        written = [
            part
            for rank, part in enumerate(parts)
            if range(*share(self.count, rank, world.size))
        ]
        world.from_chief(
            f"writing {folder.parent}", example_files.join_parts, folder / name, written
        )
        numbers: list[int] = []
        for of_rank in world.gather_objects(self._without_class, "predict.classes"):
            numbers += of_rank
        return [
            f"{self._place(number)}: {example_files.NO_CLASS}" for number in numbers
        ]

    def _outputs(self, inputs: Any) -> dict[str, tf.Tensor]:
        return self._decode(
            task_checks.outputs(self._run.task, self._run.model, inputs)
        )

    def _predicted(self, indices: range) -> list[example_files.Batch]:
        """Outputs by name; where a batch fails, each example by itself, to name it."""
        inputs = self._run.inputs.nested(example_files.batch(self._columns, indices))
        try:
            outputs = self._outputs_of(inputs)
        except tf.errors.OpError as error:
            if len(indices) == 1:
                place = self._place(indices.start)
                raise ValueError(f"{place}: {reason_of(error)}") from None
            predictions = []
            for index in indices:
                predictions += self._predicted(range(index, index + 1))
            return predictions
        arrays = {name: value.numpy() for name, value in outputs.items()}
        without = example_files.without_class(arrays)
        if without.any():
            # -1 is no number of an unsigned type.
            classes = arrays["classes"].astype(np.int64)
            arrays["classes"] = np.where(without, -1, classes)
        if without.ndim == 1:  # of an example; a token may be padding
            places = np.flatnonzero(without)
            self._without_class += [indices.start + int(place) for place in places]
        return [arrays]

    def _place(self, index: int) -> str:
        kind = "line" if self._as_lines else "example"
        return f"{self._file}, {kind} {index + 1}"
