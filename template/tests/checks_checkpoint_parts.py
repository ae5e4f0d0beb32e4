"""Run on real ranks by test_checkpoint_parts.py: checkpoints in several files.

Three launches share a folder, $PARTS_RUNS: a check belongs to the one in its name, $PARTS_LAUNCH.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from hvdkit.checkpoint import files as checkpoint_files
from hvdkit.checkpoint import parts as checkpoint_parts
from hvdkit.checkpoint import saver
from hvdkit.checkpoint.checkpoints import Checkpoints
from hvdkit.ranks import world as world_lib
from hvdkit.run.health import Ending
from hvdkit.settings import Settings
from hvdkit.stop import BUG, DONE, PREEMPTED, WRONG_USE

from checks_runs import assert_equal
from small_runs import CLASSES, FEATURES, Outcome, Small, fit, folder

RUNS = Path(os.environ.get("PARTS_RUNS", "."))
HOST = os.uname().nodename
STEPS = 8
SETTINGS = {"cpu_threads": 1, "num_steps": STEPS, "checkpoint_every": 2, "keep": 9}
SETTINGS |= {"global_batch_size": 12}
ON_ANY_RANKS = {"virtual_ranks": 6, "deterministic": True}
TWO = ["state-1-of-2.npz", "state-2-of-2.npz"]


def part_of(launch: str) -> Callable:
    """Where the launch is another one, the check is none."""

    def decorate(check: Callable) -> Callable:
        @functools.wraps(check)
        def checked(world):
            # Before ranks exchange anything, as in a run.
            world_lib.set_up(world, Settings(cpu_threads=1))
            if os.environ.get("PARTS_LAUNCH") == launch:
                check(world)

        return checked

    return decorate


class Large(Small):
    """Of several kernels, so that there is something to share out."""

    def build_model(self):
        y = x = keras.Input((FEATURES,))
        for width in (32, 32, 24, 40):
            y = keras.layers.Dense(width, activation="tanh")(y)
        return keras.Model(x, keras.layers.Dense(CLASSES)(y), name="large")


def acting(act: Callable[[Any, int], Ending | None]) -> type:
    """The task, with act(run, step) after every step and before its save."""

    class Acting(Large):
        def actions(self, run):
            class Act:
                settles = True

                def due(self, step):
                    return True

                def __call__(self, step, result):
                    return act(run, step)

            return [Act()]

    return Acting


def trained(world, name: str, task: type = Large, **settings) -> tuple[Outcome, str]:
    """The run in the folder RUNS/name, and what rank 0 printed."""
    settings = {"run_dir": RUNS / name} | SETTINGS | settings
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ended = fit(world, task, **settings)
    return ended, world.broadcast_object(said.getvalue(), "parts.said")


def sha(name: str) -> str:
    return json.loads((RUNS / name / "summary.json").read_text())["weights_sha256"]


def files(ended: Outcome, step: int) -> list[str]:
    path = ended.folder / "checkpoints" / f"step-{step:08d}"
    assert checkpoint_files.fault(path) is None
    return sorted(p.name for p in path.iterdir())


def nothing_unfinished(ended: Outcome) -> bool:
    return not [p for p in (ended.folder / "checkpoints").iterdir() if p.name.startswith(".")]


@contextlib.contextmanager
def unwritable(on: bool, times: int = 10**9) -> Iterator[None]:
    """Where `on`, parts cannot be written for so many times: the disk says no to all files."""
    write, left = checkpoint_parts.write_part, [times]

    def fails(partial: Path, *rest: Any) -> None:
        if not on or not left[0]:
            return write(partial, *rest)
        left[0] -= 1
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(partial))

    with mock.patch.object(checkpoint_parts, "write_part", fails):
        yield


# ---- 2 ranks -----------------------------------------------------------------------------------


@part_of("two")
def check_two_ranks_write_half_each_and_go_on_to_the_same_weights(world):
    def stop(run, step):
        return Ending(PREEMPTED, "preempted", "stop", save=True) if step == 5 else None

    whole, _ = trained(world, "whole", **ON_ANY_RANKS)
    assert whole.code == DONE and files(whole, STEPS) == ["manifest.json", "state.npz"]
    ended, _ = trained(world, "stopped", acting(stop), checkpoint_parts=2, **ON_ANY_RANKS)
    assert ended.code == PREEMPTED, ended.message
    assert files(ended, 4) == files(ended, 5) == ["manifest.json", *TWO]
    assert nothing_unfinished(ended)
    newest = ended.folder / "checkpoints" / "step-00000005"
    sizes = [(newest / name).stat().st_size for name in TWO]
    assert max(sizes) < 1.3 * min(sizes), sizes
    if world.is_chief:
        for name in ("one", "two", "three", "damaged"):
            shutil.copytree(ended.folder, RUNS / name)
    again, said = trained(world, "two", checkpoint_parts=2, **ON_ANY_RANKS)
    assert again.code == DONE and "step-00000005 at step 5" in said, said
    assert files(again, STEPS) == ["manifest.json", *TWO] and sha("two") == sha("whole")
    # In one file again, from several.
    again, _ = trained(world, "again", resume=str(newest), **ON_ANY_RANKS)
    assert again.code == DONE and files(again, STEPS) == ["manifest.json", "state.npz"]
    assert sha("again") == sha("whole")
    into, said = trained(world, "begun", init_from=str(newest), num_steps=1)
    assert into.code == DONE, into.message


@part_of("two")
def check_two_moving_statistics_that_are_each_ranks_own_are_rank_0s(world):
    class Normalized(Large):
        def build_model(self):
            x = keras.Input((FEATURES,))
            y = keras.layers.BatchNormalization()(keras.layers.Dense(40)(x))
            y = keras.layers.BatchNormalization()(keras.layers.Dense(40)(y))
            return keras.Model(x, keras.layers.Dense(CLASSES)(y))

    settings = {"deterministic": True, "bn_sync": "none", "num_steps": 3}
    found = []
    for name, parts in (("one file", 1), ("two files", 2)):
        ended, _ = trained(world, name, Normalized, **settings, checkpoint_parts=parts)
        assert ended.code == DONE, ended.message
        found.append(checkpoint_files.read(ended.folder / "checkpoints" / "step-00000003"))
        own = [v.numpy() for v in ended.model.variables if v.name == "moving_mean"]
    assert_equal(*found)
    everyone = world.gather_objects(own, "parts.own")
    assert not (everyone[0][0] == everyone[1][0]).all(), "the ranks' are other ones"


@part_of("two")
def check_two_of_a_damaged_part_the_older_checkpoint_is_taken(world):
    part = RUNS / "damaged" / "checkpoints" / "step-00000005" / TWO[1]
    if world.is_chief:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    ended, said = trained(world, "damaged", checkpoint_parts=2, **ON_ANY_RANKS)
    assert ended.code == DONE and sha("damaged") == sha("whole")
    assert f"passed over: {part} is damaged" in said and "at step 4" in said, said


@part_of("two")
def check_two_a_rank_whose_disk_is_full_is_told_while_steps_go_on_and_the_next_save_is_fine(world):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run, step):
        if run.world.rank == 1 and step in (4, 8):
            limit = 1000 if step == 4 else usual[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
        time.sleep(0.2)

    ended, said = trained(world, "full", acting(fill), checkpoint_parts=2, checkpoint_every=4)
    assert ended.code == DONE, ended.message
    assert ended.checkpoints == ["step-00000008"] and files(ended, 8) == ["manifest.json", *TWO]
    assert said.count("was not written") == 1 and nothing_unfinished(ended)
    note = f"the checkpoint of step 4 was not written: rank 1 on {HOST}: File too large ("
    assert note in said and said.index(note) < said.index("step 8/8"), said


@part_of("two")
def check_two_the_last_save_is_tried_again_by_all_writers(world):
    with unwritable(world.rank == 1, times=1):
        ended, said = trained(world, "late", checkpoint_parts=2, checkpoint_every=0)
    assert ended.code == DONE and "the checkpoint of step 8 is written now" in said, said
    manifest = checkpoint_files.read_manifest(ended.folder / "checkpoints" / "step-00000008")
    assert manifest.score is not None and files(ended, 8) == ["manifest.json", *TWO]
    with unwritable(world.rank == 1):
        ended, _ = trained(world, "never", checkpoint_parts=2, max_failed_saves=2)
    assert ended.code == BUG and f"rank 1 on {HOST}: Read-only file system (" in ended.message
    assert "2 saves in a row were not written (--max_failed_saves)" in ended.message
    assert ended.checkpoints == [] and nothing_unfinished(ended)


@part_of("two")
def check_two_rank_0s_own_part_may_fail(world):
    with unwritable(world.rank == 0, times=1):
        ended, said = trained(world, "chief", checkpoint_parts=2)
    assert ended.code == DONE, ended.message
    assert said.count("was not written") == 1 and "step 2 was not written: Read-only" in said, said
    assert ended.checkpoints == [f"step-0000000{step}" for step in (4, 6, 8)]
    assert nothing_unfinished(ended)


@part_of("two")
def check_two_without_room_for_a_copy_a_part_is_not_written(world):
    copy, left = Checkpoints.copy, [world.rank]

    def full(self, *rest):
        if left[0]:
            left[0] -= 1
            raise MemoryError("cannot allocate 9 GiB")
        return copy(self, *rest)

    with mock.patch.object(Checkpoints, "copy", full):
        ended, said = trained(world, "memory", checkpoint_parts=2)
    assert ended.code == DONE and f"rank 1 on {HOST}: cannot allocate 9 GiB" in said, said
    assert ended.checkpoints == [f"step-0000000{step}" for step in (4, 6, 8)]


@part_of("two")
def check_two_ranks_without_a_shared_disk_are_refused_before_the_first_step(world):
    """Paths may differ between hosts, so that the ranks' may lead to two disks."""
    name = f"own-{world.rank}/runs"
    with mock.patch.object(checkpoint_parts, "_PROBED_FOR", 0.3):
        ended, said = trained(world, name, checkpoint_parts=2)
    assert ended.code == WRONG_USE and "step 1/" not in said, ended.message
    seen = f"{HOST} does not see {RUNS}/own-1/runs/.shared-"
    words = (seen, f"rank 0 on {HOST}", "on a disk that all hosts share", f"(rank 1 on {HOST})")
    assert all(word in ended.message for word in words), ended.message
    assert "\n" not in ended.message and not list(RUNS.glob("own-*")), "nothing is left of it"
    ended, _ = trained(world, name, num_steps=1)  # in one file: rank 0 alone writes
    assert ended.code == DONE


@part_of("two")
def check_two_paths_to_one_disk_may_differ(world):
    if world.is_chief:
        (RUNS / "there").mkdir()
        (RUNS / "link").symlink_to("there")
    world.gather_objects(None, "parts.linked")
    ended, _ = trained(world, ("there/run", "link/run")[world.rank], checkpoint_parts=2)
    assert ended.code == DONE and files(ended, 4) == ["manifest.json", *TWO], ended.message
    assert not list(ended.folder.glob(".shared-*"))


@part_of("two")
def check_two_a_disk_that_is_no_longer_shared_is_told(world):
    place = checkpoint_parts.unfinished

    def elsewhere(folder, step, save):
        return place(RUNS / "elsewhere" if world.rank and step == 2 else folder, step, save)

    with (
        mock.patch.object(checkpoint_parts, "unfinished", elsewhere),
        mock.patch.object(saver, "SEEN_WITHIN", 0.3),
    ):
        ended, said = trained(world, "lost", checkpoint_parts=2)
    assert ended.code == DONE and said.count("was not written") == 1, said
    assert f"{HOST} does not see " in said and f"{TWO[1]}, which rank 1 on {HOST} wrote" in said
    assert ended.checkpoints == [f"step-0000000{step}" for step in (4, 6, 8)]


@part_of("two")
def check_two_rank_0_does_not_wait_for_ever_when_the_run_has_ended(world):
    kept = Checkpoints(folder(world), 2, world, writers=checkpoint_parts.choose(world, 2))
    saves = saver.Saver(kept, most_failed=3)
    if world.is_chief:
        with (
            contextlib.suppress(RuntimeError),
            mock.patch.object(saver, "_AFTER_FAILURE", 0.2),
            contextlib.redirect_stdout(io.StringIO()) as said,
            saves,
        ):
            saves.save(1, {"w": tf.Variable(1.0)}, Settings())
            raise RuntimeError("as Horovod's, when rank 1 has died")
        assert "step 1 was still being written when the run ended" in said.getvalue()
        saves._thread.join(5)
        assert not saves._thread.is_alive() and not list(kept.folder.iterdir())


# ---- 1 rank and 3 ranks ------------------------------------------------------------------------


@part_of("one")
def check_one_rank_goes_on_from_two_parts(world):
    ended, said = trained(world, "one", checkpoint_parts=2, **ON_ANY_RANKS)
    assert ended.code == DONE and sha("one") == sha("whole"), ended.message
    assert "step-00000005 at step 5" in said and files(ended, 8) == ["manifest.json", "state.npz"]
    assert "--checkpoint_parts=2 is more than there are ranks: checkpoints are of 1 file" in said


@part_of("three")
def check_three_ranks_go_on_from_two_parts_and_write_three(world):
    ended, said = trained(world, "three", checkpoint_parts=3, **ON_ANY_RANKS)
    assert ended.code == DONE and sha("three") == sha("whole"), ended.message
    assert "step-00000005 at step 5" in said and "checkpoint_parts" not in said, said
    names = [f"state-{n}-of-3.npz" for n in (1, 2, 3)]
    assert files(ended, 6) == files(ended, 8) == ["manifest.json", *names]
    # Of three ranks two write, and the third takes part in all they tell each other.
    ended, _ = trained(world, "two of three", checkpoint_parts=2, **ON_ANY_RANKS)
    assert ended.code == DONE and files(ended, 8) == ["manifest.json", *TWO]
    assert sha("two of three") == sha("whole")
