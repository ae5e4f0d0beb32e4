"""The engine of a training template for TensorFlow 2 and Horovod.

A fork's train.py uses `Run` and `main`, its settings.py `Settings`, `setting` and `add_reader`;
all else has a room: settings, ranks, data, train, checkpoint, observe, evaluate, run, commands.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.run.loop import Run
    from hvdkit.settings import Settings, add_reader, setting

__all__ = ["Run", "Settings", "__version__", "add_reader", "check_flags", "main", "setting"]
__version__ = "0.1.0"


def check_flags(kind: type[Settings], argv: Sequence[str] = sys.argv) -> None:
    """Refuses wrong flags before TensorFlow's long import, which it then does quietly.

    Until the run starts, Ctrl-C ends the process without a trace.
    """
    from hvdkit import settings

    settings.check(argv, kind)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("hvdkit.ranks.quiet")


def main(train: Any, kind: type[Settings], argv: Sequence[str] = sys.argv) -> int:
    """Trains by `train(run)` on the ranks that were launched; returns the exit code."""
    from hvdkit.run import main as entry

    return entry.main(train, kind, argv)


def __getattr__(name: str) -> Any:
    # TensorFlow takes seconds to import: only where something of it is used.
    if name == "Run":
        return importlib.import_module("hvdkit.run.loop").Run
    if name in ("Settings", "add_reader", "setting"):
        return getattr(importlib.import_module("hvdkit.settings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
