"""How a run ends: its last words, its records, and the one time that it goes back.

Every rank must call these, at the same place of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit import logs
from hvdkit.observe.telemetry import Telemetry
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World, say
from hvdkit.run.context import RunContext
from hvdkit.run.health import Ending
from hvdkit.stop import DONE, PREEMPTED, GoBack, Stop


def go_back(run: RunContext, ending: Ending) -> None:
    """Raises GoBack, on all ranks, where there is a checkpoint before the bad steps; once a run.

    From the same weights the same batches would lead to the same steps. So the batches between are
    left out: those that lead up to it, as Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, section
    5.1) did, who saw that it takes both, certain batches and certain weights.
    """
    step = int(run.state.step)
    found = run.checkpoints.sound_before(ending.bad_since)
    if found and not int(run.state.passed_over):
        say(
            run.world,
            f"note: {ending.message}. Going back to step {found.step}; the batches of steps "
            f"{found.step + 1} to {step} are left out. A run goes back only once",
        )
        raise GoBack(str(found.path), step)


def finish(
    run: RunContext, telemetry: Telemetry, figures: Mapping[str, float], ending: Ending | None
) -> None:
    """The run's last words, and the proof that all ranks hold the same weights.

    Raises:
      Stop: on all ranks, when the weights differ, or with the ending's exit code if not done.
    """
    config, world, model, state = run.config, run.world, run.model, run.state
    step = int(state.step)
    sha = world_lib.weights_sha256(model.variables)
    shared = sha  # with --bn_sync=none each rank has moving statistics of its own
    if config.bn_sync == "none":
        shared = world_lib.weights_sha256(model.trainable_variables)
    world.check_same(shared, "the final weights")
    reason = ending.reason if ending else "benchmark" if config.benchmark else "done"
    telemetry.summary(
        {"step": step, "exit_reason": reason, "skipped_steps": int(state.skipped)}
        | {"samples_per_second": telemetry.median_speed()}
        | {f"eval_{name}": value for name, value in figures.items()}
        | {"batches_passed_over": int(state.passed_over)}
        | {"weights_sha256": sha, "ranks": world.size, "fingerprint": run.fingerprint}
    )
    kept = not (config.benchmark or config.dry_run or config.find_lr)
    if kept:
        write_report(world, Path(config.run_dir))
    if ending and ending.code != DONE:
        gone_back = ending.bad_since and int(state.passed_over)
        before = f" It went back once, and left out {gone_back} batches." if gone_back else ""
        stopped = ending.code == PREEMPTED and kept
        how = "rerun" if config.resume == "auto" else "rerun with --resume=auto"
        saved = f": saved at step {step}; {how} to resume" if stopped else ""
        raise Stop(ending.code, ending.message + before + saved)
    if ending:
        say(world, ending.message)


def write_report(world: World, run_dir: Path) -> None:
    """For a person to look at: whatever goes wrong with it, the run is what it is."""
    if world.is_chief:
        try:
            from hvdkit.observe import (
                report,  # here: it takes half a second, which no rank needs before its end
            )

            logs.say(f"report: {report.write(run_dir)}")
        except Exception as error:
            logs.say(f"note: no report: {type(error).__name__}: {error}")
