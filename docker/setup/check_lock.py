"""Refuses a uv.lock that cannot be read, or that was not made from the requirements beside it.

check_lock.py MODE PROJECT    --lock makes it anew: then it need only be readable
"""

import re
import sys
import tomllib
from pathlib import Path

# Its name, extras and versions, up to markers.
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(\[[^]]*\])?\s*\(?([^;)]*)")
# The normal form of a name, at the beginning of a requirement.
NAME = re.compile("[a-z0-9-]*")
# Where a package comes from, if from no index.
SOURCES = {"directory", "editable", "virtual", "path", "git", "url"}


def main(mode: str, project: Path) -> None:
    packages = read(project / "uv.lock")
    if mode == "--lock":
        return
    requires: list[dict] = []
    for package in packages:
        if "." in package["source"].values():
            requires = package.get("metadata", {}).get("requires-dist", [])
    about = tomllib.loads((project / "pyproject.toml").read_text())
    own = about.get("project", {})
    files = about.get("tool", {}).get("setuptools", {}).get("dynamic", {})

    # The markers of an extra's entries name it.
    for_runs = [entry for entry in requires if "extra" not in entry.get("marker", "")]
    lines = own.get("dependencies", [])
    compare(project, files.get("dependencies"), lines=lines, requires=for_runs)
    for extra, listed in files.get("optional-dependencies", {}).items():
        marker = f"extra == '{normal(extra)}'"
        entries = [entry for entry in requires if marker in entry.get("marker", "")]
        compare(project, listed, lines=[], requires=entries)


def read(path: Path) -> list[dict]:
    """The packages of a lock."""
    try:
        return tomllib.loads(path.read_text())["package"]
    except FileNotFoundError:
        fault = "is missing"
    except (ValueError, KeyError) as error:  # as after a merge with conflicts
        fault = f"cannot be read ({error})"
    sys.exit(
        f"error: {path} {fault}: bring the last one back by `git checkout HEAD -- {path}`, then "
        f"make lock"
    )


def compare(
    project: Path, listed: dict | None, *, lines: list[str], requires: list[dict]
) -> None:
    """Ends the program where a requirement has no entry in the lock, or an entry no requirement.

    `listed`: pyproject.toml's {file = ...}, a name or several; `lines`: those of that file itself.
    """
    names = (listed or {}).get("file", [])
    files = [project / name for name in ([names] if isinstance(names, str) else names)]
    if not all(file.exists() for file in files):  # an image is built without some
        return
    wanted = set(requirements("\n".join(lines)))
    for file in files:
        wanted |= set(requirements(file.read_text()))
    where = " and ".join(file.name for file in files) or "pyproject.toml"
    locked = set()
    for entry in requires:
        extras = ",".join(entry.get("extras", []))
        locked.add(spelled(entry["name"], extras, entry.get("specifier", "")))
        # A package from a folder or an address has no versions there.
        if SOURCES & entry.keys():
            same = spelled(entry["name"], extras, "")
            wanted = {same if is_of(text, same) else text for text in wanted}
    for new in sorted(wanted - locked):
        name = NAME.match(new)[0]
        old = [text for text in sorted(locked) if NAME.match(text)[0] == name]
        if old:
            sys.exit(
                f"error: {new} of {where} is not in uv.lock, which has {', '.join(old)}: make "
                "lock, or write it so"
            )
        sys.exit(f"error: {new} of {where} is not in uv.lock: make lock")
    for old in sorted(locked - wanted):
        sys.exit(f"error: {old} of uv.lock is not in {where}: make lock")


def is_of(text: str, name: str) -> bool:
    """Whether it is this package with its extras, of some versions."""
    return text == name or (text.startswith(name) and text[len(name)] in "<>=!~")


def requirements(text: str) -> list[str]:
    """The lines of a file as the lock has them; of a package by its address, the name."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        parts = REQUIREMENT.match(text)
        if parts:
            name, extras, versions = parts.groups(default="")
            found.append(spelled(name, extras.strip("[]"), versions.partition("@")[0]))
        elif text:  # make lock says why it takes no such line
            found.append(text)
    return found


def spelled(name: str, extras: str, versions: str) -> str:
    """As in a lock, whatever the case, the spaces and the order: opencv-python>=4,<5."""
    extras = ",".join(sorted(normal(extra) for extra in words(extras)))
    extras = f"[{extras}]" if extras else ""
    return normal(name) + extras + ",".join(sorted(words(versions)))


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def words(text: str) -> list[str]:
    """The parts between commas, without spaces."""
    return [part for part in re.sub(r"\s", "", text).split(",") if part]


main(sys.argv[1], Path(sys.argv[2]))
