"""Signals to the launcher that a command has started; orphans that process 1 must reap."""

import contextlib
import os
import signal
import subprocess

import psutil

from hvdkit.logs import complain


def tell(child: subprocess.Popen, number: int) -> None:
    """Signals the launcher, also within a script or the shell that horovodrun becomes.

    A shell that runs a script does not pass a signal on: it would end alone, and what it has
    started would run on with nobody watching. So on each branch of the tree the first process that
    handles the signal gets it. Where none does, all get it.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(child.pid)
        # A shell handles SIGINT for itself; whoever handles SIGTERM is told of SIGINT too.
        handled = signal.SIGTERM if number == signal.SIGINT else number
        for process in _handling(top, handled) or [top, *top.children(recursive=True)]:
            passed = number
            if process.pid != child.pid and number == signal.SIGTERM:
                # After SIGTERM mpirun kills its ranks within a second.
                passed = signal.SIGUSR1
            try:
                os.kill(process.pid, passed)
            except ProcessLookupError:
                continue
            except PermissionError:
                complain(
                    f"process {process.pid} is another user's (sudo?): it cannot be told to stop"
                )


def _handling(process: psutil.Process, number: int) -> list[psutil.Process]:
    """The first process on each branch that handles the signal."""
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if _handles(process.pid, number):
            return [process]
        found = []
        for child in process.children():
            found += _handling(child, number)
        return found
    return []


def _handles(pid: int, number: int) -> bool:
    """Whether a process catches the signal, or blocks it to wait for it, as srun does."""
    # A name is cut at 15 bytes, which may be within a character.
    with open(f"/proc/{pid}/status", errors="replace") as status:
        masks = dict(line.split(":\t", 1) for line in status if line.startswith("Sig"))
    handled = int(masks["SigCgt"], 16) | int(masks["SigBlk"], 16)
    return bool(handled >> (number - 1) & 1)


def reap_orphans(child: subprocess.Popen) -> None:
    """As the first process of a container: ends the entries of processes whose parents are gone.

    They are given to process 1, and would stay in the table as zombies. The child's own end is left
    to who waits for it. Call it where no other process is waited for in another thread.
    """
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == child.pid:
                return
            os.waitpid(ended.si_pid, 0)
