"""Settings of a step: batch, optimizer, precision, batch norm, learning rate, reduction."""

import math

from hvdkit.settings import fields
from hvdkit.settings.fields import Room, numbers, setting

# The largest float32 below 1 is 1 - 6e-8: beyond that a decay of 1 would be computed with.
_UNDER_1 = 1 - 1e-7


class TrainSettings(Room):
    """Batch size, optimizer, precision, batch norm"""

    global_batch_size: int = setting(32, "samples a step, over all ranks", low=1)
    batch_per_rank: int = setting(
        0, "samples a step on each rank, not over all; 0: off", low=0
    )
    accumulation_steps: int = setting(
        1, "micro-batches in a step (gradient accumulation)", low=1
    )

    optimizer: str = setting(
        "sgd", "update rule", choices=("sgd", "adam", "adamw", "lamb", "lars")
    )
    momentum: float = setting(0.9, "momentum of sgd and lars", low=0, below=_UNDER_1)
    nesterov: bool = setting(False, "Nesterov's momentum, of sgd and lars")
    adam_beta1: float = setting(
        0.9, "decay of the gradient's average: adam, adamw, lamb", low=0, below=_UNDER_1
    )
    adam_beta2: float = setting(
        0.999, "decay of its square's average: adam, adamw, lamb", low=0, below=_UNDER_1
    )
    adam_epsilon: float = setting(
        1e-7, "added to the root: adam, adamw, lamb", low=1e-37
    )
    weight_decay: float = setting(
        0.0, "L2 of kernels; adamw, lamb, lars: their own decay", low=0
    )
    clip_norm: float = setting(
        0.0, "clip gradients to this global norm; 0: no clipping", low=0
    )
    ema_decay: float = setting(
        0.0, "decay of a moving average of weights; 0: none", low=0, below=_UNDER_1
    )

    precision: str = setting(
        "float32",
        "type of computation; weights are float32, or float64",
        choices=("float32", "float64", "bfloat16", "float16"),
    )
    jit: bool = setting(
        False, "compile a step with XLA, as two programs; slower on CPUs"
    )
    jit_cache: str = setting(
        "", "folder of compiled programs for later starts", path=True
    )
    steps_per_call: int = setting(
        1,
        "steps in one call, for small models; a stop comes up to twice so many later",
        low=1,
        below=101,
    )
    bn_sync: str = setting(
        "mean",
        "across ranks: mean or moments sync moving statistics, full normalizes the global batch",
        choices=("mean", "moments", "full", "none"),
    )
    bn_sync_every: int = setting(
        0, "steps between syncs; 0: only when they are read", low=0
    )
    max_bad_steps: int = setting(
        3,
        "after this many skipped steps (NaN) in a row go back; the second time end",
        low=1,
    )

    def check(self) -> None:
        name = "batch_per_rank" if self.batch_per_rank else "global_batch_size"
        if getattr(self, name) % self.accumulation_steps:
            raise ValueError(
                f"--{name}={getattr(self, name)} is not a multiple of "
                f"--accumulation_steps={self.accumulation_steps}: micro-batches must be of one size"
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "--nesterov is a kind of momentum, and --momentum is 0: leave out one"
            )
        if self.jit and self.bn_sync == "full":
            raise ValueError(
                "--jit compiles the forward and backward pass as one program, and with "
                "--bn_sync=full each batch norm waits for the other ranks within it: "
                "leave out one of them"
            )

    def without_effect(self) -> dict[str, str]:
        found = {}
        if self.optimizer not in ("sgd", "lars"):
            found["momentum"] = f"--optimizer={self.optimizer}"
        if self.bn_sync in ("full", "none"):
            found["bn_sync_every"] = f"--bn_sync={self.bn_sync}"
        return found


class ScheduleSettings(Room):
    """Steps and learning rate: base * (1 - step/N) ** power by default"""

    # Below 10**8: checkpoints are named by eight digits of the step.
    num_steps: int = setting(
        1000,
        "steps of the run (N of the schedule); 30epochs, or --epochs=30: passes over the data",
        low=1,
        below=10**8,
        steps=True,
    )
    base_lr: float = setting(0.01, "learning rate after warm-up", above=0)
    lr_policy: str = setting(
        "poly", "schedule", choices=("poly", "cosine", "step", "constant", "plateau")
    )
    power: float = setting(0.9, "power of the poly policy", low=0)
    end_lr: float = setting(0.0, "learning rate at the last step (poly, cosine)", low=0)
    warmup_steps: int = setting(0, "steps of linear warm-up", low=0, steps=True)
    lr_boundaries: str = setting(
        "0.5,0.75", "step policy: fractions of num_steps, comma-separated"
    )
    lr_gamma: float = setting(0.1, "step policy: factor at each boundary", above=0)
    plateau_factor: float = setting(
        0.1,
        "plateau policy: factor where the main metric stands still",
        above=0,
        below=1,
    )
    plateau_patience: int = setting(
        10, "evaluations without a better main metric, then", low=1
    )
    plateau_min_delta: float = setting(
        1e-4, "by how much a better main metric is better", low=0
    )
    plateau_cooldown: int = setting(
        0,
        "plateau policy: once the rate is lowered, evaluations count again from this one on, as "
        "in Keras (0: the next)",
        low=0,
    )
    plateau_min_lr: float = setting(0.0, "plateau policy: lowest learning rate", low=0)
    lr_scaling: str = setting(
        "none",
        "multiply base_lr by the ranks, or their root",
        choices=("none", "linear", "sqrt"),
    )

    def check(self) -> None:
        if self.lr_policy in ("poly", "cosine") and self.end_lr > self.base_lr:
            raise ValueError(
                f"--end_lr={self.end_lr} is greater than --base_lr={self.base_lr}"
            )
        if self.lr_policy == "step":
            _ = self.boundary_steps
        if self.lr_policy == "plateau" and self.plateau_min_lr > self.base_lr:
            raise ValueError(
                f"--plateau_min_lr={self.plateau_min_lr} is greater than --base_lr={self.base_lr}"
            )

    def lr_factor(self, size: int) -> float:
        """What base_lr is multiplied by on `size` ranks.

        linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014 (arXiv:1404.5997). Both
        are for a batch that grows with the number of ranks; with a fixed global batch use none.
        """
        return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[
            self.lr_scaling
        ]

    @property
    def boundary_steps(self) -> list[int]:
        """Steps at which the step policy lowers the rate, from fractions of num_steps."""
        fractions = numbers(
            self,
            "lr_boundaries",
            "rising fractions between 0 and 1, with commas between them: 0.5,0.75",
            fits=lambda values: (
                values[0] > 0 and values[-1] < 1 and values == sorted(set(values))
            ),
        )
        return [round(fraction * self.num_steps) for fraction in fractions]

    def notes(self) -> list[str]:
        note = (
            f"--warmup_steps={self.warmup_steps} is more than --num_steps={self.num_steps}: "
            "the learning rate does not reach --base_lr"
        )
        return [note] if self.warmup_steps > self.num_steps else []

    def without_effect(self) -> dict[str, str]:
        names = fields.of(ScheduleSettings)
        read_by = {
            "poly": {"power", "end_lr"},
            "cosine": {"end_lr"},
            "step": {"lr_boundaries", "lr_gamma"},
            "plateau": {name for name in names if name.startswith("plateau_")},
        }
        unread = set().union(*read_by.values()) - read_by.get(self.lr_policy, set())
        return dict.fromkeys(sorted(unread), f"--lr_policy={self.lr_policy}")


class ReductionSettings(Room):
    """Sending gradients"""

    reduce_backend: str = setting(
        "auto",
        "backend that the gradients must use",
        choices=("auto", "gloo", "mpi", "nccl"),
    )
    compression: str = setting(
        "none", "gradients in 16 bits", choices=("none", "fp16", "bf16")
    )
    gradient_groups: int = setting(
        0, "messages for all gradients; 0: fused by arrival", low=0
    )
    pack_bytes: int = setting(
        0, "pack gradients of up to this many bytes together; 0: off", low=0
    )
    pack_count: int = setting(16, "largest number of gradients in one pack", low=1)

    def check(self) -> None:
        if self.compression == "bf16" and (self.pack_bytes or self.gradient_groups):
            raise ValueError(
                "--compression=bf16 packs gradients by itself: leave out grouping"
            )
        if self.pack_bytes and self.gradient_groups:
            raise ValueError(
                "--pack_bytes and --gradient_groups are two ways to group: choose one"
            )

    def without_effect(self) -> dict[str, str]:
        return {} if self.pack_bytes else {"pack_count": "--pack_bytes=0"}
