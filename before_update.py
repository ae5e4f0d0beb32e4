"""Refuses an update of a project that would lose files of its owner, before it changes any.

`copier update` (copier.yml) runs this file of the newer version in the project's folder. Copier
takes a file that git does not track for one that the owner deleted, and writes the newer version's
files over whatever has their names.
"""

import os
import subprocess
import sys
from pathlib import Path

# Of the repository, whole folders that a project holds under these names.
FOLDERS = {
    "docker/": "docker/",
    "examples/": "examples/",
    "hvdkit/": "vendor/hvdkit/",
    "launch/": "launch/",
}
# Of the folder template/, the files that an update changes.
MERGED = (
    "Dockerfile.jinja",
    "pyproject.toml",
    "requirements.txt",
    "requirements-dev.txt",
    "uv.lock",
)
NAMED = 5  # files that a message names; of more it says how many


def git(*arguments: str, folder: Path | None = None, stdin: str = "") -> list[str]:
    """The entries that a command of git prints."""
    command = ["git", *arguments]
    ended = subprocess.run(
        command, cwd=folder, input=stdin, stdout=subprocess.PIPE, text=True, check=False
    )
    return [entry for entry in ended.stdout.split("\0") if entry]


def template_files(repository: Path, version: str) -> dict[str, str]:
    """What an update to or from this version touches: paths in a project and in the repository."""
    files = {}
    for path in git("ls-tree", "-r", "-z", "--name-only", version, folder=repository):
        for prefix, folder in FOLDERS.items():
            if path.startswith(prefix):
                files[folder + path.removeprefix(prefix)] = path
    for name in MERGED:
        files[name.removesuffix(".jinja")] = f"template/{name}"
    return files


def occupant(name: str) -> Path | None:
    """What has this place on the disk: the file, or something else where its folders would be."""
    path = Path(name)
    for folder in reversed(path.parents):
        if folder.is_symlink() or folder.is_file():
            return folder
    return path if os.path.lexists(path) else None


def same(mine: Path, theirs: Path) -> bool:
    return (
        mine.is_file() and theirs.is_file() and mine.read_bytes() == theirs.read_bytes()
    )


def listed(names: list[str]) -> str:
    more = len(names) - NAMED
    text = ", ".join(names[:NAMED])
    return f"{text} and {more} more" if more > 0 else text


def untracked_message(names: list[str]) -> str:
    found = git("check-ignore", "--verbose", "-z", "--stdin", stdin="\0".join(names))
    # Four entries a file: where the rule is, its line, the rule, the file.
    rules = {
        f"{place} line {line}: {rule}"
        for place, line, rule in zip(found[::4], found[1::4], found[2::4], strict=True)
    }
    why = f" (ignored by {'; '.join(sorted(rules))})" if rules else ""
    way_out = "lift that rule for them, " if rules else ""
    return (
        f"error: nothing is updated, since git does not track {listed(names)}{why}, which an "
        f"update would delete or overwrite for good: {way_out}git add and commit them, then update"
    )


def own_message(names: list[str]) -> str:
    return (
        f"error: nothing is updated, since the newer version brings files that would overwrite "
        f"yours: {listed(names)}; rename or delete yours, commit, then update"
    )


def link_message(names: list[str]) -> str:
    return (
        f"error: nothing is updated, since an update does not write through links, as here "
        f"{listed(names)}: put the files themselves there, commit, then update"
    )


def gone_message() -> str | None:
    """What the owner deleted or renamed of all that an update is about."""
    names = [*FOLDERS.values(), *(name.removesuffix(".jinja") for name in MERGED)]
    gone = [name for name in names if not os.path.lexists(name)]
    if not gone:
        return None
    return (
        f"note: {', '.join(gone)}: not here, so not updated, nor under another name; "
        f"only files that the newer version adds come there"
    )


def refusals(repository: Path, version: str) -> list[str]:
    """A sentence for each kind of files that an update from this version would lose."""
    old = template_files(repository, version)
    new = template_files(repository, "HEAD")
    tracked = set(git("ls-files", "-z"))
    untracked: list[str] = []
    own: dict[str, None] = {}
    links: dict[str, None] = {}
    for name in sorted(old | new):
        found = occupant(name)
        if found is None:
            continue
        if found.is_symlink():
            links[str(found)] = None
        elif name in old and found == Path(name) and not found.is_dir():
            if name not in tracked:
                untracked.append(name)
        elif name in new and not same(found, repository / new[name]):
            own[str(found)] = None
    messages = []
    if links:
        messages.append(link_message(list(links)))
    if untracked:
        messages.append(untracked_message(untracked))
    if own:
        messages.append(own_message(list(own)))
    return messages


if __name__ == "__main__":
    template = Path(__file__).resolve().parent
    messages = refusals(template, os.environ["VERSION_FROM"])
    if messages:
        sys.exit("\n".join(messages))
    note = gone_message()
    if note:
        print(note, file=sys.stderr)
