"""Searches for the best settings: each trial is a run of its own, and weak ones end early.

    hvdkit sweep configs/demo.cfg --base_lr=1e-4:1e-2:log --model=small,tiny --trials=20

--NAME=LOW:HIGH or LOW:HIGH:log is a range, --NAME=A,B a choice, --NAME=X holds for all trials (a
setting that is a list itself goes into the flagfile, which is copied when the sweep begins). The
score is the main metric of a run's last evaluation. Given again, the command resumes.
"""

import shlex
import sys
from pathlib import Path

from hvdkit import logs
from hvdkit.commands.jobs.search_space import search_space
from hvdkit.settings import project
from hvdkit.settings.typed import path_argument
from hvdkit.stop import NOT_NOW, WRONG_USE, passes


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 no trial has a score, 2 wrong use, 75 stopped, 76 later."""
    parser = logs.parser(__doc__)
    add = parser.add_argument
    add("base", type=Path, metavar="BASE.cfg", help="flagfile of all trials")
    add("--folder", type=path_argument, help="for the trials' runs (runs/sweep-BASE)")
    add("--trials", type=int, default=20, metavar="N", help="how many (20)")
    add("--jobs", type=int, default=1, metavar="N", help="so many at a time (1)")
    add("--seed", type=int, default=1, help="of drawn values; BASE.cfg has the runs'")
    add(
        "--launch",
        default=shlex.join([sys.executable, "train.py"]),
        metavar="COMMAND",
        help="what starts a trial (python train.py)",
    )
    arguments, words = parser.parse_known_args(argv[1:])
    arguments.folder = arguments.folder or Path("runs", f"sweep-{arguments.base.stem}")
    arguments.command = logs.printable(shlex.join(["hvdkit", "sweep", *argv[1:]]))
    if not project.is_fork(Path.cwd()):
        logs.refuse(project.elsewhere("sweep"))
    if min(arguments.trials, arguments.jobs) < 1:
        logs.refuse("--trials and --jobs: 1 or more")
    try:
        from hvdkit.commands.jobs.sweep_trials import Sweep
    except ModuleNotFoundError as error:
        logs.refuse(f"{error}: hvdkit sweep needs Optuna: python -m pip install optuna")
    try:
        sweep = Sweep(arguments, search_space(arguments.base, words))
        with sweep.lock:
            return sweep.run()
    except (OSError, ValueError) as error:  # trials that run save and end
        logs.complain(str(error))
        return NOT_NOW if passes(error) else WRONG_USE
