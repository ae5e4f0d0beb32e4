"""Holds hvdkit.run.health and hvdkit.train.step.updating: bad steps are skipped, then left out.

A step is bad whose loss is no number. On real ranks.
"""

import json
from functools import partial
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks_objective import own_train
from checks_runs import PLAIN_SGD, batch_ids, plain_sgd
from small_runs import Small, classifier, fit, numbers, same

from hvdkit.checkpoint import files
from hvdkit.data.sampler import Sampler
from hvdkit.ranks import world as world_lib
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, WRONG_USE
from hvdkit.train.step import updating

SAMPLES, BATCH = 600, 12
SETTINGS = PLAIN_SGD | {"checkpoint_every": 2, "keep": 9}


def of_batch(*steps: int, place: int = 0) -> list[int]:
    """The sample at this place of the batch of each step."""
    return [batch_ids(step, SAMPLES)[place] for step in steps]


def bad(ids: list[int]) -> type:
    class Bad(Small):
        def sources(self):
            train = numbers(1, SAMPLES)
            train._arrays["x"][ids] = np.nan
            return train, numbers(2, 20)

    return Bad


def trained(world, task, *words, **settings):
    return fit(world, task, *words, **SETTINGS | settings)


def named(world, step: int, rank: int) -> str:
    """A rank and its samples of a step, as a note names them."""
    share = Sampler(SAMPLES, BATCH, micro_batches=1, seed=1, rank=rank, size=world.size)
    numbers_of_samples = share.local_samples(tf.constant(step, tf.int64))[0].numpy()
    shown = ", ".join(str(number) for number in numbers_of_samples)
    return f"rank {rank} with samples {shown})"


def model_arrays(state: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Those of the model in a checkpoint's state."""
    return [value for name, value in state.items() if name.startswith("model/")]


def as_plain(ended, begin: int, steps) -> None:
    """From the checkpoint of a step on the run is that of these batches, in one process."""
    start = model_arrays(ended.state(begin))
    weights, _ = plain_sgd(start, steps, size=SAMPLES)
    same(ended.weights(), weights, 1e-12)


def check_a_bad_step_is_skipped_and_named(world):
    # Once for all checks here, before the first operation.
    world_lib.set_up(world, Settings())
    wrong = of_batch(3, place=-1)  # the last share's
    ended = trained(world, bad(wrong), num_steps=6, checkpoint_every=1)
    if world.is_chief:
        notes = [line for line in ended.printed.splitlines() if "is skipped" in line]
        assert len(notes) == 1 and "step 4 is skipped, its loss nan" in notes[0], notes
        assert f"(no number: loss of {named(world, 3, world.size - 1)}" in notes[0]
        assert (
            ended.summary["skipped_steps"] == 1
            and ended.summary["samples_passed_over"] == 0
        )
        same(model_arrays(ended.state(3)), model_arrays(ended.state(4)))
        as_plain(ended, 4, [4, 5])


def check_a_step_ends_on_a_gpu_as_on_a_cpu(world):
    """By XLA, here on CPUs too; a bad step gives back moving statistics and seeds."""

    class Normed(bad(of_batch(2))):
        def build_model(self):
            return classifier(
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
            )

    with mock.patch.object(world_lib, "gpu", lambda: ""):
        on_cpu = trained(world, Normed, num_steps=5, ema_decay=0.5)
    with (
        mock.patch.object(world_lib, "gpu", lambda: "/CPU:0"),
        mock.patch.object(updating, "by_branch", None),  # a GPU must not call it
    ):
        on_gpu = trained(world, Normed, num_steps=5, ema_decay=0.5)
    same(on_cpu.weights(), on_gpu.weights(), 1e-12, 1e-15)
    assert all(np.isfinite(array).all() for array in on_cpu.weights())
    if world.is_chief:
        states = []
        losses = []
        for ended in (on_cpu, on_gpu):
            assert ended.summary["skipped_steps"] == 1
            losses.append([loss or 0 for loss in ended.losses])  # None: no number
            states.append(ended.state(5))
            assert int(states[-1]["ema_updates/0"]) == 4
        same(losses[0], losses[1], 1e-12)
        for name, average in states[0].items():
            if name.startswith("ema"):
                same([average], [states[1][name]], 1e-12, 1e-15)


def check_a_loss_of_nan_is_named_with_float16_too(world):
    """NaN in the gradient only is a matter of the loss scale."""
    printed = trained(world, bad(of_batch(3)), precision="float16", num_steps=5).printed
    if world.is_chief:
        assert (
            printed.count("is skipped") == 1
            and "loss of rank 0 with samples" in printed
        )


def check_bad_steps_in_a_row_send_the_run_back_and_leave_out_their_batches(world):
    """A bad stretch of data, steps 8 to 10: from step 6 on with the batch after it."""
    task = bad(of_batch(7, 8, 9))
    ended = trained(world, task, num_steps=12)
    if world.is_chief:
        for words in (
            "Going back to step 6; the batches of steps 7 to 10 are left out",
            "diverged at step 10 (3 steps in a row skipped)",
            named(world, 9, 0),
        ):
            assert words in ended.printed, ended.printed
        steps = [record["step"] for record in ended.records if "loss" in record]
        assert steps == list(range(1, 13)), "each step once"
        assert ended.summary["samples_passed_over"] == 4 * 12
        as_plain(ended, 6, range(10, 16))
    # An interruption later changes nothing.
    trained(world, task, num_steps=11, run_dir=f"{ended.folder}-b")
    resumed = trained(world, task, num_steps=12, run_dir=f"{ended.folder}-b")
    same(ended.weights(), resumed.weights())
    # Nor is anything read twice, or left out, where the next steps are of another size.
    other = trained(
        world, task, num_steps=14, run_dir=ended.folder, global_batch_size=6
    )
    if world.is_chief:
        file = other.folder / "checkpoints/step-00000014/manifest.json"
        manifest = json.loads(file.read_text())
        assert manifest["samples"] == 12 * 12 + 2 * 6
        assert manifest["passed_over"] == 4 * 12


def slow_check_layers_have_their_names_again_once_it_has_gone_back(world):
    """SampleDropout draws by its name: as a run that is interrupted later, and resumes."""
    keras.layers.Dense(1)  # as in a cell of a notebook
    built = []

    class Named(bad(of_batch(4, 5))):
        def build_model(self):
            model = super().build_model()
            built.append([layer.name for layer in model.layers])
            return model

    trained(world, Named, num_steps=7, max_bad_steps=2)
    assert len(built) == 2 and built[0] == built[1], built


def check_a_second_time_ends_the_run(world):
    ended = trained(
        world,
        bad(of_batch(4, 5, 9, 10)),
        "It went back once, and left out 24 samples",
        code=DIVERGED,
        num_steps=12,
        max_bad_steps=2,
    )
    if world.is_chief:
        assert (
            ended.printed.count("Going back") == 1
            and ended.summary["exit_reason"] == "diverged"
        )
        assert {"step-00000004", "step-00000006"} <= {*ended.checkpoints}
        for path in (ended.folder / "checkpoints").iterdir():
            files.verify(path)


def check_without_a_checkpoint_before_it_the_run_ends(world):
    ended = trained(
        world, bad(of_batch(0, 1)), code=DIVERGED, num_steps=12, max_bad_steps=2
    )
    assert "went back" not in ended.message and "Going back" not in ended.printed
    assert not ended.checkpoints


def weighted(
    weights: dict[int, float],
    *,
    named: str = "",
    evaluated: float = 1.0,
    place: int = 5,
) -> type:
    """Training samples have these weights, all others 1; of a term where it is `named`."""

    class Weighted(Small):
        def sources(self):
            train, val = numbers(1, SAMPLES), numbers(2, 20)
            for data in (train, val):
                data._arrays["weight"] = np.ones(len(data), np.float32)
            for sample, weight in weights.items():
                train._arrays["weight"][sample] = weight
            val._arrays["weight"][place] = evaluated
            return train, val

        def training_example(self, sample, key):
            return self.evaluation_example(sample)

        def evaluation_example(self, sample):
            return {"inputs": sample["x"], "targets": (sample["y"], sample["weight"])}

        def loss(self, outputs, targets):
            labels, weights_of_samples = targets
            losses, ones = super().loss(outputs, labels)
            if named:
                return {"other": (losses, ones), named: (losses, weights_of_samples)}
            return losses, weights_of_samples

        def sums(self, outputs, targets):
            return super().sums(outputs, targets[0])

    return Weighted


def check_a_weight_that_is_negative_or_no_number_ends_the_run_by_name(world):
    """The weights' sum divides the loss: where it is negative, plain Keras goes the other way."""
    world_lib.set_up(world, Settings())
    (one,) = of_batch(3, place=-1)
    (other,) = of_batch(3, place=0)
    cases = [
        (
            {one: -1.0},
            {},
            "step 4 a weight of the task's loss is -1 (1 of the global batch)",
        ),
        ({one: float("nan")}, {}, "a weight of the task's loss is nan (1 of"),
        ({one: float("inf")}, {"precision": "float16"}, "is inf (1 of"),
        ({one: -1.0, other: 1.0}, {"accumulation_steps": 2}, "is -1 (1 of"),
        ({one: -1.0, other: -0.5}, {"jit": True}, "is -0.75 on average (2 of"),
        ({one: -1.0}, {"virtual_ranks": 4, "precision": "float32"}, "is -1 (1 of"),
    ]
    for weights, settings, words in cases:
        ended = trained(
            world, weighted(weights), words, code=WRONG_USE, num_steps=6, **settings
        )
        assert ended.checkpoints == ["step-00000002"], ended.checkpoints
        assert "is skipped" not in ended.printed
    task = weighted({one: -1.0}, named="box")
    trained(
        world,
        task,
        "a weight of the task's loss 'box' is -1",
        code=WRONG_USE,
        num_steps=6,
    )
    scored = weighted({}, evaluated=-2.0)
    words = "a weight of the task's loss is -2 but weights are finite numbers from 0 up"
    # One rank divides no batch, so that it tries no samples before its first step.
    place = "evaluating the validation data"
    if world.size > 1:
        place = "evaluating a few samples"
    trained(world, scored, place, words, code=WRONG_USE)
    # Of none of the samples that are tried.
    scored = weighted({}, evaluated=-2.0, place=8)
    trained(world, scored, "sample", words, code=WRONG_USE, num_steps=2, eval_every=2)


def check_virtual_ranks_are_named(world):
    wrong = of_batch(3, place=3)  # it is in the second share of 3 samples
    ended = trained(
        world, bad(wrong), virtual_ranks=4, num_steps=5, precision="float32"
    )
    if world.is_chief:
        samples = ", ".join(str(sample) for sample in batch_ids(3, SAMPLES)[3:6])
        expected = f"loss of virtual rank 1 with samples {samples})"
        assert expected in ended.printed, ended.printed


def check_own_losses_of_each_output_and_every_other_are_refused(world):
    """Outputs [n, 1] minus targets [n] would be [n, n]."""
    own = partial(own_train, change=lambda x: x[:, None] - x)
    trained(world, Small, "one example more", own_train=own, code=WRONG_USE)
