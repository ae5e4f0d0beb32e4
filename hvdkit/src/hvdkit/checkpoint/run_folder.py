"""One run in one folder: what is ahead of a run's start is set aside, never mixed in.

Nothing is deleted that a later run does not write again.
"""

import itertools
import math
import shutil
from collections.abc import Set
from pathlib import Path

from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.checkpoint import files as checkpoint_files
from hvdkit.checkpoint import lease
from hvdkit.checkpoint.checkpoints import Found
from hvdkit.settings import Settings, flagfiles, project, runs, typed
from hvdkit.stop import NotNow

BAD_SAMPLES = "bad_samples.jsonl"
_LOGS = ("metrics.jsonl", "gradients.jsonl", BAD_SAMPLES)
# A start that made no step leaves this too, and no run that is worth keeping.
_STARTS = ("starts.jsonl",)
_RESULTS = ("summary.json", "report.html", "predictions.png", "confusion.csv", "benchmark.json")
_BOARD = "tensorboard"
_RECORDS = (*_LOGS, *_STARTS, *_RESULTS, "config.cfg", "trackers.json", _BOARD)


def begin(
    run_dir: Path,
    found: Found | None,
    config: Settings,
    *,
    evaluates_first: bool,
    listed: Set[str] | None = None,
) -> str:
    """Prepares the folder for a run that resumes from `found`, or starts anew where it is None.

    For rank 0, right before the first step: a start that is refused must change nothing. A kill
    at any moment leaves the old run or the new one to resume, never a mixture.

    - Anew, or from a checkpoint that is elsewhere: all checkpoints and records are set aside.
    - Back to an earlier checkpoint (it was asked for): later checkpoints are set aside, and a copy
      of the records; what was logged up to the checkpoint stays in place too.
    - From the newest sound one: newer, unsound ones are set aside; lines after it are dropped,
      because the same run logs them again.

    `found`: what `Checkpoints.find` chose. `config`: the settings as this number of ranks made
    them. `evaluates_first`: the run first evaluates `found` itself, so an earlier evaluation of
    that step is dropped from the records too. `listed`: the checkpoints that `find` chose from.

    Returns a line that says what was set aside, or "". Raises OSError: a file cannot be written,
    another run is in the folder, or its disk came only now; ValueError for a speed beside a run.
    """
    folder = run_dir / "checkpoints"
    for inner in (folder, run_dir / _BOARD):
        if inner.is_symlink():
            raise ValueError(f"{inner} is a link, which is not followed: make --run_dir one")
    folder.mkdir(parents=True, exist_ok=True)
    if found is None and listed is not None:
        _check_none_came(folder, listed)
    lease.take(run_dir)
    if config.benchmark and checkpoint_files.candidates(folder):
        raise ValueError(
            f"--benchmark would replace the records of the run in {run_dir}: choose another "
            "--run_dir"
        )
    own = found is not None and found.own
    newest = found.step if own else -1
    note = ""
    with whole_files.held(folder) as at:
        ahead = [p for p in checkpoint_files.candidates(at) if checkpoint_files.step_of(p) > newest]
        records = [run_dir / name for name in (*_LOGS, *_RESULTS)]
        if own and ahead:
            note = set_aside(run_dir, ahead, _RECORDS if found.asked else ())
            _remove(run_dir, _RESULTS if found.asked else ())
        elif not own and (ahead or any(p.exists() and p.stat().st_size for p in records)):
            note = set_aside(run_dir, ahead, _RECORDS)
            _remove(run_dir, _RECORDS)
        checkpoint_files.tidy(at)
    _remove(run_dir, () if own else _STARTS)
    for name in (*_LOGS, *_STARTS) if own else ():
        _drop_lines(run_dir / name, found.step, evaluates_first)
    left = [path.name for path in run_dir.glob(".*.partial")]  # by a kill
    _remove(run_dir, ("summary.json", "benchmark.json", *left))
    with whole_files.written(run_dir / runs.CONFIG) as partial:
        settings_lib.write(config, partial)
    return note


def _check_none_came(folder: Path, listed: Set[str]) -> None:
    there = {path.name for path in checkpoint_files.candidates(folder)}
    if new := there - listed:
        raise NotNow(
            f"{folder} has {min(new)}, which was not there when this start looked for "
            "checkpoints: its disk came in between"
        )


def data_away(config: Settings) -> bool:
    """Whether the data folder is gone or empty that an earlier start of this run has read.

    Not of the settings' own folder in the project: where a demo's data are missing, they are made.
    """
    folder = Path(project.folder(), config.data_dir)
    made = folder == Path(project.folder(), type(config).data_dir)
    is_remote = "://" in config.data_dir  # a server that is away is an error of its own
    if config.synthetic_data or is_remote or (made and folder.is_relative_to(project.folder())):
        return False
    try:
        known = flagfiles.recorded(Path(config.run_dir, runs.CONFIG)).get("data_dir")
        read = known and folder == Path(project.folder(), typed.path(known, is_quoted=True))
        return bool(read) and not (folder.is_dir() and any(folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return False  # it never began
    except OSError:
        return True


def set_aside(run_dir: Path, checkpoints: list[Path], records: tuple[str, ...]) -> str:
    """Moves checkpoints to RUN_DIR/aside-N/checkpoints, copies records to aside-N; says so."""
    free = (run_dir / f"aside-{number}" for number in itertools.count(1))
    aside = next(path for path in free if not path.exists())
    aside.mkdir()
    there = [name for name in records if (run_dir / name).exists()]
    # Records first, as copies: after a kill before the last checkpoint is moved, the old run
    # resumes with its own records.
    with whole_files.held(aside) as held:
        for name in there:
            whole_files.copy(run_dir / name, held / name)
        (held / "checkpoints").mkdir()
        # Newest first, for the same reason: what is left at any moment has no gap.
        for path in reversed(checkpoints):
            path.rename(held / "checkpoints" / path.name)
    steps = sorted({checkpoint_files.step_of(p) for p in checkpoints})
    span = f" (of steps {steps[0]} to {steps[-1]})" if steps else ""
    files = f" and {len(there)} records ({', '.join(there)})" if there else ""
    return f"note: set aside in {aside}: {len(checkpoints)} checkpoints{span}{files}"


def _remove(run_dir: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _drop_lines(path: Path, step: int, evaluates_first: bool) -> None:
    """Lines of steps after `step`; with `evaluates_first` its evaluation's too.

    TensorBoard's events stay: of steps that are there twice it shows the newer.
    """
    if not path.exists():
        return

    def stays(line: bytes) -> bool:
        try:
            record = whole_files.from_json(line, path)
            again = evaluates_first and any(key.startswith("eval_") for key in record)
            return record.get("step", math.inf) <= (step - 1 if again else step)
        except (ValueError, TypeError, AttributeError):  # a kill cut the line
            return False

    with whole_files.opened(path) as old, whole_files.written(path) as to, to.open("wb") as new:
        new.writelines(filter(stays, old))  # one at a time: gradients.jsonl may be of gigabytes
