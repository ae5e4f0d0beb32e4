"""slurm.sbatch on a real Slurm of two nodes: trains, is stopped, requeued, goes on to the end."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, hosts  # noqa: F401
from slurm import Slurm

STEPS = 120
TRAINING = [
    *(sys.executable, "train.py", "--flagfile=configs/demo.cfg", "--image_size=32"),
    "--eval_crop=32",
    *("--global_batch_size=4", "--warmup_steps=0", "--log_every=1", "--eval_every=0"),
    *("--checkpoint_every=0", "--eval_batch_size=8", f"--num_steps={STEPS}"),
]


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:  # noqa: F811
    two_nodes = Slurm(tmp_path_factory.mktemp("slurm"), hosts)
    yield two_nodes
    two_nodes.end()


class Job:
    """A training job of two tasks on two nodes, from the template's folder."""

    def __init__(self, slurm: Slurm, folder: Path, launch: str, launch_flags: str = "") -> None:
        from hvdkit.data import scenes

        data = folder / "data"
        scenes.make(data, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3)))
        self._slurm, self._log, self.run_dir = slurm, folder / "job.log", folder / "run"
        export = f"--export=ALL,LAUNCH={launch},LAUNCH_FLAGS={launch_flags}"
        words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=30", export]
        words += [f"--output={self._log}", str(ROOT / "launch" / "slurm.sbatch"), *TRAINING]
        words += [f"--data_dir={data}", f"--run_dir={self.run_dir}"]
        self.number = slurm(*words, cwd=ROOT / "template").strip()
        assert self.number.isdigit(), self.number

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def state(self) -> str:
        return self._slurm.job(self.number).get("JobState", "gone")

    def wait_for(self, what: str, ready: Callable[[], object], seconds: float = 220) -> None:
        end = time.monotonic() + seconds
        while not ready():
            last = "\n".join(self.log().splitlines()[-40:])
            ended = self.state() in ("FAILED", "CANCELLED", "TIMEOUT", "gone")
            assert not ended and time.monotonic() < end, (
                f"{what}: job {self.state()}\n{last}\n{self._slurm.log()}"
            )
            time.sleep(0.5)

    def check_that_it_went_on_to_the_end(self) -> None:
        self.wait_for("completion", lambda: self.state() == "COMPLETED")
        stops = re.findall(r"stop signal received: saved at step (\d+)", self.log())
        starts = re.findall(r"resuming from .* at step (\d+)", self.log())
        assert stops == starts and len(stops) == 1, self.log()
        assert 0 < int(stops[0]) < STEPS
        assert f"job {self.number}, start 1:" in self.log()
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert (summary["exit_reason"], summary["step"]) == ("done", STEPS)
        assert self._slurm.job(self.number)["Restarts"] == "1"


@pytest.mark.timeout(700)
def test_srun_with_pmix_is_preempted_requeued_and_goes_on(slurm: Slurm, tmp_path: Path):
    job = Job(slurm, tmp_path, "srun")
    job.wait_for("first steps", lambda: f"step 2/{STEPS}" in job.log())
    assert "2 ranks on 2 host(s) (node1, node2)" in job.log()
    assert ", MPI" in job.log()
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--time=5"]
    urgent = slurm(*words, f"--output={tmp_path}/urgent.log", "--wrap=hostname; sleep 2").strip()
    job.wait_for("the urgent job", lambda: slurm.job(urgent).get("JobState") == "COMPLETED")
    assert "back into the queue" in job.log()
    job.check_that_it_went_on_to_the_end()


@pytest.mark.timeout(400)
def test_a_job_script_trains_alone_and_srun_without_mpi_is_refused(slurm: Slurm, tmp_path: Path):
    """A script is given a rank by Slurm too, though it is nobody's peer."""
    words = [*TRAINING, "--synthetic_data", "--num_steps=1", f"--run_dir={tmp_path}/run"]
    alone = " ".join(words)
    script = f"{alone}; echo alone $?; srun --mpi=none {alone}; echo srun $?"
    job = [
        "sbatch",
        "--parsable",
        "--nodes=1",
        "--ntasks=2",
        "--time=9",
        f"--output={tmp_path}/log",
    ]
    number = slurm(*job, f"--wrap={script}", cwd=ROOT / "template").strip()
    wait_for_end(slurm, number, 300)
    log = (tmp_path / "log").read_text()
    assert "1 rank on 1 host(s) (node1)" in log and "alone 0" in log, log
    assert log.count("error: srun started 2 tasks that know nothing of each other") == 1, log
    assert "srun 2" in log and "Traceback" not in log, log


def test_ranks_that_slurm_has_bound_stay_where_they_are(slurm: Slurm, tmp_path: Path):
    """task/affinity gave each a core of its own: bind.sh would share it out again."""
    show = "import os; print('cores', sorted(os.sched_getaffinity(0)))"
    words = [
        "sbatch",
        "--parsable",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--time=5",
        f"--output={tmp_path}/log",
    ]
    words += ["--export=ALL,BIND=1,BIND_SHOW=1", str(ROOT / "launch/slurm.sbatch")]
    number = slurm(*words, sys.executable, "-c", show, cwd=ROOT / "template").strip()
    assert number.isdigit(), number
    wait_for_end(slurm, number, 60)
    log = (tmp_path / "log").read_text()
    assert "cores [0]" in log and "cores [1]" in log and "local rank" not in log, log


def wait_for_end(slurm: Slurm, number: str, seconds: float) -> dict[str, str]:
    end = time.monotonic() + seconds
    while (job := slurm.job(number))["JobState"] not in ("COMPLETED", "FAILED"):
        assert time.monotonic() < end, job
        time.sleep(0.5)
    return job


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_is_not_requeued(slurm: Slurm, tmp_path: Path, code: int):
    words = ["sbatch", "--parsable", "--nodes=1", "--time=5", f"--output={tmp_path}/log"]
    words += [str(ROOT / "launch/slurm.sbatch"), sys.executable, "-c", f"raise SystemExit({code})"]
    job = wait_for_end(slurm, slurm(*words, cwd=ROOT / "template").strip(), 60)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", f"{code}:0")
    # Slurm itself starts a job again whose first start it lost on a busy machine: no look at that.
    assert "back into the queue" not in (tmp_path / "log").read_text()
