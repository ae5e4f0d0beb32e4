"""Copies an example into the project, or lists them.

    hvdkit example                 lists what the folder examples/ has
    hvdkit example tokens          copies it to tasks/tokens.py and prints how to train it

An example's own loop (of gan) goes to train_NAME.py. A file that is there already stays.
"""

import ast
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hvdkit import logs
from hvdkit.settings import project
from hvdkit.stop import DONE


@logs.explained
def main(argv: Sequence[str]) -> int:
    parser = logs.parser(__doc__)
    parser.add_argument(
        "name", nargs="?", help="the example to copy; without it, all are listed"
    )
    name = parser.parse_args(list(argv[1:])).name
    fork = project.folder()
    if not project.is_fork(fork):
        raise ValueError(project.elsewhere("example"))
    tasks = {path.parent.name: path for path in sorted(fork.glob("examples/*/task.py"))}
    if not name:
        for example, task in tasks.items():
            first_line, *_ = _docstring(task).splitlines() or [""]
            print(f"{example:<12} {first_line}")
        return DONE
    if name not in tasks:
        names = ", ".join(tasks) or "no example"
        raise ValueError(f"hvdkit example {name}: {fork / 'examples'} has {names}")
    copies = {tasks[name]: fork / "tasks" / f"{name}.py"}
    loop = tasks[name].with_name("train.py")
    if loop.is_file():
        copies[loop] = fork / f"train_{name}.py"
    for copy in copies.values():
        if os.path.lexists(copy):
            raise ValueError(f"{copy} is there already: move it away, or delete it")
    docstring = _docstring(tasks[name])
    for original, copy in copies.items():
        shutil.copyfile(original, copy)
    print(f"copied to {logs.join(str(copy) for copy in copies.values())}\n")
    print(docstring)
    return DONE


def _docstring(file: Path) -> str:
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file} is no Python file: {error}") from None
    return ast.get_docstring(module) or ""
