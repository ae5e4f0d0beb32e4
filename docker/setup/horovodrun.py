"""horovodrun of this environment: Horovod's own, with a stop that saves. Set-up puts it into bin/.

Horovod's own leaves ranks one second (mpirun) or five (Gloo) to save after Ctrl-C or SIGTERM, and
Gloo's ends with a traceback. Here ranks get SIGUSR1, as from launch/hosts.sh: they save, however
long it takes, and end with exit code 75. A second Ctrl-C ends everything at once: 130.
"""

import argparse
import codecs
import contextlib
import ctypes
import errno
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WRONG_USE, SAVED, NOT_NOW, NOT_FOUND, ENDED_BY_CTRL_C = 2, 75, 76, 127, 130
# Codes of ranks that a request ended before they had a handler: there is nothing yet to save.
TOO_EARLY = {128 + number for number in REQUESTS}
# SIGINTs this close together, in seconds, are one: make passes the terminal's on.
ONE_PRESS = 0.5
# Seconds in which ranks that do not listen yet may end by mpirun's own means.
STARTING = 5
# What another horovodrun's ranks have, which Horovod would take for its own.
OF_A_RANK = re.compile(
    r"HOROVOD_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|GLOO_RENDEZVOUS_.*)"
)
# What srun and mpirun give their processes, as launch/hosts.sh has it. A user's OMPI_MCA_* stay; in
# a rank of launch/hosts.sh its own are in their places.
OF_A_LAUNCH = re.compile(r"(PMIX|ORTE|OMPI_(MCA_(orte|ess)|[A-LN-Z][A-Z]*))_.*")
OF_HOSTS_SH = re.compile(r"LAUNCH_ID|(PMIX|ORTE|OMPI)_.*")
PR_SET_PDEATHSIG = 1
execve = os.execve  # Horovod calls become_mpirun by its name


class Stop:
    """Passes requests to stop on to the ranks of a launcher, which is a child of this process."""

    def __init__(self, launcher: int) -> None:
        self.asked = False
        self.came_too_early = False  # no rank had a handler yet
        self._launcher = launcher
        self._passed_to_mpirun = 0  # how often
        self._pressed: float | None = None  # when Ctrl-C came first
        for number in REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._hear)
        signal.signal(signal.SIGALRM, self._pass_on)

    def _hear(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._pressed is not None and now - self._pressed > ONE_PRESS:
                self._kill()
            self._pressed = self._pressed or now
        if self.asked:
            return
        self.asked = True
        if number in (signal.SIGINT, signal.SIGTERM):
            again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            start = "\n" if os.isatty(2) else ""  # the terminal shows ^C
            text = f"{start}stopping after this step: saving, then ending{again}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
        self._pass_on()

    def _pass_on(self, *_: object) -> None:
        """SIGUSR1 to the ranks here; all learn of it. Else to mpirun, for ranks of other hosts."""
        listeners = [process for process in self._processes() if listens(process)]
        ranks = [process for process in listeners if is_rank(process)]
        for process in ranks or listeners:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        if not listeners and not self._passed_to_mpirun:
            self._end()
        elif listeners and not ranks:
            self._wait_for_ranks(listeners)

    def _wait_for_ranks(self, listeners: list[psutil.Process]) -> None:
        """mpirun had no rank yet, or has them on other hosts, where saving has no limit."""
        self._passed_to_mpirun += 1
        if self._passed_to_mpirun <= STARTING:
            signal.alarm(1)
        elif not any(names_other_hosts(process) for process in listeners):
            self._end()

    def _end(self) -> None:
        """Ends a launcher that has no rank to save: its process group is it and mpirun."""
        self.came_too_early = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher, signal.SIGTERM)

    def _kill(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        os._exit(ENDED_BY_CTRL_C)

    def _processes(self) -> list[psutil.Process]:
        """The launcher first, which would print messages about the end of the others."""
        try:
            launcher = psutil.Process(self._launcher)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.Error:
            return []


def listens(process: psutil.Process) -> bool:
    """Whether it has a handler for SIGUSR1."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:  # it has ended
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def is_rank(process: psutil.Process) -> bool:
    try:
        names = process.environ()
    except psutil.Error:
        return False
    return "HOROVOD_RANK" in names or "OMPI_COMM_WORLD_RANK" in names


def names_other_hosts(mpirun: psutil.Process) -> bool:
    """Whether ranks of it may be on another host: Horovod gives it -H NAME:RANKS,..."""
    try:
        words = mpirun.cmdline()
    except psutil.Error:
        return False
    if "-H" not in words[:-1]:
        return False
    name = socket.gethostname()
    own = {"localhost", "127.0.0.1", name, name.partition(".")[0]}
    hosts = words[words.index("-H") + 1].split(",")
    return any(host.partition(":")[0] not in own for host in hosts)


def built(verbose: bool = False) -> bool:
    """Set-up has tried Gloo and MPI. Horovod would import TensorFlow to ask: seconds, ten lines."""
    return True


def signal_when_alone(number: int) -> None:
    """This process gets the signal where its parent is killed, so that no run is left behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def become_mpirun(shell: str, words: list[str], env: dict[str, str]) -> None:
    """Horovod's `sh -c mpirun ...` without the shell, which would get signals in its stead."""
    signal_when_alone(signal.SIGUSR1)  # mpirun passes it on to the ranks
    execve(shell, [*words[:-1], f"exec {words[-1]}"], env)


def launch() -> None:
    """Horovod's own program, in a process group that Ctrl-C does not reach."""
    os.setpgid(0, 0)
    # As a background process it may print where the terminal stops such (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal_when_alone(signal.SIGTERM)
    from horovod.runner import launch as launcher
    from horovod.runner.common.util import safe_shell_exec

    launcher.gloo_built = built
    launcher.mpi_built = built
    safe_shell_exec.codecs = AnyText
    os.execve = become_mpirun
    parse = launcher.parse_args
    launcher.parse_args = lambda: checked(parse())
    # Its cache is a file in the home folder, which a container may lack, and names hosts as good
    # for an hour.
    sys.argv.insert(1, "--disable-cache")
    try:
        launcher.run_commandline()
    except Exception as error:
        # Over Gloo, the first rank that failed: Horovod has printed its number and code.
        ended = re.search(r"^Exit code: (-?\d+)$", str(error), re.MULTILINE)
        if not ended:
            is_wrong_use = isinstance(error, (ValueError, LookupError, OSError))
            refuse(str(error), WRONG_USE if is_wrong_use else 1)
        sys.exit(exit_code(int(ended[1])))


class AnyText:
    """In place of `codecs` where Horovod reads a rank's output: it may be no UTF-8."""

    @staticmethod
    def getincrementaldecoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
        return partial(codecs.getincrementaldecoder(encoding), errors="replace")


def checked(arguments: argparse.Namespace) -> argparse.Namespace:
    """Horovod's arguments, where it could do nothing with them; over Gloo it ends with 0 then."""
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    command = arguments.command
    if not command and not arguments.check_build:
        refuse("what is to be started? horovodrun -np 2 python train.py")
    if arguments.num_proc is not None and arguments.num_proc < 1:
        refuse(f"-np {arguments.num_proc}: at least one rank")
    hosts = arguments.hosts or arguments.hostfile or arguments.host_discovery_script
    if command and not hosts and not shutil.which(command[0]):
        refuse(f"{command[0]}: no such program", NOT_FOUND)
    if not arguments.use_gloo:
        for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
            if os.environ.get(name, "").lower() == "gloo":
                refuse(f"{name}=gloo needs --gloo: unset it, or start with --gloo")
    return arguments


def exit_code(of_child: int) -> int:
    """A shell's code for a child's, which is negative where a signal ended it."""
    return of_child if of_child >= 0 else 128 - of_child


def refuse(text: str, code: int = WRONG_USE) -> NoReturn:
    print(f"error: horovodrun: {text}", file=sys.stderr)
    sys.exit(code)


def check_temporary_folder() -> None:
    """Open MPI takes none but TMPDIR or /tmp, and ends with many lines; Python finds others."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        is_full = os.access(os.environ.get("TMPDIR", "/tmp"), os.W_OK)
        refuse(
            f"{error.strerror}: make room in one, or name another in TMPDIR (docker: --tmpfs /tmp)",
            NOT_NOW if is_full else WRONG_USE,
        )
    if folder != "/tmp":
        os.environ["TMPDIR"] = folder


def check_shared_memory() -> None:
    """Horovod's own makes locks there, and ends with a traceback where it cannot."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        refuse(
            f"no lock can be made in /dev/shm of {os.uname().nodename}: {error.strerror}: make "
            "room there (df -h /dev/shm), or give the container more (docker: --shm-size 1g)",
            NOT_NOW if error.errno == errno.ENOSPC else WRONG_USE,
        )


@contextlib.contextmanager
def private_folder() -> Iterator[None]:
    """For Open MPI's files. Its usual place, /tmp/ompi.HOST.UID, may be another user's, who could
    have it overwrite any file of this one.

    A process of its own removes it when this one and mpirun have ended, however they did.
    """
    folder = tempfile.mkdtemp(prefix="horovodrun-")
    os.environ.setdefault("OMPI_MCA_orte_tmpdir_base", folder)
    ended, held = os.pipe()
    os.set_inheritable(held, True)
    # Not `read`, which some systems end after some minutes (TMOUT).
    waits = 'trap "" INT TERM HUP USR1; cat >/dev/null; rm -rf "$0"'
    remove = ["sh", "-c", waits, folder]
    quiet = subprocess.DEVNULL  # whoever reads this one's output waits for no other
    remover = subprocess.Popen(
        remove, stdin=ended, stdout=quiet, stderr=quiet, start_new_session=True
    )
    os.close(ended)
    yield
    os.close(held)
    with contextlib.suppress(subprocess.TimeoutExpired):
        remover.wait(ONE_PRESS)


def check_loopback() -> None:
    """Ranks of one host meet by it, and Horovod's own ends with an index out of range."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # sends nothing
    except OSError:
        refuse(
            "this host does not reach itself, at 127.0.0.1: turn its loopback on "
            "(ip link set lo up)"
        )


def hold_streams() -> None:
    """A closed output, or one that nobody reads, ends no run."""
    # Where another project uses this environment.
    with contextlib.suppress(ImportError):
        from hvdkit import streams

        streams.hold()
        streams.never_wait()


def set_environment() -> None:
    """Settings of Open MPI and Horovod; and what was inherited, but is not for these ranks."""
    # Where a parent ignores it, as some daemons do, exit codes of children are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # mpirun lies beside this program, which may be started by its path (cron).
    folders = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{folders}"
    left = [OF_A_RANK]
    if "PMIX_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        # As launch/hosts.sh: srun or mpirun started this program, and its ranks are none of theirs.
        left.append(OF_HOSTS_SH if "LAUNCH_ID" in os.environ else OF_A_LAUNCH)
    for name in list(os.environ):
        if any(pattern.fullmatch(name) for pattern in left):
            del os.environ[name]
    # mpirun's wait before and after SIGTERM; it ends ranks only where one has failed.
    os.environ.setdefault("OMPI_MCA_odls_base_sigkill_timeout", "1")
    # A batch system's variables (SLURM_JOBID), which may be left of another job, name other hosts.
    os.environ.setdefault("OMPI_MCA_ras", "^slurm,tm,lsf,alps,gridengine")
    os.environ.setdefault("OMPI_MCA_plm", "^slurm,tm,lsf,alps")
    # By default Open MPI takes no name of a host with other characters than A-Za-z0-9.-
    os.environ.setdefault("OMPI_MCA_regx", "naive")


def main() -> int:
    hold_streams()
    check_temporary_folder()
    check_shared_memory()
    check_loopback()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # No traceback while Horovod's own starts.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_environment()
    with private_folder():
        launcher = os.fork()
        if launcher == 0:
            launch()
            return 0
        stop = Stop(launcher)
        _, status = os.waitpid(launcher, 0)
    code = exit_code(os.waitstatus_to_exitcode(status))
    if stop.came_too_early and code in (0, 1):  # Horovod's own over Gloo; mpirun
        return SAVED
    return SAVED if stop.asked and code in TOO_EARLY else code


if __name__ == "__main__":
    sys.exit(main())
