"""Where a run is in its data, counted in samples: steps may have been of several sizes."""

from typing import NamedTuple


class Place(NamedTuple):
    """A run after `step` steps, which had `samples` samples; `passed_over` more were left out."""

    step: int = 0
    samples: int = 0
    passed_over: int = 0

    @property
    def position(self) -> int:
        """Position of the next sample, counted over all epochs."""
        return self.samples + self.passed_over

    def after(self, steps: int, batch: int) -> "Place":
        """The place after more steps of `batch` samples each."""
        return self._replace(
            step=self.step + steps, samples=self.samples + steps * batch
        )

    def left_out(self, steps: int, batch: int) -> "Place":
        """The place once the batches of so many steps are left out."""
        return self._replace(passed_over=self.passed_over + steps * batch)


BEGINNING = Place()
