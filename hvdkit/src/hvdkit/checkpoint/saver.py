"""Saves while training goes on: rank 0 copies the values, and a thread writes them.

One failed write does not end the run: rank 0 prints a note, older checkpoints stay as they are, and
the next save tries again. The number of saves that failed in a row is a vote of rank 0
(hvdkit/run/health.py), so that all ranks end together when there are too many.
"""

import errno
import os
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any, Self

from hvdkit.checkpoint import files
from hvdkit.checkpoint.checkpoints import Checkpoints, Copy, Variables
from hvdkit.data.place import Place
from hvdkit.ranks.world import say
from hvdkit.scores import Score
from hvdkit.settings import Settings
from hvdkit.stop import BUG, NOT_NOW, Stop, passes, passes_for_a_run

# After so many failed saves in a row, or tries of the last one, the run ends.
MOST_FAILED = 3
_BETWEEN_TRIES = 1.0  # The last save is tried again after so many seconds.
_AFTER_FAILURE = 5.0  # A run that ends by an error waits so many seconds for its save.


class Saver:
    """The saves of one run; every rank makes one, and rank 0's writes.

    Leaving its `with` waits for the save that is being written. `failed`: saves in a row that are
    known to have failed, on rank 0; `error`: why the last one did, or None.
    """

    def __init__(self, checkpoints: Checkpoints, skipped: int = 0) -> None:
        """`skipped`: of the checkpoint that the run resumes from, see Copy."""
        self._checkpoints = checkpoints
        self._world = checkpoints.world
        self._pool = futures.ThreadPoolExecutor(1, "saver")
        # An empty task starts the thread now: later there may be too many processes.
        self._pool.submit(int)
        self._writing: futures.Future | None = None
        # Step, figures and `skipped` (see Copy) are those of the newest save; the score is the
        # newest one.
        self._step: int | None = None
        self._figures: Mapping[str, Any] | None = None
        self._skipped = skipped
        self._score: Score | None = None
        # Scores that could not be written yet; `Checkpoints.awaiting` has their steps.
        self._unwritten: list[Score] = []
        self.failed = 0
        self.error: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: object
    ) -> None:
        if not error or isinstance(error, Stop):
            self.wait()
        elif self._writing and futures.wait([self._writing], _AFTER_FAILURE).not_done:
            say(
                self._world,
                f"note: the checkpoint of step {self._step} was still being written when the "
                "run ended: a rerun resumes from the one before it",
            )

    def save(
        self,
        place: Place,
        variables: Variables,
        config: Settings,
        *,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the values as they are now, and begins to write them; on every rank.

        It waits first for the save before it, if that is still being written. `figures`: see
        hvdkit.checkpoint.files.Manifest.
        """
        self.wait()
        self._step = place.step
        self._figures = figures
        if not self._world.is_chief:
            return
        self._write_scores()
        try:
            copy = self._checkpoints.copy(place, variables, config, figures=figures)
        except MemoryError as error:
            self._fail(error)
            return
        self._skipped = copy.skipped
        self._writing = self._pool.submit(self._write, copy)

    def add_score(self, score: Score) -> None:
        """Marks the checkpoint of its step as evaluated, once it is written, if it could be."""
        self.wait()
        self._score = score
        if not self._world.is_chief or (score.step == self._step and self.error):
            # A note was printed already; it gets its score if a later try writes it.
            return
        self._unwritten.append(score)
        self._write_scores()

    def _write_scores(self) -> None:
        """On rank 0, those of checkpoints that lack theirs; what fails is tried at the next save.

        Until then their checkpoints stay, as one of them may be the best.
        """
        awaiting = self._checkpoints.awaiting
        for score in [*self._unwritten]:
            try:
                awaiting.discard(score.step)
                self._checkpoints.add_score(score, self._skipped)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) or passes(error):
                    awaiting.add(score.step)
                else:  # its checkpoint is gone or damaged
                    self._unwritten.remove(score)
                say(
                    self._world,
                    f"note: the score of step {score.step} was not written: {self._reason(error)}",
                )
            else:
                self._unwritten.remove(score)

    def last(self, place: Place, variables: Variables, config: Settings) -> None:
        """Waits for the run's last save, at `place`; where it failed, tries again.

        Every rank must call it, with the variables as they were saved.

        Raises Stop: on all ranks, when it cannot be written.
        """
        step = place.step
        for tries in range(MOST_FAILED):
            if tries:
                time.sleep(_BETWEEN_TRIES)
                self.save(place, variables, config, figures=self._figures)
            self.wait()
            error = self._world.broadcast_object(self.error, "saver.last")
            if not error:
                break
        else:
            code = NOT_NOW if passes_for_a_run(error) else BUG
            raise Stop(
                code, f"the last checkpoint, of step {step}, was not written: {error}"
            )
        if self._world.is_chief:
            self._write_scores()
        if tries:
            say(self._world, f"the checkpoint of step {step} is written now")
            if self._score and self._score.step == step:
                self.add_score(self._score)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is there, on rank 0."""
        try:
            return (self._checkpoints.folder / files.name_of(step)).is_dir()
        except OSError:  # not known
            return True

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._writing:
            futures.wait([self._writing])
            self.look()

    def look(self) -> None:
        """Learns how a save ended that has ended."""
        if not self._writing or not self._writing.done():
            return
        error = self._writing.exception()
        self._writing = None
        if error is None:
            self.failed = 0
            self.error = None
        elif isinstance(error, OSError | ValueError | MemoryError):
            self._fail(error)
        else:
            raise error

    def _write(self, copy: Copy) -> None:
        # A folder made anew would hide from the next start that the run's disk is away.
        folder = self._checkpoints.folder
        if not folder.is_dir():
            reason = f"{os.strerror(errno.ENODEV)}: is its disk mounted?"
            raise OSError(errno.ENODEV, reason, str(folder))
        self._checkpoints.write(copy)

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        folder = self._checkpoints.folder
        try:
            names = [path.name for path in files.candidates(folder)]
            kept = ", ".join(names) or "none"
        except OSError:  # the disk is away
            kept = "not known"
        self.error = f"{self._reason(error)}. Kept in {folder}: {kept}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.error += ". Free some space, or use another --run_dir"
        say(
            self._world,
            f"note: the checkpoint of step {self._step} was not written: {self.error}",
        )

    def _reason(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return f"{error.strerror or error} ({error.filename or self._checkpoints.folder})"
        return str(error) or type(error).__name__
