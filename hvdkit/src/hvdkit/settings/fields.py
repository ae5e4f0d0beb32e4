"""A setting: a field of a dataclass that is a flag too. Its limits, its paths, its help."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from hvdkit.settings.flagfiles import Given

Fields = Mapping[str, dataclasses.Field]

# Whole numbers end up in int32 (seeds) and in products that must fit int64 (steps x batch).
_INT_LIMIT = 2**31

_PARSERS = {
    "int": flags.IntegerParser(),
    "float": flags.FloatParser(),
    "bool": flags.BooleanParser(),
    "str": flags.ArgumentParser(),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}

# Names that other programs have for a setting.
_ELSEWHERE = {
    "base_lr": "lr learning_rate initial_lr init_lr max_lr",
    "batch_per_rank": "batch_per_gpu local_batch_size per_device_train_batch_size",
    "bn_sync": "sync_bn",
    "class_weights": "weights",
    "clip_norm": "clip grad_clip max_grad_norm gradient_clip_norm",
    "data_dir": "data dataset dataset_dir data_path data_root",
    "accumulation_steps": "grad_accum gradient_accumulation_steps",
    "flagfile": "config config_file cfg",
    "global_batch_size or --batch_per_rank": "batch batch_size train_batch_size",
    "jit": "xla jit_compile compile",
    "init_from": "pretrained checkpoint restore init_checkpoint",
    "lr_policy": "schedule lr_schedule scheduler lr_scheduler",
    "mirror": "flip hflip random_flip horizontal_flip",
    "model": "arch backbone network",
    "num_steps": "epochs num_epochs max_epochs steps max_steps train_steps num_train_steps",
    "precision": "fp16 bf16 amp mixed_precision dtype",
    "run_dir": "output_dir model_dir out_dir save_dir logdir log_dir workdir",
    "seed": "random_seed rng_seed",
    "warmup_steps": "warmup warmup_epochs",
    "weight_decay": "wd l2",
}


def setting(
    default: Any,
    help: str,
    *,
    heading: str = "",
    choices: tuple = (),
    low: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    path: bool = False,
    words: tuple = (),
) -> Any:
    """A field with its help and limits.

    Args:
      heading: this field and those after it stand under it in --help.
      choices, low, above, below: one of `choices`; low <= value, above < value < below.
      path: it names a file or folder, unless it is one of `words`.
    """
    if type(default) is int:
        below = min(below, _INT_LIMIT)
    meta = {"help": help, "heading": heading, "choices": choices, "path": path}
    meta |= {"words": words, "low": low, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=meta)


def value(field: dataclasses.Field, text: str) -> Any:
    """What `text` says for the field, in the field's type.

    Raises:
      ValueError: it is not of that type or beyond the field's limits; the message names both.
    """
    try:
        found = _PARSERS[field.type].parse(text)
    except (ValueError, TypeError):
        found = None
    if found is None or not _fits(field, found):
        kind = _KINDS.get(field.type, "one line of text without spaces at its ends")
        words = _limits(field) if field.metadata["choices"] else f"{kind}{_limits(field)}"
        raise ValueError(f"--{field.name}={text}: must be {words}")
    return found


def recognize(flag: Given, fields: Fields) -> Given:
    """The flag under its setting's name and with a value, which a switch may leave out.

    Raises:
      ValueError: there is no such setting (the message names the nearest), or its value is missing.
    """
    name, value = flag.name, flag.value
    off = name.removeprefix("no")
    if name not in fields and name != off and off in fields and fields[off].type == "bool":
        if value is not None:
            raise flag.error(f"--{name} takes no value: write --{off}={value} or --{name}")
        name, value = off, "false"
    if name not in fields:
        raise flag.error(f"there is no flag --{name}{_nearest(name, fields)} (--help lists all)")
    if value is None and fields[name].type == "bool":
        value = "true"
    if value is None:
        raise flag.error(f"--{name} needs a value: write --{name}=VALUE")
    return dataclasses.replace(flag, name=name, value=value)


def placed(field: dataclasses.Field, value: Any, folder: Path, project: Path) -> Any:
    """The value; a relative path as it is where the working folder is the project, else absolute.

    Args:
      folder: what a relative path is relative to.
    """
    if not field.metadata["path"] or not value or value in field.metadata["words"]:
        return value
    if value == "~" or value.startswith("~/"):
        return os.path.expanduser(value)  # bash leaves --name=~/folder as it is
    return value if Path.cwd() == project else str(folder / value)


def _nearest(name: str, fields: Fields) -> str:
    plain = name.replace("-", "_").lower()
    for meant, names in _ELSEWHERE.items():
        if plain in names.split():
            return f": did you mean --{meant}?"
    known = [*fields, "flagfile", *(f"no{n}" for n, f in fields.items() if f.type == "bool")]
    close = difflib.get_close_matches(plain, known, n=1)
    return f": did you mean --{close[0]}?" if close else ""


def _fits(field: dataclasses.Field, value: Any) -> bool:
    meta = field.metadata
    if meta["choices"]:
        return value in meta["choices"]
    if isinstance(value, str):
        return value == value.strip() and not set(value) & set("\n\r\0")
    low, above, below = meta["low"], meta["above"], meta["below"]
    return math.isfinite(value) and low <= value and above < value < below


def _limits(field: dataclasses.Field) -> str:
    if choices := field.metadata["choices"]:
        return "one of " + ", ".join(c or "(empty)" for c in choices)
    words = {"low": "at least", "above": "greater than", "below": "less than"}
    bounds = {w: field.metadata[k] for k, w in words.items() if math.isfinite(field.metadata[k])}
    return "".join(f", {w} {int(b) if b == int(b) else b}" for w, b in bounds.items())


def help_text(program: str, fields: Fields) -> str:
    """All flags under their headings, in at most 100 columns."""
    lines = [
        f"usage: {program} [--flagfile=FILE] [--name=value ...]",
        "A flagfile has one flag per line. If a flag is given twice, the later one counts.",
    ]
    for field in fields.values():
        if field.metadata["heading"]:
            lines += ["", f"{field.metadata['heading']}:"]
        flag = f"  --{'[no]' if field.type == 'bool' else ''}{field.name}"
        room = {"width": 100, "subsequent_indent": " " * 32, "break_on_hyphens": False}
        lines += textwrap.wrap(f"{flag:<31} {_help(field)}", **room)
    return "\n".join(lines)


def _help(field: dataclasses.Field) -> str:
    limits = _limits(field).removeprefix(", ").removesuffix(f"less than {_INT_LIMIT}")
    default = str(field.default).lower() if field.type == "bool" else field.default
    notes = [limits.removesuffix(", "), f"default {default}" if default != "" else ""]
    notes = "; ".join(note for note in notes if note)
    return field.metadata["help"] + (f" ({notes})" if notes else "")
