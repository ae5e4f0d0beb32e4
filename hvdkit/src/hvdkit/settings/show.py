"""--help: the flags that most people set first, then all others by room."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap

from absl import flags

from hvdkit.settings import fields
from hvdkit.settings.fields import Room
from hvdkit.stop import launch_rank

_FIRST = ("task", "model", "data_dir", "run_dir", "num_classes", "image_size")
_FIRST += ("global_batch_size", "num_steps", "base_lr", "precision")


def shown(program: str, kind: type[Room]) -> str:
    """All settings under their headings, in at most 100 columns."""
    own = fields.of(kind)
    lines = [
        f"usage: {program} [--flagfile=FILE] [--name=value ...]",
        "A flagfile has one flag per line. If a flag is given twice, the later one counts.",
        "--helpfull also lists flags that are no settings: absl's, and those of flags.DEFINE_*.",
    ]
    parts = {"Most people set these first": [own[name] for name in _FIRST]}
    for room, found in fields.rooms(kind).items():
        heading = (room.__doc__ or room.__name__).splitlines()[0].rstrip(".")
        parts[heading] = [field for field in found if field.name not in _FIRST]
    for heading, found in parts.items():
        lines += ["", f"{heading}:", *map(_line, found)]
    return "\n".join(lines)


def print_help(program: str, kind: type[Room]) -> None:
    _print(shown(program, kind))


def print_full_help() -> None:
    """All that is defined on absl's FLAGS, by module."""
    _print(flags.FLAGS.get_help())


def described(field: dataclasses.Field) -> str:
    """Help, limits, default."""
    limits = fields.limits(field).removeprefix(", ")
    limits = limits.removesuffix(f"less than {fields.INT_LIMIT}").removesuffix(", ")
    default = str(field.default).lower() if fields.kind(field) == "bool" else field.default
    notes = [limits, f"default {default}" if default != "" else ""]
    notes = "; ".join(note for note in notes if note)
    return field.metadata["help"] + (f" ({notes})" if notes else "")


def _line(field: dataclasses.Field) -> str:
    flag = f"  --{'[no]' if fields.kind(field) == 'bool' else ''}{field.name}"
    space = {"width": 100, "subsequent_indent": " " * 32, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(f"{flag:<31} {described(field)}", **space))


def _print(text: str) -> None:
    if launch_rank() != 0:
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `--help | head` reads no more; Python would complain when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
