"""Run on real ranks by test_flags.py: every pair of values of any two flags stands in a run."""

from __future__ import annotations

import functools
import os
import time

import flag_values
import numpy as np
from flag_runs import Sweep, all_pass, count, judge_weights, sweep
from flag_values import Row
from small_runs import Outcome, StopSignal

from hvdkit import settings as settings_lib
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World
from hvdkit.run.actions import evaluation_due
from hvdkit.settings import Settings
from hvdkit.stop import DIVERGED, PREEMPTED

# The first rows have most pairs. Of all rows on 1 rank: one part of so many.
PART = int(os.environ["FLAGS_PART"])
ROWS_ON_RANKS = 6


class Stopped(StopSignal):
    asked = True


def check_every_pair_of_flags(world):
    made = sweep(world)
    # The tasks' own flags on one rank only: test_tasks.py trains every task on more.
    tables = [flag_values.VALUES] + [flag_values.TASK_VALUES] * (world.size == 1)
    for values in tables:
        start, before = time.process_time(), made.runs
        array = flag_values.covering(values, made.accepts)
        parts = [array.rows, array.pairs, array.refused]
        array = flag_values.Array(*world.broadcast_object(parts, "flags.array"))
        rows = array.rows[: -(-len(array.rows) // PART) if world.size == 1 else ROWS_ON_RANKS]
        all_pass(world, functools.partial(try_row, made), [(row,) for row in rows])
        count(
            world,
            f"{len(rows)} of {len(array.rows)} rows, {made.runs - before} runs; "
            f"{len(flag_values.pairs_in(rows))} of {array.pairs} pairs of values of {len(values)} "
            f"flags ({array.refused} refused); {time.process_time() - start:.0f} s of CPU",
        )


def try_row(made: Sweep, row: Row) -> None:
    """Where the row resumes, a stop signal ends a first run before its last step."""
    values, begun = list(row.values()), 0
    # Where the only step is one that float16 skips.
    skips = {"--precision=float16", "--num_steps=1"} <= {*values}
    if row.get("resume", "--resume=never") != "--resume=never":
        made.names["first"] = f"{made.folder}/first-{made.runs}"
        place = f"--run_dir={made.names['first']}"
        first = made.run([*values, place, "--resume=never --nobenchmark"], Stopped())
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
    evaluated = [s for s in (begun, *steps) if s and evaluation_due(config, s)]
    evaluated = [] if config.benchmark else evaluated
    assert reason != "early stop" or (config.early_stop_evals and evaluated)
    assert [r["step"] for r in ended.records if "eval_loss" in r] == evaluated
    assert all(np.isfinite(r["eval_loss"]) for r in ended.records if "eval_loss" in r)
    every = config.checkpoint_every
    saved = [s for s in steps if evaluation_due(config, s) or (every and s % every == 0)]
    saved = [] if config.benchmark else saved
    # What it resumed from is in its folder already, or is saved there to be evaluated.
    saved = ([begun] if goes_on or begun in evaluated else []) + saved
    there = [int(name.removeprefix("step-")) for name in ended.checkpoints]
    newest = saved[-config.keep :]
    assert set(newest) <= set(there) <= set(saved) and len(there) <= config.keep + 1, there
    again = settings_lib.parse(["train.py", f"--flagfile={ended.folder}/config.cfg"])
    assert again == config.for_ranks(world.size)
