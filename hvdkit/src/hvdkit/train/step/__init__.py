"""The training step.

step.Step               loss and update of a step, for train.py
tracing                 a step while its function is traced; the direct call of its graph
calls                   several steps in one call
objective               terms of a loss, each a mean over the global batch
losses                  cross-entropy; losses that a model adds by itself
across                  rows of the whole global batch in a loss
gradients               accumulation, L2, clipping, loss scale
compression             gradients as float16 on the wire
reduction               how gradients are summed over ranks
programs                parts of a step that XLA compiles
updating                one update, or none
state                   State, all that a checkpoint holds, by name
combine                 rules for other state that forward passes change
graph_checks            what a traced graph must not do
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # The module `step` imports the others of this room, which another room may import first.
    if name == "Step":
        return importlib.import_module("hvdkit.train.step.step").Step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
