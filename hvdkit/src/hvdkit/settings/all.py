"""`Settings`: every setting of a run, inherited from the rooms, and what they mean together.

A setting is added in one place, here or in a fork's settings.py: its name, type, default, help and
limits. The command-line flags, --help, flagfiles and RUN_DIR/config.cfg are made from that.
"""

import copy
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from hvdkit.settings import fields
from hvdkit.settings.data import DataSettings, EvaluationSettings, TaskSettings
from hvdkit.settings.fields import Room
from hvdkit.settings.project import folder
from hvdkit.settings.run import (
    CheckpointSettings,
    ObserveSettings,
    RanksSettings,
    RunSettings,
)
from hvdkit.settings.train import ReductionSettings, ScheduleSettings, TrainSettings


class Settings(
    # A dataclass takes fields from its last base first.
    RanksSettings,
    ReductionSettings,
    ObserveSettings,
    CheckpointSettings,
    EvaluationSettings,
    TrainSettings,
    ScheduleSettings,
    DataSettings,
    TaskSettings,
    RunSettings,
):
    """All settings; a fork subclasses it to add its own"""

    # Settings that the user did not choose, as a file gives them along with others; by name: that
    # file. It is configs/default.cfg, where the task is another than its own, or a run's config.cfg
    # (parse.py finds them). Where a task does not read one, that is a note and no refusal.
    came_with_file = MappingProxyType[str, str]({})

    # Whether --batch_per_rank was given, which `for_ranks` resolves.
    grows_with_ranks = False

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other. A fork may extend it."""
        for room in _ROOMS:
            room.check(self)
        if self.lr_policy == "plateau" and not self.eval_every:
            raise ValueError(
                "--lr_policy=plateau goes by evaluations, and --eval_every=0: set it"
            )
        # This check comes first: virtual ranks set --deterministic, which nobody may have given.
        if self.virtual_ranks:
            self._check_virtual()
        if self.deterministic and (self.pack_bytes or self.gradient_groups > 1):
            raise ValueError(
                "--deterministic needs one group: leave out --pack_bytes, --gradient_groups"
            )

    def untrained(self) -> Self:
        """The settings where nothing is trained, so that batch norm asks for no number of ranks."""
        return self.changed(bn_sync="mean") if self.bn_sync == "full" else self

    def for_ranks(self, size: int) -> Self:
        """The settings of `size` ranks with --global_batch_size; ValueError if they do not fit."""
        virtual = self.virtual_ranks
        if 0 < virtual < size:
            raise ValueError(
                f"--virtual_ranks={virtual} cannot be split over {size} ranks: start at most "
                f"{virtual}"
            )
        if self.bn_sync == "full" and virtual not in (0, size):
            raise ValueError(
                f"--bn_sync=full needs each of --virtual_ranks={virtual} on a rank of its own: "
                f"start {virtual} ranks, or use --bn_sync=mean"
            )
        if not self.batch_per_rank:
            return self
        field = fields.of(self)["global_batch_size"]
        global_batch_size = fields.value(field, str(self.batch_per_rank * size))
        resolved = self.changed(global_batch_size=global_batch_size, batch_per_rank=0)
        resolved.check()
        return resolved

    def for_samples(self, samples: int, *, step: int = 0, used: int = 0) -> Self:
        """The settings with steps for what was given in epochs of `samples` training samples.

        `step`, `used`: where the run goes on, and the samples that it has used by then.
        """
        known = fields.of(self)
        counted = self
        for name, epochs in vars(self).items():
            if not isinstance(epochs, fields.Epochs):
                continue
            if known[name].metadata["every"]:
                steps = epochs.steps(samples, self.global_batch_size)
            else:
                steps = epochs.steps(
                    samples, self.global_batch_size, step=step, used=used
                )
            counted = counted.changed(**{name: fields.value(known[name], str(steps))})
        return counted

    def implied(self) -> Self:
        """The settings with those that --virtual_ranks cannot do without."""
        if not self.virtual_ranks:
            return self
        # Kernels on CPUs split their sums by threads, so their number must be the same.
        return self.changed(deterministic=True, cpu_threads=self.cpu_threads or 1)

    def changed(self, **values: Any) -> Self:
        """The settings with other values."""
        settings = dataclasses.replace(self, **values)
        if self.came_with_file:
            object.__setattr__(settings, "came_with_file", self.came_with_file)
        if self.grows_with_ranks or self.batch_per_rank:
            object.__setattr__(settings, "grows_with_ranks", True)
        return settings

    def watched(self) -> Self:
        """A copy whose `_reads` names the settings that were asked of it."""
        view = copy.copy(self)
        object.__setattr__(view, "_reads", set())
        return view

    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if "_reads" in attributes:
            attributes["_reads"].add(name)
        return object.__getattribute__(self, name)

    def not_defaults(self) -> Mapping[str, object]:
        """Settings with another value than their default, by name."""
        values = {}
        for name, field in fields.of(self).items():
            default = getattr(type(self), name)
            value = getattr(self, name)
            if value not in (default, fields.placed(field, default, folder())):
                values[name] = value
        return values

    def notes(self) -> list[str]:
        texts = []
        for room in _ROOMS:
            texts += room.notes(self)
        if self.lr_policy == "plateau":
            # The first evaluation sets the score that the others must beat, the last one ends the
            # run.
            lowering = (self.num_steps - 1) // self.eval_every - 1
            if lowering < self.plateau_patience:
                texts.append(
                    f"--plateau_patience={self.plateau_patience}: the learning rate is never "
                    f"lowered: with --eval_every={self.eval_every}, {max(lowering, 0)} evaluations "
                    "can count"
                )
        if self.virtual_ranks:
            texts.append(
                f"--virtual_ranks sets --deterministic --cpu_threads={self.cpu_threads}"
            )
        changed = self.not_defaults()
        ignored = []
        for name, cause in self.without_effect().items():
            if name in changed:
                ignored.append(f"--{name}={changed[name]} ({cause})")
        if ignored:
            texts.append(f"without effect here: {', '.join(ignored)}")
        return texts

    def without_effect(self) -> dict[str, str]:
        """Settings without effect, by name: the flag that takes it from them."""
        causes: dict[str, str] = {}
        for room in _ROOMS:
            causes |= room.without_effect(self)
        if self.deterministic:
            causes["bn_sync_every"] = "--deterministic"
        return causes

    def _check_virtual(self) -> None:
        virtual = self.virtual_ranks
        for name in (
            "compression",
            "pack_bytes",
            "gradient_groups",
            "batch_per_rank",
            "lr_scaling",
        ):
            if getattr(self, name) not in ("none", 0):
                raise ValueError(
                    f"--virtual_ranks={virtual} cannot be used with --{name}: leave out --{name}"
                )
        if self.bn_sync not in ("mean", "full"):
            raise ValueError(
                f"--virtual_ranks={virtual} needs --bn_sync=mean instead of {self.bn_sync}"
            )
        micro_batch = self.global_batch_size // self.accumulation_steps
        if micro_batch < virtual:
            raise ValueError(
                f"--virtual_ranks={virtual}: each needs a sample, and a micro-batch "
                f"(--global_batch_size / --accumulation_steps) has {micro_batch}: make it larger "
                "or use fewer virtual ranks"
            )


_ROOMS: tuple[type[Room], ...] = Settings.__bases__
