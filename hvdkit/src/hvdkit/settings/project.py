"""Where the fork is: the folder with train.py and tasks/, to which its relative paths refer."""

import os
import stat
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[1]  # The folder of this package.
_OF_PYTHON = ("stdlib", "platlib", "scripts")

_folder: list[Path] = []  # It holds the fork's folder once that is known.


def use(path: Path) -> None:
    """Names the fork's folder, for programs that neither lie nor run in it (tests)."""
    _folder[:] = [path]


def folder() -> Path:
    """The nearest fork from the calling files upward, then from the working folder; else this one.

    Last comes the fork that a program of this environment (hvdkit, pytest) is installed in.
    """
    if not _folder:
        script = Path(
            getattr(sys.modules["__main__"], "__file__", None) or Path.cwd()
        ).resolve()
        places = [Path.cwd(), script.parent]
        if script.parent != Path(sysconfig.get_path("scripts")).resolve():
            places.reverse()
        use(of_caller() or above(places[0]) or above(places[1]) or Path.cwd())
    return _folder[0]


def of_caller() -> Path | None:
    """The nearest fork from the files that call upward, from the innermost on; None: in no fork."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if is_own(file) and not file.is_relative_to(ENGINE):
            fork = above(file.resolve().parent)
            if fork:
                return fork
    return None


def elsewhere(command: str) -> str:
    """The refusal of a command that is called outside a fork; it names one that lies below."""
    below = [path.parent for path in Path.cwd().glob("*/train.py")]
    below += [path.parent for path in Path.cwd().glob("*/*/train.py")]
    forks = sorted(path.relative_to(Path.cwd()) for path in below if is_fork(path))
    hint = f"; type `cd {forks[0]}`" if forks else ""
    return f"hvdkit {command}: run it in your fork, the folder that holds train.py and tasks/{hint}"


def find() -> None:
    """Looks for the fork again where no script says where it is: in a notebook one may chdir."""
    if not getattr(sys.modules["__main__"], "__file__", None):
        _folder.clear()


def importable() -> None:
    """Lets the fork's modules be imported. Raises ValueError where another fork's tasks are."""
    fork = folder()
    tasks = getattr(sys.modules.get("tasks"), "__path__", [fork / "tasks"])
    if not any(Path(path).resolve() == (fork / "tasks").resolve() for path in tasks):
        raise ValueError(
            f"this process has the tasks of {tasks[0]}: for {fork} start another one"
        )
    enter()


def enter() -> None:
    """Lets the fork's modules be imported; never those of a mere folder, or of another user."""
    fork = folder()
    if is_fork(fork) and is_safe(fork) and str(fork) not in sys.path:
        sys.path.insert(0, str(fork))


def nearest(start: Path) -> Path | None:
    """The nearest fork, from a folder upward, whoever it belongs to."""
    places = (start, *start.parents)
    return next((place for place in places if is_fork(place)), None)


def above(start: Path) -> Path | None:
    """The nearest fork, from a folder upward; None where it is not safe."""
    fork = nearest(start)
    return fork if fork and is_safe(fork) else None


def is_safe(fork: Path) -> bool:
    """Whether other users cannot change what it runs, or Python imports from it anyway."""
    if any(os.path.realpath(fork) == os.path.realpath(entry) for entry in sys.path):
        return True
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0:
        # In a container root works in a mounted folder of a user, and trusts that user.
        trusted.add(Path.cwd().stat().st_uid)
    for path in (fork, fork / "train.py", fork / "tasks", fork / "settings.py"):
        if path.exists():
            status = path.stat()
            if status.st_uid not in trusted or status.st_mode & stat.S_IWOTH:
                return False
    return True


def refusal_of_foreign(command: str) -> str:
    """Why a command does not run in the working folder; "" where no other user's fork is there."""
    fork = nearest(Path.cwd())
    if fork is None or is_safe(fork):
        return ""
    return (
        f"hvdkit {command}: other users own or can change {fork}, whose code it would run: "
        f"change to a fork of your own, or set PYTHONPATH={fork} if you trust it"
    )


def is_fork(path: Path) -> bool:
    return (path / "train.py").is_file() and (path / "tasks").is_dir()


def is_own(file: str | Path) -> bool:
    """Whether a file is the user's or this package's, and not a library's."""
    path = Path(file)
    return may_be_own(path) and (path.is_relative_to(ENGINE) or path.is_file())


def may_be_own(file: str | Path) -> bool:
    """As `is_own` by the file's name alone: its disk, which may hang, is not asked."""
    path = Path(file)
    if path.is_relative_to(ENGINE):
        return True
    if any(path.is_relative_to(sysconfig.get_path(name)) for name in _OF_PYTHON):
        return False
    # TensorFlow generates such files in /tmp.
    is_generated = path.name.startswith("__autograph_generated")
    # Python calls what is no file <string>, <frozen importlib._bootstrap> and the like.
    is_code = not path.name.startswith("<") and not is_generated
    return is_code and "site-packages" not in path.parts


def line_in_fork(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost of the user's own lines among frames, as "FILE, line N"; "" for none."""
    line = ""
    for frame in frames:
        if is_own(frame.filename) and not Path(frame.filename).is_relative_to(ENGINE):
            line = f"{Path(frame.filename).name}, line {frame.lineno}"
    return line


def line_of(function: object) -> str:
    """Where a function of the user's begins, as "FILE, line N"; "" for what has no such line."""
    code = getattr(function, "__code__", None)
    if code is None or Path(code.co_filename).is_relative_to(ENGINE):
        return ""
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def name_of(file: str | Path) -> str:
    """A file that `is_own`, by its name in the fork or in this package."""
    path = Path(file)
    for root in (ENGINE.parent, folder()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name
