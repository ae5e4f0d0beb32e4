"""When to stop early: no better score for a number of evaluations."""

from __future__ import annotations


def given_up(step: int, best_step: int | None, eval_every: int, evals: int) -> bool:
    """Whether `evals` evaluations have passed since the best one.

    It uses steps alone, which checkpoints hold, so that a resumed run stops at the same step as an
    uninterrupted one.

    Args:
      step: now; best_step: of the best score so far, None before the first evaluation.
      eval_every: steps between evaluations; evals: how many to wait; if either is 0, never.
    """
    if not evals or not eval_every or best_step is None:
        return False
    return step // eval_every - best_step // eval_every >= evals
