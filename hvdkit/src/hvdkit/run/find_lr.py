"""--find_lr: the loss while the learning rate rises, and a rate to begin with.

The range test of Smith 2017 (arXiv:1506.01186, section 3.3): from schedule.LOWEST the rate grows by
the same factor each step, until the loss blows up. Lines through windows of the curve say where the
loss falls most steeply over the rate's logarithm (fastai's "steep"). That is a little low: the best
rate of sweeps was 0.9 to 4.4 times as high (benchmarks/learning_rate.py of the engine's
repository). So it suggests the middle between there and where the fall is half as steep, but at
most twice the steepest, if the fall is clear of the noise. It keeps a page beside --run_dir.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdkit.ranks.world import say
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.stop import DONE
from hvdkit.train.step.step import Result

_WINDOW = math.log(32.0)  # The loss is smoothed over rates that differ by this factor.
_CLEAR = 4.0  # A fall must have so many standard errors.
_ABOVE = 2.0  # At most so many times the steepest rate is suggested.
_BLOWN_UP = 4.0  # A loss of so many times the least one ends the search.
_RECENT = 5  # The median of so many losses is judged.
_FEWEST_STEPS = 10
_ROWS = 16  # The table has at most so many.


class FindLr:
    """The only action of such a run."""

    settles = True

    def __init__(self, run: RunContext, page: Path) -> None:
        """`page`: the HTML file that is written."""
        self._run = run
        self._page = page
        self._rates: list[float] = []  # They are values of --base_lr.
        self._losses: list[float] = []
        self._least = math.inf

    def due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, result: Result) -> Ending | None:
        config = self._run.config
        size = self._run.world.size
        self._rates.append(float(result["lr"]) / config.lr_factor(size))
        self._losses.append(float(result["loss"]))
        recent = float(np.median(self._losses[-_RECENT:]))
        self._least = min(self._least, recent)
        least = self._least
        if least > 0:
            most = _BLOWN_UP * least
        else:  # A loss below 0 has no multiple to compare with.
            most = least + _BLOWN_UP * max(-least, abs(self._losses[0]))
        blown_up = not math.isfinite(recent) or recent > most
        if step < config.num_steps and not (blown_up and step >= _FEWEST_STEPS):
            return None
        suggestion = suggested(self._rates, self._losses)
        self._run.world.from_chief("writing ", self._write, suggestion, path=self._page)
        sentence = _sentence(suggestion, steps=len(self._losses))
        return Ending(DONE, "find_lr", f"{sentence}; page: {self._page}", save=False)

    def _write(self, suggestion: tuple[float, float, float] | None) -> None:
        # The import stands here because plots take half a second to load.
        from hvdkit.observe import pages

        world = self._run.world
        rows = np.linspace(0, len(self._losses) - 1, _ROWS).round()
        say(world, f"{'base_lr':>10}  {'loss':>10}")
        for place in dict.fromkeys(rows.astype(int).tolist()):
            say(world, f"{self._rates[place]:>10.2e}  {self._losses[place]:>10.4g}")
        lines: dict[str, tuple[pages.Numbers, pages.Numbers]]
        lines = {"loss": (self._rates, self._losses)}
        if np.isfinite(self._losses).all():
            lines["smoothed"] = (self._rates, slopes(self._rates, self._losses).smooth)
        title = "Loss over learning rate"
        if suggestion:
            title += f", suggested: {suggestion[0]:.1e}"
        marks = list(suggestion or [])
        plot = pages.curves(title, lines, xlabel="base_lr", log_x=True, marks=marks)
        pages.write(self._page, "Learning rate", [pages.cards([plot])], by="find_lr")


def _sentence(suggestion: tuple[float, float, float] | None, steps: int) -> str:
    if steps < _FEWEST_STEPS:
        return (
            f"--num_steps={steps} is too few: give {_FEWEST_STEPS} or more, better 100"
        )
    if not suggestion:
        return (
            f"in {steps} steps the loss did not fall clearly at any rate: give a larger batch "
            "or more --num_steps; if that does not help, is the model's loss right?"
        )
    rate, low, high = suggestion
    return (
        f"try --base_lr={rate:.1e}: the loss falls steeply there, at least half as steeply "
        f"as anywhere from {low:.1e} to {high:.1e}"
    )


class Slopes(NamedTuple):
    """Slopes of the loss over the rate's natural logarithm, by local lines; arrays [points].

    `error`: the standard error of the slope.
    """

    smooth: np.ndarray
    slope: np.ndarray
    error: np.ndarray


def slopes(rates: Sequence[float], losses: Sequence[float]) -> Slopes:
    """Lines through the points of a window of `_WINDOW` around each, near ones weigh more."""
    x = np.log(rates)
    y = np.array(losses, np.float64)
    # Neighbours differ by noise alone. The median of a standard normal's size is 0.6745.
    noise = np.median(np.abs(np.diff(y))) / 0.6745 / np.sqrt(2)
    distance = np.abs(x[:, None] - x) / (_WINDOW / 2)
    # These are tricube weights (Cleveland 1979).
    weights = np.where(distance < 1, (1 - distance**3) ** 3, 0.0)
    weights /= weights.sum(1, keepdims=True)
    offset = x - (weights @ x)[:, None]
    spread = (weights * offset**2).sum(1)
    lever = weights * offset / np.maximum(spread, 1e-12)[:, None]
    slope = lever @ y
    error = noise * np.sqrt((lever**2).sum(1))
    return Slopes(weights @ y + slope * (x - weights @ x), slope, error)


def suggested(
    rates: Sequence[float], losses: Sequence[float]
) -> tuple[float, float, float] | None:
    """A rate a little above that of the steepest fall; from where to where it is half as steep.

    None where no fall before the least loss is clear of the noise.
    """
    finite = [math.isfinite(loss) for loss in losses]
    end = len(losses) if all(finite) else finite.index(False)
    if end < _FEWEST_STEPS:
        return None
    curve = slopes(rates[:end], losses[:end])
    fall = curve.slope[: int(np.argmin(curve.smooth)) + 1]
    place = int(np.argmin(fall))
    if fall[place] > -_CLEAR * curve.error[place]:
        return None
    gentle = np.flatnonzero(fall > fall[place] / 2)
    low = max(gentle[gentle < place], default=-1) + 1
    high = min(gentle[gentle > place], default=len(fall)) - 1
    above = min(math.sqrt(rates[high] / rates[place]), _ABOVE)
    return rates[place] * above, rates[low], rates[high]
