"""Names that look alike and are not the same: 7 and 007, 1 and 1.0, Cat and cat, two kinds of é."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from hvdkit.logs import join

_NUMBER = re.compile(r"0*(\d+)(?:\.0*)?")


def composed(name: str) -> str:
    """Of names that look alike, one spelling: macOS stores an accent as a character of its own."""
    return unicodedata.normalize("NFC", name)


def plain(name: str) -> str:
    """The same for names that look alike."""
    folded = composed(name).casefold().strip()
    number = _NUMBER.fullmatch(folded)
    return number[1] if number else folded


def check_classes(names: Iterable[str], where: object) -> None:
    """Raises ValueError for two classes that may be one. Letters (A, a) may be two."""
    alike = defaultdict(list)
    for name in names:
        key = name if len(name) == 1 and name.isalpha() else plain(name)
        alike[key].append(name)
    for same in alike.values():
        if len(same) > 1:
            names = join(ascii(name) for name in same)
            raise ValueError(f"{where}: {names} look like one class: give it one name")


def near(name: str, others: Iterable[str]) -> str:
    """A note about the first of the others that looks like this name; "" where none does."""
    key = plain(name)
    for other in others:
        if other != name and plain(other) == key:
            return f"; {other!a} is spelled otherwise"
    return ""


def common_start(texts: Sequence[str]) -> str:
    """What all begin with."""
    least = min(texts, default="")
    most = max(texts, default="")
    for place, (letter, other) in enumerate(zip(least, most)):
        if letter != other:
            return least[:place]
    return least
