"""The trials of `hvdkit sweep`: starts and stops their runs, in a study of Optuna's.

Values are drawn by TPE. Trials are pruned by asynchronous successive halving over evaluations
(ASHA, Li et al. 2018, arXiv:1810.05934): after evaluations 1, 3, 9, ... the best third goes on.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna import distributions
from optuna.trial import FrozenTrial, TrialState

from hvdkit import whole_files
from hvdkit.commands import seeds
from hvdkit.commands.supervise import end_with_parent, hear, newest_step
from hvdkit.commands.sweep import Asked
from hvdkit.logs import complain, printable
from hvdkit.observe import pages, records
from hvdkit.ranks import placement
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import typed
from hvdkit.stop import BUG, DIVERGED, DONE, NOT_NOW, PREEMPTED, WRONG_USE, NotNow

_FAILURES = 3  # trials, after which a sweep without a score ends
_RESTARTS, _PAUSE = 3, 5.0  # of a trial that ends with 75 or 76 by itself; seconds before each
_BASE = "base.cfg"  # in the folder: the flagfile as it was when the sweep began
_WRITTEN = (_BASE, "best.cfg", "journal.log", "sweep.html")  # in the folder, beside sweep.json
_SCORED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclasses.dataclass
class Run:
    """A trial that runs, in one of --jobs places."""

    trial: optuna.Trial
    slot: int
    folder: Path
    reported: int  # evaluations
    process: subprocess.Popen | None = None
    began: float = 0.0
    restarts: int = 0
    pruned: bool = False
    stopped: bool = False


class Sweep:
    """The trials of one folder; `run` returns the exit code."""

    def __init__(self, own: argparse.Namespace, asked: Asked) -> None:
        """Raises ValueError where the folder has another sweep, NotNow while one runs there."""
        self._own, self._asked, self._launch = own, asked, shlex.split(own.launch)
        names = {Path(word).name for word in self._launch}
        # SIGTERM makes srun kill the ranks, and mpirun after a second; both pass SIGUSR1 on.
        self._signal = signal.SIGUSR1 if names & {"srun", "mpirun"} else signal.SIGTERM
        self._gpus = _gpus() if own.jobs > 1 and "srun" not in names else []
        own.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = whole_files.lock(own.folder / ".lock")
        except BlockingIOError:
            raise NotNow(f"{own.folder} is in use by another sweep: wait for its end") from None
        self._study, self._running, self._code = _study(own.folder, asked), [], DONE

    def run(self) -> int:
        """Runs trials to the last one, or to a signal. Raises OSError: the folder fails."""
        hear(self._hear)
        try:
            return self._run()
        finally:  # where the folder fails, those that are left save and end
            for process in [run.process for run in self._running if run.process]:
                if process.poll() is None:
                    os.killpg(process.pid, self._signal)
                process.wait()

    def _run(self) -> int:
        while True:
            while not self._code and len(self._running) < self._own.jobs and self._begin():
                pass
            if not self._running:
                break
            time.sleep(1)
            for run in [*self._running]:
                code = run.process.poll()
                self._look(run)
                if code is not None and not _is_used(run.folder):
                    self._end(run, code)
                elif code is None and (run.pruned or self._code) and not run.stopped:
                    run.stopped = True
                    os.killpg(run.process.pid, self._signal)
        best = self._write()
        if best and not self._code:
            print(printable(f"best settings: {best}; all: {best.with_name('sweep.html')}"))
        elif not self._code:
            reasons = [one.user_attrs["why"] for one in self._trials() if "why" in one.user_attrs]
            last = f": {reasons[-1]}" if reasons else ""
            complain(f"no trial has a score{last}; {self._own.folder}/trial-*.log say more")
        return self._code or (DONE if best else BUG)

    def _hear(self, number: int, frame: object) -> None:
        if not self._code:
            self._code = PREEMPTED
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, b"stopping: trials save, then end; the same command resumes\n")

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(states=states or None)

    def _begin(self) -> bool:
        """Starts a trial, first those that an earlier start left; False where there is none."""
        number = len(self._trials())
        if number >= self._own.trials and not self._trials(TrialState.WAITING):
            return False
        seed = random.Random(f"{self._own.seed} {number}").getrandbits(32)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)  # alike after a restart
        trial = self._study.ask(_space(self._asked))
        reported = max(self._trials()[trial.number].intermediate_values, default=0)
        slot = min({*range(self._own.jobs)} - {run.slot for run in self._running})
        folder = self._own.folder / f"trial-{trial.number + 1:04}"
        self._running.append(Run(trial, slot, folder, reported))
        self._start(self._running[-1])
        return True

    def _start(self, run: Run) -> None:
        env, count = dict(os.environ), max(1, len(self._gpus) // self._own.jobs)
        if self._gpus:
            first = run.slot * count % len(self._gpus)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + count])
        base = typed.written(self._own.folder / _BASE, is_path=True)
        flags = [f"--flagfile={base}", *self._asked.words(run.trial.params)]
        run_dir = typed.written(run.folder, is_path=True)
        words = [*self._launch, *flags, f"--run_dir={run_dir}", "--resume=auto"]
        how = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": env}
        how |= {"process_group": 0, "preexec_fn": end_with_parent}
        with whole_files.opened(run.folder.with_suffix(".log"), append=True) as log:
            run.process, run.began = subprocess.Popen(words, stdout=log, **how), time.monotonic()

    def _look(self, run: Run) -> None:
        """Reports new evaluations to Optuna, which may prune by each."""
        try:
            found = records.read(run.folder)
        except (OSError, ValueError):  # it has not begun to write
            return
        metric = found.main_metric()
        values = records.column(found.evaluations, f"eval_{metric.name}")
        if values and not self._metric().name:
            self._study.set_user_attr("metric", metric)
        if metric != self._metric():  # `_end` refuses its score
            return
        for number, value in enumerate(values[run.reported :], run.reported + 1):
            run.reported = number
            if math.isfinite(value):  # else the next evaluation may have a score
                run.trial.report(metric.height(value), number)
                run.pruned = run.pruned or run.trial.should_prune()

    def _metric(self) -> MainMetric:
        """Of all trials, whose values in the study are its heights; without a name at first."""
        return MainMetric(*self._study.user_attrs.get("metric", [""]))

    def _end(self, run: Run, code: int) -> None:
        """What follows an exit code: the trial's result, another start, or the sweep's end."""
        seconds = run.trial.user_attrs.get("seconds", 0.0) + time.monotonic() - run.began
        run.trial.set_user_attr("seconds", seconds)
        run.trial.set_user_attr("steps", newest_step(run.folder))
        state, score, why = TrialState.FAIL, None, f"exit code {code}"
        # Wrong use, or, before any score, the third failure.
        hopeless = code == WRONG_USE or len(self._trials(TrialState.FAIL)) >= _FAILURES - 1
        self._running.remove(run)
        if run.pruned and run.stopped:
            state = TrialState.PRUNED
        elif self._code:  # it goes on when the sweep does; horovodrun may return 0 for 75
            return
        elif code == DONE:
            try:
                metric, newest = seeds.score(run.folder)
                if metric != self._metric():
                    others = self._metric().describe()
                    raise ValueError(f"its score is of {metric.describe()}, others' of {others}")
                run.trial.set_user_attr("loss", newest.loss)
                state, score = TrialState.COMPLETE, metric.height(newest.value)
            except (OSError, ValueError) as error:
                why = str(error)
        elif code in (PREEMPTED, NOT_NOW) and run.restarts < _RESTARTS:
            run.restarts += 1
            self._running.append(run)
            time.sleep(_PAUSE)
            return self._start(run)
        elif hopeless and code not in (DONE, DIVERGED) and not self._trials(*_SCORED):
            self._code = code
            self._study.tell(run.trial, state=state)  # not drawn again
            log = run.folder.with_suffix(".log")
            text = whole_files.read(log, whole_files.LINES_BYTES).decode(errors="replace")
            last = (re.findall(r"error: (.*)", text) or text.splitlines() or [""])[-1]
            return complain(f"{run.folder}.log: {last}")
        if state == TrialState.FAIL:
            run.trial.set_user_attr("why", why)
        self._tell(self._study.tell(run.trial, score, state), why)

    def _tell(self, trial: FrozenTrial, why: str) -> None:
        """Prints a line about a trial, writes the files anew."""
        metric, best, what = self._metric(), self._best(), f"failed, {why}"
        if trial.value is not None:
            what = f"{metric.name} {metric.height(trial.value):.4f}"
        if trial.state == TrialState.PRUNED:
            what = f"pruned at evaluation {max(trial.intermediate_values)}, {what}"
        than = "no score yet"
        if best:
            than = f"best {metric.height(best.value):.4f}, trial {best.number + 1}"
        values = " ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
        done, seconds = f"{trial.number + 1}/{self._own.trials}", trial.user_attrs["seconds"]
        print(printable(f"trial {done}: {what} ({than}): {values}; {seconds:.0f} s"), flush=True)
        self._write()

    def _best(self) -> FrozenTrial | None:
        return max(self._trials(TrialState.COMPLETE), key=_rank, default=None)

    def _write(self) -> Path | None:
        """sweep.html, and best.cfg, whose path it returns, where there is a best trial."""
        folder, best = self._own.folder, self._best()
        metric = self._metric()
        parts = _parts(metric, self._trials(), self._asked)
        pages.write(folder / "sweep.html", str(folder), parts, by="sweep")
        if not best:
            return None
        score = f"{metric.name} {metric.height(best.value):.6g}"
        about = f"# {score}, trial {best.number + 1}: {self._own.command}"
        run_dir = typed.written(folder / "best", is_path=True)
        lines = [about, *self._asked.flagfile(best.params), f"--run_dir={run_dir}\n"]
        with whole_files.written(folder / "best.cfg") as partial:
            partial.write_text("\n".join(lines))
        return folder / "best.cfg"


def _study(folder: Path, asked: Asked) -> optuna.Study:
    """A new study, or the one of the folder; ValueError where that is of another sweep."""
    file, journal = folder / "sweep.json", folder / "journal.log"
    new = [*(line for _, line in asked.base), *asked.words({})]
    old = new
    if file.exists():
        old = whole_files.from_json(whole_files.read(file, whole_files.JSON_BYTES), file)
        if not isinstance(old, list) or not all(isinstance(line, str) for line in old):
            raise ValueError(f"{file} holds no lines of a sweep: move it, or give another --folder")
    others = [name for name in _WRITTEN if not file.exists() and (folder / name).exists()]
    if others:
        raise ValueError(f"{folder} has {others[0]} of no sweep: move it, or give another --folder")
    for line in [line for line in (*old, *new) if (line in old) != (line in new)]:
        whose = "that one" if line in old else "this one"
        raise ValueError(f"{folder} has another sweep: only {whose} has {line}; give --folder")
    whole_files.write_json(file, new)
    with whole_files.written(folder / _BASE) as partial:
        partial.write_text("".join(f"{line}\n" for _, line in asked.base))
    if journal.exists() and not (text := journal.read_bytes()).endswith(b"\n"):
        os.truncate(journal, text.rfind(b"\n") + 1)  # a full disk cut its last line
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    storage = optuna.storages.JournalStorage(backend)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    how = {"storage": storage, "pruner": pruner, "direction": "maximize", "load_if_exists": True}
    study = optuna.create_study(study_name="sweep", **how)
    for left in study.get_trials(states=[TrialState.RUNNING]):  # `ask` takes these first
        storage.set_trial_state_values(left._trial_id, TrialState.WAITING)
    return study


def _space(asked: Asked) -> dict[str, distributions.BaseDistribution]:
    found = {}
    for name, values in asked.values.items():
        whole = isinstance(values[0], int)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        if isinstance(values[0], str):
            found[name] = distributions.CategoricalDistribution(values)
        else:
            found[name] = kind(*values, log=asked.flags[name].endswith(":log"))
    return found


def _is_used(folder: Path) -> bool:
    """Whether rank 0 holds its lock (hvdkit/checkpoint/lease.py): it may outlive its launcher."""
    try:
        whole_files.lock(folder / ".lock").close()
    except OSError as error:  # others: no folder yet, no locks
        return isinstance(error, BlockingIOError)
    return False


def _gpus() -> list[str]:
    """This host's, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return given.split(",")
    try:
        return [*map(str, range(placement.granted()))]
    except (OSError, subprocess.SubprocessError):  # each trial says why
        return []


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rank(trial: FrozenTrial) -> tuple[bool, tuple[float, float, int]]:
    """Of which the highest is the best: whole trials, then by score; of equals the first."""
    height = -math.inf if trial.value is None else trial.value
    loss = trial.user_attrs.get("loss", math.inf)
    score = Score(height, -trial.number, loss, since=0)
    return trial.state == TrialState.COMPLETE, MainMetric("height").rank(score)


def _parts(metric: MainMetric, trials: Sequence[FrozenTrial], asked: Asked) -> list[str]:
    """Plots, and a table: the best trial first, pruned ones below whole ones, failed ones last."""
    trials, rows, name = sorted(trials, key=_rank, reverse=True), [], metric.name or "score"
    for one in trials:
        ran = one.user_attrs.get("steps", ""), round(one.user_attrs.get("seconds", 0))
        score = "" if one.value is None else f"{metric.height(one.value):.4f}"
        values = (_short(one.params.get(name, "")) for name in asked.values)
        rows.append([one.number + 1, score, *values, *ran, one.state.name.lower()])
    table = pages.table(rows, ["trial", name, *asked.values, "steps", "seconds", "state"])
    scored, plots = [one for one in trials if one.state in _SCORED and one.value is not None], []
    if scored:
        axes = {name: [one.params[name] for one in scored] for name in asked.values}
        log = {name for name in axes if asked.flags[name].endswith(":log")}
        axes |= {name: [metric.height(one.value) for one in scored]}
        least = metric.mode == "min"
        plots.append(pages.parallel("Settings and score", axes, log=log, least_is_best=least))
    whole = [one for one in trials if one.state == TrialState.COMPLETE]
    whole = sorted((one.number + 1, one.value) for one in whole)
    if whole:
        numbers, heights = zip(*whole)
        best = [metric.height(height) for height in itertools.accumulate(heights, max)]
        curve = {"best": (numbers, best)}
        plots.append(pages.curves(f"Best {name} so far", curve, xlabel="trial"))
    return [pages.cards(plots), pages.section("Trials", table)]
