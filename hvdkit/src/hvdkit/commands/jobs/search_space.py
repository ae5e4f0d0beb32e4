"""What `hvdkit sweep` searches: a flagfile, and ranges and choices of its settings."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdkit import settings as settings_lib
from hvdkit.settings import Settings, fields, flagfiles, typed

_NUMBERS = {"int": (int, "whole numbers"), "float": (float, "numbers")}
_BATCH = {"global_batch_size", "batch_per_rank"}  # a flagfile may hold one of them


class SearchSpace(NamedTuple):
    """What is searched."""

    base: list[tuple[str, str]]  # names and lines of the flagfile
    flags: dict[str, str]  # texts by name, as given
    # For each swept flag: the two ends of its range as numbers, or its choices as texts.
    values: dict[str, list]

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Flags of a trial, in which swept ones have these values."""
        return [
            f"--{name}={value}" for name, value in (self.flags | {**values}).items()
        ]

    def flagfile(self, values: Mapping[str, object]) -> list[str]:
        """Lines of a flagfile that trains as a trial with these values does."""
        replaced = {*self.flags, "run_dir"}
        if replaced & _BATCH:
            replaced |= _BATCH
        lines = []
        for name, line in self.base:
            if name not in replaced and name.removeprefix("no") not in replaced:
                lines.append(line)
        for name, value in (self.flags | {**values}).items():
            lines.append(f"--{name}={typed.written(value)}")
        return lines


def search_space(base: Path, words: Sequence[str]) -> SearchSpace:
    """Raises ValueError where a trial could not be started; both ends of a range are tried."""
    kind = settings_lib.of_project()
    flagfile = f"--flagfile={typed.written(base, is_path=True)}"
    lines = [(flag.name, flag.text()) for flag in flagfiles.expand([flagfile], ())]
    flags: dict[str, str] = {}
    swept: dict[str, list] = {}
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals or name in ("run_dir", "flagfile"):
            raise ValueError(
                f"{word}: give settings as --NAME=VALUES; --folder is for all runs"
            )
        field = fields.of(kind).get(name)
        values = _values(name, text, fields.kind(field) if field else "")
        flags[name] = text
        swept.pop(name, None)  # the last one counts
        if len(values) > 1:
            swept[name] = values
    space = SearchSpace(lines, flags, swept)

    settings = _tried(space, flagfile, kind)
    if not swept:
        raise ValueError(
            "nothing to search: give a range, --base_lr=1e-4:1e-2:log, or a choice"
        )
    if not settings.eval_every:
        raise ValueError(
            "--eval_every=0 makes no evaluations, by which trials are compared"
        )
    if settings.resume not in ("auto", "never"):
        raise ValueError(
            f"--resume={settings.resume}: a trial resumes its own run alone; --init_from= takes "
            "first weights from another"
        )
    for name in ("dry_run", "find_lr", "benchmark"):
        if getattr(settings, name):
            raise ValueError(f"--{name} gives no score to compare: leave it out")
    return space


def _tried(space: SearchSpace, flagfile: str, kind: type[Settings]) -> Settings:
    """Parses each swept value once, the others at their first; returns the last settings."""
    first = {name: values[0] for name, values in space.values.items()}
    trials = [first]
    for name, values in space.values.items():
        trials += [first | {name: value} for value in values]
    for trial in trials:
        command = ["sweep", flagfile, *space.words(trial), "--run_dir=trial"]
        settings = settings_lib.parse(command, kind)
    return settings


def _values(name: str, text: str, kind: str) -> list:
    """Both ends of a range, as numbers; or all values, as texts."""
    if kind not in _NUMBERS or ":" not in text:
        return text.split(",")
    number, numbers = _NUMBERS[kind]
    low, _, high = text.removesuffix(":log").partition(":")
    with contextlib.suppress(ValueError):
        ends = [number(low), number(high)]
        if ends[0] < ends[1] and (ends[0] > 0 or not text.endswith(":log")):
            return ends
    raise ValueError(
        f"--{name}={text} is no range: write {numbers} as LOW:HIGH or, above 0, LOW:HIGH:log, "
        "with LOW < HIGH"
    )
