"""Holds hvdkit.settings on real ranks: rows of flags, what each flag changes, what is refused.

test_fields.py starts the ranks; $FLAGS_ROWS is the number of rows.
"""

import functools
import importlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import flag_values
import horovod.tensorflow as hvd
import keras
import numpy as np
from flag_values import Row, words
from small_runs import CLASSES, FEATURES, Outcome, Small, fit_config, folder, on_chief
from tensorflow.python.framework import config as tf_config

from hvdkit import settings as settings_lib
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, DONE, PREEMPTED, WRONG_USE
from hvdkit.train.layers.dropout import SampleDropout
from hvdkit.train.step import losses

ROWS = int(os.environ["FLAGS_ROWS"])


class Varied(Small):
    """Every flag means something to it: batch norm, dropout, a regularizer, the loss's flags."""

    def training_example(self, sample, key):
        return {"inputs": self._inputs(sample["x"], key), "targets": sample["y"]}

    def evaluation_example(self, sample):
        return self.training_example(sample, np.zeros(2, np.int32))

    def _inputs(self, x, key):
        return {"x": x, "key": key} if self.config.dropout else {"x": x}

    def build_model(self):
        inputs = {"x": keras.Input((FEATURES,), name="x")}
        l2 = keras.regularizers.L2(0.01)
        body = keras.layers.Dense(
            5, activation="tanh", kernel_regularizer=l2, name="body"
        )
        y = keras.layers.BatchNormalization(name="norm")(body(inputs["x"]))
        if self.config.dropout:
            inputs["key"] = keras.Input((2,), dtype="int32", name="key")
            y = SampleDropout(self.config.dropout)([y, inputs["key"]])
        return keras.Model(
            inputs, keras.layers.Dense(CLASSES, name="head")(y), name="varied"
        )

    def loss(self, outputs, targets):
        return losses.cross_entropy(
            outputs,
            targets,
            smoothing=self.config.label_smoothing,
            class_weights=self.config.class_weight_list,
        )


class Sweep:
    """Runs by their command lines, and what the values' braces stand for."""

    def __init__(self, world: World) -> None:
        world_lib.set_up(world, Settings())  # before anything is exchanged, as in a run
        self.world = world
        self.folder = folder(world)
        self.runs = 0
        self._weights: dict[str, str] = {}
        self.names = {
            "carrier": "mpi" if hvd.mpi_enabled() else "gloo",
            "other_carrier": "gloo" if hvd.mpi_enabled() else "mpi",
            "threads": str(tf_config.get_intra_op_parallelism_threads()),
            "run": str(self.folder / "run"),
            "plain": str(self.folder / "plain"),
            "keras": str(self.folder / "keras.keras"),
            "first": str(self.folder / "first"),
        }
        on_chief(
            world, lambda: (self.folder / "usual.cfg").write_text(flag_values.USUAL)
        )
        self.run([f"--run_dir={self.names['plain']} --num_steps=1"])
        ended = self.run([f"--run_dir={self.names['run']} --ema_decay=0.5 --seed=3"])
        on_chief(world, lambda: ended.model.save(self.names["keras"]))

    def parse(self, values: Iterable[str]) -> Settings:
        flags = [word.format(**self.names) for word in words(values)]
        return settings_lib.parse(
            ["train.py", f"--flagfile={self.folder}/usual.cfg", *flags]
        )

    def accepts(self, values: Iterable[str]) -> bool:
        try:
            self.parse(values).for_ranks(self.world.size)
        except ValueError:
            return False
        return True

    def run(self, values: Iterable[str], stop_signal: object = None) -> Outcome:
        config = self.start(values)
        if config.task == "varied":
            task = Varied
        else:
            task = importlib.import_module(f"tasks.{config.task}").Task
        return fit_config(config, self.world, task, code=None, stop_signal=stop_signal)

    def start(self, values: Iterable[str]) -> Settings:
        """Starts as a new process would: settings, then Horovod."""
        self.runs += 1
        config = self.parse([f"--run_dir={self.folder}/{self.runs}", *values])
        hvd.shutdown()
        world_lib.connect()
        tf_config.disable_op_determinism()
        return config

    def weights(self, *values: str) -> str:
        """Fingerprint of a run's weights on this rank; a weight that is no number is a fault."""
        line = " ".join(words(values))
        if line not in self._weights:
            ended = self.run(["--eval_every=0", *values])
            judge_weights(ended)
            self._weights[line] = world_lib.weights_sha256(ended.model.variables)
        return self._weights[line]


@functools.cache
def sweep(world: World) -> Sweep:
    return Sweep(world)


def all_pass(
    world: World, attempt: Callable[..., None], cases: Iterable[tuple]
) -> None:
    """Calls attempt(*case) for all, then raises AssertionError, on every rank, if any failed."""
    failures = []
    for case in cases:
        try:
            attempt(*case)
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc(limit=-3, chain=False)}")
            # At once: what comes next may hang.
            print(f"FAILED {failures[-1]}", flush=True)
    # Only rank 0 judges records: the others must not go on without it.
    failures = list(itertools.chain(*world.gather_objects(failures, "flags.failures")))
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures)


def judge_weights(ended: Outcome) -> None:
    assert ended.code == DONE, f"exit code {ended.code}: {ended.message}"
    broken = [v.path for v in ended.model.variables if not np.isfinite(v.numpy()).all()]
    assert not broken, f"not finite: {broken}"


def check_rows_of_flags(world):
    runs = sweep(world)
    rows = flag_values.rows(flag_values.VALUES, runs.accepts, ROWS)
    all_pass(world, functools.partial(try_row, runs), [(row,) for row in rows])


def try_row(runs: Sweep, row: Row) -> None:
    """Where the row resumes, a stop signal ends a first run before its last step."""
    values = list(row.values())
    first_step = 0
    # float16 may skip the only step.
    may_diverge = {"--precision=float16", "--num_steps=1"} <= set(values)
    if row.get("resume", "--resume=never") != "--resume=never":
        runs.names["first"] = f"{runs.folder}/first-{runs.runs}"
        run_dir = f"--run_dir={runs.names['first']}"
        first = runs.run(
            [*values, run_dir, "--resume=never --nobenchmark"],
            SimpleNamespace(asked=True),
        )
        if first.code == DIVERGED and may_diverge:
            return
        assert first.code == PREEMPTED, first.message
        checkpoints = runs.world.broadcast_object(first.checkpoints, "flags.first")
        first_step = int(checkpoints[-1].removeprefix("step-"))
        if row["resume"] == "--resume=auto":
            if row.get("benchmark"):
                first_step = 0  # a folder with checkpoints is not for --benchmark
            else:
                values.append(run_dir)
    ended = runs.run(values)
    if ended.code == DIVERGED and may_diverge:
        return
    judge_weights(ended)
    if runs.world.is_chief:
        config = runs.parse([*values, f"--run_dir={ended.folder}"])
        judge_records(ended, config, first_step)
        judge_folder(ended, config, first_step)
        again = settings_lib.parse(
            ["train.py", f"--flagfile={ended.folder}/config.cfg"]
        )
        # A run with checkpoints goes on from its own.
        resume = "auto" if ended.checkpoints else config.resume
        assert again == config.for_ranks(runs.world.size).changed(resume=resume)


def judge_records(ended: Outcome, config: Settings, first_step: int) -> None:
    """summary.json, metrics.jsonl and gradients.jsonl are as the flags say.

    `first_step`: of the checkpoint that the run began with, or 0.
    """
    summary = ended.summary
    last = summary["step"]
    assert summary["weights_sha256"] == world_lib.weights_sha256(ended.model.variables)
    if config.benchmark:
        reason = "benchmark"
    elif last == config.num_steps:
        reason = "done"
    else:
        reason = "early stop"
        assert config.early_stop_evals and ended.evaluated
    assert summary["exit_reason"] == reason

    first_logged = 1 if has_first_part(ended) else first_step + 1
    logged = [
        step for step in range(first_logged, last + 1) if step % config.log_every == 0
    ]
    records = [record for record in ended.records if "loss" in record]
    assert [record["step"] for record in records] == logged
    skipped = [record["step"] for record in records if record["grad_norm"] is None]
    assert len(skipped) <= (
        summary["skipped_steps"] if config.precision == "float16" else 0
    )
    gradients = ended.folder / "gradients.jsonl"
    assert bool(logged and config.log_gradients) == gradients.exists()
    if not has_first_part(ended):
        is_profiled = config.profile == "2:3:all" and first_step == 0 and last == 3
        assert (ended.folder / "profile" / "operations.json").exists() == is_profiled

    evaluated = [] if config.benchmark else due_evaluations(config, first_step, last)
    assert ended.evaluated == evaluated
    for record in ended.records:
        assert np.isfinite(record.get("eval_loss", 0.0))


def has_first_part(ended: Outcome) -> bool:
    """Whether its folder holds the first part of the run too."""
    return ended.folder.name.startswith("first")


def due_evaluations(config: Settings, first_step: int, last: int) -> list[int]:
    every = config.eval_every or config.num_steps
    steps = range(max(first_step, 1), last + 1)
    return [step for step in steps if step % every == 0 or step == config.num_steps]


def judge_folder(ended: Outcome, config: Settings, first_step: int) -> None:
    """The checkpoints that the flags say are there."""
    last = ended.summary["step"]
    due = due_evaluations(config, first_step, last)
    saved = []
    # What it resumed from is in its folder already, or is saved there to be evaluated.
    if has_first_part(ended) or first_step in ended.evaluated:
        saved.append(first_step)
    if not config.benchmark:
        every = config.checkpoint_every
        for step in range(first_step + 1, last + 1):
            if step in due or (every and step % every == 0):
                saved.append(step)
    present = [int(name.removeprefix("step-")) for name in ended.checkpoints]
    newest = saved[-config.keep :]
    assert set(newest) <= set(present) <= set(saved), present
    assert len(present) <= config.keep + 1, present


def check_flags_that_must_change_the_weights(world):
    runs = sweep(world)
    facts = flag_values.CHANGES if world.size == 1 else flag_values.CHANGES_ON_RANKS

    def attempt(base: str, flags: list[str]) -> None:
        # All runs first: a rank that fails must not leave the others alone in the next.
        weights = {flag: runs.weights(base, flag) for flag in ["", *flags]}
        pairs = itertools.combinations(weights, 2)
        alike = [(one, other) for one, other in pairs if weights[one] == weights[other]]
        assert not alike, f"the same weights: {alike}"

    all_pass(world, attempt, facts)


def check_flags_that_must_not_change_the_weights(world):
    runs = sweep(world)
    facts = list(flag_values.KEEPS)
    if world.size == 1:
        facts += flag_values.KEEPS_ON_ONE_RANK

    def attempt(base: str, flags: str) -> None:
        # Both runs first: a rank that fails must not leave the others alone in the next.
        plain = runs.weights(base)
        flagged = runs.weights(base, flags)
        assert plain == flagged, "other weights"

    all_pass(world, attempt, facts)


def check_what_a_run_refuses(world):
    runs = sweep(world)

    def attempt(flags: str, part: str) -> None:
        part = part.format(**runs.names)
        ended = runs.run([flags])
        assert ended.code == WRONG_USE and part in ended.message, (
            f"{ended.code}: {ended.message}"
        )
        assert "\n" not in ended.message, ended.message

    # That every rank ends with the same words: checks_tasks.py, checks_errors.py.
    if world.size == 1:
        all_pass(world, attempt, flag_values.REFUSED_BY_RUN.items())
