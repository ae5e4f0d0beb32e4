"""Checkpoints on disk: whole or not there, verified, few kept; by one rank, without a launcher."""

import contextlib
import json
import math
import os
import resource
import subprocess
from collections import Counter
from dataclasses import replace

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from kills import killed_at_each
from small_checkpoints import ALONE, names, restored, save, variables

from hvdkit.checkpoint import files, writing
from hvdkit.checkpoint.checkpoints import Checkpoints, changes, check_types
from hvdkit.checkpoint.saver import Saver
from hvdkit.ranks import agreement
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings, setting
from hvdkit.stop import Stop
from hvdkit.train.state import State


def test_what_was_saved_is_restored(kept):
    path = save(kept, 7, 1.5)
    into = variables(0.0)
    into["step"].assign(0)
    found = kept.find("auto", 7)
    assert found == (path, 7, False)
    kept.restore(found, into, Settings())
    assert int(into["step"]) == 7 and np.all(into["w/kernel"].numpy() == 1.5)


def test_types_that_numpy_does_not_know(kept):
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    values = {"v": tf.Variable(value), "w": tf.Variable(True), "s": tf.Variable(value[0])}
    check_types(values)
    path = kept.write(kept.copy(1, values, Settings()))
    assert files.read(path)["v"].dtype == value.dtype
    into = {"v": tf.Variable(tf.zeros_like(value)), "w": tf.Variable(False)}
    into["s"] = tf.Variable(tf.zeros_like(value[0]))
    kept.restore(kept.find("auto", 1), into, Settings())
    assert np.all(into["v"].numpy() == value) and bool(into["w"]) and into["s"].numpy() == 1.5
    with pytest.raises(ValueError, match="t is of type object: a checkpoint holds numbers only"):
        check_types({"t": tf.Variable("text")})


def test_a_copy_takes_over_the_memory_of_the_one_before_where_it_fits(kept):
    first = kept.copy(1, {"w": tf.Variable([1.0, 2.0])}, Settings()).arrays["w"]
    second = kept.copy(2, {"w": tf.Variable([3.0, 4.0])}, Settings()).arrays["w"]
    assert second is first and second.tolist() == [3.0, 4.0]
    for other in ([5.0], [5, 6]):
        third = kept.copy(3, {"w": tf.Variable(other)}, Settings()).arrays["w"]
        assert third.tolist() == other and third.dtype == np.asarray(tf.constant(other)).dtype


def test_the_newest_and_the_best_are_kept(kept):
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None)]:
        save(kept, step, score=score)
    assert names(kept) == ["step-00000002", "step-00000004", "step-00000005"]
    assert kept.best() == (0.9, 2)


def test_of_equal_scores_the_first_is_the_best(kept):
    """It is the one that an uninterrupted run compares with, so early stopping stays the same."""
    for step, score in [(1, 0.9), (2, 0.9), (3, 0.2), (4, 0.2)]:
        save(kept, step, score=score)
    assert names(kept) == ["step-00000001", "step-00000003", "step-00000004"]
    assert kept.best() == (0.9, 1)


def test_scores_of_another_measure_are_none(kept):
    """They are not the best, also where the same weights are saved once more; theirs is kept."""
    old = replace(kept, measure={"--eval_crop": 16, "--eval_flip": False})
    new = replace(kept, measure={"--eval_crop": 0, "--eval_flip": False})
    path = save(old, 1, score=0.9)
    save(new, 1)
    assert old.has_score(path) and old.best() == (0.9, 1) and old.other_scores() == (0, "")
    assert not new.has_score(path) and new.best() is None
    words = "the score of step 1 is of another measure (--eval_crop was 16, is 0): "
    step, said = new.other_scores()
    assert step == 1 and said.startswith(words)
    save(new, 2, score=0.3)
    save(new, 3, score=0.2)
    save(new, 4, score=0.1)
    save(new, 5)
    assert names(kept) == [f"step-0000000{step}" for step in (1, 2, 4, 5)]
    assert new.best() == (0.3, 2) and old.best() == (0.9, 1)
    assert new.other_scores() == (1, said) and kept.best() == (0.9, 1), "of none: like all"


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_known_and_never_the_best(score, kept):
    path = save(kept, 1)
    assert not kept.has_score(path) and kept.best() is None
    kept.add_score(1, score)
    assert kept.has_score(path) and kept.best() is None
    save(kept, 2, score=-5.0)
    assert kept.best() == (-5.0, 2)
    assert kept.find("auto", 9).step == 2, "a score leaves a checkpoint sound"


def test_pruning_touches_nothing_else(kept):
    others = ["notes.txt", "step-1", "step-00000001.tar", ".step-00000001.mine"]
    kept.folder.mkdir()
    for name in others:
        (kept.folder / name).mkdir()
    (kept.folder / "step-00000000").write_text("a file")
    for step in (123456789, 1234567890):  # more digits than the name has room for
        save(kept, step)
    assert kept.find("auto", 10**10).step == 1234567890
    assert set(names(kept)) >= {*others, "step-00000000"}


def test_a_score_without_its_checkpoint_is_refused(kept):
    save(kept, 1)
    with pytest.raises(ValueError, match=r"step-00000002.*missing"):
        kept.add_score(2, 0.5)


def test_the_same_step_saved_again_keeps_its_score_only_with_the_same_weights(kept):
    path = save(kept, 1, 1.0, score=0.5)
    save(kept, 1, 1.0, config=Settings(num_steps=5))
    assert kept.best() == (0.5, 1)
    assert files.read_manifest(path).config["num_steps"] == 5
    save(kept, 1, 2.0)
    assert not kept.has_score(path) and restored(kept) == 2.0 and names(kept) == [path.name]


def test_a_damaged_checkpoint_is_passed_over_and_named(kept, capsys):
    save(kept, 1)
    state = save(kept, 2) / "state.npz"
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    state.write_bytes(damaged)
    assert kept.find("auto", 9).path == kept.folder / "step-00000001"
    assert "step-00000002/state.npz is damaged" in capsys.readouterr().out
    with pytest.raises(Stop, match="damaged"):
        kept.find(str(state.parent), 9)


def test_auto_never_a_checkpoint_and_a_run(kept, tmp_path):
    assert kept.find("auto", 9) is None
    paths = [save(kept, step, float(step)) for step in (1, 2)]
    assert kept.find("never", 9) is None
    assert kept.find(str(paths[0]), 9) == (paths[0], 1, True)
    for run in (tmp_path, f"{tmp_path}/"):
        assert kept.find(str(run), 9) == (paths[1], 2, False)
    renamed = paths[0].rename(tmp_path / "my favourite")
    assert kept.find(str(renamed), 9) == (renamed, 1, True)
    for nothing in (tmp_path / "nothing", tmp_path / "checkpoints", tmp_path / "step-00000001"):
        with pytest.raises(Stop, match=f"--resume={nothing}: .*checkpoint"):
            kept.find(str(nothing), 9)


def test_a_step_past_the_last_is_refused_with_the_ways_out(kept):
    save(kept, 8)
    assert kept.find("auto", 8).step == 8
    with pytest.raises(Stop) as stop:
        kept.find("auto", 6)
    words = ("step 8", "--num_steps=6", "--run_dir", "--resume=never", "step-00000008")
    assert all(word in str(stop.value) for word in words) and "\n" not in str(stop.value)


@pytest.mark.parametrize("number", [2, 4])
def test_another_format_is_refused_by_name_not_passed_over(number, kept):
    save(kept, 1)
    file = save(kept, 2) / "manifest.json"
    record = json.loads(file.read_text())
    del record["checksum"], record["format"]
    record |= {"checksum": files.checksum_of(record, number), "format": number}
    file.write_text(json.dumps(record))
    for resume in ("auto", str(file.parent)):
        with pytest.raises(Stop, match=rf"step-00000002 is of checkpoint format {number}"):
            kept.find(resume, 9)


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (variables(shape=(3, 2)), ["w/kernel", "(2, 3)", "(3, 2)"]),
        (variables(dtype=tf.float64), ["w/kernel is float32", "float64", "--precision"]),
        ({"step": variables()["step"]}, ["'w/kernel' is not known"]),
        (variables() | {"v": tf.Variable(1.0)}, ["'v' is missing"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(kept, into, words):
    save(kept, 7)
    before = [v.numpy() for v in into.values()]
    with pytest.raises(Stop) as stop:
        kept.restore(kept.find("auto", 9), into, Settings())
    assert all(word in str(stop.value) for word in words), stop.value
    assert all(np.array_equal(v, b) for v, b in zip(into.values(), before))


def test_changed_settings_are_named(kept, capsys):
    save(kept, 7, config=Settings(seed=1, power=0.9, log_every=20))
    now = Settings(seed=2, power=1.0, log_every=1, run_dir="elsewhere", pack_bytes=100)
    kept.restore(kept.find("auto", 9), variables(), now)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note")]
    assert "--seed was 1, is 2" in line and "--power was 0.9, is 1.0" in line
    assert line.count(" was ") == 2, line


def test_another_number_of_ranks_is_named_where_it_changes_numbers(kept):
    plain = Settings(bn_sync="full")
    before = files.read_manifest(save(kept, 7, config=plain))
    assert changes(before, plain, ranks=4, normed=True) == []
    for config, normed, word in (
        (replace(plain, lr_scaling="linear"), False, "--lr_scaling=linear multiplies"),
        (Settings(bn_sync="mean"), True, "--bn_sync=mean normalizes"),
        (Settings(bn_sync="moments"), True, "--bn_sync=moments normalizes"),
    ):
        found = [x for x in changes(before, config, ranks=4, normed=normed) if "were 1, are 4" in x]
        assert len(found) == 1 and word in found[0]
        assert not [x for x in changes(before, config, ranks=1, normed=normed) if "are" in x]
        assert not any("normalizes" in x for x in changes(before, config, ranks=4, normed=False))


def test_a_setting_that_came_later_had_its_default(kept):
    before = files.read_manifest(save(kept, 7))
    del before.config["clip_norm"]
    assert changes(before, Settings(), ranks=1, normed=True) == []
    assert changes(before, Settings(clip_norm=1.0), ranks=1, normed=True) == [
        "--clip_norm was 0.0, is 1.0"
    ]

    class OfFork(Settings):
        noise: float = setting(0.1, "share of pixels that are noise")

    old = replace(before, config=before.config | {"noise": 0.2})
    assert changes(old, OfFork(), ranks=1, normed=True) == ["--noise was 0.2, is 0.1"]


def test_the_manifest_says_what_it_is(kept):
    about = json.loads((save(kept, 7, score=0.25) / "manifest.json").read_text())
    assert (about["step"], about["score"], about["config"]["seed"]) == (7, 0.25, 1)


# A full disk, a kill, and bytes that nobody wrote.


@pytest.fixture
def full_disk(tmp_path):
    """A function that leaves `free` bytes to write, and another that gives them back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root: the limit on a file's size is tested")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_the_newest_before_skipped_steps_is_kept_for_going_back(tmp_path):
    kept = Checkpoints(tmp_path / "checkpoints", keep=1, world=ALONE)
    for step, skipped in ((5, 0), (6, 0), (8, 1), (9, 2), (10, 3)):
        state = variables() | {"skipped_in_a_row": tf.Variable(skipped, dtype=tf.int64)}
        copy = kept.copy(step, state, Settings())
        kept.write(copy)
        kept.add_score(step, math.nan, copy.skipped)
        before = ["step-00000006"] if skipped else []
        assert names(kept) == [*before, f"step-{step:08d}"]
    save(kept, 11)
    assert names(kept) == ["step-00000011"]


def big(value):
    noise = np.random.default_rng(value).random((80, 200))  # 128 kB
    return {"w": tf.Variable(noise)}


def test_a_full_disk_leaves_what_was_there_and_no_half(full_disk):
    kept = Checkpoints(full_disk / "checkpoints", keep=2, world=ALONE)
    kept.write(kept.copy(1, big(1), Settings()))
    for step in (2, 1):  # a new step, and one that would replace the old
        with pytest.raises(OSError, match="No space left"):
            kept.write(kept.copy(step, big(2), Settings()))
        assert names(kept) == ["step-00000001"]
    filler = full_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        kept.add_score(1, 0.5)
    into = big(3)
    kept.restore(kept.find("auto", 9), into, Settings())
    assert np.array_equal(into["w"], big(1)["w"]) and not kept.has_score(kept._path(1))
    assert sorted(p.name for p in kept._path(1).iterdir()) == ["manifest.json", "state.npz"]
    filler.unlink()
    kept.add_score(1, 0.5)
    assert kept.best() == (0.5, 1)


def test_a_file_that_may_not_grow_so_far_leaves_nothing(kept):
    save(kept, 1)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            kept.write(kept.copy(2, big(1), Settings()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert names(kept) == ["step-00000001"] and restored(kept) == 1.0


def test_a_kill_at_any_moment_of_saving_a_step_again_loses_nothing(tmp_path):
    def saves(folder, value):
        arrays = {"w": np.full((2, 3), value, np.float32)}
        writing.write(folder, 5, arrays, config={}, ranks=1, tensorflow="", fingerprint={})

    def start(folder):
        saves(folder, 1.0)
        writing.set_score(folder / "step-00000005", 0.5, {})

    outcomes = Counter()
    for folder in killed_at_each(tmp_path, start, lambda folder: saves(folder, 2.0)):
        found, passed_over = files.newest_sound(folder)
        assert found and not passed_over
        value = files.read(found)["w"][0, 0]
        outcomes[float(value)] += 1
        assert files.read_manifest(found).evaluated == (value == 1.0)
        files.tidy(folder)
        assert [p.name for p in folder.iterdir()] == ["step-00000005"]
        saves(folder, 3.0)
        assert files.read(folder / "step-00000005")["w"][0, 0] == 3.0
    print(f"killed at {sum(outcomes.values())} moments: {dict(outcomes)}")
    assert outcomes[1.0] > 5 and outcomes[2.0] > 1


# Saves that are written beside the steps.


def test_what_is_written_are_the_values_at_the_step(kept):
    """Whatever the next step makes of them meanwhile."""
    weights = tf.Variable(tf.ones([4_000_000]))
    with Saver(kept) as saver:
        saver.save(1, {"w": weights}, Settings())
        assert not (kept.folder / "step-00000001").exists(), "it was waited for"
        weights.assign(tf.fill([4_000_000], 2.0))
        saver.save(2, {"w": weights}, Settings())
        weights.assign(tf.fill([4_000_000], 3.0))
    for step in (1, 2):
        values = files.read(kept.folder / f"step-{step:08d}")["w"]
        assert np.all(values == step)


def test_failures_in_a_row_are_counted_until_one_is_written(kept, capsys):
    kept.folder.mkdir()
    with Saver(kept) as saver:
        for step, failed in [(1, 1), (2, 2), (3, 0), (4, 1)]:
            if failed:
                (kept.folder / f"step-{step:08d}").touch()  # a file in its way
            saver.save(step, {"w": tf.Variable(1.0)}, Settings())
            saver.wait()
            assert saver.failed == failed and (saver.error is None) == (failed == 0)
            saver.add_score(step, 0.5)
    assert capsys.readouterr().out.count("was not written") == 3, "a score's lack is not told"
    assert kept.best() == (0.5, 3)


def test_a_last_save_that_comes_late_has_its_score(kept, capsys):
    kept.folder.mkdir()
    weights, obstacle = {"w": tf.Variable(1.0)}, kept.folder / "step-00000001"
    obstacle.touch()
    with Saver(kept) as saver:
        saver.save(1, weights, Settings())
        saver.add_score(1, 0.5)
        obstacle.unlink()
        saver.last(1, weights, Settings())
    assert kept.best() == (0.5, 1)
    assert "the checkpoint of step 1 is written now" in capsys.readouterr().out


def test_a_checksum_changes_with_any_bit_and_any_two():
    """Of the sign too, in numbers of 64 bits: an odd factor leaves the highest bit where it is."""
    rng = np.random.default_rng(1)
    for dtype in (np.float64, np.float32, np.int64, np.float16, np.uint8, np.complex64):
        value = (rng.normal(size=(8, 8)) * 100).astype(dtype)
        seen = {value.tobytes(): int(agreement._checksum(tf.constant(value)))}
        bits = value.view(np.uint8).reshape(-1)
        for _ in range(200):
            changed = bits.copy()
            for place in rng.choice(bits.size, 2, replace=False):
                changed[place] ^= 1 << rng.integers(8)
            again = changed.view(dtype).reshape(value.shape)
            seen[again.tobytes()] = int(agreement._checksum(tf.constant(again)))
        assert len({*seen.values()}) == len(seen) > 150
    assert int(agreement._checksum(tf.constant([1.0, 2.0], tf.float64))) != int(
        agreement._checksum(tf.constant([-1.0, -2.0], tf.float64))
    )


def test_all_that_a_run_counts_comes_back(kept):
    """The loss scale and its counters too: begun anew, it would skip steps once more."""

    def state(start: int) -> tuple[State, list[tf.Variable]]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        made = State(model, optimizer, "float16")
        scale = made.loss_scale
        counters = [made.step, made.skipped, made.passed_over]
        counters += [scale.value, scale.sound_steps, scale.skipped_in_a_row]
        everything = [*counters, *map(raw, (*model.variables, *optimizer.variables))]
        for number, variable in enumerate(everything, start):
            variable.assign(tf.fill(variable.shape, tf.cast(number, variable.dtype)))
        return made, everything

    saved, values = state(100)
    restored, found = state(0)
    kept.write(kept.copy(100, saved.variables, Settings()))
    kept.restore(kept.find("auto", 10**9), restored.variables, Settings())
    assert len(found) == len(saved.variables)
    for one, other in zip(values, found):
        np.testing.assert_array_equal(one, other)
