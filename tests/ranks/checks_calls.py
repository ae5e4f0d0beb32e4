"""Holds hvdkit.train.step.calls: several steps in one call compute what single ones do.

On real ranks. What is due ends a call, also where nothing was asked for every step.
"""

import time
from functools import partial
from types import SimpleNamespace

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from checks_bad_steps import bad, of_batch
from checks_runs import loop_of, plain, usual
from small_runs import Small, acting, classifier, fit, same

import train
from hvdkit.stop import PREEMPTED, WRONG_USE
from hvdkit.train.step import calls

SEVERAL = {"num_steps": 24, "log_every": 9, "checkpoint_every": 11, "eval_every": 8}
PER_CALL = 4
# After step 5 an action is due, after the steps 1 and 20 the model doctor looks at weights, and
# after step 10 ranks compare them.
ENDS = [1, 5, 8, 9, 10, 11, 15, 16, 18, 20, 22, 24]


def noting(ends: list[int]):
    """The usual loop; `ends` gets the last step of each call."""

    def note(run, step, batch):
        assert isinstance(batch, calls.Batches)
        ends.append(run.step)
        usual(run, step, batch)

    return loop_of(plain, note)


def figures(ended) -> list[dict]:
    """What a run logged, without times."""
    return [
        {
            name: value
            for name, value in record.items()
            if not ("second" in name or "time" in name or "wait" in name)
        }
        for record in ended.records
    ]


def skips(ended) -> list[str]:
    """The notes on skipped steps; others go by the clock."""
    return [line for line in ended.printed.splitlines() if "is skipped" in line]


def both(world, task: type, **settings):
    """A run of single steps, and one of several in a call, with the same weights and figures."""
    single = fit(world, task, **settings)
    several = fit(world, task, steps_per_call=PER_CALL, **settings)
    same(single.weights(), several.weights())
    if world.is_chief:
        assert figures(single) == figures(several)
        assert single.checkpoints == several.checkpoints
        assert single.summary["weights_sha256"] == several.summary["weights_sha256"]
        assert single.summary["skipped_steps"] == several.summary["skipped_steps"]
    return single, several


def check_what_is_due_ends_a_call(world):
    ends = []
    fit(
        world,
        acting(lambda run, step, result: None, 5),
        own_train=noting(ends),
        steps_per_call=PER_CALL,
        **SEVERAL,
    )
    assert ends == ENDS, ends


def check_bad_steps_within_a_call_are_judged_as_single_ones(world):
    """Also where a loop makes another mapping of the result."""

    def copy(run, step, batch):
        run.after_step({**step(batch)})

    task = bad(of_batch(2, 12))
    single, several = both(world, task, own_train=loop_of(plain, copy), **SEVERAL)
    if world.is_chief:
        assert several.summary["skipped_steps"] == 2
        assert skips(single) == skips(several)
        assert len(skips(several)) == 2


def check_a_run_that_diverges_within_a_call_goes_back_as_with_single_steps(world):
    settings = {"checkpoint_every": 6, "log_every": 50, "num_steps": 24}
    single, several = both(world, bad(of_batch(7, 8, 9)), **settings)
    if world.is_chief:
        words = "Going back to step 6; the batches of steps 7 to 10 are left out"
        for ended in (single, several):
            assert words in ended.printed, ended.printed
            assert ended.summary["samples_passed_over"] == 4 * 12


def check_a_stop_signal_within_a_call_ends_the_run_soon(world):
    stop = SimpleNamespace(asked=False)

    def ask(run, step, batch):
        usual(run, step, batch)
        stop.asked = run.step >= 7 and world.rank == world.size - 1

    train_on = partial(fit, world, Small, num_steps=24, log_every=50)
    stopped = train_on(
        "saved at step",
        code=PREEMPTED,
        stop_signal=stop,
        own_train=loop_of(plain, ask),
        steps_per_call=PER_CALL,
    )
    if world.is_chief:
        assert 7 < stopped.summary["step"] <= 9 + 2 * PER_CALL, stopped.summary["step"]
    resumed = train_on(steps_per_call=3, run_dir=stopped.folder)
    same(resumed.weights(), train_on().weights())


def normed(activation: str | None = None) -> type:
    class Normed(Small):
        def build_model(self):
            layers = [keras.layers.Dense(5), keras.layers.BatchNormalization()]
            if activation:
                layers.append(keras.layers.Activation(activation))
            return classifier(*layers)

    return Normed


def check_graphs_that_are_rewritten_compute_the_same_bits_in_a_call(world):
    """What TensorFlow makes of an activation and of Adam depends on the shapes that it knows."""
    options = tf.config.optimizer
    tests_own = options.get_experimental_options()
    options.set_experimental_options({"disable_meta_optimizer": False})
    try:
        for activation, optimizer in (("swish", "adamw"), ("gelu", "sgd")):
            both(
                world,
                normed(activation),
                num_steps=8,
                log_every=8,
                deterministic=True,
                optimizer=optimizer,
                clip_norm=1.0,
            )
    finally:
        options.set_experimental_options(tests_own)


def check_these_compute_the_same_in_a_call(world):
    """Programs of XLA, a loss scale, virtual ranks, exchanges of batch norm in a step."""
    Normed = normed()

    settings = {"num_steps": 6, "log_every": 6}
    both(world, Small, jit=True, precision="float16", **settings)
    both(world, Normed, virtual_ranks=4, accumulation_steps=2, **settings)
    both(world, Normed, bn_sync="full", deterministic=True, **settings)


def check_what_needs_python_between_steps_is_refused(world):
    def two_functions(run):
        train.make_step(run)
        return train.make_step(run)

    def wrapped(run):
        step = train.make_step(run)
        return lambda batch: step(batch)

    def refused(make):
        fit(
            world,
            Small,
            "needs a train.py with one run.function",
            code=WRONG_USE,
            own_train=loop_of(make, usual),
            steps_per_call=2,
        )

    refused(two_functions)
    refused(lambda run: run.make_step(wrapped))


def check_an_action_is_asked_once_for_each_step_and_sees_the_same_steps(world):
    class Counting:
        settles = True

        def __init__(self, run):
            self.asked = []
            self.last = 0

        def due(self, step):
            self.asked.append(step)
            if step - self.last < 3:
                return False
            self.last = step
            return True

        def __call__(self, step, result):
            acted.append(step)

    class Acting(Small):
        def actions(self, run):
            counting.append(Counting(run))
            return counting[-1:]

    seen = []
    for per_call in (1, PER_CALL):
        counting: list[Counting] = []
        acted: list[int] = []
        fit(world, Acting, num_steps=12, log_every=50, steps_per_call=per_call)
        assert counting[-1].asked == [*range(1, 13)]
        seen.append(acted)
    assert seen[0] == seen[1] == [3, 6, 9, 12]


def check_an_action_whose_due_fails_is_told(world):
    class Failing:
        settles = True

        def due(self, step):
            raise KeyError("histogram")

    class Acting(Small):
        def actions(self, run):
            return [Failing()]

    for per_call in (1, PER_CALL):
        words = "Failing.due(1) failed: checks_calls.py, line"
        fit(world, Acting, words, code=WRONG_USE, steps_per_call=per_call)


def check_a_step_may_return_entries_of_any_name(world):
    values = []

    def adding(run):
        @run.function
        def step(batch):
            with tf.GradientTape() as tape:
                loss = run.loss(batch)
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
            number = run.state.step + 1
            result = run.update(tape.gradient(loss, run.weights))
            return {**result, "ended": 2 * number, "steps": tf.ones([2, 3])}

        return step

    def note(run, step, batch):
        result = step(batch)
        assert type(result) is dict
        run.after_step(result)
        values.append((run.step, int(result["ended"]), result["steps"].shape))

    fit(world, Small, own_train=loop_of(adding, note), steps_per_call=3, num_steps=7)
    assert values, "no step ended"
    for step, ended, shape in values:
        assert ended == 2 * step, values
        assert shape[-2:] == (2, 3), values


def check_batches_of_a_call_are_refused_where_a_loop_looks_into_them(world):
    def looks(run, step, batch):
        usual(run, step, {**batch})

    def keeps(run, step, batch):
        kept.append(batch)
        usual(run, step, kept[0])

    kept: list = []
    for act in (looks, keeps):
        fit(
            world,
            Small,
            "which only the step takes, as they are",
            code=WRONG_USE,
            own_train=loop_of(plain, act),
            steps_per_call=2,
            num_steps=6,
        )


def check_a_rank_that_is_slow_at_input_is_seen_with_several_steps_in_a_call(world):
    """All input of a call comes before its first step; a time of a step is never negative."""
    is_slow = world.rank == world.size - 1
    times: list[tuple[float, float]] = []

    def slow(run):
        step = plain(run)
        read = run.parts.feed.next

        def read_slowly():
            time.sleep(0.05)
            return read()

        if is_slow:
            run.parts.feed.next = read_slowly
        return step

    def note(run, step, batch):
        usual(run, step, batch)
        times.extend(run.parts.health.pace._times[-1:])

    fit(
        world,
        Small,
        own_train=loop_of(slow, note),
        steps_per_call=3,
        num_steps=13,
        log_every=13,
    )
    if world.size > 1:
        assert len(times) == 3  # The last one is logged by then.
    for own, whole in times:
        assert 0 <= own <= whole, times
        assert own > 0.04 or not is_slow, times
