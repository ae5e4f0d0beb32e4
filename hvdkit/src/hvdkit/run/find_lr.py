"""--find_lr: the loss while the learning rate rises, and a rate to begin with.

The range test of Smith 2017 (arXiv:1506.01186, section 3.3): from schedule.LOWEST the rate grows by
the same factor each step, until the loss blows up. It suggests the rate where the smoothed loss
falls most steeply over the rate's logarithm (fastai's "steep"). It keeps a page beside --run_dir.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hvdkit.ranks.world import say
from hvdkit.run.actions import Result
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.stop import DONE

_SMOOTH = 0.9  # of the moving average that is judged
_BLOWN_UP = 4.0  # times the least: then it ends
_FEWEST = 10  # steps
_ROWS = 16  # of the table


class FindLr:
    """The only action of such a run."""

    settles = True

    def __init__(self, run: RunContext, page: Path) -> None:
        """`page`: the HTML file that is written."""
        self._run, self._page = run, page
        self._rates: list[float] = []
        self._losses: list[float] = []

    def due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, result: Result) -> Ending | None:
        self._rates.append(float(result["lr"]))
        self._losses.append(float(result["loss"]))
        smooth = smoothed(self._losses)
        blown_up = not math.isfinite(smooth[-1]) or smooth[-1] > _BLOWN_UP * min(smooth)
        if not (step >= self._run.config.num_steps or (blown_up and step >= _FEWEST)):
            return None
        rate = suggested(self._rates, smooth)
        with self._run.world.fail_together(f"writing {self._page}"):
            if self._run.world.is_chief:
                self._write(smooth, rate)
        if len(smooth) < _FEWEST:
            message = f"--num_steps={len(smooth)} is too few: give {_FEWEST} or more, better 100"
        elif rate is None:
            message = "the loss did not fall at any rate: is the model's loss right?"
        else:
            message = f"try --base_lr={rate:.1e}: there the loss falls most steeply"
        return Ending(DONE, "find_lr", f"{message}; page: {self._page}", save=False)

    def _write(self, smooth: list[float], rate: float | None) -> None:
        from hvdkit.observe import pages  # here: plots take half a second to load

        world, rows = self._run.world, np.linspace(0, len(smooth) - 1, _ROWS).round().astype(int)
        say(world, f"{'lr':>10}  {'loss':>10}  smoothed")
        for place in dict.fromkeys(rows.tolist()):
            numbers = self._rates[place], self._losses[place], smooth[place]
            say(world, "{:>10.2e}  {:>10.4g}  {:.4g}".format(*numbers))
        lines = {"loss": (self._rates, self._losses), "smoothed": (self._rates, smooth)}
        drawn = pages.curves(
            "Loss over learning rate" + (f", suggested: {rate:.1e}" if rate else ""),
            lines,
            xlabel="learning rate",
            log_x=True,
            marks=[rate] if rate else [],
        )
        pages.write(self._page, pages.page("Learning rate", [pages.cards([drawn])]))


def smoothed(losses: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start as Adam's are."""
    found, average = [], 0.0
    for count, loss in enumerate(losses, start=1):
        average = _SMOOTH * average + (1 - _SMOOTH) * loss
        found.append(average / (1 - _SMOOTH**count))
    return found


def suggested(rates: list[float], smooth: list[float]) -> float | None:
    """The rate of the steepest fall before the least loss; None where it never falls."""
    finite = [loss if math.isfinite(loss) else math.inf for loss in smooth]
    least = int(np.argmin(finite))
    if least < 2:
        return None
    slopes = np.gradient(np.array(finite[: least + 1]), np.log(rates[: least + 1]))
    return rates[int(np.argmin(slopes))]
