"""Steps whose loss is no number: skipped, then once gone back before; on real ranks."""

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
    share = Sampler(SAMPLES, BATCH, 1, 1, rank, world.size)
    found = share.local_samples(tf.constant(step, tf.int64))[0].numpy().tolist()
    return f"rank {rank} with samples {', '.join(map(str, found))})"


def as_plain(ended, begin: int, steps) -> None:
    """From the checkpoint of a step on the run is that of these batches, in one process."""
    start = [value for name, value in ended.state(begin).items() if name.startswith("model/")]
    same(ended.weights(), plain_sgd(start, steps, size=SAMPLES)[0], 1e-12)


def check_a_bad_step_is_skipped_and_named(world):
    world_lib.set_up(world, Settings())  # once for all checks here, before the first operation
    wrong = of_batch(3, place=-1)  # the last share's
    ended = trained(world, bad(wrong), num_steps=6, checkpoint_every=1)
    if world.is_chief:
        notes = [line for line in ended.printed.splitlines() if "is skipped" in line]
        assert len(notes) == 1 and "step 4 is skipped, its loss nan" in notes[0], notes
        assert f"(no number: loss of {named(world, 3, world.size - 1)}" in notes[0]
        assert ended.summary["skipped_steps"] == 1 and ended.summary["samples_passed_over"] == 0
        one, two = ended.state(3), ended.state(4)
        same(*([s[n] for n in s if n.startswith("model/")] for s in (one, two)))
        as_plain(ended, 4, [4, 5])


def check_a_step_ends_on_a_gpu_as_on_a_cpu(world):
    """By XLA, here on CPUs too; a bad step gives back moving statistics and seeds."""
    parts = keras.layers.Dense, keras.layers.BatchNormalization, keras.layers.Dropout
    model = lambda task: classifier(*(kind(n) for kind, n in zip(parts, (5, -1, 0.3))))  # noqa: E731
    task, ended = type("Normed", (bad(of_batch(2)),), {"build_model": model}), []
    for device, branch in ("", updating.by_branch), ("/CPU:0", None):  # which must not be called
        with (
            mock.patch.object(world_lib, "gpu", lambda device=device: device),
            mock.patch.object(updating, "by_branch", branch),
        ):
            ended.append(trained(world, task, num_steps=5, ema_decay=0.5))
    same(*(one.weights() for one in ended), 1e-12, 1e-15)
    assert all(np.isfinite(w).all() for w in ended[0].weights())
    if world.is_chief:
        same(*([x or 0 for x in one.losses] for one in ended), 1e-12)  # None: no number
        assert [one.summary["skipped_steps"] for one in ended] == [1, 1]
        kept = [one.state(5) for one in ended]
        averages = [name for name in kept[0] if name.startswith("ema")]
        same(*([state[name] for name in averages] for state in kept), 1e-12, 1e-15)
        assert [int(state["ema_updates/0"]) for state in kept] == [4, 4]


def check_a_loss_of_nan_is_named_with_float16_too(world):
    """NaN in the gradient only is a matter of the loss scale."""
    printed = trained(world, bad(of_batch(3)), precision="float16", num_steps=5).printed
    if world.is_chief:
        assert printed.count("is skipped") == 1 and "loss of rank 0 with samples" in printed


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
    other = trained(world, task, num_steps=14, run_dir=ended.folder, global_batch_size=6)
    if world.is_chief:
        about = json.loads((other.folder / "checkpoints/step-00000014/manifest.json").read_text())
        assert (about["samples"], about["passed_over"]) == (12 * 12 + 2 * 6, 4 * 12)


def slow_check_layers_have_their_names_again_once_it_has_gone_back(world):
    """SampleDropout draws by its name: as a run that is interrupted later, and resumes."""
    keras.utils.clear_session()
    built = []

    class Named(bad(of_batch(4, 5))):
        def build_model(self):
            made = super().build_model()
            built.append([layer.name for layer in made.layers])
            return made

    trained(world, Named, num_steps=7, max_bad_steps=2)
    assert len(built) == 2 and built[0] == built[1], built


def check_a_second_time_ends_the_run(world):
    settings = {"code": DIVERGED, "num_steps": 12, "max_bad_steps": 2}
    words = "It went back once, and left out 24 samples"
    ended = trained(world, bad(of_batch(4, 5, 9, 10)), words, **settings)
    if world.is_chief:
        assert ended.printed.count("Going back") == 1 and ended.summary["exit_reason"] == "diverged"
        assert {"step-00000004", "step-00000006"} <= {*ended.checkpoints}
        for path in (ended.folder / "checkpoints").iterdir():
            files.verify(path)


def check_without_a_checkpoint_before_it_the_run_ends(world):
    ended = trained(world, bad(of_batch(0, 1)), code=DIVERGED, num_steps=12, max_bad_steps=2)
    assert "went back" not in ended.message and "Going back" not in ended.printed
    assert not ended.checkpoints


def weighted(
    weights: dict[int, float], *, named: str = "", evaluated: float = 1.0, place: int = 7
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
            losses, ones = super().loss(outputs, targets[0])
            term = losses, targets[1]
            return {"other": (losses, ones), named: term} if named else term

        def sums(self, outputs, targets):
            return super().sums(outputs, targets[0])

    return Weighted


def check_a_weight_that_is_negative_or_no_number_ends_the_run_by_name(world):
    """The weights' sum divides the loss: where it is negative, plain Keras goes the other way."""
    world_lib.set_up(world, Settings())
    one, other = of_batch(3, place=-1), of_batch(3, place=0)
    both = {one[0]: -1.0, other[0]: 1.0}
    cases = [
        ({one[0]: -1.0}, {}, "step 4 a weight of the task's loss is -1 (1 of the global batch)"),
        ({one[0]: float("nan")}, {}, "a weight of the task's loss is nan (1 of"),
        ({one[0]: float("inf")}, {"precision": "float16"}, "is inf (1 of"),
        (both, {"accumulation_steps": 2}, "is -1 (1 of"),
        ({one[0]: -1.0, other[0]: -0.5}, {"jit": True}, "is -0.75 on average (2 of"),
        ({one[0]: -1.0}, {"virtual_ranks": 4, "precision": "float32"}, "is -1 (1 of"),
    ]
    for weights, settings, words in cases:
        ended = trained(world, weighted(weights), words, code=WRONG_USE, num_steps=6, **settings)
        assert ended.checkpoints == ["step-00000002"], ended.checkpoints
        assert "is skipped" not in ended.printed
    task = weighted({one[0]: -1.0}, named="box")
    trained(world, task, "a weight of the task's loss 'box' is -1", code=WRONG_USE, num_steps=6)
    scored = weighted({}, evaluated=-2.0)
    words = "a weight of the task's loss is -2 but weights are finite numbers from 0 up"
    trained(world, scored, "evaluating a few samples", words, code=WRONG_USE)
    scored = weighted({}, evaluated=-2.0, place=8)  # of none of the samples that are tried
    trained(world, scored, "sample", words, code=WRONG_USE, num_steps=2, eval_every=2)


def check_virtual_ranks_are_named(world):
    settings = {"virtual_ranks": 4, "num_steps": 5, "precision": "float32"}
    wrong = of_batch(3, place=3)  # of shares of 3 samples the second
    printed = trained(world, bad(wrong), **settings).printed
    if world.is_chief:
        samples = ", ".join(map(str, batch_ids(3, SAMPLES)[3:6]))
        assert f"loss of virtual rank 1 with samples {samples})" in printed, printed


def check_own_losses_of_each_output_and_every_other_are_refused(world):
    """Outputs [n, 1] minus targets [n] would be [n, n]."""
    own = partial(own_train, change=lambda x: x[:, None] - x)
    trained(world, Small, "one example more", own_train=own, code=WRONG_USE)
