"""Run on real ranks by test_flags.py: what each flag changes, what it must not, what is refused."""

from __future__ import annotations

import itertools
import time

import flag_values
import numpy as np
from flag_runs import all_pass, count, sweep

from hvdkit.stop import WRONG_USE


def check_flags_that_must_change_the_weights(world):
    made, start = sweep(world), time.process_time()
    facts = flag_values.CHANGES if world.size == 1 else flag_values.CHANGES_ON_RANKS

    def attempt(base: str, flags: list[str]) -> None:
        # All runs first: a rank that fails must not leave the others alone in the next.
        prints = {flag: made.weights(base, flag) for flag in ["", *flags]}
        pairs = itertools.combinations(prints, 2)
        alike = [(one, other) for one, other in pairs if prints[one] == prints[other]]
        assert not alike, f"the same weights: {alike}"

    all_pass(world, attempt, facts)
    tried = sum(len(flags) for _, flags in facts)
    count(world, f"{tried} values change the weights; {time.process_time() - start:.0f} s of CPU")


def check_flags_that_must_not_change_the_weights(world):
    made, start = sweep(world), time.process_time()
    facts = flag_values.KEEPS + (flag_values.KEEPS_ON_ONE_RANK if world.size == 1 else [])

    def attempt(base: str, flags: str) -> None:
        both = [made.weights(base), made.weights(base, flags)]
        assert both[0] == both[1], "other weights"

    all_pass(world, attempt, facts)
    tried = sum(len(flags.split()) for _, flags in facts)
    count(world, f"{tried} values change no bit; {time.process_time() - start:.0f} s of CPU")


def check_the_average_is_what_is_evaluated(world):
    made = sweep(world)
    plain, averaged, other_batch = (
        made.run([flags]) for flags in ("", "--ema_decay=0.9", "--eval_batch_size=3")
    )
    if world.is_chief:
        usual = plain.summary["eval_loss"]
        assert usual != averaged.summary["eval_loss"]
        np.testing.assert_allclose(usual, other_batch.summary["eval_loss"], rtol=1e-6)


def check_what_a_run_refuses(world):
    made = sweep(world)

    def attempt(flags: str, part: str) -> None:
        part = part.format(**made.names)
        ended = made.run([flags])
        assert ended.code == WRONG_USE and part in ended.message, f"{ended.code}: {ended.message}"
        assert "\n" not in ended.message, ended.message

    # That every rank ends with the same words: template/tests/checks_tasks.py, checks_errors.py.
    refused = flag_values.REFUSED_BY_RUN if world.size == 1 else {}
    all_pass(world, attempt, refused.items())
    if refused:
        count(world, f"{len(refused)} kinds of runs refused, each in one sentence")
    count(world, f"{made.runs} runs, {time.process_time():.0f} s of CPU on rank 0 with its start")
