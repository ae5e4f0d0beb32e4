"""A setting: a field of a dataclass that is a flag too. Its limits, its paths, its rooms."""

import contextlib
import dataclasses
import difflib
import fractions
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, dataclass_transform

from absl import flags

from hvdkit.logs import refuse
from hvdkit.settings import project, typed
from hvdkit.settings.flagfiles import Given

Fields = Mapping[str, dataclasses.Field]

# Whole numbers end up in int32 (seeds) and in products that must fit int64 (steps x batch).
INT_LIMIT = 2**31

PARSERS = {
    "int": flags.IntegerParser(),
    "float": flags.FloatParser(),
    "bool": flags.BooleanParser(),
    "str": flags.ArgumentParser(),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}

_LIMITS = {"low": "at least", "above": "greater than", "below": "less than"}
# Names that other programs have for a setting.
_ELSEWHERE = {
    "base_lr": "lr learning_rate initial_lr init_lr max_lr",
    "batch_per_rank": "batch_per_gpu local_batch_size per_device_train_batch_size",
    "clip_norm": "clip grad_clip max_grad_norm gradient_clip_norm",
    "data_dir": "data dataset dataset_dir data_path data_root",
    "accumulation_steps": "grad_accum gradient_accumulation_steps",
    "flagfile": "config config_file cfg",
    "global_batch_size or --batch_per_rank": "batch batchsize batch_size bs train_batch_size",
    "jit": "xla jit_compile compile",
    "init_from": "pretrained checkpoint restore init_checkpoint",
    "lr_policy": "schedule lr_schedule scheduler lr_scheduler",
    "model": "arch backbone network",
    "epochs": "num_epochs max_epochs num_train_epochs n_epochs",
    "num_steps": "steps max_steps train_steps num_train_steps",
    "precision": "fp16 bf16 amp mixed_precision dtype",
    "run_dir": "output_dir model_dir out_dir save_dir logdir log_dir workdir",
    "weight_decay": "wd l2",
}

# Flags that are no settings and are read before them.
_TAKEN = {
    "flagfile",
    "h",
    "undefok",
    *(f"help{form}" for form in ("", "short", "full", "xml")),
}


class Epochs(int):
    """Steps that were given in epochs: more than any number, until the data are counted."""

    count: float

    def __new__(cls, count: float) -> Self:
        self = super().__new__(cls, 10**8 - 1)
        self.count = count
        return self

    def __str__(self) -> str:
        return f"{self.count:g}epochs"

    def steps(self, samples: int, batch: int, *, step: int = 0, used: int = 0) -> int:
        """The step at which these epochs of `samples` are through; 1 at least.

        `batch`: samples a step from `step` on; the steps before had `used` samples.
        """
        wanted = fractions.Fraction(self.count) * samples
        exact = step + (wanted - used) / batch
        if wanted < used:  # The steps so far count as if all had been of one size.
            exact = wanted * step / used
        return max(1, math.floor(exact + fractions.Fraction(1, 2)))


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    low: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    path: bool = False,
    words: tuple = (),
    steps: bool = False,
    every: bool = False,
) -> Any:
    """A field with its help and limits.

    `steps`: a step of the run, `every`: steps from one to the next; both take epochs too: 2epochs.
    `choices`, `low`, `above`, `below`: one
    of `choices`; low <= value, above < value < below. `path`: it names a file or folder, and is no
    URL, unless it is one of `words`.
    """
    if type(default) is int:
        below = min(below, INT_LIMIT)
    meta = {
        "help": help,
        "choices": choices,
        "path": path,
        "words": words,
        "low": low,
        "above": above,
        "below": below,
        "steps": steps or every,
        "every": every,
    }
    return dataclasses.field(default=default, metadata=meta)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(setting,)
)
class Room:
    """Settings that belong together; a subclass becomes a frozen dataclass by being one.

    The first line of its docstring is its heading in --help. A wrong field is refused as a flag is.
    """

    def __init_subclass__(cls) -> None:
        # A dataclass without a docstring gets its signature as one.
        cls.__doc__ = cls.__doc__ or "Settings of this project"
        inherited: dict[str, dataclasses.Field] = {}
        try:
            for base in cls.__bases__:
                if issubclass(base, Room) and base is not Room:
                    inherited |= of(base)
            _check_fields(cls, inherited)
            for name in inherited.keys() & inspect.get_annotations(cls).keys():
                setattr(cls, name, _narrowed(vars(cls)[name], inherited[name]))
            dataclasses.dataclass(frozen=True, kw_only=True)(cls)
            for name, field in of(cls).items():
                if not _is_setting(field, kind(field)):
                    raise ValueError(
                        f"{name} is a field of another dataclass: write it in {cls.__name__}, as "
                        f'{name}: {kind(field)} = setting(DEFAULT, "help")'
                    )
                value(field, str(field.default))
        except (TypeError, ValueError) as error:
            refuse(f"{cls.__module__}.{cls.__qualname__}: {error}")

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other."""

    def notes(self) -> list[str]:
        """Sentences about surprising settings; most runs have none."""
        return []

    def without_effect(self) -> dict[str, str]:
        """Settings that the others leave without effect, by name: the one that does it."""
        return {}


def _narrowed(
    field: dataclasses.Field, engines: dataclasses.Field
) -> dataclasses.Field:
    """A field with another default: the engine's limits hold beside its own."""
    narrow = field.metadata
    wide = engines.metadata
    metadata = {name: narrow[name] or wide[name] for name in wide}
    metadata["below"] = min(narrow["below"], wide["below"])
    for name in ("low", "above"):
        metadata[name] = max(narrow[name], wide[name])
    return dataclasses.field(default=field.default, metadata=metadata)


def _check_fields(cls: type[Room], inherited: Fields) -> None:
    """Raises ValueError for a field that cannot be a flag or hides what the engine uses."""
    new_kinds = {
        name: _name(annotation)
        for name, annotation in inspect.get_annotations(cls).items()
    }
    kinds = {name: kind(field) for name, field in inherited.items()}
    for name in kinds:
        if name in vars(cls) and name not in new_kinds:
            raise ValueError(f'write {name}: {kinds[name]} = setting(DEFAULT, "help")')
    for name, new_kind in new_kinds.items():
        is_known = name in kinds
        if name in _TAKEN or (
            not is_known and any(hasattr(base, name) for base in cls.__bases__)
        ):
            raise ValueError(
                f"{name} has another meaning: choose another name for the field"
            )
        right_kind = kinds.get(name, new_kind)
        if new_kind != right_kind or not _is_setting(vars(cls).get(name), new_kind):
            raise ValueError(
                f'write {name}: {right_kind} = setting(DEFAULT, "help"), without @dataclass; its '
                "type is bool, int, float or str, in the default too, and only numbers have limits"
            )
    kinds |= new_kinds
    for name in kinds:
        if kinds[name] == "bool" and f"no{name}" in kinds:
            raise ValueError(
                f"--no{name} turns {name} off: choose another name for no{name}"
            )


def _is_setting(field: Any, kind: str) -> bool:
    """Whether `setting` made a field, of this type, and its limits and default fit the type."""
    if kind not in PARSERS or "help" not in getattr(field, "metadata", {}):
        return False
    has_limits = any(
        math.isfinite(field.metadata.get(limit, math.inf)) for limit in _LIMITS
    )
    if has_limits and kind in ("bool", "str"):
        return False
    default_kind = _name(type(field.default))
    return default_kind == kind or (kind == "float" and default_kind == "int")


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def kind(field: dataclasses.Field) -> str:
    """int, float, bool or str; annotations are texts or types."""
    return _name(field.type)


def of(settings: Any) -> Fields:
    """The fields of a class of settings or of an instance, by name."""
    return {field.name: field for field in dataclasses.fields(settings)}


def numbers(
    settings: Room, name: str, must_be: str, *, fits: Callable[..., bool]
) -> list[float]:
    """The numbers in a text with commas between them; a ValueError ends with `must_be`."""
    text = getattr(settings, name)
    with contextlib.suppress(ValueError):
        values = [float(part) for part in text.split(",")]
        if all(math.isfinite(number) for number in values) and fits(values):
            return values
    raise ValueError(f"--{name}={text!r} must be {must_be}")


def rooms(settings: type[Room]) -> dict[type[Room], list[dataclasses.Field]]:
    """Fields by the class that has them first, in the order of --help."""
    fields_of: dict[type[Room], list[dataclasses.Field]] = {}
    for field in of(settings).values():
        owners = [
            room
            for room in settings.__mro__
            if field.name in inspect.get_annotations(room)
        ]
        fields_of.setdefault(owners[-1], []).append(field)
    return fields_of


def value(field: dataclasses.Field, text: str) -> Any:
    """The value that `text` stands for, in the field's type and limits; else ValueError."""
    if is_path(field, text) and field.name != "data_dir":
        try:
            typed.check_is_no_url(text)
        except ValueError as error:
            raise ValueError(f"--{field.name}={text}: {error}") from None
    epochs = field.metadata["steps"] and re.fullmatch(r"(\d+\.?\d*|\.\d+)epochs?", text)
    if epochs and float(epochs[1]) > 0:
        return Epochs(float(epochs[1]))
    try:
        parsed = PARSERS[kind(field)].parse(text)
    except (ValueError, TypeError):
        parsed = None
    if parsed is None or not _fits(field, parsed):
        raise ValueError(f"--{field.name}={text}: must be {_must_be(field)}")
    return parsed


def _must_be(field: dataclasses.Field) -> str:
    words = _KINDS.get(
        kind(field), "one line of text, no spaces at its ends, no other flag"
    )
    if field.metadata["choices"]:
        words = ""
    words += limits(field)
    if field.metadata["steps"]:
        words += ", or epochs such as 2epochs"
    return words


def recognize(flag: Given, switches: Mapping[str, bool]) -> Given:
    """The flag under its own name and with a value; `switches`: whether each flag needs none."""
    name = flag.name
    value = flag.value
    if name == "epochs" and name not in switches and value is not None:
        if not re.fullmatch(r"[\d.]+", value):
            raise flag.error(
                f"--epochs={value}: give a number of epochs, as --epochs=30 or 0.5"
            )
        name = "num_steps"
        value = f"{value}epochs"
    off = name.removeprefix("no")
    if name not in switches and name != off and switches.get(off):
        if value is not None:
            raise flag.error(
                f"--{name} takes no value: write --{off}={value} or --{name}"
            )
        name = off
        value = "false"
    if name not in switches:
        raise flag.error(
            f"there is no flag --{name}{_nearest(name, switches)} (--help lists all)"
        )
    if value is None and switches[name]:
        value = "true"
    if value is None:
        raise flag.error(f"--{name} needs a value: write --{name}=VALUE")
    return dataclasses.replace(flag, name=name, value=value)


def is_path(field: dataclasses.Field, value: Any) -> bool:
    """Whether a value of this setting names a file or folder, or where data are."""
    if not field.metadata["path"] or not value or value in field.metadata["words"]:
        return False
    return field.name != "label_map" or ":" not in value


def placed(field: dataclasses.Field, value: Any, folder: Path) -> Any:
    """The value; a path relative to `folder` is made absolute outside the project."""
    if not is_path(field, value) or (field.name == "data_dir" and "://" in value):
        return value
    if value == "~" or value.startswith("~/"):
        # In --name=~/folder bash leaves the ~ as it is.
        return os.path.expanduser(value)
    return value if Path.cwd() == project.folder() else str(folder / value)


def _nearest(name: str, switches: Mapping[str, bool]) -> str:
    plain = name.replace("-", "_").lower()
    for meant, names in _ELSEWHERE.items():
        if plain in names.split():
            return f": did you mean --{meant}?"
    known = [
        *switches,
        "flagfile",
        *(f"no{name}" for name, switch in switches.items() if switch),
    ]
    close = difflib.get_close_matches(plain, known, n=1)
    return f": did you mean --{close[0]}?" if close else ""


def _fits(field: dataclasses.Field, value: Any) -> bool:
    meta = field.metadata
    if meta["choices"]:
        return value in meta["choices"]
    if isinstance(value, str):
        holds_flag = re.search(r"\s--\w", value)  # A flagfile has one flag a line.
        return (
            not holds_flag and value == value.strip() and not set(value) & set("\n\r\0")
        )
    is_in_range = meta["low"] <= value and meta["above"] < value < meta["below"]
    return math.isfinite(value) and is_in_range


def limits(field: dataclasses.Field) -> str:
    """A field's limits in words: "one of a, b", or ", at least 1, less than 10"."""
    if choices := field.metadata["choices"]:
        return "one of " + ", ".join(str(choice) or "(empty)" for choice in choices)
    words = ""
    for name, relation in _LIMITS.items():
        bound = field.metadata[name]
        if math.isfinite(bound):
            words += f", {relation} {int(bound) if bound == int(bound) else bound}"
    return words
