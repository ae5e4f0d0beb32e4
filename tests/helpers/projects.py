"""Projects made from the template, in repositories of their own, for tests."""

import os
import shutil
import subprocess
from pathlib import Path

import copier
from hosts import ROOT, run

GIT = {
    "GIT_AUTHOR_NAME": "a@b.c",
    "GIT_AUTHOR_EMAIL": "a@b.c",
    "GIT_COMMITTER_NAME": "a@b.c",
    "GIT_COMMITTER_EMAIL": "a@b.c",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def shell(command: str, folder: Path, timeout: float = 300) -> str:
    """Runs a command, which must end well and in time; returns its output."""
    # Flags of a make that runs the tests are not meant for the projects' own.
    without_flags = [
        "env",
        "--unset=ARGS",
        "--unset=MAKEFLAGS",
        "--unset=MAKEOVERRIDES",
    ]
    bash = ["bash", "-euo", "pipefail", "-c", command]
    ended = run([*without_flags, *bash], timeout, GIT, cwd=folder)
    assert ended.code == 0, f"{command}: exit code {ended.code}\n{ended.output[-6000:]}"
    return ended.output


def tracked() -> list[str]:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [
        name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)
    ]


def repository(folder: Path) -> Path:
    """A repository of the files as they are here, tagged v1.0.0."""
    for file in tracked():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
    shell("git init -q && git add -A && git commit -qm 1 && git tag v1.0.0", folder)
    return folder


def make(
    source: Path, to: Path, task: str, *, version: str | None = None, **answers: str
) -> Path:
    data = {"task": task, "author": "Ada", "license": "MIT", **answers}
    copier.run_copy(
        str(source), to, data=data, vcs_ref=version, defaults=True, quiet=True
    )
    shell("git init -q && git add -A && git commit -qm 'A new project'", to)
    return to
