"""Projects made from the template, in repositories of their own, for tests."""

import os
import shutil
import subprocess
from pathlib import Path

import copier
from hosts import ROOT, run

GIT = {
    f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}
GIT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def shell(command: str, folder: Path, timeout: float = 300) -> str:
    """What a command prints; it must end well, and in time."""
    # What a make that runs the tests was given is not meant for the projects' own.
    words = ["env", *(f"--unset={name}" for name in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES"))]
    ended = run([*words, "bash", "-euo", "pipefail", "-c", command], timeout, GIT, cwd=folder)
    assert ended.code == 0, f"{command}: exit code {ended.code}\n{ended.output[-6000:]}"
    return ended.output


def tracked() -> list[str]:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [f for f in listed.split("\0") if f and os.path.lexists(ROOT / f)]


def repository(folder: Path) -> Path:
    """A repository of the files as they are here, tagged v1.0.0."""
    for file in tracked():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
    shell("git init -q && git add -A && git commit -qm 1 && git tag v1.0.0", folder)
    return folder


def make(source: Path, to: Path, task: str, *, version: str | None = None, **answers: str) -> Path:
    data = {"task": task, "author": "Ada", "license": "MIT", **answers}
    copier.run_copy(str(source), to, data=data, vcs_ref=version, defaults=True, quiet=True)
    shell("git init -q && git add -A && git commit -qm 'A new project'", to)
    return to
