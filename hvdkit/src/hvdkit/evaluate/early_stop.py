"""When to give up: no better score for a number of evaluations."""

from __future__ import annotations


def given_up(step: int, best_step: int | None, eval_every: int, evals: int) -> bool:
    """Whether `evals` evaluations have passed since the best one.

    Told from steps alone, which a checkpoint knows, so that a run that is started again gives up
    at the step at which it would have.

    Args:
      step: now; best_step: of the best score so far, None before the first evaluation.
      eval_every: steps between evaluations; evals: how many to wait; 0 of either: for ever.
    """
    if not evals or not eval_every or best_step is None:
        return False
    return step // eval_every - best_step // eval_every >= evals
