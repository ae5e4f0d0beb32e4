"""slurm.sbatch on a real Slurm: when a job goes back into the queue, and when it must not.

What it starts stands for a training program (stand_in/train.py); test_slurm.py has real ones.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, hosts  # noqa: F401
from slurm import Slurm

STAND_IN = ROOT / "tests" / "helpers" / "stand_in" / "train.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "gone")


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:  # noqa: F811
    two_nodes = Slurm(tmp_path_factory.mktemp("slurm"), hosts)
    yield two_nodes
    two_nodes.end()


class Job:
    """Two tasks of the stand-in on two nodes."""

    def __init__(
        self,
        slurm: Slurm,
        folder: Path,
        *flags: str,
        launch: str = "srun",
        launch_flags: str = "",
        sbatch: tuple[str, ...] = (),
        env: str = "",
    ) -> None:
        self._slurm, self._log = slurm, folder / "job.log"
        words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=30", *sbatch]
        words += [f"--export=ALL,LAUNCH={launch},LAUNCH_FLAGS={launch_flags}{env}"]
        words += [f"--output={self._log}", str(ROOT / "launch" / "slurm.sbatch")]
        words += [sys.executable, str(STAND_IN), f"--run_dir={folder / 'run'}", *flags]
        self.number = slurm(*words, cwd=ROOT).strip()
        assert self.number.isdigit(), self.number

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def facts(self) -> dict[str, str]:
        return self._slurm.job(self.number)

    def state(self) -> str:
        return self.facts().get("JobState", "gone")

    def wait_for(self, ready: str | Callable[[], object], seconds: float = 60) -> None:
        """Until the log holds the words, or until it is true."""
        end = time.monotonic() + seconds
        while not (ready in self.log() if isinstance(ready, str) else ready()):
            assert time.monotonic() < end, f"{ready}: {self.state()}\n{self.log()}\n{self.facts()}"
            time.sleep(0.2)

    def end(self, seconds: float = 60) -> dict[str, str]:
        """What Slurm says of it when it has ended for good."""
        self.wait_for(lambda: self.state() in ENDED, seconds)
        time.sleep(1)
        assert self.state() in ENDED, self.log()
        return self.facts()

    def tell(self) -> None:
        """What --signal=B:USR1 does when the time limit comes near."""
        self._slurm("scancel", "--batch", "--signal=USR1", self.number)

    def steps_at_starts(self) -> list[int]:
        return [int(step) for step in re.findall(r"rank 0 of 2 begins at step (\d+)", self.log())]


def left_behind(hosts: Hosts) -> list[str]:  # noqa: F811
    return [host.name for host in hosts if str(STAND_IN) in host.sh("ps ax")]


@pytest.mark.parametrize(
    "launch, flags", [("srun", ""), pytest.param("ssh", "-p 2222", marks=pytest.mark.slow)]
)
def test_a_time_limit_goes_back_and_a_cancel_in_mid_run_does_not(
    slurm: Slurm,
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    launch: str,
    flags: str,
):
    job = Job(slurm, tmp_path, "--steps=1000", launch=launch, launch_flags=flags)
    job.wait_for("begins at step 0")
    time.sleep(2)
    job.tell()
    job.wait_for("its time limit is near (exit code 75): back into the queue")
    job.wait_for(lambda: len(job.steps_at_starts()) == 2)
    assert job.steps_at_starts()[1] > 0
    time.sleep(2)
    slurm("scancel", job.number)
    ended = job.end()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), job.log()
    assert "cancelled (exit code" in job.log() and "not put back" in job.log(), job.log()
    assert not left_behind(hosts)


def test_cancelled_before_the_ranks_listen_and_after_it_was_put_back(slurm: Slurm, tmp_path: Path):
    early = Job(slurm, tmp_path, "--steps=1000")
    early.wait_for(", start 0:")
    slurm("scancel", early.number)
    ended = early.end()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), early.log()

    (tmp_path / "late").mkdir()
    late = Job(slurm, tmp_path / "late", "--steps=1000")
    late.wait_for("begins at step 0")
    time.sleep(1)
    late.tell()
    late.wait_for(lambda: late.state() == "PENDING")
    slurm("scancel", late.number)
    ended = late.end()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), late.log()


@pytest.mark.parametrize("kill_on_bad_exit", [0, 1])
def test_whatever_the_cluster_does_on_a_bad_exit(
    slurm: Slurm, tmp_path: Path, kill_on_bad_exit: int
):
    """The slower rank is waited for; an error of one rank is the job's, and not started again."""
    slurm.kill_on_bad_exit(kill_on_bad_exit)
    slow = Job(slurm, tmp_path, "--steps=1000", "--slow_rank=0")
    slow.wait_for("begins at step 0")
    time.sleep(1)
    slow.tell()
    slow.wait_for("(exit code 75): back into the queue")
    slow.wait_for(lambda: slow.state() == "PENDING")  # a cancel before that would be undone
    slurm("scancel", slow.number)
    slow.end()

    (tmp_path / "bad").mkdir()
    bad = Job(slurm, tmp_path / "bad", "--fail=3:3", "--steps=6")
    ended = bad.end()
    found = (ended["JobState"], ended["ExitCode"], ended["Restarts"])
    assert found == ("FAILED", "3:0", "0"), bad.log()
    slurm.kill_on_bad_exit(0)


def test_no_step_since_the_last_start_ends_it(slurm: Slurm, tmp_path: Path):
    """As where --time is shorter than the warning before its end."""
    job = Job(slurm, tmp_path, "--mute")
    job.wait_for("begins at step 0")
    time.sleep(0.5)
    job.tell()
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    assert "no step was made" in job.log() and "--time longer" in job.log()


def test_a_killed_rank_goes_back_and_is_counted(slurm: Slurm, tmp_path: Path):
    once = Job(
        slurm, tmp_path, "--fail=5:SIGKILL:once", "--steps=8", sbatch=("--nodes=1", "--ntasks=1")
    )
    ended = once.end()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), once.log()


def test_someones_stop_is_not_put_back(slurm: Slurm, hosts: Hosts, tmp_path: Path):  # noqa: F811
    job = Job(slurm, tmp_path, "--steps=1000")
    job.wait_for("begins at step 0")
    time.sleep(1)
    for host in (hosts[1], hosts[2]):
        host.sh(str(ROOT / "launch" / "stop.sh"))
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    assert "stopped by someone" in job.log()


def test_a_limit_of_restarts(slurm: Slurm, tmp_path: Path):
    job = Job(slurm, tmp_path, "--steps=1000", env=",MAX_RESTARTS=1")
    for start in range(2):
        job.wait_for(lambda start=start: len(job.steps_at_starts()) > start)
        time.sleep(1)
        job.tell()
    ended = job.end()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "1"), job.log()
    assert "it was started again 1 times" in job.log()


def test_a_node_that_dies(slurm: Slurm, hosts: Hosts, tmp_path: Path):  # noqa: F811
    """Slurm requeues the job by itself; it goes on from its last checkpoint."""
    job = Job(slurm, tmp_path, "--steps=40")
    job.wait_for("begins at step 0")
    time.sleep(2)
    slurm.kill_node(hosts[2])
    job.wait_for(lambda: job.state() == "PENDING", 90)
    slurm.start_node(hosts[2])
    ended = job.end(120)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert job.steps_at_starts()[1] > 0
