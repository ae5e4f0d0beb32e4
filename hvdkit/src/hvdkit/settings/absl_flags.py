"""Settings as flags of absl: `FLAGS.num_steps` holds what was resolved; --help, --helpfull.

Other flags may stand beside them: some of absl's own, and those that a fork defines with
`flags.DEFINE_string("name", ...)`. hvdkit.settings.parse reads the words, because absl takes a line
`num_steps=5` of a flagfile in silence; absl is handed what it found.
"""

import dataclasses
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags, logging  # noqa: F401 (absl's own flags)

from hvdkit import streams
from hvdkit.launcher import launch_rank
from hvdkit.logs import one_line
from hvdkit.settings import fields, project
from hvdkit.settings.fields import Room
from hvdkit.settings.flagfiles import Given

FLAGS = flags.FLAGS

# absl's own flags that have an effect here; its log files, for example, are not written.
_OF_ABSL = {
    "verbosity",
    "v",
    "logger_levels",
    "pdb",
    "pdb_post_mortem",
    "run_with_pdb",
    "run_with_profiling",
    "profile_file",
    "use_cprofile_for_profiling",
}

# --help shows these first.
_FIRST = (
    "task",
    "model",
    "data_dir",
    "run_dir",
    "num_classes",
    "image_size",
    "global_batch_size",
    "num_steps",
    "base_lr",
    "precision",
)

_DEFINED = re.compile(r"""DEFINE_(\w+)\(\s*(?:name\s*=\s*)?["'](\w+)["']""")
# What has it is a setting, or an alias of one: absl gives that the same.
_SERIALIZER: flags.ArgumentSerializer = flags.ArgumentSerializer()


class _SettingFlag(flags.Flag):
    """The flag of a setting."""

    unknown_until = ""  # What its value awaits; "" where that is known.

    @property
    def value(self) -> Any:
        """Raises ValueError where the value is not known yet."""
        if self.unknown_until:
            raise ValueError(f"FLAGS.{self.name} is read before {self.unknown_until}")
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value


_settings: dict[str, _SettingFlag] = {}  # `define` made these.


def define(kind: type[Room]) -> None:
    """Defines each setting on FLAGS, in the module of its room; it may be called again."""
    for name in [name for name in _settings if FLAGS[name] is _settings[name]]:
        delattr(FLAGS, name)
    _settings.clear()
    for room, fields_of_room in fields.rooms(kind).items():
        for field in fields_of_room:
            if field.name in FLAGS:
                module = FLAGS.find_module_defining_flag(field.name)
                raise ValueError(
                    f"{field.name} is already a flag of {module}: rename the setting"
                )
            _settings[field.name] = _flag(field)
            flags.DEFINE_flag(_settings[field.name], module_name=room.__module__)


def _flag(field: dataclasses.Field) -> _SettingFlag:
    kind = fields.kind(field)
    return _SettingFlag(
        fields.PARSERS[kind],
        _SERIALIZER,
        field.name,
        field.default,
        described(field),
        boolean=kind == "bool",
    )


def beside(kind: type[Room]) -> dict[str, bool]:
    """Flags that are no settings and are taken: by name, whether it is on or off.

    They are defined on FLAGS; or a file of the fork will define them, when it is imported.
    """
    switches = {}
    for path in [*project.folder().glob("*.py"), *project.folder().glob("tasks/*.py")]:
        if not path.is_file():  # An editor's lock may be a link that leads nowhere.
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for type_name, name in _DEFINED.findall(text):
            switches[name] = type_name in ("bool", "boolean")
    for name in (*_OF_ABSL, *of_the_fork()):
        switches[name] = FLAGS[name].boolean
    return {
        name: switch for name, switch in switches.items() if name not in fields.of(kind)
    }


def check(flag: Given) -> None:
    """Raises ValueError where a flag of `beside` that is defined by now does not take its value.

    It is one line of text: a run's config.cfg has a line for each flag.
    """
    if "\n" in str(flag.value):
        raise flag.error(f"--{flag.name}={flag.value!r}: must be one line of text")
    if flag.name in FLAGS:
        try:
            FLAGS[flag.name].parser.parse(flag.value)
        except (ValueError, TypeError) as error:
            raise flag.error(f"--{flag.name}={flag.value}: {error}") from None


def take(program: str, settings: Room, others: Sequence[Given]) -> None:
    """Makes FLAGS those of this run, if the fork's validators let them: settings, other flags."""
    _refuse_aliases()
    for name in {*_settings, *(flag.name for flag in others)} & {*FLAGS}:
        FLAGS[name].unparse()
    words = []
    for name in _settings:
        value = getattr(settings, name)
        # absl takes 1 and 0 for switches, and no epochs.
        words.append(f"--{name}={int(value) if isinstance(value, int) else value}")
    words += [f"--{flag.name}={flag.value}" for flag in others]
    resolve(settings)  # The fork's validators read these values.
    try:
        FLAGS([program, *words])
    except flags.Error as error:
        raise ValueError(one_line(error)) from None


def resolve(settings: Room) -> None:
    """Makes FLAGS hold settings that are counted, for these ranks and these samples.

    What is not counted yet cannot be read there: a number in epochs, the batch of --batch_per_rank.
    """
    values = vars(settings)
    for name in _settings.keys() & values.keys():
        flag = _settings[name]
        flag.value = values[name]
        flag.unknown_until = ""
        if isinstance(values[name], fields.Epochs):
            flag.unknown_until = (
                "its data are counted: read it in build_model or later, or give "
                f"--{name} in steps"
            )
    batch = _settings.get("global_batch_size")
    if batch is not None and values.get("batch_per_rank"):
        batch.unknown_until = (
            "its ranks are counted: read it in the task, or give --global_batch_size"
        )


def _refuse_aliases() -> None:
    """Raises ValueError where a flag of the fork would change a setting on FLAGS alone."""
    for name, flag in of_the_fork().items():
        if flag.serializer is _SERIALIZER:
            raise ValueError(
                f"--{name} is an alias of a setting, which the run would not follow: remove its "
                "flags.DEFINE_alias"
            )


def of_the_fork() -> dict[str, flags.Flag]:
    """The flags that the fork defines with flags.DEFINE_*, by name."""
    return {
        name: FLAGS[name]
        for name in FLAGS
        if name not in _settings
        and not FLAGS.find_module_defining_flag(name).startswith("absl")
    }


def values_of_the_fork() -> dict[str, str]:
    """The fork's flags as texts, by name with two dashes, as no setting is named."""
    return {f"--{name}": str(flag.value) for name, flag in of_the_fork().items()}


def help_text(program: str, kind: type[Room]) -> str:
    """All settings under their headings, in at most 100 columns."""
    settings = fields.of(kind)
    lines = [
        f"usage: {program} [--flagfile=FILE] [--name=value ...]",
        "A flagfile has one flag per line. If a flag is given twice, the later one counts.",
        "--helpfull also lists flags that are no settings: absl's, and those of flags.DEFINE_*.",
    ]
    parts = {"Most people set these first": [settings[name] for name in _FIRST]}
    for room, fields_of_room in fields.rooms(kind).items():
        heading = (room.__doc__ or room.__name__).splitlines()[0].rstrip(".")
        parts[heading] = [field for field in fields_of_room if field.name not in _FIRST]
    for heading, fields_of_part in parts.items():
        lines += ["", f"{heading}:"]
        lines += [_line(field) for field in fields_of_part]
    return "\n".join(lines)


def described(field: dataclasses.Field) -> str:
    """Help, limits, default."""
    limits = fields.limits(field).removeprefix(", ")
    limits = limits.removesuffix(f"less than {fields.INT_LIMIT}").removesuffix(", ")
    notes = [limits] if limits else []
    if fields.kind(field) == "bool":
        notes.append(f"default {str(field.default).lower()}")
    elif field.default != "":
        notes.append(f"default {field.default}")
    text = field.metadata["help"]
    if notes:
        text += f" ({'; '.join(notes)})"
    return text


def _line(field: dataclasses.Field) -> str:
    dashes = "--[no]" if fields.kind(field) == "bool" else "--"
    flag = f"  {dashes}{field.name}".ljust(31)
    return textwrap.fill(
        f"{flag} {described(field)}",
        width=100,
        subsequent_indent=" " * 32,
        break_on_hyphens=False,
    )


def end_with_help(text: str) -> NoReturn:
    """Prints the text on rank 0 and ends the process with exit code 0."""
    if launch_rank() == 0:
        streams.hold()  # In `--help | head`, head may end before all is written.
        print(text, flush=True)
    sys.exit(0)
