"""One run in one folder: what is ahead of a run's start is set aside, never mixed in.

Nothing is deleted that a later run does not write again.
"""

import math
import shutil
from collections.abc import Callable, Set
from pathlib import Path

from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.checkpoint import files as checkpoint_files
from hvdkit.checkpoint import lease
from hvdkit.checkpoint.checkpoints import CheckpointInfo
from hvdkit.settings import Settings, flagfiles, project, runs, typed
from hvdkit.stop import NotNow

BAD_SAMPLES = "bad_samples.jsonl"
_LOGS = ("metrics.jsonl", "gradients.jsonl", BAD_SAMPLES)
# A start that made no step leaves this too, and no run that is worth keeping.
_STARTS = ("starts.jsonl",)
_RESULTS = (
    "summary.json",
    "report.html",
    "predictions.png",
    "confusion.csv",
    "benchmark.json",
)
_FOLDERS = ("tensorboard", "profile")
_TRACKERS = "trackers.json"
# While trackers of a new run start: that of the run before. Then, until that is set aside: theirs.
_OLD_TRACKERS = f".{_TRACKERS}.old"
_NEW_TRACKERS = f".{_TRACKERS}.new"
_RECORDS = (*_LOGS, *_STARTS, *_RESULTS, "config.cfg", _TRACKERS, *_FOLDERS)


def begin(
    run_dir: Path,
    checkpoint: CheckpointInfo | None,
    config: Settings,
    *,
    evaluates_first: bool,
    listed: Set[str] | None = None,
    start_trackers: Callable[[], None] = lambda: None,
) -> str:
    """Prepares the folder for a run that resumes from `checkpoint`, or starts anew without one.

    For rank 0, right before the first step: a start that is refused must change nothing. A kill
    at any moment leaves the old run or the new one to resume, never a mixture.

    - Anew, or from a checkpoint that is elsewhere: all checkpoints and records are set aside.
    - Back to an earlier checkpoint (--resume names it): later checkpoints are set aside, and a copy
      of the records; what was logged up to the checkpoint stays in place too.
    - From the newest sound one: newer, unsound ones are set aside; lines after it are dropped,
      because the same run logs them again.

    `checkpoint`: what `Checkpoints.find` chose. `config`: the settings as this number of ranks made
    them. `evaluates_first`: the run first evaluates the checkpoint, so an earlier evaluation of
    that step is dropped from the records too. `listed`: the checkpoints that `find` chose from.
    `start_trackers`: starts those of the user, which may refuse the run, so before anything is
    changed; those of a run that starts anew find no trackers.json.

    Returns a line that says what was set aside, or "". Raises OSError: a file cannot be written,
    another run is in the folder, or its disk came only now; ValueError for a speed beside a run.
    """
    _check_links(run_dir)
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint is None or not checkpoint.is_own:
        _check_mount(folder)
    if checkpoint is None and listed is not None:
        _check_none_came(folder, listed)
    lease.take(run_dir)
    if config.benchmark and checkpoint_files.candidates(folder):
        raise ValueError(
            f"--benchmark would replace the records of the run in {run_dir}: choose another "
            "--run_dir"
        )
    _put_back(run_dir)
    (run_dir / _NEW_TRACKERS).unlink(missing_ok=True)  # of a start that was killed
    if checkpoint is not None and checkpoint.is_own:
        start_trackers()
    else:
        _start_anew(run_dir, start_trackers)
    with whole_files.held(folder) as held:
        note = _set_others_aside(run_dir, held, checkpoint)
        checkpoint_files.tidy(held)
    if checkpoint is not None and checkpoint.is_own:
        for name in (*_LOGS, *_STARTS):
            _drop_lines(run_dir / name, checkpoint.step, evaluates_first)
    else:
        _remove(run_dir, _STARTS)
    left = [path.name for path in run_dir.glob(".*.partial")]  # Kills leave such files.
    _remove(run_dir, ("summary.json", "benchmark.json", *left))
    with whole_files.written(run_dir / runs.CONFIG) as partial:
        settings_lib.write(config, partial)
    if (run_dir / _NEW_TRACKERS).exists():
        (run_dir / _NEW_TRACKERS).replace(run_dir / _TRACKERS)
    return note


def _start_anew(run_dir: Path, start_trackers: Callable[[], None]) -> None:
    """Starts trackers without the trackers.json of the run before, which is back afterwards."""
    file = run_dir / _TRACKERS
    if file.exists():
        file.rename(run_dir / _OLD_TRACKERS)
    try:
        start_trackers()
        if file.exists():
            file.rename(run_dir / _NEW_TRACKERS)
    finally:
        file.unlink(missing_ok=True)
        _put_back(run_dir)


def _put_back(run_dir: Path) -> None:
    """Gives trackers.json its name back, also where a kill has left it without."""
    if (run_dir / _OLD_TRACKERS).exists():
        (run_dir / _OLD_TRACKERS).replace(run_dir / _TRACKERS)


def _set_others_aside(
    run_dir: Path, folder: Path, checkpoint: CheckpointInfo | None
) -> str:
    """Sets aside what is ahead of the run's start; returns a line about it.

    `folder`: the path by which the checkpoints are reached.
    """
    ahead = checkpoint_files.candidates(folder)
    if checkpoint is None or not checkpoint.is_own:
        if not ahead and not _has_records(run_dir):
            return ""
        note = set_aside(run_dir, ahead, _RECORDS)
        _remove(run_dir, _RECORDS)
        return note
    ahead = [path for path in ahead if checkpoint_files.step_of(path) > checkpoint.step]
    if not ahead:
        return ""
    note = set_aside(run_dir, ahead, _RECORDS if checkpoint.is_named else ())
    _remove(run_dir, _RESULTS if checkpoint.is_named else ())
    return note


def _check_links(run_dir: Path) -> None:
    for name in ("checkpoints", *_FOLDERS):
        folder = run_dir / name
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link, which is not followed: make --run_dir one"
            )


def _check_mount(folder: Path) -> None:
    """Raises ValueError where a checkpoint's folder could only be copied into the run's, by parts.

    That is so between two mounts, also of one file system.
    """
    if _mount_of(folder) != _mount_of(folder.parent):
        raise ValueError(
            f"{folder} is a mount of its own, so its checkpoints could not be set aside: mount "
            f"{folder.parent} instead, with a folder {folder.name} in it, or give a --run_dir on "
            "that disk"
        )


def _mount_of(folder: Path) -> str:
    """The line of /proc by which Linux tells mounts apart; "" where it has none."""
    # --run_dir may be a link.
    with whole_files.held(folder.resolve()) as held:
        lines = Path("/proc/self/fdinfo", held.name).read_text().splitlines()
    return next((line for line in lines if line.startswith("mnt_id:")), "")


def _has_records(run_dir: Path) -> bool:
    records = [run_dir / name for name in (*_LOGS, *_RESULTS)]
    return any(path.exists() and path.stat().st_size for path in records)


def _check_none_came(folder: Path, listed: Set[str]) -> None:
    names = {path.name for path in checkpoint_files.candidates(folder)}
    if new := names - listed:
        raise NotNow(
            f"{folder} has {min(new)}, which was not there when this start looked for "
            "checkpoints: its disk came in between"
        )


def data_away(config: Settings) -> bool:
    """Whether the data folder is gone or empty that an earlier start of this run has read.

    False for the settings' default folder in the project: where a demo's data are missing there,
    they are made.
    """
    root = project.folder()
    folder = Path(root, config.data_dir)
    is_default = folder == Path(root, type(config).data_dir) and folder.is_relative_to(
        root
    )
    # A server that is away is reported by the reader, not here.
    is_remote = "://" in config.data_dir
    if config.synthetic_data or is_remote or is_default:
        return False
    try:
        recorded = flagfiles.recorded(Path(config.run_dir, runs.CONFIG)).get("data_dir")
        if not recorded or folder != Path(root, typed.path(recorded, is_quoted=True)):
            return False
        return not (folder.is_dir() and any(folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return False  # The run never began.
    except OSError:
        return True


def set_aside(run_dir: Path, checkpoints: list[Path], records: tuple[str, ...]) -> str:
    """Moves checkpoints to RUN_DIR/aside-N/checkpoints, copies records to aside-N; says so."""
    number = 1
    while (run_dir / f"aside-{number}").exists():
        number += 1
    aside = run_dir / f"aside-{number}"
    aside.mkdir()
    names = [name for name in records if (run_dir / name).exists()]
    try:
        _fill(aside, [run_dir / name for name in names], checkpoints)
    except OSError:
        # Where no checkpoint was moved, these are copies only.
        if not any(aside.glob("checkpoints/*")):
            shutil.rmtree(aside, ignore_errors=True)
        raise
    note = f"note: set aside in {aside}: {len(checkpoints)} checkpoints"
    if checkpoints:
        steps = [checkpoint_files.step_of(path) for path in checkpoints]
        note += f" (of steps {min(steps)} to {max(steps)})"
    if names:
        note += f" and {len(names)} records ({', '.join(names)})"
    return note


def _fill(aside: Path, records: list[Path], checkpoints: list[Path]) -> None:
    # Records come first, as copies: after a kill before the last checkpoint is moved, the old run
    # resumes with its own records.
    with whole_files.held(aside) as held:
        for path in records:
            whole_files.copy(path, held / path.name)
        (held / "checkpoints").mkdir()
        # The newest is moved first, so that what is left after a kill has no gap.
        for path in reversed(checkpoints):
            path.rename(held / "checkpoints" / path.name)


def _remove(run_dir: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _drop_lines(path: Path, step: int, evaluates_first: bool) -> None:
    """Drops the lines of steps after `step`; with `evaluates_first` its evaluation's too.

    TensorBoard's events stay: of steps that are there twice it shows the newer.
    """
    if not path.exists():
        return

    def stays(line: bytes) -> bool:
        try:
            record = whole_files.from_json(line, path)
            if evaluates_first and any(key.startswith("eval_") for key in record):
                return record.get("step", math.inf) < step
            return record.get("step", math.inf) <= step
        except (ValueError, TypeError, AttributeError):  # A kill cut the line.
            return False

    with (
        whole_files.opened(path) as old,
        whole_files.written(path) as to,
        to.open("wb") as new,
    ):
        # One line is in memory at a time: gradients.jsonl may be of gigabytes.
        new.writelines(line for line in old if stays(line))
