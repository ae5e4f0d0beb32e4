"""Settings of the ranks: their devices, and what happens where one hangs or drifts."""

from __future__ import annotations

from hvdkit.settings.fields import Room, setting


class RanksSettings(Room):
    """Ranks and devices"""

    device: str = setting(
        "auto",
        "auto: one GPU for each rank, or CPUs if the host has no GPU",
        choices=("auto", "gpu", "cpu"),
    )
    cpu_threads: int = setting(
        0, "CPU threads of a rank; 0: its share of the cores, 1 with --virtual_ranks", low=0
    )
    stall_shutdown_s: int = setting(
        1800, "end the run after waiting this many seconds for a rank that hangs; 0: never", low=0
    )
    drift_every: int = setting(
        1000, "steps between checks that all ranks hold the same weights; 0: at the end", low=0
    )
    drift: str = setting(
        "stop", "if weights differ: stop, or take those of rank 0", choices=("stop", "repair")
    )
