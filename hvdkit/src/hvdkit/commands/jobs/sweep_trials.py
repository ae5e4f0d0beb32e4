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

from hvdkit import scores, whole_files
from hvdkit.commands.jobs import seeds
from hvdkit.commands.jobs.search_space import SearchSpace
from hvdkit.commands.jobs.supervise import (
    AGAIN,
    STARTING,
    end_with_parent,
    hear,
    newest_step,
)
from hvdkit.logs import complain, join, printable
from hvdkit.observe import pages, records
from hvdkit.ranks import placement
from hvdkit.scores import MainMetric, Score
from hvdkit.settings import typed
from hvdkit.stop import BUG, DIVERGED, DONE, NOT_NOW, PREEMPTED, WRONG_USE, NotNow

_FAILURES = 3  # a sweep without a score ends after so many trials that failed
_RESTARTS = 3  # a trial that ends with 75 or 76 by itself is restarted so often
_INTERVAL = 1.0  # seconds between two looks at the trials that run
_PAUSE = 5.0  # seconds before a restart
_LOG_END = 2**20  # bytes of a log in which its error stands
# The copy, in the folder, of the flagfile as the sweep began with it.
_BASE = "base.cfg"
# Names in the folder, beside sweep.json.
_WRITTEN = (_BASE, "best.cfg", "journal.log", "sweep.html")
_SCORED = (TrialState.COMPLETE, TrialState.PRUNED)
# Flags of launchers that name hosts.
_HOSTS = ("-H", "--host", "-host", "--hosts", "--hostfile", "-hostfile")


@dataclasses.dataclass(kw_only=True)
class TrialRun:
    """A trial that runs, in one of --jobs places."""

    trial: optuna.Trial
    slot: int
    folder: Path
    reported: int  # evaluations that Optuna knows
    process: subprocess.Popen = dataclasses.field(init=False)
    started_at: float = 0.0
    told_at: float = 0.0  # when it was last told to stop
    restarts: int = 0
    pruned: bool = False
    stopped: bool = False


class Sweep:
    """The trials of one folder; `run` returns the exit code."""

    def __init__(self, arguments: argparse.Namespace, space: SearchSpace) -> None:
        """Raises ValueError where the folder has another sweep, NotNow while one runs there."""
        self._arguments = arguments
        self._space = space
        self._launch = shlex.split(arguments.launch)
        _check_launch(self._launch)
        programs = {Path(word).name for word in self._launch}
        # SIGTERM makes srun kill the ranks, and mpirun after a second; both pass SIGUSR1 on.
        needs_usr1 = programs & {"srun", "mpirun"}
        self._signal = signal.SIGUSR1 if needs_usr1 else signal.SIGTERM
        self._gpus = _gpus() if arguments.jobs > 1 and "srun" not in programs else []
        self._check_gpus()

        folder = arguments.folder
        self.lock: contextlib.AbstractContextManager
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = whole_files.lock(folder / ".lock")
        except whole_files.NoLocks:
            self.lock = contextlib.nullcontext()
            note = (
                f"note: the disk of {folder} has no locks: start one sweep there only"
            )
            print(printable(note), flush=True)
        except BlockingIOError:
            raise NotNow(
                f"{folder} is in use by another sweep: wait for its end"
            ) from None

        self._study = _study(folder, space)
        self._running: list[TrialRun] = []
        self._code = DONE  # another code ends the sweep

    def _check_gpus(self) -> None:
        """Raises ValueError where trials that run at once would share GPUs."""
        jobs = self._arguments.jobs
        flags = [line for _, line in self._space.base]
        flags += [*self._launch, *self._space.words({})]
        if not self._gpus or "--device=cpu" in flags:
            return
        if jobs > len(self._gpus):
            raise ValueError(
                f"--jobs={jobs} trials would share {len(self._gpus)} GPU(s): at most one a GPU"
            )
        for flag, value in itertools.pairwise([*self._launch, ""]):
            name, _, joined = flag.partition("=")
            if name in _HOSTS and not _is_here(joined or value):
                raise ValueError(
                    f"--jobs={jobs} trials would share the GPUs of other hosts ({name} in "
                    "--launch): give --jobs=1"
                )

    def run(self) -> int:
        """Runs trials to the last one, or to a signal; returns the exit code.

        BUG: no trial has a score. Raises OSError where the folder cannot be read or written.
        """
        hear(self._hear)
        try:
            self._run_trials()
        finally:  # after an error some trials still run: they save and end
            for run in self._running:
                if run.process.poll() is None:
                    os.killpg(run.process.pid, self._signal)
                run.process.wait()

        best_file = self._write_results()
        if self._code:  # a signal came, or `_give_up` has said why the sweep ends
            return self._code
        folder = self._arguments.folder
        if best_file:
            page = folder / "sweep.html"
            print(printable(f"best settings: {best_file}; all: {page}"))
            return DONE

        reason = "none has failed"
        for trial in self._trials():  # the last failure gives the reason
            reason = trial.user_attrs.get("why", reason)
        complain(f"no trial has a score: {reason}; {folder}/trial-*.log say more")
        return BUG

    def _run_trials(self) -> None:
        while True:
            while not self._code and len(self._running) < self._arguments.jobs:
                if not self._begin():
                    break
            if not self._running:
                return

            time.sleep(_INTERVAL)
            for run in [*self._running]:
                code = run.process.poll()
                self._look(run)
                if code is not None and not _is_used(run.folder):
                    self._end(run, code)
                elif code is None and (run.pruned or self._code):
                    self._stop(run)

    def _stop(self, run: TrialRun) -> None:
        """Tells a trial to stop, again while it may be lost: srun loses it before ranks run."""
        now = time.monotonic()
        is_young = now - run.started_at < STARTING and not newest_step(run.folder)
        if not run.stopped or (is_young and now - run.told_at >= AGAIN):
            run.stopped = True
            run.told_at = now
            os.killpg(run.process.pid, self._signal)

    def _hear(self, number: int, frame: object) -> None:
        if not self._code:
            self._code = PREEMPTED
            message = b"stopping: trials save, then end; the same command resumes\n"
            with contextlib.suppress(OSError):  # its reader may have gone
                os.write(2, message)

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(states=states or None)

    def _begin(self) -> bool:
        """Starts a trial, first those that an earlier start left; False where there is none."""
        number = len(self._trials())
        if number >= self._arguments.trials and not self._trials(TrialState.WAITING):
            return False

        # The seed makes the sampler draw the same after a restart.
        seed = random.Random(f"{self._arguments.seed} {number}").getrandbits(32)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = self._study.ask(_distributions(self._space))

        free = {*range(self._arguments.jobs)} - {run.slot for run in self._running}
        run = TrialRun(
            trial=trial,
            slot=min(free),
            folder=self._arguments.folder / f"trial-{trial.number + 1:04}",
            reported=max(self._trials()[trial.number].intermediate_values, default=0),
        )
        self._start(run)
        self._running.append(run)
        return True

    def _start(self, run: TrialRun) -> None:
        env = dict(os.environ)
        if self._gpus:
            count = max(1, len(self._gpus) // self._arguments.jobs)
            first = run.slot * count % len(self._gpus)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + count])

        base = typed.written(self._arguments.folder / _BASE, is_path=True)
        run_dir = typed.written(run.folder, is_path=True)
        command = [
            *self._launch,
            f"--flagfile={base}",
            *self._space.words(run.trial.params),
            f"--run_dir={run_dir}",
            "--resume=auto",
        ]
        with whole_files.opened(run.folder.with_suffix(".log"), append=True) as log:
            run.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
                preexec_fn=end_with_parent,
            )
        run.started_at = time.monotonic()

    def _look(self, run: TrialRun) -> None:
        """Reports new evaluations to Optuna, which may prune by each."""
        try:
            record = records.read(run.folder)
        except (OSError, ValueError):  # it has not begun to write
            return

        metric = record.main_metric()
        values = records.column(record.evaluations, f"eval_{metric.name}")
        if values and self._refuse_other_losses(metric):
            return
        if values and not self._metric().name:
            self._study.set_user_attr("metric", metric)
        if metric != self._metric():  # `_height` refuses its score
            return

        for number, value in enumerate(values[run.reported :], run.reported + 1):
            run.reported = number
            if math.isfinite(value):  # else the next evaluation may have a score
                run.trial.report(metric.height(value), number)
                run.pruned = run.pruned or run.trial.should_prune()

    def _refuse_other_losses(self, metric: MainMetric) -> bool:
        """Ends the sweep, with a sentence, where the score is a loss that it changes itself."""
        swept = [f"--{name}" for name in scores.OF_LOSS if name in self._space.values]
        if metric.name != "loss" or not swept:
            return False
        if not self._code:
            self._code = WRONG_USE
            complain(
                f"the main metric is the loss, which {join(swept)} changes, so that trials cannot "
                "be compared: give the task another main_metric, or sweep other settings"
            )
        return True

    def _metric(self) -> MainMetric:
        """Of all trials, whose values in the study are its heights; without a name at first."""
        return MainMetric(*self._study.user_attrs.get("metric", [""]))

    def _end(self, run: TrialRun, code: int) -> None:
        """What follows an exit code: the trial's result, another start, or the sweep's end."""
        trial = run.trial
        seconds_before = trial.user_attrs.get("seconds", 0.0)
        seconds = seconds_before + time.monotonic() - run.started_at
        trial.set_user_attr("seconds", seconds)
        trial.set_user_attr("steps", newest_step(run.folder))

        if run.pruned and run.stopped:
            self._tell(run, TrialState.PRUNED)
        elif self._code:
            # The trial goes on when the sweep does; horovodrun may return 0 for 75.
            self._running.remove(run)
        elif code == DONE:
            try:
                height = self._height(run)
            except (OSError, ValueError) as error:
                self._tell(run, TrialState.FAIL, reason=str(error))
            else:
                self._tell(run, TrialState.COMPLETE, height=height)
        elif code in (PREEMPTED, NOT_NOW) and run.restarts < _RESTARTS:
            run.restarts += 1
            time.sleep(_PAUSE)
            self._start(run)
        elif code == NOT_NOW:
            # What is away would end the other trials too. This one goes on when the sweep does.
            self._code = code
            self._running.remove(run)
            complain(f"{run.folder}.log says what is away: start the sweep again later")
        elif code != DIVERGED and self._is_hopeless(code):
            self._give_up(run, code)
        else:
            self._tell(run, TrialState.FAIL, reason=f"exit code {code}")

    def _height(self, run: TrialRun) -> float:
        """The score of a run that ended well. Raises ValueError: there is none to compare."""
        metric, newest = seeds.score(run.folder)
        if metric != self._metric():
            its = metric.describe()
            others = self._metric().describe()
            raise ValueError(f"its score is of {its}, others' of {others}")
        run.trial.set_user_attr("loss", newest.loss)
        return metric.height(newest.value)

    def _is_hopeless(self, code: int) -> bool:
        """Whether no trial has a score yet, and this is wrong use, or the last failure allowed."""
        if self._trials(*_SCORED):
            return False
        failures = len(self._trials(TrialState.FAIL)) + 1
        return code == WRONG_USE or failures >= _FAILURES

    def _give_up(self, run: TrialRun, code: int) -> None:
        self._code = code
        self._running.remove(run)
        self._study.tell(run.trial, state=TrialState.FAIL)  # it is not drawn again

        log = run.folder.with_suffix(".log")
        with whole_files.opened(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_END))
            text = file.read().decode(errors="replace")
        lines = re.findall(r"error: (.*)", text) or text.splitlines() or [""]
        complain(f"{run.folder}.log: {lines[-1]}")

    def _tell(
        self,
        run: TrialRun,
        state: TrialState,
        *,
        height: float | None = None,
        reason: str = "",
    ) -> None:
        """Tells Optuna a trial's result, prints a line about it, writes the files anew."""
        self._running.remove(run)
        if reason:
            run.trial.set_user_attr("why", reason)
        trial = self._study.tell(run.trial, height, state)

        values = [f"{name}={_short(value)}" for name, value in trial.params.items()]
        line = (
            f"trial {trial.number + 1}/{self._arguments.trials}: "
            f"{self._result(trial, reason)} ({self._comparison()}): {' '.join(values)}; "
            f"{trial.user_attrs['seconds']:.0f} s"
        )
        print(printable(line), flush=True)
        self._write_results()

    def _result(self, trial: FrozenTrial, reason: str) -> str:
        if trial.value is None:
            return f"failed, {reason}"
        metric = self._metric()
        score = metric.height(trial.value)
        if trial.state == TrialState.PRUNED:
            last = max(trial.intermediate_values)
            return f"pruned at evaluation {last}, {metric.name} {score:.4f}"
        return f"{metric.name} {score:.4f}"

    def _comparison(self) -> str:
        best = self._best()
        if not best:
            return "no score yet"
        return f"best {self._metric().height(best.value):.4f}, trial {best.number + 1}"

    def _best(self) -> FrozenTrial | None:
        return max(self._trials(TrialState.COMPLETE), key=_rank, default=None)

    def _write_results(self) -> Path | None:
        """Writes sweep.html, and best.cfg once a trial has a score; returns the path of best.cfg.

        best.cfg is a flagfile that trains with the settings of the best trial.
        """
        folder = self._arguments.folder
        metric = self._metric()
        parts = _parts(metric, self._trials(), self._space)
        pages.write(folder / "sweep.html", str(folder), parts, by="sweep")

        best = self._best()
        if not best:
            return None
        score = metric.height(best.value)
        run_dir = typed.written(folder / "best", is_path=True)
        lines = [
            f"# {metric.name} {score:.6g}, trial {best.number + 1}: {self._arguments.command}",
            *self._space.flagfile(best.params),
            f"--run_dir={run_dir}\n",
        ]
        best_file = folder / "best.cfg"
        with whole_files.written(best_file) as partial:
            partial.write_text("\n".join(lines))
        return best_file


def _study(folder: Path, space: SearchSpace) -> optuna.Study:
    """A new study, or the one of the folder; ValueError where that is of another sweep."""
    _keep_search(folder, space)
    with whole_files.written(folder / _BASE) as partial:
        partial.write_text("".join(f"{line}\n" for _, line in space.base))

    journal = folder / "journal.log"
    if journal.exists():
        text = journal.read_bytes()
        if not text.endswith(b"\n"):  # a full disk cut its last line
            os.truncate(journal, text.rfind(b"\n") + 1)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Of a sweep that was killed, as this one holds `Sweep.lock`: Optuna would wait for it.
    journal.with_name("journal.log.lock").unlink(missing_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(journal.absolute()))
    storage = optuna.storages.JournalStorage(backend)
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.create_study(
        study_name="sweep",
        storage=storage,
        pruner=halving,
        direction="maximize",
        load_if_exists=True,
    )

    # `ask` draws the settings of these trials first.
    for left in study.get_trials(states=[TrialState.RUNNING]):
        storage.set_trial_state_values(left._trial_id, TrialState.WAITING)
    return study


def _keep_search(folder: Path, space: SearchSpace) -> None:
    """Writes what is searched; ValueError where the folder has another sweep."""
    file = folder / "sweep.json"
    lines = [line for _, line in space.base] + space.words({})
    if file.exists():
        content = whole_files.read(file, whole_files.JSON_BYTES)
        old = whole_files.from_json(content, file)
        if not isinstance(old, list) or not all(isinstance(line, str) for line in old):
            raise ValueError(
                f"{file} holds no lines of a sweep: move it, or give another --folder"
            )
        for line in (*old, *lines):
            if line not in old or line not in lines:
                sweep = "that one" if line in old else "this one"
                raise ValueError(
                    f"{folder} has another sweep: only {sweep} has {line}; give --folder"
                )
    else:
        for name in _WRITTEN:
            if (folder / name).exists():
                raise ValueError(
                    f"{folder} has {name} of no sweep: move it, or give another --folder"
                )
    whole_files.write_json(file, lines)


def _distributions(space: SearchSpace) -> dict[str, distributions.BaseDistribution]:
    """What Optuna draws each swept setting from."""
    drawn: dict[str, distributions.BaseDistribution] = {}
    for name, values in space.values.items():
        is_log = _is_log(space, name)
        if isinstance(values[0], str):
            drawn[name] = distributions.CategoricalDistribution(values)
        elif isinstance(values[0], int):
            drawn[name] = distributions.IntDistribution(*values, log=is_log)
        else:
            drawn[name] = distributions.FloatDistribution(*values, log=is_log)
    return drawn


def _is_log(space: SearchSpace, name: str) -> bool:
    return space.flags[name].endswith(":log")


def _check_launch(launch: Sequence[str]) -> None:
    """Raises ValueError for a flag of the script in --launch: best.cfg would lack it."""
    names = [Path(word).name for word in launch]
    scripts = [place for place, name in enumerate(names) if name == "train.py"]
    for word in launch[scripts[-1] :] if scripts else ():
        if word.startswith("-"):
            raise ValueError(
                f"--launch has {word} after the script: give settings to the sweep itself, as "
                "--NAME=VALUE"
            )


def _is_used(folder: Path) -> bool:
    """Whether rank 0 holds its lock (hvdkit/checkpoint/lease.py): it may outlive its launcher."""
    try:
        whole_files.lock(folder / ".lock").close()
    except OSError as error:  # other errors: no folder yet, no locks
        return isinstance(error, BlockingIOError)
    return False


def _is_here(hosts: str) -> bool:
    """Whether host:2,host:2 names this host alone; a file of hosts may name others."""
    own_name = os.uname().nodename
    local = {"localhost", "127.0.0.1", own_name, own_name.partition(".")[0]}
    return all(entry.partition(":")[0] in local for entry in hosts.split(","))


def _gpus() -> list[str]:
    """This host's, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = visible.split(",")
        return [] if names[0] in ("", "-1", "NoDevFiles") else names
    try:
        return [str(number) for number in range(placement.granted())]
    except (OSError, subprocess.SubprocessError):  # each trial says why
        return []


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rank(trial: FrozenTrial) -> tuple[bool, tuple[float, float, int]]:
    """The best trial has the highest rank: whole ones, then by score; of equals the first."""
    height = -math.inf if trial.value is None else trial.value
    loss = trial.user_attrs.get("loss", math.inf)
    score = Score(height, -trial.number, loss, since=0)
    return trial.state == TrialState.COMPLETE, MainMetric("height").rank(score)


def _parts(
    metric: MainMetric, trials: Sequence[FrozenTrial], space: SearchSpace
) -> list[str]:
    """Plots, and a table: the best trial first, pruned ones below whole ones, failed ones last."""
    trials = sorted(trials, key=_rank, reverse=True)
    finished = [trial for trial in trials if trial.state in _SCORED]
    scored = [trial for trial in finished if trial.value is not None]

    plots = []
    if scored:
        plots.append(_parallel(metric, scored, space))
    whole = [trial for trial in scored if trial.state == TrialState.COMPLETE]
    if whole:
        plots.append(_best_so_far(metric, whole))
    return [pages.cards(plots), pages.section("Trials", _table(metric, trials, space))]


def _table(
    metric: MainMetric, trials: Sequence[FrozenTrial], space: SearchSpace
) -> str:
    score_head = metric.name or "score"
    heads = ["trial", score_head, *space.values, "steps", "seconds", "state"]
    rows = []
    for trial in trials:
        score = "" if trial.value is None else f"{metric.height(trial.value):.4f}"
        row = [
            trial.number + 1,
            score,
            *[_short(trial.params.get(name, "")) for name in space.values],
            trial.user_attrs.get("steps", ""),
            round(trial.user_attrs.get("seconds", 0)),
            trial.state.name.lower(),
        ]
        rows.append(row)
    return pages.table(rows, heads)


def _parallel(
    metric: MainMetric, trials: Sequence[FrozenTrial], space: SearchSpace
) -> str:
    axes = {name: [trial.params[name] for trial in trials] for name in space.values}
    axes[metric.name or "score"] = [metric.height(trial.value) for trial in trials]
    return pages.parallel(
        "Settings and score",
        axes,
        log={name for name in space.values if _is_log(space, name)},
        least_is_best=metric.mode == "min",
    )


def _best_so_far(metric: MainMetric, trials: Sequence[FrozenTrial]) -> str:
    trials = sorted(trials, key=lambda trial: trial.number)
    numbers = [trial.number + 1 for trial in trials]
    highest = itertools.accumulate([trial.value for trial in trials], max)
    best = [metric.height(height) for height in highest]
    title = f"Best {metric.name or 'score'} so far"
    return pages.curves(title, {"best": (numbers, best)}, xlabel="trial")
