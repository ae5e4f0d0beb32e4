"""What becomes of a run whose disk, memory or devices fail; on real ranks, by run_checks."""

import errno
import gc
import os
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
from small_runs import Outcome, Small, acting, fit, same
from tensorflow.python.data.ops import iterator_ops

from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.ranks.world import World, raw
from hvdkit.run import actions
from hvdkit.run.health import Ending
from hvdkit.stop import BUG, DONE, NOT_NOW, PREEMPTED


def blocked(*steps: int) -> type:
    """A task in whose run a file is in the way of the checkpoints of `steps`."""

    def block(run, step, result):
        for step in steps if run.world.is_chief else ():
            (run.checkpoints.folder / f"step-{step:08d}").touch()

    return acting(block, 1, settles=False)


def trained(world: World, task: type, *words: str, **settings) -> Outcome:
    return fit(world, task, *words, checkpoint_every=1, keep=9, **settings)


def check_a_save_that_fails_ends_nothing(world):
    clean = fit(world, num_steps=5)
    ended = trained(world, blocked(2, 3), num_steps=5)
    same(clean.weights(), ended.weights())
    if world.is_chief:
        notes = [line for line in ended.printed.splitlines() if "was not written" in line]
        assert len(notes) == 2 and "checkpoint of step 2" in notes[0], notes
        assert "step-00000002 is in the way" in notes[0] and "Kept in" in notes[0]
        sound = [n for n in ended.checkpoints if (ended.folder / "checkpoints" / n).is_dir()]
        assert sound == ["step-00000001", "step-00000004", "step-00000005"]
        assert ended.summary["eval_accuracy"] is not None


def check_too_many_saves_that_fail_in_a_row_end_the_run_and_a_rerun_goes_on(world):
    words = ("saves in a row were not written", " is in the way")
    ended = trained(world, blocked(2, 4, 5, 6, 7, 8, 9), *words, code=BUG, num_steps=9)
    # The third is known when the fourth begins at the latest, which may fail too before the end.
    assert ended.message.startswith(("3 ", "4 ")), ended.message
    if world.is_chief:
        assert ended.summary["step"] in (7, 8) and ended.summary["exit_reason"] == "saves failed"
    again = trained(world, Small, num_steps=9, run_dir=ended.folder)
    assert "at step 3" in again.printed or not world.is_chief, again.printed


def check_a_last_save_that_fails_is_no_success(world):
    words = ("the last checkpoint, of step 3, was not", "step-00000002")  # which is kept
    trained(world, blocked(3), *words, code=BUG)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # which may pass
    with mock.patch.object(Checkpoints, "write", side_effect=full):
        trained(world, Small, "No space left on device", code=NOT_NOW)


def check_an_ending_that_wants_no_checkpoint_gets_none(world):
    enough = Ending(DONE, "enough", "the budget is used up", save=False)
    assert fit(world, acting(lambda *of: enough, 2)).checkpoints == []


def flip(run, step, result):
    """A bit of the momentum, on rank 1."""
    if run.world.rank == 1:
        [one] = [v for n, v in run.state.variables.items() if "dense/kernel/momentum" in n]
        bits = raw(one).numpy().copy()
        bits.reshape(-1).view(np.uint32)[3] ^= 1 << 20  # the last might be rounded away
        raw(one).assign(bits)


def check_a_bit_that_flips_on_one_rank_is_found_and_named(world):
    words = ("at step 3", "dense/kernel/momentum", "on rank 1 (") if world.size > 1 else ()
    with mock.patch.object(actions, "DRIFT_EVERY", 3):
        fit(world, acting(flip, 2), *words, code=BUG if words else DONE, num_steps=4)


def check_nothing_reads_ahead_when_a_run_has_ended(world):
    """TensorFlow crashes where its threads still read as the process ends: exit code 139 for 75."""
    held = []

    class Keeps(Small):
        def sources(self):
            held.append(sys._getframe())  # as a module keeps the error of an import it does without
            return super().sources()

    def iterators():
        return [o for o in gc.get_objects() if isinstance(o, iterator_ops.OwnedIterator)]

    before = (
        iterators()
    )  # An earlier check may hold the error of a run, and with it what that read.
    fit(world, Keeps, stop_signal=SimpleNamespace(asked=True), code=PREEMPTED, num_steps=50)
    assert held
    assert not [o for o in iterators() if not any(o is other for other in before)]
