"""How a run ends: exit codes, and the one message about it. Imports no TensorFlow."""

import errno
import os
import socket

# Exit codes of a run. Python itself ends with 1 after an uncaught exception.
DONE = 0
BUG = 1
WRONG_USE = 2
DIVERGED = 3
PREEMPTED = 75
NOT_NOW = 76

# Errors of a disk or network that may be away only for a while, and of too many open files.
_PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EBUSY,
    errno.EAGAIN,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EMFILE,
    errno.ENFILE,
)

# Where launchers tell a process its rank: horovodrun, mpirun, PMIx and PMI launchers; and srun,
# also to a job's script, which is rank 0 of nothing.
LAUNCHED = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
RANK_VARIABLES = (*LAUNCHED, "SLURM_PROCID")

_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# What launchers say of each rank; they also say where the launcher is.
_OF_A_RANK = (
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_"),
    *("OMPI_COMM_WORLD_", "PMIX_RANK"),
)
_ANSWER_SECONDS = 2.0  # of a launcher on this host


class GoBack(Exception):
    """All ranks go on from the checkpoint at `path`, and leave out the batches to step `last`."""

    def __init__(self, path: str, last: int) -> None:
        super().__init__(path, last)
        self.path = path
        self.last = last


class NotNow(OSError):
    """A run that cannot start now and may later: what it needs is away, or taken."""


class Stop(Exception):
    """The run ends here, on every rank, with this exit code; `message` is for a person."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def passes(error: object) -> bool:
    """Whether the same start may work later, by an error or its text: it names a disk or network
    that fails, or no space."""
    text = str(error)
    return isinstance(error, NotNow) or any(os.strerror(number) in text for number in _PASSING)


def launch_rank() -> int:
    """This process's rank by its launcher's variables, before Horovod is up; 0 when run alone."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def launched_ranks() -> tuple[int, str]:
    """How many processes the launcher started with this one, and the variable that says so."""
    for name in _SIZE_VARIABLES:
        if name in os.environ:
            return int(os.environ[name]), name
    return 1, ""


def left_of_a_launch() -> str:
    """An error's text where variables of a rank are left of another run; else empty."""
    left = sorted(name for name in os.environ if name.startswith(_OF_A_RANK))
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
        if name == "HOROVOD_GLOO_RENDEZVOUS_ADDR":
            places.append((value, os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")))
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
