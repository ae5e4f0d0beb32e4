"""What a fork's tests use: real ranks that never hang, and two promises of a task.

from hvdkit import testing

def test_same_weights_on_any_number_of_ranks():
    testing.assert_same_weights("--flagfile=configs/demo.cfg", ranks=(1, 2))

def test_it_learns_one_batch():
    testing.assert_learns_one_batch("--flagfile=configs/demo.cfg")
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hvdkit.settings import project

# When a launch hangs or fails, so many lines of each rank are shown.
_LAST_LINES = 25

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Seconds; where a rank has failed, mpirun waits so long twice.
    "OMPI_MCA_odls_base_sigkill_timeout": "1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a launch ended: the launcher's exit code, and everything that was printed."""

    code: int
    output: str

    def errors(self) -> list[str]:
        """The lines that start with `error:`, whatever rank they come from."""
        return re.findall(
            r"^(?:\[[\d,]+\]<\w+>:)?error: (.*)$", self.output, re.MULTILINE
        )


def launch(
    ranks: int,
    command: list[str],
    backend: str = "",
    *,
    timeout: float = 400,
    env: dict[str, str] | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> Launch:
    """Runs `python COMMAND` in the project on `ranks` ranks and waits for its end.

    Args:
      backend: gloo or mpi (through horovodrun), mpirun, or alone (no launcher, one rank). By
        default what starts soonest: MPI's ranks get in each other's way where they are more than
        cores.
      kill_when: SIGKILL everything as soon as this is true; the code is then -9.
    Raises:
      AssertionError: it was killed after `timeout` seconds; with each rank's last lines.
    """
    backend = backend or {1: "alone", 2: "mpirun"}.get(ranks, "gloo")
    prefix = {
        "alone": [],
        "mpirun": ["mpirun", "-np", str(ranks), "--bind-to", "none", "--tag-output"],
        "gloo": ["horovodrun", "--gloo", "--disable-cache", "-np", str(ranks)],
        "mpi": ["horovodrun", "--mpi", "--disable-cache", "-np", str(ranks)],
    }[backend]
    words = [*prefix, sys.executable, *[str(word) for word in command]]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words,
            # A test knows its project, wherever pytest was started.
            cwd=project.of_caller() or project.folder(),
            env=os.environ | ENVIRONMENT | (env or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(process, timeout, kill_when)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_session(process.pid)
        log.seek(0)
        output = log.read()
    if code is None:
        raise AssertionError(
            f"{words} hung: killed after {timeout} s\n{last_lines(output)}"
        )
    return Launch(code, output)


def assert_same_weights(
    *flags: str, ranks: Sequence[int] = (1, 2), steps: int = 3
) -> None:
    """Trains a few steps in float64 on each number of ranks: the weights differ by rounding alone.

    Batch norm normalizes over all ranks (--bn_sync=full), or weights would depend on their number.

    Raises:
      AssertionError: a run did not end well, or a weight differs by more than 1e-9 of the largest
        of its array; the message names it. An array counts as no smaller than a millionth of the
        largest weight: what attention adds to all keys has no gradient but rounding. A weight that
        is not float64, as Keras's factors of LoRA never are, may differ by 100 times its type's
        rounding.
    """
    first, *others = ranks
    expected = _weights(flags, first, steps)
    least_scale = max(1e-6 * max(map(_largest, expected.values())), 1e-30)
    for count in others:
        weights = _weights(flags, count, steps)
        for name, value in expected.items():
            difference = _relative_difference(value, weights[name], least_scale)
            assert difference < _rounding(value.dtype), (
                f"{name} on {count} ranks differs from {first}: {difference:.1e}"
            )


def _relative_difference(
    one: np.ndarray, other: np.ndarray, least_scale: float
) -> float:
    """Of two arrays, by the largest finite value of the first; infinity where they must be equal.

    Equal must be what is no float, as a seed's state or a mask, and the places of infinities.
    """
    if one.dtype.kind != "f":
        return 0.0 if np.array_equal(one, other) else math.inf
    is_finite = np.isfinite(one)
    if not np.array_equal(one[~is_finite], other[~is_finite], equal_nan=True):
        return math.inf
    scale = max(_largest(one), least_scale)
    difference = np.abs(one[is_finite] - other[is_finite])
    return float(np.max(difference, initial=0.0)) / scale


def _rounding(dtype: np.dtype) -> float:
    """Relative difference of weights of this type that rounding may make in a few steps."""
    if dtype.kind != "f":
        return 1e-9
    return max(1e-9, 100 * float(np.finfo(dtype).eps))


def _largest(array: np.ndarray) -> float:
    """The largest finite value of floats; 0 of others, as a seed's state, which are no weights."""
    if array.dtype.kind != "f":
        return 0.0
    return float(np.max(np.abs(array[np.isfinite(array)]), initial=0.0))


def assert_learns_one_batch(*flags: str, steps: int = 50, factor: float = 0.5) -> None:
    """Takes train.py's step on the first batch again and again: its loss falls to `factor`.

    Raises:
      AssertionError: it did not end well, or the loss did not fall enough.
    """
    code = f"from hvdkit import testing; testing.print_losses({steps}, {list(flags)!r})"
    losses = json.loads(_ended(1, ["-c", code]).splitlines()[-1])
    start = losses[0]
    end = float(np.mean(losses[-3:]))
    assert end < factor * start, (
        f"the loss went from {start:.4g} to {end:.4g} in {steps} steps"
    )


def print_losses(steps: int, flags: Sequence[str]) -> None:
    """The losses of `steps` steps on the first batch, as JSON; in a process of its own."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import train
    from hvdkit import settings as settings_lib
    from hvdkit.logs import refuse
    from hvdkit.ranks.interrupt import StopSignal
    from hvdkit.run.loop import Run
    from hvdkit.run.main import with_ranks

    if not hasattr(train, "make_step"):
        refuse(
            "train.py has no make_step(run): assert_learns_one_batch takes the step from there"
        )
    words = ["train.py", "--resume=never", *flags, "--steps_per_call=1"]
    settings = settings_lib.from_command_line(words, settings_lib.of_project())

    def work(world, stop_signal: StopSignal) -> None:
        run = Run(settings, world, stop_signal=stop_signal)
        step = run.make_step(train.make_step)
        batch = run.parts.feed.next()
        print(
            json.dumps([float(step(batch)["loss"]) for _ in range(steps)]), flush=True
        )

    sys.exit(with_ranks(settings, work))


def _weights(flags: Sequence[str], ranks: int, steps: int) -> dict[str, np.ndarray]:
    """Variables of the model after a short run, by name."""
    with tempfile.TemporaryDirectory() as folder:
        _ended(
            ranks,
            [
                "train.py",
                *flags,
                "--precision=float64",
                "--bn_sync=full",
                "--deterministic",
                "--eval_every=0",
                "--early_stop_evals=0",
                "--virtual_ranks=0",
                "--nojit",
                # They round sums otherwise on another number of ranks.
                "--compression=none",
                "--gradient_groups=0",
                "--pack_bytes=0",
                "--warmup_steps=0",
                f"--run_dir={folder}/run",
                f"--num_steps={steps}",
            ],
        )
        path = Path(folder) / "run" / "checkpoints" / f"step-{steps:08d}" / "state.npz"
        with np.load(path) as file:
            return {
                name: file[name] for name in file.files if name.startswith("model/")
            }


def _ended(ranks: int, command: list[str]) -> str:
    """The output of a launch. Raises AssertionError, with its error, where it did not end well."""
    ended = launch(ranks, command)
    assert ended.code == 0, "\n".join(ended.errors()) or last_lines(ended.output)
    return ended.output


def last_lines(output: str) -> str:
    """The last lines of each rank, by the tags that the launchers put before them."""
    lines_of: dict[str, list[str]] = {}
    for line in output.splitlines():
        tag = re.match(r"\[(?:\d+,)?(\d+)\]<", line)
        speaker = f"rank {tag[1]}" if tag else "launcher"
        lines_of.setdefault(speaker, []).append(line)
    parts = []
    for speaker, lines in sorted(lines_of.items()):
        parts += [f"--- {speaker}", *lines[-_LAST_LINES:]]
    return "\n".join(parts)


def _wait(
    process: subprocess.Popen, timeout: float, kill_when: Callable[[], bool] | None
) -> int:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if kill_when and kill_when():
            kill_session(process.pid)
        time.sleep(0.05)
    return process.wait(0)  # raises TimeoutExpired


def kill_session(session: int) -> None:
    """Kills whatever is left of a launch, also ranks that have process groups of their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended by itself
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)
