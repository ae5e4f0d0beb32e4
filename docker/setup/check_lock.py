"""Refuses a uv.lock that cannot be read, or that was not made from the requirements beside it.

check_lock.py MODE PROJECT    --lock makes it anew: then it need only be readable
"""

import re
import sys
import tomllib
from pathlib import Path

# Its name, extras and versions, up to markers.
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(\[[^]]*\])?\s*\(?([^;)]*)")
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

    for_runs = [entry for entry in requires if "extra" not in entry.get("marker", "")]
    lines = own.get("dependencies", [])
    compare(project, files.get("dependencies"), lines=lines, requires=for_runs)
    files_of_extras = files.get("optional-dependencies", {})
    lines_of_extras = own.get("optional-dependencies", {})
    for extra in [*files_of_extras, *lines_of_extras]:
        marker = f"extra == '{extra}'"
        entries = [entry for entry in requires if marker in entry.get("marker", "")]
        lines = lines_of_extras.get(extra, [])
        listed = files_of_extras.get(extra)
        compare(project, listed, lines=lines, requires=entries)


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
        if (
            SOURCES & entry.keys()
        ):  # from a folder or an address, where it has no versions
            same = spelled(entry["name"], extras, "")
            wanted = {same if is_of(text, same) else text for text in wanted}
    for new in sorted(wanted - locked):
        name = re.split("[^a-z0-9-]", new)[0]
        old = [
            text for text in sorted(locked) if re.split("[^a-z0-9-]", text)[0] == name
        ]
        has = (
            f", which has {', '.join(old)}: make lock, or write it so"
            if old
            else ": make lock"
        )
        sys.exit(f"error: {new} of {where} is not in uv.lock{has}")
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
