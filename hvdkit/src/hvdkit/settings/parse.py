"""From the command line to `Settings`, and back to a flagfile, RUN_DIR/config.cfg.

Paths in flagfiles and defaults are relative to the project (the folder with train.py), whatever
folder the run is started in; paths on the command line are relative to the working folder.
"""

import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.launcher import launch_rank
from hvdkit.logs import join, refuse, say
from hvdkit.settings import absl_flags, fields, flagfiles, project, runs, typed
from hvdkit.settings.all import Settings
from hvdkit.settings.flagfiles import Given

# This file of the project names the settings of its demo.
_DEFAULTS = "configs/default.cfg"


def of_project() -> type[Settings]:
    """The `Settings` of the fork's settings.py, for commands; the engine's where there is none."""
    folder = project.folder()
    if not (folder / "settings.py").is_file() or project.above(folder) != folder:
        return Settings
    project.enter()
    return importlib.import_module("settings").Settings


def of_command(words: Sequence[str]) -> Settings | None:
    """Settings of a training command, as its own project reads it; None if it does not train."""
    found = all_of_command(words)
    return found[0] if found else None


def all_of_command(words: Sequence[str]) -> tuple[Settings, list[Given]] | None:
    """As `of_command`, and with the command's flags that are no settings."""
    names = [Path(word).name for word in words]
    if "train.py" not in names:
        return None
    place = names.index("train.py")
    if fork := project.above(Path(words[place]).resolve().parent):
        project.use(fork)
    try:
        return _read(words[place:], of_project())
    except (ImportError, ValueError):
        return None


def from_command_line(argv: Sequence[str], kind: type[Settings]) -> Settings:
    """`load` at a program's start: rank 0 reports what is wrong, and all exit with 2."""
    try:
        return load(argv, kind)
    except ValueError as error:
        refuse(str(error))


def check(argv: Sequence[str], kind: type[Settings]) -> Settings | None:
    """Refuses wrong flags as `from_command_line` does, before the fork's task is imported.

    Returns the settings, or None for --helpfull.
    """
    try:
        absl_flags.define(kind)
        return None if "--helpfull" in argv else parse(argv, kind)
    except ValueError as error:
        refuse(str(error))


def load(
    argv: Sequence[str], kind: type[Settings], past: Path | None = None
) -> Settings:
    """Settings from `argv`, as `parse` returns them; then absl's FLAGS hold all flags.

    Flags that are no settings are absl's own, or the task's code defines them: so it is imported
    where such a flag is not known yet. --helpfull prints all flags and ends with 0.
    `past`: flagfile of a run that was trained: flags in it that no longer exist become a note.
    """
    absl_flags.define(kind)
    asks_for_help = "--helpfull" in argv
    words = [word for word in argv if word != "--helpfull"]
    settings, others = _read(words, kind, past)
    task = project.folder() / "tasks" / f"{settings.task}.py"
    may_define = asks_for_help or any(
        flag.name not in absl_flags.FLAGS for flag in others
    )
    if may_define and task.is_file():
        importlib.import_module(f"tasks.{settings.task}")
    if asks_for_help:
        absl_flags.end_with_help(absl_flags.FLAGS.get_help())
    for flag in others:
        if flag.name not in absl_flags.FLAGS:
            raise flag.error(
                f"--{flag.name} is a flag of code that --task={settings.task} lacks"
            )
        absl_flags.check(flag)
    absl_flags.take(argv[0], settings, others)
    return settings


def load_values(kind: type[Settings], values: Mapping[str, object]) -> Settings:
    """`load` of values by name instead of a command line; those of a flagfile come first."""
    project.find()
    names = sorted(values, key=lambda name: name != "flagfile")
    flags = [f"--{name}={_text(name, values[name])}" for name in names]
    return load(["load_settings", *flags], kind)


def _text(name: str, value: object) -> str:
    """A value as a flag has it. Raises ValueError for what is none."""
    if hasattr(value, "item"):  # NumPy's numbers have this.
        value = value.item()
    if not isinstance(value, bool | int | float | str | os.PathLike):
        raise ValueError(
            f"{name}={value!r:.99}: give a number, a text, a path, True or False"
        )
    return (
        typed.written(value, is_path=True)
        if isinstance(value, os.PathLike)
        else str(value)
    )


def parse(argv: Sequence[str], kind: type[Settings] = Settings) -> Settings:
    """Settings from `argv` (argv[0] is the program's name); --help prints all and ends with 0.

    A ValueError names the flag and what it takes, and the flagfile and line that it stands in.
    """
    return _read(argv, kind)[0]


def _read(
    argv: Sequence[str], kind: type[Settings], past: Path | None = None
) -> tuple[Settings, list[Given]]:
    """The settings, and the flags that are no settings; --help ends the program."""
    if {"--help", "-h", "-help", "--helpshort"} & set(argv[1:]):
        absl_flags.end_with_help(absl_flags.help_text(argv[0], kind))
    known = fields.of(kind)
    flags = _flags(argv[1:], kind, past)
    others = [flag for flag in flags if flag.name not in known]
    for flag in others:
        absl_flags.check(flag)
    given = [flag for flag in flags if flag.name in known]
    given += _folder_of_run(given)

    came_with_file = _came_with_file(given, str(known["task"].default))
    values = _values(given, known)
    if came_with_file.get("run_dir") == _DEFAULTS:
        # The folder of default.cfg is that of another task's runs.
        own_folder = f"runs/{values['task']}"
        values["run_dir"] = fields.placed(
            known["run_dir"], own_folder, project.folder()
        )
    if _is_of_the_run_itself(given, values["run_dir"]):
        values["resume"] = "auto"
    values[_unused_batch(given, values["batch_per_rank"])] = 0

    settings = kind(**values)
    object.__setattr__(settings, "came_with_file", came_with_file)
    settings = settings.implied()
    settings.check()
    return settings, others


def _values(
    given: Sequence[Given], known: Mapping[str, dataclasses.Field]
) -> dict[str, Any]:
    """The value of each setting: its default, or what its last flag says."""
    folder = project.folder()
    values = {}
    for name, field in known.items():
        values[name] = fields.placed(field, field.default, folder)
    for flag in given:
        values[flag.name] = _value(flag, known[flag.name])
    return values


def _is_of_the_run_itself(given: Sequence[Given], run_dir: str) -> bool:
    """Whether the last --resume stands in the config.cfg of the run that goes on in `run_dir`."""
    files = [flag.file for flag in given if flag.name == "resume"]
    if not files or not files[-1]:
        return False
    return runs.has_begun(files[-1], project.folder() / run_dir)


def _flags(
    words: Sequence[str], kind: type[Settings], past: Path | None
) -> list[Given]:
    """All flags that were given, without those in `past` that no longer exist."""
    switches = absl_flags.beside(kind)
    for name, field in fields.of(kind).items():
        switches[name] = fields.kind(field) == "bool"
    valueless = [name for name, switch in switches.items() if switch]
    valueless += [f"no{name}" for name in valueless]
    flags = flagfiles.expand(words, valueless)
    gone = []
    if past:
        names = {*switches, *valueless}
        gone = [flag for flag in flags if flag.file == past and flag.name not in names]
    if gone and launch_rank() == 0:
        gone_names = join(f"--{flag.name}" for flag in gone)
        say(
            f"note: {past} has flags that no longer exist, which are ignored: {gone_names}"
        )
    return [fields.recognize(flag, switches) for flag in flags if flag not in gone]


def _value(flag: Given, field: dataclasses.Field) -> Any:
    """What the flag says, in the field's type; the folder of a relative path depends on where."""
    try:
        text = flag.path() if fields.is_path(field, flag.value) else flag.value or ""
        value = fields.value(field, text)
    except ValueError as error:
        raise flag.error(str(error)) from None
    return fields.placed(field, value, project.folder() if flag.file else Path.cwd())


def _folder_of_run(given: Sequence[Given]) -> list[Given]:
    """--run_dir of the run that a config.cfg stands for, where that says last where to train."""
    files = {flag.file for flag in given if flag.file}
    configs = {
        file for file in files if runs.CONFIG in (file.name, file.resolve().name)
    }
    deciding = [
        flag for flag in given if flag.name == "run_dir" or flag.file in configs
    ]
    if not deciding or deciding[-1].file not in configs:
        return []
    file = deciding[-1].file
    recorded = [
        flag.path() for flag in deciding if flag.name == "run_dir" and flag.file == file
    ]
    run_dir = runs.run_dir(file, recorded[-1] if recorded else "")
    return (
        [Given("run_dir", typed.written(run_dir, is_path=True), file)]
        if run_dir
        else []
    )


def _came_with_file(given: Sequence[Given], usual_task: str) -> dict[str, str]:
    """`Settings.came_with_file`: of each setting that the user did not choose, the file.

    What default.cfg says is about its demo, so not chosen where --task is another. A run's
    config.cfg holds all settings, so not chosen either. What a later flag sets again is chosen.
    `usual_task`: the task where no flag names one.
    """
    # A setting's last flag is the one that counts.
    deciding = {flag.name: flag for flag in given}
    default_tasks = [
        flag.value for flag in given if flag.name == "task" and flag.is_default
    ]
    demo_task = default_tasks[-1] if default_tasks else usual_task
    is_demo = "task" not in deciding or deciding["task"].value == demo_task
    files = {flag.file for flag in deciding.values() if flag.file}
    run_configs = {
        file for file in files if file.name == runs.CONFIG and runs.folder_of(file)
    }
    file_of = {}
    for name, flag in deciding.items():
        if flag.is_default and not is_demo:
            file_of[name] = _DEFAULTS
        elif flag.file in run_configs:
            file_of[name] = runs.CONFIG
    return file_of


def _unused_batch(given: Sequence[Given], batch_per_rank: int) -> str:
    """Of the two that say how large a batch is: the one that was not given last."""
    chosen = "global_batch_size"
    name_in_file: dict[Path | None, str] = {}
    for flag in given:
        if flag.name not in ("global_batch_size", "batch_per_rank"):
            continue
        chosen = flag.name
        if name_in_file.setdefault(flag.file, flag.name) != flag.name:
            raise flag.error(
                "--global_batch_size and --batch_per_rank both say how large a batch is: leave "
                "one out"
            )
    if chosen == "batch_per_rank" and batch_per_rank:
        return "global_batch_size"
    return "batch_per_rank"


def write(settings: Settings, path: Path) -> None:
    """Writes the settings as a flagfile that reads back to the same, from any working folder.

    Raises ValueError for a text that a line of a flagfile cannot hold.
    """
    lines = [runs.HEADER]
    unused = "global_batch_size" if settings.batch_per_rank else "batch_per_rank"
    for name, field in fields.of(settings).items():
        value = fields.placed(field, getattr(settings, name), Path.cwd())
        if name == unused:
            continue
        if isinstance(value, bool):
            lines.append(f"--{'' if value else 'no'}{name}")
        else:
            fields.value(field, str(value))
            is_path = fields.is_path(field, value)
            lines.append(f"--{name}={typed.written(value, is_path=is_path)}")
    for flag in absl_flags.of_the_fork().values():
        if flag.present:
            lines += [_line(line) for line in flag.serialize().split("\n")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")


def _line(flag: str) -> str:
    """A flag as absl writes it, as a line of a flagfile."""
    name, is_given, value = flag.partition("=")
    return f"{name}={typed.written(value)}" if is_given else flag
