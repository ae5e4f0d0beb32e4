"""`hvdkit predict` on a file of examples: each rank predicts a part, rank 0 joins the parts."""

from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit import logs, whole_files
from hvdkit.commands import examples
from hvdkit.data.pipeline import reason_of
from hvdkit.data.sampler import share
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import load_run
from hvdkit.settings import Settings
from hvdkit.train import task_checks


class Work:
    """Predicts on a file of examples; every rank must make it, and call its methods."""

    def __init__(self, config: Settings, world: World, own: Any) -> None:
        self._world, self._most = world, config.eval_batch_size
        self._file: Path = own.pictures[0]
        self._as_lines = self._file.suffix == ".jsonl"
        with world.fail_together("reading the examples"):
            if len(own.pictures) > 1:
                raise ValueError(f"give one file of examples ({' or '.join(examples.SUFFIXES)})")
            digest = whole_files.sha256(self._file)
            self._run = load_run.trained(config, own.checkpoint, own.ema)
            self._columns = examples.read(self._file, self._run.inputs)
            self.count = examples.count(self._columns)
            # Twice the first one: what forgets the batch shows with more than one.
            tried = self._run.inputs.nested(examples.batch(self._columns, [0, 0]))
            try:
                self._decode = load_run.decoder(self._run, config, tried)
            except ValueError as error:
                raise ValueError(f"{self._place(0)}: {error}") from error
        weights = world_lib.weights_sha256(self._run.model.variables)
        world.check_same(weights, f"the weights of {self._run.path.name}")
        world.check_same(digest, f"the examples of {self._file}")
        say(world, f"{self.count:,} examples, by {self._run.path}")
        spec = [self._run.inputs.structure]
        self._outputs_of = tf.function(self._outputs, input_signature=spec, autograph=False)

    def predict_into(self, folder: Path, stop_signal: StopSignal) -> list[str]:
        """Writes predictions.npz or .jsonl; nothing is skipped: what is wrong raises Stop."""
        world = self._world
        name = examples.LINES if self._as_lines else examples.ARRAYS
        parts = [folder / f"{rank:06d}-{name}" for rank in range(world.size)]
        class_names = examples.class_names(self._run.path)
        mine = range(*share(self.count, world.rank, world.size))
        found: list[examples.Batch] = []
        with world.fail_together("predicting"):
            for indices in examples.batches(self._columns, mine, self._most):
                if stop_signal.asked:
                    break
                found += self._predicted(indices)
                if world.is_chief:
                    logs.progress("examples", indices.stop - mine.start, len(mine))
            if found and self._as_lines:
                examples.write_lines(parts[world.rank], found, class_names)
            elif found:
                examples.write_arrays(parts[world.rank], found)
        examples.check_stopped(world, stop_signal)
        with world.fail_together(f"writing {folder.parent}"):
            if world.is_chief:
                examples.join_parts(folder / name, [part for part in parts if part.exists()])
        return []

    def _outputs(self, inputs: Any) -> dict[str, tf.Tensor]:
        return self._decode(task_checks.outputs(self._run.task, self._run.model, inputs))

    def _predicted(self, indices: range) -> list[examples.Batch]:
        """Outputs by name; where a batch fails, each example by itself, to name it."""
        inputs = self._run.inputs.nested(examples.batch(self._columns, indices))
        try:
            outputs = self._outputs_of(inputs)
        except tf.errors.OpError as error:
            if len(indices) == 1:
                place = self._place(indices.start)
                raise ValueError(f"{place}: {reason_of(error)}") from None
            found = []
            for index in indices:
                found += self._predicted(range(index, index + 1))
            return found
        return [{name: value.numpy() for name, value in outputs.items()}]

    def _place(self, index: int) -> str:
        return f"{self._file}, {'line' if self._as_lines else 'example'} {index + 1}"
