"""Checkpoints that are written beside the steps; by one rank, without a launcher."""

import keras
import numpy as np
import tensorflow as tf

from hvdkit.checkpoint import files
from hvdkit.checkpoint.saver import Saver
from hvdkit.ranks import agreement
from hvdkit.ranks.world import raw
from hvdkit.settings import Settings
from hvdkit.train.state import State


def test_what_is_written_are_the_values_at_the_step(kept):
    """Whatever the next step makes of them meanwhile."""
    weights = tf.Variable(tf.ones([4_000_000]))
    with Saver(kept) as saver:
        saver.save(1, {"w": weights}, Settings())
        weights.assign(tf.fill([4_000_000], 2.0))
        saver.save(2, {"w": weights}, Settings())
        weights.assign(tf.fill([4_000_000], 3.0))
    for step in (1, 2):
        values = files.read(kept.folder / f"step-{step:08d}")["w"]
        assert np.all(values == step)


def test_a_save_goes_on_beside_the_steps(kept):
    weights = tf.Variable(tf.ones([4_000_000]))
    final = kept.folder / "step-00000001"
    with Saver(kept) as saver:
        saver.save(1, {"w": weights}, Settings())
        assert not final.exists(), "it was waited for"
    assert final.exists()


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
