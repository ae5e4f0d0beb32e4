"""A Slurm of two nodes, from Debian's packages, on two of the hosts of hosts.py."""

import re
import shutil
import subprocess
from pathlib import Path

from hosts import Host, Hosts, require, wait_for

_CONF = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
# A requeued job waits for as long as a credential is valid: seconds here, minutes elsewhere.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillOnBadExit={kill_on_bad_exit}
SlurmdTimeout=10
KillWait=10
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node[1-2] CPUs=2 RealMemory=4000 Gres=gpu:1
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=100 MaxTime=60
PartitionName=high Nodes=node[1-2] PriorityTier=10 MaxTime=60
"""


class Slurm:
    def __init__(self, folder: Path, hosts: Hosts) -> None:
        require("munged", "slurmctld", "slurmd", "sbatch")
        self._folder = folder
        self._node = hosts[1]
        (folder / "state").mkdir()
        self.kill_on_bad_exit(0)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._env = {"SLURM_CONF": str(folder / "slurm.conf")}
        key = folder / "munge.key"
        key.write_bytes(bytes(range(128)))
        key.chmod(0o600)
        socket = folder / "munge.socket"
        munged = self._start(
            hosts[1],
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
            f"--socket={socket}",
        )
        self._processes = [munged]
        wait_for(socket.exists, "no munged", 40)
        self._processes.append(self._start(hosts[1], "slurmctld", "-D"))
        for node in (hosts[1], hosts[2]):
            self.start_node(node)
        wait_for(lambda: self._idle_nodes() == 2, "no two nodes", 40)

    def __call__(self, *words: str, cwd: Path | None = None) -> str:
        env = ["env", f"--chdir={cwd}"] if cwd else ["env"]
        return self._node.run(*env, *words, timeout=30, env=self._env).output

    def _idle_nodes(self) -> int:
        listed = self("sinfo", "-h", "-N", "-p", "low", "-t", "idle")
        return listed.count("\n")

    def start_node(self, node: Host) -> None:
        # With a killed daemon's files, a step with the same number would not start.
        for name in (f"spool-{node.name}", f"tmp-{node.name}"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
            (self._folder / name).mkdir()
        self._processes.append(self._start(node, "slurmd", "-D", "-N", node.name))

    def kill_node(self, node: Host, daemon_alone: bool = False) -> None:
        """Kills Slurm's daemon and its processes there, as when the node's power is cut."""
        node.sh("pkill -KILL slurmd")
        if not daemon_alone:
            node.sh("pkill -KILL slurmstepd; pkill -KILL -f [r]un_dir= || true")

    def kill_on_bad_exit(self, value: int) -> None:
        """Sets what srun does from now on without a flag."""
        conf = _CONF.format(folder=self._folder, kill_on_bad_exit=value)
        (self._folder / "slurm.conf").write_text(conf)

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number)))

    def end(self) -> None:
        self("scancel", "--user=root")
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def log(self) -> str:
        files = sorted(self._folder.glob("slurm*.log"))
        return "\n".join(
            f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files
        )

    def _start(self, host: Host, *words: str) -> subprocess.Popen:
        # A machine starts them so: of the user's environment a job has only what it brings.
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        } | self._env
        with open(self._folder / f"{words[0]}-{host.name}.out", "w") as log:
            return subprocess.Popen(host.words(*words), env=env, stdout=log, stderr=log)
