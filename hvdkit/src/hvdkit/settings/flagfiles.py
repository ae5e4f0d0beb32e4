"""Flags as they were given, on the command line and in flagfiles, in order, each with its place."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from hvdkit import whole_files
from hvdkit.logs import printable
from hvdkit.settings import project, typed

_FLAG = re.compile(r"--?(?P<name>\w[\w-]*)(?:=(?P<value>.*))?", re.DOTALL)
_COMMENTS = ("#", "//")
_LONGEST = 600  # A message has at most so many characters.
_MOST_FILES = 100  # One start reads at most so many: flagfiles may name each other.
_MOST_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Given:
    """One flag, `--name=value` or `--name` (value None); `file` is None on the command line.

    `is_quoted`: the value stood in quotes of a flagfile. `is_default`: of configs/default.cfg.
    """

    name: str
    value: str | None
    file: Path | None = None
    line: int = 0
    is_quoted: bool = False
    is_default: bool = False

    def path(self) -> str:
        """The value as a path, with ~ and variables replaced."""
        try:
            return typed.path(self.value or "", is_quoted=self.is_quoted)
        except ValueError as error:
            raise self.error(f"--{self.name}={self.value}: {error}") from None

    def text(self) -> str:
        """The line of a flagfile that says the same."""
        if self.value is None:
            return f"--{self.name}"
        value = typed.in_quotes(self.value) if self.is_quoted else self.value
        return f"--{self.name}={value}"

    def error(self, text: str) -> ValueError:
        """The error about this flag in one line, with the flagfile's name and line in front."""
        # The text of a damaged file is shown on a terminal, and may be long.
        text = printable(text)
        if len(text) > _LONGEST:
            text = " ... ".join([text[: _LONGEST // 2], text[-_LONGEST // 2 :]])

        if not self.file:
            return ValueError(text)
        file = self.file
        if file.is_relative_to(Path.cwd()):
            file = file.relative_to(Path.cwd())
        return ValueError(f"{file}, line {self.line}: {text}")


def expand(words: Sequence[str], switches: Collection[str]) -> list[Given]:
    """All flags of a command line, with those of a flagfile in the place of --flagfile.

    A flagfile on the command line is looked for in the working folder, then in the project; one
    that is named in a flagfile in the project, then beside that flagfile. Where the command line
    names none, the project's configs/default.cfg is read, if it is there.

    `switches` are flags that take no value; any other may have it as the next word.
    """
    flags = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = _FLAG.fullmatch(word)
        if not match:
            raise ValueError(
                f"unexpected argument {word!r}: flags are written --name=value"
            )
        name = match["name"]
        value = match["value"]
        has_next_word = bool(rest) and not rest[0].startswith("--")
        if value is None and name not in switches and has_next_word:
            value = rest.pop(0)
        flags.append(Given(name, value))

    default = project.folder() / "configs" / "default.cfg"
    if default.exists() and all(flag.name != "flagfile" for flag in flags):
        path = typed.written(default, is_path=True)
        flags.insert(0, Given("flagfile", path, is_default=True))

    read: list[Path] = []
    expanded = []
    for flag in flags:
        expanded += _of_file(flag, read) if flag.name == "flagfile" else [flag]
    return expanded


def _of_file(flag: Given, read: list[Path]) -> list[Given]:
    """The flags in the flagfile that `flag` names, which is added to those `read` so far."""
    path = _find(flag)
    read.append(path)
    if len(read) > _MOST_FILES:
        raise flag.error(
            f"--flagfile={flag.value} is one file too many: {_MOST_FILES} are read"
        )

    try:
        # The name of a folder may hold bytes that are no UTF-8.
        content = whole_files.read(path, _MOST_BYTES, links=True)
        text = content.decode("utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise flag.error(
            f"--flagfile={flag.value}: {error.strerror} ({path})"
        ) from None

    flags = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line.startswith(_COMMENTS):
            continue
        place = Given("", None, path, number, is_default=flag.is_default)
        inner = _of_line(line, place)
        if inner.name == "flagfile":
            flags += _of_file(inner, read)
        else:
            flags.append(inner)
    return flags


def recorded(file: Path) -> dict[str, str | None]:
    """The flags of a run's config.cfg by name; lines that are none are left out."""
    content = whole_files.read(file, whole_files.JSON_BYTES)
    values = {}
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        if line.startswith("--"):
            with contextlib.suppress(ValueError):
                flag = _of_line(line.strip(), Given("", None, file))
                values[flag.name] = flag.value
    return values


def _of_line(line: str, place: Given) -> Given:
    """The flag in a line of a flagfile: `place` with the line's name and value filled in.

    Raises ValueError where the line is no flag.
    """
    try:
        match = _FLAG.fullmatch(typed.without_comment(line))
    except ValueError as error:
        raise place.error(str(error)) from None
    if not match:
        raise place.error(f"{line!r} is not a flag: write --name=value, one a line")

    unquoted = typed.unquoted(match["value"] or "")
    is_quoted = unquoted is not None
    value = unquoted if is_quoted else match["value"]
    return dataclasses.replace(
        place, name=match["name"], value=value, is_quoted=is_quoted
    )


def _find(flag: Given) -> Path:
    fork = project.folder()
    folders = (fork, flag.file.parent) if flag.file else (Path.cwd(), fork)
    if not flag.value:
        raise flag.error("--flagfile= names no file: write --flagfile=FILE")
    name = flag.path()
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    if os.path.isabs(name):
        raise flag.error(f"--flagfile={flag.value}: there is no such file")
    places = " or ".join(dict.fromkeys(str(folder) for folder in folders))
    raise flag.error(f"--flagfile={flag.value}: there is no such file in {places}")
