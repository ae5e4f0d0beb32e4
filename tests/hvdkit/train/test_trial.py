import numpy as np
import pytest

from hvdkit.train.trial import trial

PLAN = trial.Plan(
    4, by_ranks=True, by_steps=False, near=1e-3, whose="the task's loss: "
)


def outcome(*gradients: np.ndarray) -> trial.Outcome:
    return trial.Outcome(state={}, means=list(gradients), sums=[], terms=())


def test_gradients_that_overflow_are_not_compared():
    """As with float16's first loss scale: no step is made by them."""
    infinite = np.array([1.0, np.inf], np.float16)
    trial._check_gradients(PLAN, outcome(infinite), outcome(infinite))
    with pytest.raises(ValueError, match="gradient of 4 samples together, of norm 1"):
        trial._check_gradients(PLAN, outcome(np.ones(1)), outcome(np.full(1, np.inf)))
