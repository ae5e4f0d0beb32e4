"""The settings of a run: fields of dataclasses, which are flags. Imports no TensorFlow.

Settings            every setting; a fork's settings.py subclasses it
setting             a field of it, with its help and limits
add_reader          a value of --data_format
parse               settings from a command line
load                the same, and absl's FLAGS hold them
load_values         the same, of values by name, for notebooks
from_command_line   the same, for a program's start: a mistake ends it with exit code 2
check               refuses a wrong command line, before anything slow is imported
write               settings as a flagfile that reads back to the same
of_project          the fork's own Settings
of_command          settings of a training command
all_of_command      the same, with its flags that are no settings
"""

from hvdkit.settings.all import Settings
from hvdkit.settings.data import add_reader
from hvdkit.settings.fields import setting
from hvdkit.settings.parse import (
    all_of_command,
    check,
    from_command_line,
    load,
    load_values,
    of_command,
    of_project,
    parse,
    write,
)

__all__ = [
    "Settings",
    "add_reader",
    "all_of_command",
    "check",
    "from_command_line",
    "load",
    "load_values",
    "of_command",
    "of_project",
    "parse",
    "setting",
    "write",
]
