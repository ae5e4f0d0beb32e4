"""Prints the commit that `make update` takes: the newest of the repository a project comes from.

`make fork` takes the newest commit too. The last tag, copier's own choice, may be older than that.
"""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ANSWERS = Path(".copier-answers.yml").absolute()
# Copier's short names of hosts.
HOSTS = {"gh:": "https://github.com/", "gl:": "https://gitlab.com/", "git+": ""}


def source() -> str:
    """The repository that the answers file names, as copier was told."""
    try:
        answers = yaml.safe_load(ANSWERS.read_text())
    except FileNotFoundError:
        sys.exit(
            f"error: nothing is updated, since {ANSWERS} is missing, which names the repository "
            f"that updates come from: bring it back, or give it this name again"
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        sys.exit(f"error: nothing is updated, since {ANSWERS} cannot be read: {reason}")
    repository = answers.get("_src_path") if isinstance(answers, dict) else None
    if not isinstance(repository, str):
        sys.exit(
            f"error: nothing is updated, since {ANSWERS} names no repository that updates come "
            f"from: give it a line _src_path: ADDRESS"
        )
    return repository


def newest(repository: str) -> str:
    address = os.path.expanduser(repository)
    for short, host in HOSTS.items():
        if address.startswith(short):
            address = host + address.removeprefix(short)
    command = ["git", "ls-remote", "--", address, "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not ended.stdout:
        reason = ended.stderr.partition("\n")[0] or "it has no commit"
        sys.exit(
            f"error: nothing is updated, since git cannot read {repository}, where updates come "
            f"from ({reason}): if it moved, correct _src_path in {ANSWERS} and commit"
        )
    return ended.stdout.split()[0]


if __name__ == "__main__":
    print(newest(source()))
