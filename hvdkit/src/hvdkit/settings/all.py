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
from hvdkit.settings.run import CheckpointSettings, ObserveSettings, RanksSettings, RunSettings
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

    # Settings that nobody asked for, by name: the flagfile that gives them (parse.py).
    unasked = MappingProxyType({})

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other. A fork may extend it."""
        for room in _ROOMS:
            room.check(self)
        if self.lr_policy == "plateau" and not self.eval_every:
            raise ValueError("--lr_policy=plateau goes by evaluations, and --eval_every=0: set it")
        if self.virtual_ranks:  # first: it brings --deterministic, which nobody may have given
            self._check_virtual()
        if self.deterministic and (self.pack_bytes or self.gradient_groups > 1):
            raise ValueError(
                "--deterministic needs one group: leave out --pack_bytes, --gradient_groups"
            )

    def for_ranks(self, size: int) -> Self:
        """The settings of `size` ranks with --global_batch_size; ValueError if they do not fit."""
        flag = f"--virtual_ranks={self.virtual_ranks}"
        virtual = self.virtual_ranks
        if 0 < virtual < size:
            raise ValueError(f"{flag} cannot be split over {size} ranks: start at most {virtual}")
        if self.bn_sync == "full" and virtual not in (0, size):
            raise ValueError(
                f"--bn_sync=full needs each of {flag} on a rank of its own: start {virtual} ranks, "
                "or use --bn_sync=mean"
            )
        if not self.batch_per_rank:
            return self
        whole = fields.value(fields.of(self)["global_batch_size"], str(self.batch_per_rank * size))
        resolved = self.changed(global_batch_size=whole, batch_per_rank=0)
        resolved.check()
        return resolved

    def for_samples(self, samples: int, *, step: int = 0, used: int = 0) -> Self:
        """The settings with steps for what was given in epochs of `samples` training samples.

        `step`, `used`: where the run goes on, and the samples that it has used by then.
        """
        known = fields.of(self)
        found = {}
        for name, given in vars(self).items():
            if not isinstance(given, fields.Epochs):
                continue
            if known[name].metadata["every"]:
                steps = given.steps(samples, self.global_batch_size)
            else:
                steps = given.steps(samples, self.global_batch_size, step=step, used=used)
            found[name] = fields.value(known[name], str(steps))
        return self.changed(**found)

    def implied(self) -> Self:
        """The settings with those that --virtual_ranks cannot do without."""
        threads = self.cpu_threads or 1  # kernels on CPUs split their sums by threads
        needed = {"deterministic": True, "cpu_threads": threads} if self.virtual_ranks else {}
        return self.changed(**needed)

    def changed(self, **values: Any) -> Self:
        """The settings with other values."""
        made = dataclasses.replace(self, **values)
        if self.unasked:
            object.__setattr__(made, "unasked", self.unasked)
        return made

    def watched(self) -> Self:
        """A copy whose `_reads` names the settings that were asked of it."""
        view = copy.copy(self)
        object.__setattr__(view, "_reads", set())
        return view

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if "_reads" in own:
            own["_reads"].add(name)
        return object.__getattribute__(self, name)

    def not_defaults(self) -> Mapping[str, object]:
        """Settings with another value than their default, by name."""
        found = {}
        for name, field in fields.of(self).items():
            default = getattr(type(self), name)
            if getattr(self, name) not in (default, fields.placed(field, default, folder())):
                found[name] = getattr(self, name)
        return found

    def notes(self) -> list[str]:
        found = [note for room in _ROOMS for note in room.notes(self)]
        if self.lr_policy == "plateau":
            # The first sets the score that the others must beat, the last one ends the run.
            lowering = (self.num_steps - 1) // self.eval_every - 1
            if lowering < self.plateau_patience:
                found.append(
                    f"--plateau_patience={self.plateau_patience}: the learning rate is never "
                    f"lowered: with --eval_every={self.eval_every}, {max(lowering, 0)} evaluations "
                    "can count"
                )
        if self.virtual_ranks:
            found.append(f"--virtual_ranks sets --deterministic --cpu_threads={self.cpu_threads}")
        changed = self.not_defaults()
        unread = self.without_effect()
        ignored = [f"--{n}={changed[n]} ({why})" for n, why in unread.items() if n in changed]
        return found + ([f"without effect here: {', '.join(ignored)}"] if ignored else [])

    def without_effect(self) -> dict[str, str]:
        """Of all rooms, and of --deterministic."""
        found = {name: why for room in _ROOMS for name, why in room.without_effect(self).items()}
        return found | ({"bn_sync_every": "--deterministic"} if self.deterministic else {})

    def _check_virtual(self) -> None:
        flag = f"--virtual_ranks={self.virtual_ranks}"
        without = ("compression", "pack_bytes", "gradient_groups", "batch_per_rank", "lr_scaling")
        for name in without:
            if getattr(self, name) not in ("none", 0):
                raise ValueError(f"{flag} cannot be used with --{name}: leave out --{name}")
        if self.bn_sync not in ("mean", "full"):
            raise ValueError(f"{flag} needs --bn_sync=mean instead of {self.bn_sync}")
        micro = self.global_batch_size // self.accumulation_steps
        if micro < self.virtual_ranks:
            raise ValueError(
                f"{flag}: each needs a sample, and a micro-batch (--global_batch_size / "
                f"--accumulation_steps) has {micro}: make it larger or use fewer virtual ranks"
            )


_ROOMS: tuple[type[Room], ...] = Settings.__bases__
