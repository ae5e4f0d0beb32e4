"""Horovod's timeline and TensorFlow's profile of the steps that --timeline=FIRST:LAST names.

    RUN_DIR/timeline/step-00000100.json                           for chrome://tracing, Perfetto
    RUN_DIR/tensorboard/plugins/profile/step-00000100/*.xplane.pb   for TensorBoard's Profile tab

Both are named after the first step in them. Rank 0 writes them: its Horovod coordinates all ranks
and knows when each of them was ready. The profile is that of rank 0.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks.world import World, say
from hvdkit.settings import Settings


class Timeline:
    """An action, and what comes before a step; on all ranks alike, though rank 0 alone writes.

    What cannot be written (a full disk) is told, and the run goes on.
    """

    settles = True

    def __init__(self, config: Settings, world: World, telemetry: Telemetry, done: int) -> None:
        """`done`: the step that the run begins after; steps up to it are not made again."""
        self._steps, self._world, self._telemetry = timeline_steps(config), world, telemetry
        self._dir = Path(config.run_dir)
        self._open = contextlib.ExitStack()  # what is being recorded; it closes the files
        self._step_mark = contextlib.ExitStack()
        self._recorded: list[int] = []
        missed = [step for step in self._steps if step <= done]
        if missed:
            what = "nothing" if len(missed) == len(self._steps) else f"steps from {done + 1} on"
            say(world, f"note: --timeline={config.timeline} records {what}: step {done} is done")

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *error: object) -> None:
        """A run may end before the last of the steps, by a mistake too: what there is is kept."""
        self.stop()

    def due(self, step: int) -> bool:
        # Before the first one too: what a GPU still does for an earlier step is not recorded.
        return bool(self._steps) and step in (self._steps[0] - 1, self._steps[-1])

    def before(self, step: int) -> None:
        """Begins to record, if that is due; all ranks must call it before their steps."""
        if step not in self._steps:
            return
        if not self._recorded:
            if self._world.is_chief:
                self._start(f"step-{step:08d}")
            # Or the others would be in the step already, and rank 0 the one that all wait for.
            self._world.meet("timeline.start")
        self._recorded.append(step)
        if not self._world.is_chief:
            return
        self._step_mark.close()
        self._step_mark.enter_context(tf.profiler.experimental.Trace("train", step_num=step, _r=1))

    def __call__(self, step: int, result: object) -> None:
        if step == self._steps[-1]:
            self.stop()

    def stop(self) -> None:
        """Closes the files, where any are open."""
        with self._telemetry.not_training():
            self._step_mark.close()
            self._open.close()

    def _start(self, name: str) -> None:
        with self._told("TensorFlow's profile"):
            self._start_profile(name)
        with self._told("Horovod's timeline"):
            self._start_horovod(self._dir / "timeline" / f"{name}.json")

    def _start_profile(self, name: str) -> None:
        # TensorFlow names what it writes after the time, so it writes in a folder of its own first.
        made, shown = self._dir / "timeline" / ".profile", self._dir / "tensorboard"
        _remove(made)
        made.mkdir(parents=True)
        tf.profiler.experimental.start(str(made))

        def end() -> None:
            with self._told("TensorFlow's profile"):
                tf.profiler.experimental.stop()
                place = shown / "plugins" / "profile" / name
                _remove(place)
                for found in made.glob("plugins/profile/*"):
                    shutil.move(found, place)
                _remove(made)

        self._open.callback(end)

    def _start_horovod(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")  # where Horovod cannot open it, it tells in its log alone
        hvd.start_timeline(str(path.absolute()), mark_cycles=True)

        def end() -> None:
            with self._told("Horovod's timeline"):
                hvd.stop_timeline()  # returns when the file is closed
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(size - 1, 0))
                    if file.read(1) != b"]":
                        raise OSError(f"{path} is cut: is the disk full?")
                first, last = self._recorded[0], self._recorded[-1]
                say(self._world, f"timeline of steps {first} to {last}: {path}")

        self._open.callback(end)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, tf.errors.OpError) as error:
            say(self._world, f"note: {what} cannot be written; training continues: {error}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
