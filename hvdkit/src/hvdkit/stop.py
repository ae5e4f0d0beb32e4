"""How a run ends: exit codes, and the one message about it. Imports no TensorFlow."""

import errno
import os

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
    errno.EKEYEXPIRED,  # of Kerberos, for NFS
)


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


def passes_for_a_run(error: object) -> bool:
    """As `passes`, of a disk on which this run has written: one that fails becomes read-only."""
    return passes(error) or os.strerror(errno.EROFS) in str(error)


def passes(error: object) -> bool:
    """Whether the same start may work later, by an error or its text: it names a disk or network
    that fails, or no space."""
    text = str(error)
    return isinstance(error, NotNow) or any(
        os.strerror(number) in text for number in _PASSING
    )
