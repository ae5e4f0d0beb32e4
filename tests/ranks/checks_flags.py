"""Run on real ranks by test_fields.py: rows of flags, what each flag changes, what is refused."""

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
        body = keras.layers.Dense(5, activation="tanh", kernel_regularizer=l2, name="body")
        y = keras.layers.BatchNormalization(name="norm")(body(inputs["x"]))
        if self.config.dropout:
            inputs["key"] = keras.Input((2,), dtype="int32", name="key")
            y = SampleDropout(self.config.dropout)([y, inputs["key"]])
        return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(y), name="varied")

    def loss(self, outputs, targets):
        config = self.config
        how = {"smoothing": config.label_smoothing, "class_weights": config.class_weight_list}
        return losses.cross_entropy(outputs, targets, **how)


class Sweep:
    """Runs by their command lines, and what the values' braces stand for."""

    def __init__(self, world: World) -> None:
        world_lib.set_up(world, Settings())  # before anything is exchanged, as in a run
        self.world, self.folder, self.runs = world, folder(world), 0
        self._weights: dict[str, str] = {}
        carriers = ("mpi", "gloo") if hvd.mpi_enabled() else ("gloo", "mpi")
        self.names = dict(zip(("carrier", "other_carrier"), carriers))
        self.names["threads"] = str(tf_config.get_intra_op_parallelism_threads())
        self.names |= {n: str(self.folder / n) for n in ("run", "plain", "keras", "first")}
        self.names["keras"] += ".keras"
        on_chief(world, lambda: (self.folder / "usual.cfg").write_text(flag_values.USUAL))
        self.run([f"--run_dir={self.names['plain']} --num_steps=1"])
        made = self.run([f"--run_dir={self.names['run']} --ema_decay=0.5 --seed=3"])
        on_chief(world, lambda: made.model.save(self.names["keras"]))

    def parse(self, values: Iterable[str]) -> Settings:
        flags = [word.format(**self.names) for word in words(values)]
        return settings_lib.parse(["train.py", f"--flagfile={self.folder}/usual.cfg", *flags])

    def accepts(self, values: Iterable[str]) -> bool:
        try:
            self.parse(values).for_ranks(self.world.size)
        except ValueError:
            return False
        return True

    def run(self, values: Iterable[str], stop_signal: object = None) -> Outcome:
        config = self.start(values)
        own = config.task == "varied"
        task = Varied if own else importlib.import_module(f"tasks.{config.task}").Task
        return fit_config(config, self.world, task, code=None, stop_signal=stop_signal)

    def start(self, values: Iterable[str]) -> Settings:
        """As a new process would: settings, Horovod."""
        self.runs += 1
        config = self.parse([f"--run_dir={self.folder}/{self.runs}", *values])
        hvd.shutdown()
        world_lib.connect()
        tf_config.disable_op_determinism()
        return config

    def weights(self, *values: str) -> str:
        """Fingerprint of a run's weights on this rank; what has no number is a fault."""
        line = " ".join(words(values))
        if line not in self._weights:
            ended = self.run(["--eval_every=0", *values])
            judge_weights(ended)
            self._weights[line] = world_lib.weights_sha256(ended.model.variables)
        return self._weights[line]


@functools.cache
def sweep(world: World) -> Sweep:
    return Sweep(world)


def all_pass(world: World, attempt: Callable[..., None], cases: Iterable[tuple]) -> None:
    """Calls attempt(*case) for all, then raises AssertionError, on every rank, if any failed."""
    failures = []
    for case in cases:
        try:
            attempt(*case)
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc(limit=-3, chain=False)}")
            print(f"FAILED {failures[-1]}", flush=True)  # at once: what comes next may hang
    # Only rank 0 judges records: the others must not go on without it.
    failures = [f for theirs in world.gather_objects(failures, "flags.failures") for f in theirs]
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures)


def judge_weights(ended: Outcome) -> None:
    assert ended.code == DONE, f"exit code {ended.code}: {ended.message}"
    broken = [v.path for v in ended.model.variables if not np.isfinite(v.numpy()).all()]
    assert not broken, f"not finite: {broken}"


def check_rows_of_flags(world):
    made = sweep(world)
    rows = flag_values.rows(flag_values.VALUES, made.accepts, ROWS)
    all_pass(world, functools.partial(try_row, made), [(row,) for row in rows])


def try_row(made: Sweep, row: Row) -> None:
    """Where the row resumes, a stop signal ends a first run before its last step."""
    values, begun = list(row.values()), 0
    # Where the only step is one that float16 skips.
    skips = {"--precision=float16", "--num_steps=1"} <= {*values}
    if row.get("resume", "--resume=never") != "--resume=never":
        made.names["first"] = f"{made.folder}/first-{made.runs}"
        place = f"--run_dir={made.names['first']}"
        first = made.run(
            [*values, place, "--resume=never --nobenchmark"], SimpleNamespace(asked=True)
        )
        if first.code == DIVERGED and skips:
            return
        assert first.code == PREEMPTED, first.message
        found = made.world.broadcast_object(first.checkpoints, "flags.first")
        begun = int(found[-1].removeprefix("step-"))
        if row["resume"] == "--resume=auto" and not row.get("benchmark"):
            values += [place]
        elif row["resume"] == "--resume=auto":
            begun = 0  # a folder with checkpoints is not for --benchmark
    ended = made.run(values)
    if ended.code == DIVERGED and skips:
        return
    judge_weights(ended)
    if made.world.is_chief:
        judge_records(ended, made.parse([*values, f"--run_dir={ended.folder}"]), begun, made.world)


def judge_records(ended: Outcome, config: Settings, begun: int, world: World) -> None:
    """summary.json, metrics.jsonl, gradients.jsonl, checkpoints, config.cfg: as flags say."""
    summary, last = ended.summary, ended.summary["step"]
    assert summary["weights_sha256"] == world_lib.weights_sha256(ended.model.variables)
    reason = (
        "benchmark" if config.benchmark else "done" if last == config.num_steps else "early stop"
    )
    assert summary["exit_reason"] == reason
    steps = range(begun + 1, last + 1)
    goes_on = ended.folder.name.startswith("first")  # in the folder that holds its first part
    logged = [s for s in range(1 if goes_on else begun + 1, last + 1) if s % config.log_every == 0]
    assert [r["step"] for r in ended.records if "loss" in r] == logged
    skipped = [r["step"] for r in ended.records if "loss" in r and r["grad_norm"] is None]
    assert len(skipped) <= (summary["skipped_steps"] if config.precision == "float16" else 0)
    gradients = ended.folder / "gradients.jsonl"
    assert bool(logged and config.log_gradients) == gradients.exists()
    if not goes_on:
        profiled = config.profile == "2:3:all" and begun == 0 and last == 3
        assert (ended.folder / "profile" / "operations.json").exists() == profiled
    often = config.eval_every or config.num_steps
    due = {s for s in (begun, *steps) if s and (s % often == 0 or s == config.num_steps)}
    evaluated = [] if config.benchmark else sorted(due)
    assert reason != "early stop" or (config.early_stop_evals and evaluated)
    assert ended.evaluated == evaluated
    assert all(np.isfinite(r["eval_loss"]) for r in ended.records if "eval_loss" in r)
    every = config.checkpoint_every
    saved = [s for s in steps if s in due or (every and s % every == 0)]
    saved = [] if config.benchmark else saved
    # What it resumed from is in its folder already, or is saved there to be evaluated.
    saved = ([begun] if goes_on or begun in evaluated else []) + saved
    there = [int(name.removeprefix("step-")) for name in ended.checkpoints]
    newest = saved[-config.keep :]
    assert set(newest) <= set(there) <= set(saved) and len(there) <= config.keep + 1, there
    again = settings_lib.parse(["train.py", f"--flagfile={ended.folder}/config.cfg"])
    resume = "auto" if there else config.resume  # it goes on from its own
    assert again == config.for_ranks(world.size).changed(resume=resume)


def check_flags_that_must_change_the_weights(world):
    made = sweep(world)
    facts = flag_values.CHANGES if world.size == 1 else flag_values.CHANGES_ON_RANKS

    def attempt(base: str, flags: list[str]) -> None:
        # All runs first: a rank that fails must not leave the others alone in the next.
        prints = {flag: made.weights(base, flag) for flag in ["", *flags]}
        pairs = itertools.combinations(prints, 2)
        alike = [(one, other) for one, other in pairs if prints[one] == prints[other]]
        assert not alike, f"the same weights: {alike}"

    all_pass(world, attempt, facts)


def check_flags_that_must_not_change_the_weights(world):
    made = sweep(world)
    facts = flag_values.KEEPS + (flag_values.KEEPS_ON_ONE_RANK if world.size == 1 else [])

    def attempt(base: str, flags: str) -> None:
        both = [made.weights(base), made.weights(base, flags)]
        assert both[0] == both[1], "other weights"

    all_pass(world, attempt, facts)


def check_what_a_run_refuses(world):
    made = sweep(world)

    def attempt(flags: str, part: str) -> None:
        part = part.format(**made.names)
        ended = made.run([flags])
        assert ended.code == WRONG_USE and part in ended.message, f"{ended.code}: {ended.message}"
        assert "\n" not in ended.message, ended.message

    # That every rank ends with the same words: checks_tasks.py, checks_errors.py.
    if world.size == 1:
        all_pass(world, attempt, flag_values.REFUSED_BY_RUN.items())
