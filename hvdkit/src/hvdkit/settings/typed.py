"""Values as people type them: in quotes, before a comment, with ~ and variables.

A flagfile's value may stand in quotes of either kind, inside which the same quote is written twice.
Without quotes, " #" or " //" begins a comment. On the command line the shell has dealt with both.
In a path ~, $NAME and ${NAME} are replaced, and $$ stands for the character $.
"""

import argparse
import os
import re
import string
from pathlib import Path

_QUOTED = re.compile(r"""(["'])(?P<inside>(?:(?!\1).|\1\1)*)\1""")
_COMMENT = re.compile(r"\s+(?:#|//).*", re.DOTALL)
# A shell would make something else of these: quotes inside a value, a backslash that protects or
# ends a line, a command in backquotes.
_OF_A_SHELL = re.compile(
    r"""["'\u201c\u2018].*["'\u201d\u2019]|\\([\s$~"'#]|\Z)|`.*`"""
)


def without_comment(text: str) -> str:
    """The text of a flagfile's line up to its comment, which may stand after quotes."""
    value = text.partition("=")[2]
    if value[:1] not in ("'", '"'):
        return _COMMENT.sub("", text)
    quoted = _QUOTED.match(value)
    if not quoted:
        raise ValueError(f"{text}: its quotes are not closed")
    rest = value[quoted.end() :]
    if _COMMENT.sub("", rest):
        raise ValueError(
            f"{text}: something follows the quotes: put the whole value into them"
        )
    return text.removesuffix(rest)


def unquoted(text: str) -> str | None:
    """What stands in the quotes around a text; None where it has none, or none around all of it."""
    quoted = _QUOTED.fullmatch(text)
    if not quoted:
        return None
    quote = text[0]
    return quoted["inside"].replace(2 * quote, quote)


def written(value: object, *, is_path: bool = False) -> str:
    """A value as it is typed, in a flagfile or as a path on a command line, to be read the same."""
    text = str(value)
    if is_path:
        text = text.replace("$", "$$")
        text = f"./{text}" if text.startswith("~") else text
    if (
        text[:1] in ("'", '"')
        or text != text.strip()
        or _COMMENT.search(text)
        or (is_path and _OF_A_SHELL.search(text))
    ):
        return in_quotes(text)
    return text


def in_quotes(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def path(text: str, *, is_quoted: bool = False) -> str:
    """A path with ~ and variables replaced; `is_quoted`: it stood in quotes of a flagfile.

    Raises ValueError: a variable is not set, there is no such user, or quotes are inside the path.
    """
    inside = None if is_quoted else unquoted(text)
    text = text if inside is None else inside
    if not is_quoted and inside is None and _OF_A_SHELL.search(text):
        raise ValueError(
            "quotes go around the whole path, and nothing needs a backslash or backquotes"
        )
    found = _with_variables(text)
    expanded = os.path.expanduser(found)
    if expanded == found and found.startswith("~"):
        raise ValueError(
            f"there is no user {found[1:].split('/')[0]}: write ./{found} for a file"
        )
    return expanded


def check_is_no_url(text: str) -> None:
    """Raises ValueError for a URL, which would become a folder of this name."""
    if "://" in text:
        raise ValueError(
            "this is a URL: name a path on a disk, and copy it from or to elsewhere"
        )


def _with_variables(text: str) -> str:
    known = {name: value for name, value in os.environ.items() if value}
    try:
        return string.Template(text).substitute(known)
    except KeyError as error:
        (name,) = error.args
        state = "empty" if name in os.environ else "not set"
        raise ValueError(
            f"the variable {name} is {state}; $$ stands for the character $"
        ) from None
    except ValueError:
        raise ValueError(
            "$ must be followed by a variable's name; $$ stands for the character $"
        ) from None


def path_argument(text: str) -> Path:
    """The type of a path flag of a command, for argparse."""
    try:
        check_is_no_url(text)
        return Path(path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
