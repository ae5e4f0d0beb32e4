"""What becomes of a run whose disk, memory or devices fail; on real ranks, by run_checks."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import threading
from unittest import mock

import numpy as np
from small_runs import Outcome, Small, fit
from tensorflow.python.data.ops import iterator_ops

from hvdkit.ranks.world import World, raw
from hvdkit.run import actions
from hvdkit.run.health import Ending
from hvdkit.stop import BUG, DONE, PREEMPTED


def blocked(*steps: int, until: float = 0) -> type:
    """A task in whose run a file is in the way of the checkpoints of `steps`, for some seconds."""

    class Blocked(Small):
        def actions(self, run):
            class Block:
                settles = False

                def due(self, step):
                    return step == 1

                def __call__(self, step, result):
                    files = [run.checkpoints.folder / f"step-{step:08d}" for step in steps]
                    for file in files if run.world.is_chief else []:
                        file.touch()
                        if until:
                            threading.Timer(until, file.unlink).start()

            return [Block()]

    return Blocked


def told(world: World, task: type, **settings) -> tuple[Outcome, str]:
    """How the run ended, and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ended = fit(world, task, checkpoint_every=1, keep=9, **settings)
    return ended, printed.getvalue()


def check_a_save_that_fails_ends_nothing(world):
    clean = fit(world, num_steps=5)
    ended, printed = told(world, blocked(2, 3), num_steps=5)
    assert ended.code == DONE, ended.message
    for one, other in zip(clean.weights(), ended.weights()):
        np.testing.assert_array_equal(one, other)
    if world.is_chief:
        notes = [line for line in printed.splitlines() if "was not written" in line]
        assert len(notes) == 2 and "checkpoint of step 2" in notes[0], printed
        assert "step-00000002 is in the way" in notes[0] and "Kept in" in notes[0]
        sound = [n for n in ended.checkpoints if (ended.folder / "checkpoints" / n).is_dir()]
        assert sound == ["step-00000001", "step-00000004", "step-00000005"]
        assert ended.summary["eval_accuracy"] is not None


def check_too_many_saves_that_fail_in_a_row_end_the_run_and_a_rerun_goes_on(world):
    clean = fit(world, num_steps=9)
    ended, _ = told(world, blocked(2, 4, 5, 6, 7, 8, 9), num_steps=9)
    assert ended.code == BUG, (ended.code, ended.message)
    assert "3 saves in a row were not written" in ended.message
    assert "step-00000006 is in the way" in ended.message, ended.message
    if world.is_chief:
        # The third is known when the fourth begins at the latest.
        assert ended.summary["step"] in (7, 8) and ended.summary["exit_reason"] == "saves failed"
    again, printed = told(world, Small, num_steps=9, run_dir=str(ended.folder))
    assert again.code == DONE, again.message
    if world.is_chief:
        assert "at step 3" in printed, printed
    for one, other in zip(clean.weights(), again.weights()):
        np.testing.assert_array_equal(one, other)


def check_the_last_save_is_tried_again(world):
    ended, printed = told(world, blocked(3, until=1.0), num_steps=3)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        assert "the checkpoint of step 3 was not written" in printed
        assert (ended.folder / "checkpoints/step-00000003/manifest.json").exists()


def check_a_last_save_that_fails_is_no_success(world):
    ended, _ = told(world, blocked(3), num_steps=3)
    assert ended.code == BUG and "the last checkpoint, of step 3, was not" in ended.message
    assert "step-00000002" in ended.message, "what is kept"


def check_an_ending_that_wants_no_checkpoint_gets_none(world):
    class Ends(Small):
        def actions(self, run):
            class End:
                settles = True

                def due(self, step):
                    return step == 2

                def __call__(self, step, result):
                    return Ending(DONE, "enough", "the budget is used up", save=False)

            return [End()]

    ended = fit(world, Ends, num_steps=5)
    assert ended.code == DONE and ended.checkpoints == []


# ---- ranks whose weights are no longer the same ------------------------------------------------


def flips(place: str) -> type:
    """A task in whose run a bit flips after step 2, on rank 1, in a variable that has this name."""

    class Flips(Small):
        def actions(self, run):
            class Flip:
                settles = True

                def due(self, step):
                    return step == 2

                def __call__(self, step, result):
                    if run.world.rank != 1:
                        return
                    [one] = [v for n, v in run.state.variables.items() if place in n]
                    bits = raw(one).numpy().copy()
                    bits.reshape(-1).view(np.uint32)[3] ^= 1 << 20  # the last might be rounded away
                    raw(one).assign(bits)

            return [Flip()]

    return Flips


def check_a_bit_that_flips_on_one_rank_is_found_and_named(world):
    for place in ("model/0000/", "dense/kernel/momentum"):
        with mock.patch.object(actions, "DRIFT_EVERY", 3):
            ended = fit(world, flips(place), num_steps=6)
        if world.size == 1:
            assert ended.code == DONE
            continue
        assert ended.code == BUG and "at step 3" in ended.message, ended.message
        assert place in ended.message and "on rank 1 (" in ended.message, ended.message


def check_nothing_reads_ahead_when_a_run_has_ended(world):
    """TensorFlow crashes where its threads still read as the process ends: exit code 139 for 75."""
    held = []

    class Keeps(Small):
        def sources(self):
            held.append(sys._getframe())  # as a module keeps the error of an import it does without
            return super().sources()

    class Stopped:
        asked = True

    ended = fit(world, Keeps, stop_signal=Stopped(), num_steps=50)
    assert ended.code == PREEMPTED and held
    assert not [o for o in gc.get_objects() if isinstance(o, iterator_ops.OwnedIterator)]
