"""What launched this process, by environment variables, before Horovod or MPI is up.

LAUNCHERS has a line for each kind of launcher; the doctor in launch/ reads them too. Programs that
are no Python (launch/hosts.sh, launch/stop.sh, docker/) find ranks by the same names.

Imports nothing but the standard library: the doctor loads this file by itself where hvdkit is not
installed.
"""

import json
import os
import socket
from typing import NamedTuple


class Launcher(NamedTuple):
    """The variables in which a launcher tells a process its place among the ranks."""

    rank: str
    size: str = ""
    local_rank: str = ""
    of_a_rank: tuple[str, ...] = ()  # prefixes of what no process but a rank has
    makes_ranks: bool = True  # whether who has `rank` was launched as a rank
    makes_mpi_world: bool = False  # whether its ranks are those of an MPI world


LAUNCHERS = (
    # horovodrun over Gloo
    Launcher(
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        of_a_rank=("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_"),
    ),
    # mpirun, also under horovodrun --mpi and hosts.sh
    Launcher(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        of_a_rank=("OMPI_COMM_WORLD_",),
        makes_mpi_world=True,
    ),
    # srun --mpi=pmix
    Launcher(rank="PMIX_RANK", of_a_rank=("PMIX_RANK",), makes_mpi_world=True),
    # srun, also for a job's script, which is rank 0 of nothing
    Launcher(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        makes_ranks=False,
    ),
)

# Variables of the rank and the number of processes by launchers whose processes do not meet here:
# of MPICH and Intel MPI, torchrun and Kubeflow's PyTorchJob, Kubeflow's TrainJob, Flux, MVAPICH,
# jsrun, AWS Batch, SkyPilot, dstack. Kubeflow's TFJob sets TF_CONFIG, JSON:
# {"cluster": {"worker": ["host:port", ...]}, "task": {...}}; SageMaker sets SM_HOSTS, a JSON list.
_OTHERS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
)

_GLOO_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_ANSWER_SECONDS = 2.0  # timeout of a launcher on this host


def launch_rank() -> int:
    """This process's rank, before Horovod is up; 0 when run alone."""
    for launcher in LAUNCHERS:
        rank = _number(launcher.rank)
        if rank is not None:
            return rank
    return 0


def launch_local_rank() -> int:
    """Its number among the ranks of its host; 0 where no variable says it."""
    for launcher in LAUNCHERS:
        rank = _number(launcher.local_rank)
        if rank is not None:
            return rank
    return 0


def launched_ranks() -> tuple[int, str]:
    """How many processes the launcher started with this one, and the variable that says so."""
    for launcher in LAUNCHERS:
        size = _number(launcher.size)
        if size is not None:
            return size, launcher.size
    return 1, ""


def _number(variable: str) -> int | None:
    """What a variable holds; None where it is not set, or is no number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def is_launched() -> bool:
    """Whether a launcher started this process as a rank, be it the only one."""
    return any(
        launcher.makes_ranks and launcher.rank in os.environ for launcher in LAUNCHERS
    )


def is_under_mpirun() -> bool:
    """Whether Open MPI's mpirun started this process, whose signals come in its own order."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


def over_gloo() -> bool:
    """Whether ranks meet at the address that horovodrun gives for Gloo."""
    return _GLOO_ADDRESS in os.environ


def in_mpi_world() -> bool:
    """Whether mpirun or `srun --mpi=pmix` started this process."""
    if over_gloo():
        return False
    return any(
        launcher.makes_mpi_world and launcher.rank in os.environ
        for launcher in LAUNCHERS
    )


def is_lone_task_of_srun() -> bool:
    """Whether srun started this process and others which know nothing of each other."""
    ranks, _ = launched_ranks()
    return (
        "SLURM_STEP_ID" in os.environ
        and ranks > 1
        and not (over_gloo() or in_mpi_world())
    )


def launch_fault() -> str:
    """An error's text where variables say that there are ranks, and there are none; else empty."""
    return _left_of_a_launch() or _launched_by_others()


def _launched_by_others() -> str:
    """Where another kind of launcher started several processes: each would train alone."""
    ranks, _ = launched_ranks()
    if is_launched() or ranks > 1:
        # srun's own variables come first: its tasks may have those of PMI too.
        return ""
    counts = {"TF_CONFIG": _tasks_of_tensorflow(), "SM_HOSTS": _hosts_of_sagemaker()}
    for rank, size in _OTHERS:
        if _number(rank) is not None:
            counts[size] = _number(size) or 1
    for variable, count in counts.items():
        if count > 1:
            return (
                f"{variable} says that {count} processes or hosts belong together, and their "
                "launcher makes no ranks here: each would work alone. To run several ranks: "
                "launch/hosts.sh, horovodrun, mpirun, or srun --mpi=pmix. To run this process "
                f"alone: unset {variable}"
            )
    return ""


def _tasks_of_tensorflow() -> int:
    """How many processes TensorFlow's own strategies would have, by TF_CONFIG."""
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))["cluster"]
        return sum(len(addresses) for addresses in cluster.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 1


def _hosts_of_sagemaker() -> int:
    """How many hosts SageMaker started, each with a process of this program."""
    try:
        hosts = json.loads(os.environ.get("SM_HOSTS", "[]"))
    except (ValueError, RecursionError):
        return 1
    return len(hosts) if isinstance(hosts, list) else 1


def _left_of_a_launch() -> str:
    prefixes: tuple[str, ...] = ()
    for launcher in LAUNCHERS:
        prefixes += launcher.of_a_rank
    left = sorted(name for name in os.environ if name.startswith(prefixes))
    if not left or _launcher_is_there():
        return ""
    return (
        f"{left[0]}={os.environ[left[0]]} says that this process is one of several ranks, but no "
        f"launcher started it. To run alone: unset {' '.join(left)}. To run several ranks: "
        "launch/hosts.sh, horovodrun or mpirun, from a new shell"
    )


def _launcher_is_there() -> bool:
    """Whether the launcher that this process's variables name may be there: nothing shows that its
    port is closed."""
    places = []
    for name, value in os.environ.items():
        if name == _GLOO_ADDRESS:
            places.append((value, os.environ.get(_GLOO_PORT, "")))
        elif name.startswith("PMIX_SERVER_URI"):  # 12.0;tcp4://127.0.0.1:4000
            host, _, port = value.rpartition("//")[2].rpartition(":")
            places.append((host, port))
        elif name.startswith("PMI_"):
            return True
    return not all(_is_closed(host, port) for host, port in places)


def _is_closed(host: str, port: str) -> bool:
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # it may only be slow, or be no address of TCP
        return False
    return False
