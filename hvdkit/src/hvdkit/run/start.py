"""Where a run begins: at step 0, or at a checkpoint; chosen and read by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from hvdkit.checkpoint import pretrained, run_folder, warm_start
from hvdkit.checkpoint.checkpoints import Found
from hvdkit.run.context import RunContext
from hvdkit.stop import GoBack

Source = Literal["new", "own", "other"]


class Start(NamedTuple):
    """Where a run begins, the same on every rank.

    `source`: "new" weights (of the seed, of --init_from or --backbone_weights), or a checkpoint
    of this run's "own" folder or of "other" ones.
    """

    step: int
    source: Source
    found: Found | None = None

    @property
    def path(self) -> Path | None:
        return self.found.path if self.found else None


def begin(context: RunContext, back: GoBack | None = None) -> Start:
    """Finds the start, gives all variables its values, and then those of rank 0 on every rank.

    Args:
      back: the run goes back to an earlier checkpoint of its own.
    Raises:
      Stop: on all ranks, when the folder is in use, or what --resume, --init_from or
        --backbone_weights names cannot be read or does not fit the model.
    """
    config, world, state = context.config, context.world, context.state
    with world.fail_together("locking the run folder"):
        if world.is_chief:
            run_folder.lock(Path(config.run_dir))
    resume = back.path if back else config.resume
    found = context.checkpoints.find(resume, config.num_steps)
    if found:
        context.checkpoints.restore(found, state.variables, config)
        state.passed_over.assign_add(back.last - found.step if back else 0)
    elif config.init_from or config.backbone_weights:
        read = warm_start.start if config.init_from else pretrained.start
        with world.fail_together("reading the first weights"):
            if world.is_chief:
                read(context.model, config)
    world.broadcast_variables(list(state.variables.values()))
    source = "new"
    if found:
        source = "own" if context.checkpoints.holds(found) else "other"
    return Start(int(state.step), source, found)
