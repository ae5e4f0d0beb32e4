"""`hvdkit COMMAND ...`: all commands besides training, by name."""

import importlib
import signal
import sys
from collections.abc import Sequence

from hvdkit import streams
from hvdkit.logs import refuse
from hvdkit.settings import project
from hvdkit.stop import WRONG_USE

# By name: a module with main(argv) -> exit code, and a summary.
COMMANDS = {
    "example": (
        "hvdkit.commands.example",
        "copies an example into tasks/, or lists them",
    ),
    "start": (
        "hvdkit.commands.start.start",
        "a folder of pictures to a flagfile that trains on them",
    ),
    "check": (
        "hvdkit.data.prepare.check",
        "reads every sample of a data set, lists the bad ones",
    ),
    "browse": ("hvdkit.commands.browse", "a sheet of samples as the model gets them"),
    "pack": (
        "hvdkit.data.prepare.pack",
        "many small files into a few large ones, for network disks",
    ),
    "evaluate": (
        "hvdkit.commands.evaluate",
        "scores of a checkpoint, classes, worst samples",
    ),
    "predict": ("hvdkit.commands.predict", "predictions on pictures"),
    "export": ("hvdkit.commands.export", "a SavedModel that needs none of this code"),
    "serve": (
        "hvdkit.commands.serve",
        "a page in the browser: a picture, the prediction",
    ),
    "compare": (
        "hvdkit.observe.compare",
        "runs side by side: curves, scores, settings, bits",
    ),
    "seeds": (
        "hvdkit.commands.jobs.seeds",
        "several seeds of one run: mean and confidence interval",
    ),
    "sweep": (
        "hvdkit.commands.jobs.sweep",
        "searches settings by many runs, weak ones end early",
    ),
    "supervise": (
        "hvdkit.commands.jobs.supervise",
        "starts a run again until it is done",
    ),
    "report": ("hvdkit.observe.report", "a run's report.html again"),
}
_RUNS_A_TASK = {"start", "browse", "evaluate", "predict", "export", "serve"}
_NEEDS_TENSORFLOW = {"check", "pack", "report"} | _RUNS_A_TASK


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code. Run it in the fork's folder: it uses its tasks/."""
    streams.hold()
    words = list(sys.argv if argv is None else argv)
    if len(words) < 2 or words[1] in ("-h", "--help"):
        print("usage: hvdkit COMMAND ... (hvdkit COMMAND --help says more)\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:<10} {summary}")
        sys.exit(0)
    name = words[1]
    if name not in COMMANDS:
        refuse(
            f"hvdkit {name}: there is no such command; there are {', '.join(COMMANDS)}"
        )
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, until a run handles it
    # Where a parent ignores it, as some daemons do, exit codes of children are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Other commands continue when the reader of their output ends; all that compare does is print.
    if name == "compare":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if foreign := project.refusal_of_foreign(name):
        refuse(foreign)
    if name in _RUNS_A_TASK and not project.is_fork(project.folder()):
        refuse(project.elsewhere(name))
    project.enter()
    if name in _NEEDS_TENSORFLOW:
        importlib.import_module("hvdkit.ranks.quiet")
    module, _ = COMMANDS[name]
    sys.argv = [f"hvdkit {name}", *words[2:]]  # argparse names the program by it
    code = importlib.import_module(module).main(sys.argv)
    if name == "compare" and streams.is_lost():
        code = code or WRONG_USE
    sys.exit(code)
