"""Training samples that could not be read and were replaced: counted over ranks, kept in a file.

hvdkit/data/pipeline.py replaces them. RUN_DIR/bad_samples.jsonl has a line for each replacement:
step, sample, by (the sample in its place) and why. A resume counts those up to its step.
"""

import json
from pathlib import Path

from hvdkit import whole_files
from hvdkit.checkpoint.run_folder import BAD_SAMPLES
from hvdkit.data.pipeline import Replaced
from hvdkit.observe.records import lines
from hvdkit.ranks.world import World, say
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop


class BadSamples:
    """The bad samples of a run so far, the same on every rank."""

    def __init__(self, world: World, config: Settings, samples: int) -> None:
        self._world, self._file = world, Path(config.run_dir) / BAD_SAMPLES
        self._limit, self._most = config.max_bad_samples, config.most_bad_samples(samples)
        self._why: dict[int, str] = {}  # by sample

    def begin(self) -> None:
        """Counts those of earlier starts; on every rank, once the run's folder is open.

        Raises Stop, on all ranks, where they are too many.
        """
        pairs = []
        with self._world.fail_together("reading earlier bad samples"):
            found = lines(self._file) if self._world.is_chief else []
            sound = [one for one in found if isinstance(one.get("sample"), int)]
            pairs = [[one["sample"], str(one.get("why"))] for one in sound]
        self._why = dict(self._world.broadcast_object(pairs, "bad_samples.begin"))
        if too_many := self._too_many():
            raise Stop(WRONG_USE, too_many)

    def add(self, step: int, own: list[Replaced]) -> str:
        """Adds what this rank replaced at a step; a sentence where there are too many by now.

        Every rank must call it once for each step at which any rank replaced a sample.
        """
        everyone = self._world.gather_objects([list(one) for one in own], "bad_samples.add")
        found = sorted(Replaced(*one) for theirs in everyone for one in theirs)
        self._why |= {one.sample: one.why for one in found}
        what = f"{len(found)} bad samples replaced: {found[0].why}"
        say(self._world, f"note: step {step}: {what}")
        try:
            if self._world.is_chief:
                with whole_files.opened(self._file, append=True) as file:
                    file.writelines(json.dumps(one._asdict()) + "\n" for one in found)
        except OSError as error:  # a full disk ends no run
            say(self._world, f"note: {self._file} cannot be written: {error.strerror or error}")
        return self._too_many()

    def _too_many(self) -> str:
        if len(self._why) <= self._most:
            return ""
        last = [*self._why.values()][-1]
        return (
            f"{len(self._why):,} bad training samples, more than --max_bad_samples={self._limit}: "
            f"{self._file} lists them; the last: {last}"
        )
