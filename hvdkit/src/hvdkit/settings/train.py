"""Settings of a step: batch, optimizer, precision, batch norm."""

from __future__ import annotations

from hvdkit.settings.fields import Room, setting


class TrainSettings(Room):
    """Batch size, optimizer, precision, batch norm"""

    global_batch_size: int = setting(32, "samples a step, over all ranks", low=1)
    batch_per_rank: int = setting(
        0, "samples a step on each rank, instead of global_batch_size; 0: not used", low=0
    )
    accumulation_steps: int = setting(1, "micro-batches in a step (gradient accumulation)", low=1)

    optimizer: str = setting("sgd", "update rule", choices=("sgd", "adam", "adamw", "lamb"))
    momentum: float = setting(0.9, "momentum of sgd", low=0, below=1)
    weight_decay: float = setting(
        0.0, "L2 of kernels (sgd, adam) or decoupled decay of kernels (adamw, lamb)", low=0
    )
    clip_norm: float = setting(0.0, "clip gradients to this global norm; 0: no clipping", low=0)
    ema_decay: float = setting(
        0.0,
        "keep a moving average of the weights (EMA) with this decay and evaluate it; 0: none",
        low=0,
        below=1,
    )

    precision: str = setting(
        "float32",
        "type of computation; weights are float32, or float64 with float64",
        choices=("float32", "float64", "bfloat16", "float16"),
    )
    jit: bool = setting(
        False, "compile forward and backward pass with XLA; several times slower on CPUs"
    )
    bn_sync: str = setting(
        "mean",
        "batch norm across ranks: mean or moments combine the moving statistics, full normalizes "
        "with the global batch",
        choices=("mean", "moments", "full", "none"),
    )
    bn_sync_every: int = setting(
        0, "steps between syncs of the moving statistics; 0: only when they are read", low=0
    )
    max_bad_steps: int = setting(
        3,
        "steps with NaN or infinity are skipped; after this many in a row, go back to a checkpoint "
        "and leave out the batches since; the second time end with exit code 3",
        low=1,
    )

    def check(self) -> None:
        name = "batch_per_rank" if self.batch_per_rank else "global_batch_size"
        if getattr(self, name) % self.accumulation_steps:
            raise ValueError(
                f"--{name}={getattr(self, name)} is not a multiple of "
                f"--accumulation_steps={self.accumulation_steps}: micro-batches must be of one size"
            )
        if self.jit and self.bn_sync == "full":
            raise ValueError(
                "--jit compiles the computation of one rank, and --bn_sync=full communicates "
                "between ranks inside it: use another --bn_sync or leave out --jit"
            )

    def without_effect(self) -> dict[str, str]:
        found = {}
        if self.optimizer != "sgd":
            found["momentum"] = f"--optimizer={self.optimizer}"
        if self.bn_sync in ("full", "none"):
            found["bn_sync_every"] = f"--bn_sync={self.bn_sync}"
        return found
