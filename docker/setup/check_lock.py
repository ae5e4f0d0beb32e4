"""Refuses a uv.lock that cannot be read, or that was not made from the requirements beside it.

check_lock.py MODE PROJECT    --lock makes it anew: then it need only be readable
"""

import re
import sys
import tomllib
from pathlib import Path

# Its name, extras and versions, up to markers.
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(\[[^]]*\])?\s*\(?([^;)]*)")


def main(mode: str, project: Path) -> None:
    packages = read(project / "uv.lock")
    if mode == "--lock":
        return
    requires: list[dict] = []
    for package in packages:
        if "." in package["source"].values():
            requires = package["metadata"]["requires-dist"]
    for_runs = [entry for entry in requires if "extra" not in entry.get("marker", "")]
    for_development = [
        entry for entry in requires if "extra == 'dev'" in entry.get("marker", "")
    ]
    compare(project / "requirements.txt", for_runs)
    if (project / "requirements-dev.txt").exists():  # an image is built without it
        compare(project / "requirements-dev.txt", for_development)


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


def compare(file: Path, requires: list[dict]) -> None:
    """Ends the program where a line of the file has no entry in the lock, or an entry no line."""
    wanted = set(requirements(file))
    locked = set()
    for entry in requires:
        extras = ",".join(entry.get("extras", []))
        locked.add(spelled(entry["name"], extras, entry.get("specifier", "")))
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
        sys.exit(f"error: {new} of {file.name} is not in uv.lock{has}")
    for old in sorted(locked - wanted):
        sys.exit(f"error: {old} of uv.lock is not in {file.name}: make lock")


def requirements(file: Path) -> list[str]:
    """The lines of a file as the lock has them; of a package by its address, the name."""
    found = []
    for line in file.read_text().replace("\\\n", " ").splitlines():
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
