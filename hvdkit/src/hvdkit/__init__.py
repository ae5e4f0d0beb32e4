"""The engine of a training template for TensorFlow 2 and Horovod.

A fork's train.py uses `Run` and `main`, its settings.py `Settings`, `setting` and `add_reader`;
all else has a room: settings, ranks, data, train, checkpoint, observe, evaluate, run, commands.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.stop import WRONG_USE

if TYPE_CHECKING:
    from hvdkit.run.loop import Run
    from hvdkit.settings import Settings, add_reader, setting

__all__ = [
    "Run",
    "Settings",
    "__version__",
    "add_reader",
    "check_flags",
    "load",
    "load_settings",
    "main",
    "setting",
]
__version__ = "0.1.0"

# Programs that a notebook's kernel runs as: the words after them are not meant for a run.
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")


def check_flags(kind: type[Settings], argv: Sequence[str] | None = None) -> None:
    """Refuses wrong flags before TensorFlow's long import, which it then does quietly.

    `argv`: by default sys.argv. Until the run starts, Ctrl-C ends the process without a trace.
    """
    from hvdkit import settings, streams

    streams.hold()
    checked = settings.check(_words(argv), kind)
    if checked and checked.jit_cache:
        from hvdkit.ranks import jit_cache

        jit_cache.use(checked.jit_cache, deterministic=checked.deterministic)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _import_tensorflow()


def main(
    train: Any, kind: type[Settings] | Settings, argv: Sequence[str] | None = None
) -> int:
    """Trains by `train(run)` on the ranks that were launched; returns the exit code.

    `kind`: the class of settings, which are read from `argv`, by default sys.argv; or settings, by
    `load_settings`, as in a notebook.
    """
    try:
        _import_tensorflow()
        words = _words(argv) if isinstance(kind, type) else []
    except SystemExit:
        return WRONG_USE
    from hvdkit.run import main as entry

    if not isinstance(kind, type):
        return entry.main_with(train, kind)
    return entry.main(train, kind, words)


def load_settings(kind: type[Settings], /, **values: Any) -> Settings:
    """Settings without a command line: load_settings(Settings, flagfile="a.cfg", num_steps=100).

    They are what the flags --flagfile=a.cfg --num_steps=100 make, and absl's FLAGS hold them then.
    Raises ValueError for a wrong name or value.
    """
    from hvdkit import settings

    return settings.load_values(kind, values)


def load(run_dir: str | Path, checkpoint: str | int = "best", ema: bool = True) -> Any:
    """The Keras model of a run, with the weights of a checkpoint: "best", "last", a step, a path.

    `ema`: the averages of the weights, where the run has them (--ema_decay), as its scores do.
    It starts no ranks and reads no command line. The task is that of the fork that the run lies in;
    of a run that lies elsewhere, of the fork that the working folder is in.

    Raises ValueError: there is no such run or checkpoint, or it does not fit the task; or Keras was
    imported before, with another backend than TensorFlow.
    """
    importlib.import_module("hvdkit.ranks.quiet")
    from hvdkit.run import load_run

    return load_run.load(run_dir, str(checkpoint), ema)


def _import_tensorflow() -> None:
    """The process ends with exit code 2 where Keras runs on another backend already."""
    try:
        importlib.import_module("hvdkit.ranks.quiet")
    except ValueError as error:
        from hvdkit.logs import refuse

        refuse(str(error))


def _words(argv: Sequence[str] | None) -> list[str]:
    """The command line; in a notebook there is none, and the process ends with exit code 2."""
    words = [*(sys.argv if argv is None else argv)]
    program = Path(words[0])
    if program.name in _KERNELS or program.parent.name == "ipykernel":
        from hvdkit.logs import refuse

        refuse(
            "a notebook has no flags: hvdkit.main(train, hvdkit.load_settings(Settings, ...))"
        )
    return words


def __getattr__(name: str) -> Any:
    # TensorFlow takes seconds to import, so these names import it only when they are used.
    if name == "Run":
        return importlib.import_module("hvdkit.run.loop").Run
    if name in ("Settings", "add_reader", "setting"):
        return getattr(importlib.import_module("hvdkit.settings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
