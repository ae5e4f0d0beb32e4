"""Settings of how gradients travel between ranks."""

from __future__ import annotations

from hvdkit.settings.fields import Room, setting


class ReductionSettings(Room):
    """Sending gradients"""

    reduce_backend: str = setting(
        "auto", "backend that the gradients must use", choices=("auto", "gloo", "mpi", "nccl")
    )
    compression: str = setting(
        "none", "send gradients in 16 bits", choices=("none", "fp16", "bf16")
    )
    gradient_groups: int = setting(
        0, "merge gradients into this many messages; 0: Horovod fuses them by arrival", low=0
    )
    pack_bytes: int = setting(0, "pack gradients of up to this many bytes together; 0: off", low=0)
    pack_count: int = setting(16, "largest number of gradients in one pack", low=1)

    def check(self) -> None:
        if self.compression == "bf16" and (self.pack_bytes or self.gradient_groups):
            raise ValueError("--compression=bf16 packs gradients by itself: leave out grouping")
        if self.pack_bytes and self.gradient_groups:
            raise ValueError("--pack_bytes and --gradient_groups are two ways to group: choose one")

    def without_effect(self) -> dict[str, str]:
        return {} if self.pack_bytes else {"pack_count": "--pack_bytes=0"}
