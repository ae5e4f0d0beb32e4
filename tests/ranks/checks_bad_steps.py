"""Steps whose loss is no number: skipped, then once gone back before; on real ranks."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import tensorflow as tf
from checks_runs import state
from small_runs import Small, fit, numbers

from hvdkit.data.sampler import Sampler
from hvdkit.data.source import Arrays
from hvdkit.ranks import world as world_lib
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, DONE

SAMPLES, BATCH = 600, 12
PLAIN = {"precision": "float64", "momentum": 0.0, "lr_policy": "constant", "base_lr": 0.05}
PLAIN |= {"checkpoint_every": 2, "keep": 9}


def batch_ids(step: int) -> list[int]:
    order = Sampler(SAMPLES, BATCH, 1, 1, 0, 1)
    return order.local_samples(tf.constant(step, tf.int64))[0].numpy().tolist()


def bad(ids: list[int]) -> type:
    """A task whose samples `ids` hold no numbers."""

    class Bad(Small):
        def sources(self):
            good, val = numbers(1, SAMPLES), numbers(2, 20)
            everything = tf.constant(range(SAMPLES))
            read = [t.numpy() for t in tf.vectorized_map(good.read, everything).values()]
            arrays = dict(zip(("x", "y"), read))
            arrays["x"][ids] = np.nan
            return Arrays(**arrays), val

    return Bad


def trained(world, task, **settings):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ended = fit(world, task, **PLAIN | settings)
    return ended, printed.getvalue()


def plain_steps(start: dict, steps: list[int]) -> list[np.ndarray]:
    """SGD from a checkpoint's weights on whole batches, in one process."""
    kernels = [start[n] for n in start if n.startswith("model/")]
    values, source = [tf.Variable(v) for v in kernels], numbers(1, SAMPLES)
    for step in steps:
        batch = [source.read(tf.constant(i)) for i in batch_ids(step)]
        x, y = (tf.stack([b[name] for b in batch]) for name in ("x", "y"))
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.cast(x, tf.float64) @ values[0] + values[1])
            logits = hidden @ values[2] + values[3]
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(loss)
        for value, gradient in zip(values, tape.gradient(loss, values)):
            value.assign_sub(PLAIN["base_lr"] * gradient)
    return [v.numpy() for v in values]


def check_a_bad_step_is_skipped_and_named(world):
    world_lib.set_up(world, Settings())  # once for all checks here, before the first operation
    ids = batch_ids(3)
    wrong = ids[-1]  # the last share's
    ended, printed = trained(world, bad([wrong]), num_steps=6, checkpoint_every=1)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        notes = [line for line in printed.splitlines() if "is skipped" in line]
        assert len(notes) == 1 and "step 4 is skipped, its loss nan" in notes[0], printed
        share = Sampler(SAMPLES, BATCH, 1, 1, world.size - 1, world.size)
        found = share.local_samples(tf.constant(3, tf.int64))[0].numpy().tolist()
        samples = ", ".join(map(str, found))
        assert f"(no number: loss of rank {world.size - 1} with samples {samples})" in notes[0]
        assert ended.summary["skipped_steps"] == 1 and ended.summary["batches_passed_over"] == 0
        one, two = state(ended, 3), state(ended, 4)
        for name in one:
            if name.startswith("model/"):
                np.testing.assert_array_equal(one[name], two[name])
        want = plain_steps(two, [4, 5])
        for value, other in zip(want, ended.weights()):
            np.testing.assert_allclose(other, value, rtol=1e-12)


def check_a_loss_of_nan_is_named_with_float16_too(world):
    """NaN in the gradient only is a matter of the loss scale."""
    settings = {"precision": "float16", "num_steps": 5}
    ended, printed = trained(world, bad(batch_ids(3)[:1]), **settings)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        assert printed.count("is skipped") == 1 and "loss of rank 0 with samples" in printed


def check_bad_steps_in_a_row_send_the_run_back_and_leave_out_their_batches(world):
    """A bad stretch of data, steps 8 to 10: from step 6 on with the batch after it."""
    task = bad([batch_ids(step)[0] for step in (7, 8, 9)])
    ended, printed = trained(world, task, num_steps=12)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        assert "Going back to step 6; the batches of steps 7 to 10 are left out" in printed
        first = Sampler(SAMPLES, BATCH, 1, 1, 0, world.size)
        found = first.local_samples(tf.constant(9, tf.int64))[0].numpy().tolist()
        assert "diverged at step 10 (3 steps in a row skipped)" in printed
        assert f"rank 0 with samples {', '.join(map(str, found))})" in printed
        steps = [record["step"] for record in ended.records if "loss" in record]
        assert steps == list(range(1, 13)), "each step once"
        assert ended.summary["batches_passed_over"] == 4
        want = plain_steps(state(ended, 6), [10, 11, 12, 13, 14, 15])
        for value, other in zip(want, ended.weights()):
            np.testing.assert_allclose(other, value, rtol=1e-12)
    # An interruption later changes nothing.
    trained(world, task, num_steps=11, run_dir=str(ended.folder) + "-b")
    resumed, _ = trained(world, task, num_steps=12, run_dir=str(ended.folder) + "-b")
    assert resumed.code == DONE, resumed.message
    for value, other in zip(ended.weights(), resumed.weights()):
        np.testing.assert_array_equal(value, other)


def check_layers_have_their_names_again_once_it_has_gone_back(world):
    """SampleDropout draws by its name: as a run that is interrupted later, and resumes."""
    keras.utils.clear_session()
    built = []

    class Named(bad([batch_ids(step)[0] for step in (4, 5)])):
        def build_model(self):
            made = super().build_model()
            built.append([layer.name for layer in made.layers])
            return made

    ended, _ = trained(world, Named, num_steps=7, max_bad_steps=2)
    assert ended.code == DONE, ended.message
    assert len(built) == 2 and built[0] == built[1], built


def check_a_second_time_ends_the_run(world):
    task = bad([batch_ids(step)[0] for step in (4, 5, 9, 10)])
    ended, printed = trained(world, task, num_steps=12, max_bad_steps=2)
    assert ended.code == DIVERGED, (ended.code, ended.message)
    assert "It went back once, and left out 2 batches" in ended.message, ended.message
    if world.is_chief:
        assert printed.count("Going back") == 1 and ended.summary["exit_reason"] == "diverged"
        assert {"step-00000004", "step-00000006"} <= {*ended.checkpoints}


def check_without_a_checkpoint_before_it_the_run_ends(world):
    task = bad([batch_ids(step)[0] for step in (0, 1)])
    ended, printed = trained(world, task, num_steps=12, max_bad_steps=2)
    assert ended.code == DIVERGED and "went back" not in ended.message, ended.message
    assert "Going back" not in printed and not ended.checkpoints


def check_a_dry_run_ends_where_a_run_goes_back(world):
    """From a checkpoint without its evaluation, which it makes up for and so saves: to go back."""
    first, _ = trained(world, Small, num_steps=4)
    lacks = {"resume": str(first.folder / "checkpoints" / "step-00000002"), "eval_every": 2}
    task = bad([batch_ids(step)[0] for step in (2, 3)])
    ended, printed = trained(world, task, num_steps=12, max_bad_steps=2, dry_run=True, **lacks)
    assert ended.code == DIVERGED and "diverged at step 4" in ended.message, ended.message
    assert "Going back" not in printed


def check_virtual_ranks_are_named(world):
    settings = {"virtual_ranks": 4, "num_steps": 5, "precision": "float32"}
    wrong = batch_ids(3)[3]  # of shares of 3 samples the second
    ended, printed = trained(world, bad([wrong]), **settings)
    assert ended.code == DONE, ended.message
    if world.is_chief:
        samples = ", ".join(map(str, batch_ids(3)[3:6]))
        assert f"loss of virtual rank 1 with samples {samples})" in printed, printed
