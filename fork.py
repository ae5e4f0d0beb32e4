"""Makes a project of its own for `make fork`, which passes the folder and options of copier.

What cannot become a project is refused before anything is written.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent
# Of the project, by default that of its folder: the rule of project_name in copier.yml.
NAME = re.compile(r"^[A-Za-z][A-Za-z0-9._-]*\Z")
# What a project is made of.
FOLDERS = ("template", "hvdkit", "docker", "launch", "examples")


def refusal(folder: Path) -> str | None:
    """Why this folder cannot become a project, and what to do."""
    if not NAME.search(folder.name):
        return (
            f"its last part, {folder.name!r}, is the project's name: use a letter, then letters, "
            f"digits, dots, dashes and underscores, as in NAME=../my-model"
        )
    if folder.resolve().is_relative_to(REPOSITORY):
        return f"{folder} lies in the template's own clone: name a folder outside of it"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = sorted(path.name for path in folder.iterdir() if path.name != ".git")
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}; name another folder"
    if used:
        return f"{folder} has files already, as {used[0]}: name a folder that is new or empty"
    return None


def git(*words: str) -> str:
    """What git prints of this repository; ends this program with git's words where it fails."""
    ended = subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        words_of_git = ended.stderr.strip().splitlines() or ["git failed"]
        sys.exit(
            "error: a project is made from a clone by git, which its updates need: "
            f"{words_of_git[0]}"
        )
    return ended.stdout.strip()


def main() -> None:
    typed, *options = sys.argv[1:]
    # A shell leaves the ~ as it is in quotes, and some do after a =.
    expanded = os.path.expanduser(typed)
    if expanded.startswith("~"):
        sys.exit(f"error: NAME={typed}: there is no such user; type the whole path")
    commit = git("rev-parse", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("error: commit first: updates of a project start from a commit")
    folder = Path(os.path.abspath(expanded))
    reason = refusal(folder)
    if reason:
        sys.exit(f"error: NAME={typed}: {reason}")
    untracked = git("ls-files", "--others", "--exclude-standard", "--", *FOLDERS)
    left_out = untracked.splitlines()
    if left_out:
        print(f"note: not committed, so not in the project: {', '.join(left_out)}")
    command = ["copier", "copy", "--vcs-ref", commit, *options]
    os.execvp("copier", [*command, str(REPOSITORY), str(folder)])


if __name__ == "__main__":
    main()
