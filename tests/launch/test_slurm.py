"""slurm.sbatch on a real Slurm of two nodes: trains, is stopped, goes back into the queue or
not."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import strangers
from hosts import NOBODY, PYTHON, ROOT, STAND_IN, Hosts, require
from slurm import Slurm

TRAINING = [sys.executable, str(ROOT / "template" / "train.py")]
BLANK = [
    *TRAINING,
    f"--flagfile={ROOT}/template/configs/blank.cfg",
    "--num_steps=2",
    "--eval_every=0",
]
SBATCH = str(ROOT / "launch" / "slurm.sbatch")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "gone")
OF_ANOTHER = ",".join(
    [
        "SLURM_ARRAY_JOB_ID=1",
        "SLURM_ARRAY_TASK_ID=1",
        "SLURM_RESTART_COUNT=7",
        "SLURM_CPU_BIND_TYPE=mask_cpu:",
        "SLURM_CPU_BIND=mask_cpu:0x8000",
    ]
)
STOPPED = ("FAILED", "75:0", "0")  # state, exit code, restarts


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    two_nodes = Slurm(tmp_path_factory.mktemp("slurm"), hosts)
    yield two_nodes
    two_nodes.end()


class Job:
    """By default two tasks on two nodes."""

    def __init__(
        self, slurm: Slurm, folder: Path, *command: str, sbatch: str = "", env: str = ""
    ):
        folder.mkdir(exist_ok=True)
        self._slurm = slurm
        self._log = folder / "job.log"
        printed = slurm(
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--time=30",
            *sbatch.split(),
            f"--export={env or 'ALL'}",
            f"--output={self._log}",
            *(str(word) for word in command),
            cwd=ROOT / "template",
        )
        self.number = printed.strip()
        assert self.number.isdigit(), self.number

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def catches(self, name: str) -> bool:
        """Whether its script runs and has set its trap: before that, the signal ends it."""
        bit = 1 << (signal.Signals[f"SIG{name}"] - 1)
        script = f"/job{int(self.number):05}/slurm_script"
        # -ww: lines as long as they are.
        processes = subprocess.check_output(["ps", "-wweo", "caught=,args="], text=True)
        caught = [line.split()[0] for line in processes.splitlines() if script in line]
        return any(int(mask, 16) & bit for mask in caught)

    def facts(self) -> dict[str, str]:
        return self._slurm.job(self.number)

    def state(self) -> str:
        return self.facts().get("JobState", "gone")

    def wait_for(self, ready: str | Callable[[], object], seconds: float = 60) -> None:
        """Waits until the log holds the words `ready`, or until ready() is true."""

        def is_ready() -> bool:
            if isinstance(ready, str):
                return ready in self.log()
            return bool(ready())

        end = time.monotonic() + seconds
        while not is_ready():
            assert time.monotonic() < end, (
                f"{ready}: {self.state()}\n{self.log()}\n{self.facts()}\n{self._slurm.log()}"
            )
            time.sleep(0.2)

    def end(self, seconds: float = 60) -> tuple[str, str, str]:
        """State, exit code and restarts when it has ended for good."""
        self.wait_for(lambda: self.state() in ENDED, seconds)
        time.sleep(1)
        facts = self.facts()
        assert facts["JobState"] in ENDED, self.log()
        return facts["JobState"], facts["ExitCode"], facts["Restarts"]

    def near_its_limit(self) -> None:
        """Signals as --signal=B:USR1 does when the time limit comes near."""
        self._slurm("scancel", "--batch", "--signal=USR1", self.number)

    def preempt(self, folder: Path) -> None:
        urgent = "--partition=high --exclusive --wrap=hostname"
        assert (
            Job(self._slurm, folder / "urgent", sbatch=urgent).end(120)[0]
            == "COMPLETED"
        )


def stand_in(
    slurm: Slurm, folder: Path, *flags: str, sbatch: str = "", env: str = ""
) -> Job:
    """A job that makes 5 steps a second, once it makes them."""
    job = Job(
        slurm,
        folder,
        SBATCH,
        *STAND_IN,
        f"--run_dir={folder / 'run'}",
        *flags,
        sbatch=sbatch,
        env=env,
    )
    if flags[0] in ("--steps=1000", "--mute"):
        job.wait_for("begins at step 0")
        time.sleep(1)
    return job


def starts(job: Job) -> list[int]:
    return [
        int(step) for step in re.findall(r"rank 0 of 2 begins at step (\d+)", job.log())
    ]


def test_srun_with_pmix_trains_on_two_nodes(slurm: Slurm, tmp_path: Path):
    job = Job(slurm, tmp_path, SBATCH, *BLANK, f"--run_dir={tmp_path}/run")
    assert job.end(200)[:2] == ("COMPLETED", "0:0"), job.log()
    assert "2 ranks on 2 host(s) (node1, node2)" in job.log() and ", MPI" in job.log()


@pytest.mark.slow
def test_nobody_reaches_the_ranks_that_srun_starts(
    slurm: Slurm, hosts: Hosts, tmp_path: Path
):
    """On both nodes; the port of Slurm's own PMIx takes connections of all users of its node."""
    require("cc", "setpriv", "ss")
    end = tmp_path / "end"
    attacks = ROOT / "tests/attacks"
    job = Job(
        slurm,
        tmp_path,
        SBATCH,
        sys.executable,
        attacks / "victim.py",
        end,
        sbatch="--exclusive --ntasks-per-node=2",
        env=f"ALL,LAUNCH_GUARD={strangers.guard(tmp_path)}",
    )
    job.wait_for(lambda: job.log().count("ready") == 4, 120)
    for host in (hosts[1], hosts[2]):
        places = re.findall(r"(\S+):(\d+) .*\(\(.python", host.sh("ss -tlnpH"))
        ports = [[address.strip("[]"), int(port)] for address, port in places]
        assert host.sh("cat /proc/[0-9]*/maps 2>/dev/null | grep -c guard.so") != "0\n"
        # Each rank has MPI's ports for two kinds of address, and that of the watch.
        assert len(ports) >= 6, host.sh("ss -tlnp")
        task = json.dumps({"secrets": [], "ports": ports, "seconds": 6})
        attack = host.words(*NOBODY, PYTHON, str(attacks / "stranger.py"))
        report = json.loads(subprocess.check_output(attack, input=task, text=True))
        got = list(report["got"].values())
        assert set(got) <= {0, 16} and got.count(16) >= 2, report
    end.touch()
    assert (
        job.end()[:2] == ("COMPLETED", "0:0") and job.log().count("ended well") == 4
    ), job.log()


@pytest.mark.slow
def test_slurm_gives_out_the_trials_of_a_sweep(slurm: Slurm, tmp_path: Path):
    """Two at a time, each a job step of its own, on the nodes that are free."""
    srun = " ".join(["srun --mpi=pmix --nodes=1 --ntasks=1 --exclusive", *TRAINING])
    slurm(
        str(Path(sys.executable).with_name("hvdkit")),
        "sweep",
        str(ROOT / "template/configs/blank.cfg"),
        "--base_lr=0.001,0.01",
        "--num_steps=40",
        "--eval_every=20",
        "--trials=2",
        "--jobs=2",
        f"--folder={tmp_path}/sweep",
        f"--launch={srun}",
        cwd=ROOT / "template",
    )
    logs = [
        path.read_text() for path in sorted((tmp_path / "sweep").glob("trial-*.log"))
    ]
    assert {"(node1)" in log for log in logs} == {True, False} and len(logs) == 2, logs
    assert all("1 rank on 1 host(s) (node" in log for log in logs), logs
    assert (tmp_path / "sweep" / "best.cfg").exists()


@pytest.mark.slow
def test_a_job_script_trains_alone_and_srun_without_mpi_is_refused(
    slurm: Slurm, tmp_path: Path
):
    """Slurm gives the script a rank too, though it has no peers."""
    alone = " ".join([*BLANK, f"--run_dir={tmp_path}/run"])
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\n{alone}; echo alone $?; srun --mpi=none {alone}; echo srun $?\n"
    )
    job = Job(slurm, tmp_path, str(script), sbatch="--nodes=1 --ntasks-per-node=2")
    job.end(300)
    log = job.log()
    assert "1 rank on 1 host(s) (node1)" in log and "alone 0" in log, log
    message = "error: SLURM_STEP_NUM_TASKS says that 2 processes were started together"
    assert log.count(message) == 1, log
    assert "srun 2" in log and "Traceback" not in log, log


@pytest.mark.parametrize("launch", ["LAUNCH=srun", "LAUNCH=ssh,LAUNCH_FLAGS=-p 2222"])
def test_each_of_several_tasks_a_node_may_use_its_cores_and_takes_the_interface(
    slurm: Slurm, tmp_path: Path, launch: str
):
    """task/affinity gave each a core of its own; ranks that mpirun starts share those of the
    job."""
    show = (
        "import os; host, cores = os.uname().nodename, sorted(os.sched_getaffinity(0)); e = "
        'os.environ.get; os.write(1, f\'on {host} {cores} {e("OMPI_MCA_btl_tcp_if_include")} '
        '{e("OMPI_MCA_pml")} {e("OMPI_MCA_btl")}\\n\'.encode())'
    )
    job = Job(
        slurm,
        tmp_path,
        SBATCH,
        sys.executable,
        "-c",
        show,
        sbatch="--exclusive --ntasks-per-node=2 --cpus-per-task=1",
        env=f"ALL,INTERFACE=eth0,{launch}",
    )
    assert job.end()[:2] == ("COMPLETED", "0:0"), job.log()
    assert job.log().count("eth0 ob1 ^openib\n") == 4, job.log()
    cores = sorted(re.findall(r"on (node\d) (\[[\d, ]*\])", job.log()))
    first, second = ("[0]", "[1]") if launch == "LAUNCH=srun" else ("[0, 1]", "[0, 1]")
    assert cores == [
        ("node1", first),
        ("node1", second),
        ("node2", first),
        ("node2", second),
    ], job.log()


def test_ssh_takes_no_gpus_of_other_jobs(slurm: Slurm, tmp_path: Path):
    """Its ranks are outside of the job, whose GPUs alone srun's would see; also if it has none."""
    env = "ALL,INTERFACE=eth0,LAUNCH=ssh,LAUNCH_FLAGS=-p 2222"
    for more, end in (("", ("FAILED", "2:0")), ("--exclusive", ("COMPLETED", "0:0"))):
        job = Job(slurm, tmp_path / f"job{more}", SBATCH, "true", sbatch=more, env=env)
        assert job.end()[:2] == end, job.log()
        assert (
            "on nodes with GPUs needs whole nodes: add --exclusive" in job.log()
        ) == (not more)


@pytest.mark.parametrize(
    "launch",
    [
        "LAUNCH=srun",
        pytest.param("LAUNCH=ssh,LAUNCH_FLAGS=-p 2222", marks=pytest.mark.slow),
    ],
)
def test_near_its_time_limit_a_job_is_requeued_at_most_max_restarts_times(
    slurm: Slurm, hosts: Hosts, tmp_path: Path, launch: str
):
    job = stand_in(
        slurm,
        tmp_path,
        "--steps=1000",
        sbatch="--exclusive",
        # As one that is sent from within a task of an array.
        env=f"ALL,{launch},MAX_RESTARTS=1,{OF_ANOTHER}",
    )
    job.near_its_limit()
    job.wait_for("its time limit is near (exit code 75): back into the queue")
    job.wait_for(lambda: len(starts(job)) == 2)
    assert starts(job)[1] > 0
    time.sleep(1)
    job.near_its_limit()
    assert job.end() == ("FAILED", "75:0", "1"), job.log()
    assert "it was started again 1 times" in job.log()
    assert not [host.name for host in hosts if STAND_IN[1] in host.sh("ps ax")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "USR1",
            "no step was made in this start|its time limit is near .*: back into the queue",
        ),
        ("TERM", "stopped by someone"),
    ],
)
def test_a_signal_in_the_first_second_says_what_follows(
    slurm: Slurm, tmp_path: Path, name: str, words: str
):
    """Before the supervisor, srun or the ranks can hear it."""
    job = stand_in(slurm, tmp_path, "--steps=999")
    job.wait_for(lambda: job.catches(name))
    slurm("scancel", "--batch", f"--signal={name}", job.number)
    job.wait_for(lambda: re.search(words, job.log()))
    if ": back into the queue" in job.log():
        # A cancel before that would be undone.
        job.wait_for(lambda: job.state() == "PENDING")
    slurm("scancel", job.number)
    job.end()


def test_a_preempted_job_is_requeued_and_resumes(slurm: Slurm, tmp_path: Path):
    job = stand_in(slurm, tmp_path, "--steps=1000")
    job.preempt(tmp_path)
    assert "preempted (exit code 75): back into the queue" in job.log(), job.log()
    job.wait_for(lambda: len(starts(job)) == 2)
    assert starts(job)[1] > 0
    slurm("scancel", job.number)
    job.end()


def test_a_task_of_an_array_goes_back_into_the_queue_alone(
    slurm: Slurm, tmp_path: Path
):
    """Slurm takes the id of one task of an array for the whole array."""
    command = " ".join([*STAND_IN, f"--run_dir={tmp_path}/run$SLURM_ARRAY_TASK_ID"])
    script = tmp_path / "task.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"[ $SLURM_ARRAY_TASK_ID = 0 ] && exec {command} --steps=3; {command} --steps=1000\n"
    )
    script.chmod(0o755)
    sbatch = "--array=0-1 --nodes=1 --ntasks=1"
    job = Job(
        slurm,
        tmp_path,
        SBATCH,
        str(script),
        sbatch=sbatch,
        env=f"ALL,RUN_DIR={tmp_path}/run1",
    )

    def tasks() -> dict[str, tuple[str, str]]:
        """State and restarts by the task's number."""
        shown = slurm("scontrol", "show", "job", job.number)
        by_number = {}
        for part in re.split(r"^JobId=", shown, flags=re.MULTILINE)[1:]:
            facts = dict(re.findall(r"(\w+)=(\S*)", part))
            by_number[facts["ArrayTaskId"]] = (facts["JobState"], facts["Restarts"])
        return by_number

    job.wait_for(lambda: tasks().get("0", ("",))[0] == "COMPLETED")
    job.wait_for(lambda: list((tmp_path / "run1/checkpoints").glob("step-*")))
    # The last task that starts has the array's own id.
    slurm("scancel", "--batch", "--signal=USR1", f"{job.number}_1")
    job.wait_for("back into the queue")
    job.wait_for(lambda: tasks()["1"][1] == "1")
    assert tasks()["0"] == ("COMPLETED", "0"), tasks()
    slurm("scancel", job.number)
    job.wait_for(lambda: {state for state, _ in tasks().values()} <= {*ENDED})


def test_what_only_a_part_of_would_train_is_refused(slurm: Slurm, tmp_path: Path):
    """sbatch takes jobs of several parts, srun starts the first."""
    log = tmp_path / "job.log"
    printed = slurm(
        "sbatch",
        "--parsable",
        f"--output={log}",
        "--nodes=1",
        "--ntasks=1",
        "--time=30",
        ":",
        "--nodes=1",
        "--ntasks=1",
        "--time=30",
        SBATCH,
        *STAND_IN,
        "--steps=3",
        cwd=ROOT / "template",
    )
    number = printed.strip()
    end = time.monotonic() + 60
    while slurm.job(number).get("JobState") not in ENDED:
        assert time.monotonic() < end, slurm.log()
        time.sleep(0.2)
    assert slurm.job(number)["ExitCode"] == "2:0"
    assert "would train on its first part alone" in log.read_text()


def test_ranks_get_the_jobs_settings_whatever_sbatch_exports(
    slurm: Slurm, tmp_path: Path
):
    """srun obeys --export of sbatch; without the secret anybody could be a rank."""
    script = tmp_path / "shown.sh"
    script.write_text(
        "#!/bin/sh\nfor n in LAUNCH_SECRET OMPI_MCA_pml OMPI_MCA_btl LAUNCH_JOB; do "
        'printenv $n >&2 || echo "no $n"; done\n'
    )
    script.chmod(0o755)
    job = Job(slurm, tmp_path, SBATCH, str(script), env="PATH,HOME")
    assert job.end()[:2] == ("COMPLETED", "0:0"), job.log()
    assert "no LAUNCH" not in job.log() and "no OMPI" not in job.log(), job.log()


@pytest.mark.parametrize(
    "when", ["before the ranks listen", "in mid-run", "once it is put back"]
)
def test_a_cancelled_job_ends(slurm: Slurm, tmp_path: Path, when: str):
    early = when == "before the ranks listen"
    job = stand_in(slurm, tmp_path, "--steps=999" if early else "--steps=1000")
    if early:
        job.wait_for(f"job {job.number}: srun")
    if when == "once it is put back":
        job.near_its_limit()
        job.wait_for(lambda: job.state() == "PENDING")
    slurm("scancel", job.number)
    state, _, restarts = job.end()
    assert (state, restarts) == ("CANCELLED", str(int("back" in when))), job.log()
    if when == "in mid-run":
        assert "cancelled (exit code" in job.log() and "not put back" in job.log(), (
            job.log()
        )


@pytest.mark.parametrize(
    "kill_on_bad_exit", [pytest.param(0, marks=pytest.mark.slow), 1]
)
def test_whatever_the_cluster_does_on_a_bad_exit(
    slurm: Slurm, tmp_path: Path, kill_on_bad_exit: int
):
    """The job waits for its slower rank; after an error of one rank it is not requeued."""
    slurm.kill_on_bad_exit(kill_on_bad_exit)
    slow = stand_in(slurm, tmp_path / "slow", "--steps=1000", "--slow_rank=0")
    slow.near_its_limit()
    slow.wait_for("(exit code 75): back into the queue")
    # A cancel before that would be undone.
    slow.wait_for(lambda: slow.state() == "PENDING")
    slurm("scancel", slow.number)
    slow.end()
    bad = stand_in(slurm, tmp_path / "bad", "--fail=3:3", "--steps=6")
    assert bad.end() == ("FAILED", "3:0", "0"), bad.log()
    assert "back into the queue" not in bad.log()
    slurm.kill_on_bad_exit(0)


def test_no_step_since_the_last_start_ends_it(slurm: Slurm, tmp_path: Path):
    """This happens where --time is shorter than the warning before its end."""
    job = stand_in(slurm, tmp_path, "--mute")
    job.near_its_limit()
    assert job.end() == ("FAILED", "1:0", "0")
    assert "no step was made" in job.log() and "--time longer" in job.log()


def test_a_job_that_somebody_stopped_is_not_requeued(
    slurm: Slurm, hosts: Hosts, tmp_path: Path
):
    job = stand_in(slurm, tmp_path, "--steps=1000")
    for host in (hosts[1], hosts[2]):
        host.sh(str(ROOT / "launch" / "stop.sh"))
    assert job.end() == STOPPED
    assert "stopped by someone" in job.log()


def test_after_a_killed_rank_the_run_starts_again_in_the_job(
    slurm: Slurm, tmp_path: Path
):
    job = stand_in(slurm, tmp_path, "--fail=5:SIGKILL:once", "--steps=8")
    assert job.end() == ("COMPLETED", "0:0", "0"), job.log()
    assert len(starts(job)) == 2


@pytest.mark.slow  # Slurm takes a while to miss it
@pytest.mark.parametrize("daemon_alone", [False, True])
def test_a_node_that_dies(
    slurm: Slurm, hosts: Hosts, tmp_path: Path, *, daemon_alone: bool
):
    """Slurm requeues the job by itself; it resumes from its last checkpoint."""
    # Over a minute: Slurm misses the node before.
    job = stand_in(slurm, tmp_path, "--steps=400")
    job.wait_for("begins at step 0")
    time.sleep(2)
    slurm.kill_node(hosts[2], daemon_alone)
    job.wait_for(lambda: job.state() == "PENDING", 90)
    slurm.start_node(hosts[2])
    assert job.end(120) == ("COMPLETED", "0:0", "1"), job.log()
    assert starts(job)[1] > 0
    assert not [host.name for host in hosts if STAND_IN[1] in host.sh("ps ax")]
