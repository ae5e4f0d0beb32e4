"""Stands for a training program where a launcher is tested.

A step takes a fifth of a second. Each third one is saved, and the one after which a signal stops
it. settings.py has the flags. --fail=STEP:HOW[:once] ends the last rank at a step (+3: so many
after each start) by an exit code or a signal. FOLDER/told-RANK lists the signals of a rank that
has ended.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path


def rank_and_size() -> tuple[int, int]:
    for names in (
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ):
        if all(name in os.environ for name in names):
            return int(os.environ[names[0]]), int(os.environ[names[1]])
    return 0, 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--slow_rank", type=int, default=-1)
    parser.add_argument("--fail", default="")
    options = parser.parse_args()
    rank, size = rank_and_size()
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: options.deaf or told.append(number))
    checkpoints = options.run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    wait_for_all(options.run_dir, rank, size)
    step = max((int(path.name[5:]) for path in checkpoints.iterdir()), default=0)
    print(f"rank {rank} of {size} begins at step {step}", flush=True)
    first_step = step
    while step < options.steps and not told:
        time.sleep(0.2)
        step += not options.mute
        print(f"step {step}", flush=True)
        if rank == 0 and step and (told or step % 3 == 0):
            (checkpoints / f"step-{step:08}").mkdir(exist_ok=True)
        if rank == size - 1:
            fail(options, step - first_step if options.fail.startswith("+") else step)
    if rank == options.slow_rank:
        time.sleep(2)
    if told:
        (options.run_dir / f"told-{rank}").write_text(f"{told}")
    (options.run_dir / f"here-{rank}").unlink()
    print(f"rank {rank} ends at step {step}, told {told}", flush=True)
    return 75 if told else 0


def wait_for_all(run_dir: Path, rank: int, size: int) -> None:
    """Waits as a run's first exchange does: from here on each rank can hear a signal."""
    (run_dir / f"here-{rank}").touch()
    end = time.monotonic() + 30
    while not all((run_dir / f"here-{other}").exists() for other in range(size)):
        if time.monotonic() > end:
            sys.exit("not all ranks came")
        time.sleep(0.02)


def fail(options: argparse.Namespace, step: int) -> None:
    """Ends this rank where --fail says so."""
    if not options.fail:
        return
    fail_step, ending, *once = options.fail.split(":")
    mark = options.run_dir / "failed"
    if step != int(fail_step) or (once and mark.exists()):
        return
    mark.touch()
    if ending.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, ending))
    os._exit(int(ending))


if __name__ == "__main__":
    sys.exit(main())
