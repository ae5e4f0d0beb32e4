"""What launchers ask of a project's settings."""

from types import SimpleNamespace


def parse(words):
    found = [word.removeprefix("--run_dir=") for word in words if word.startswith("--run_dir=")]
    return SimpleNamespace(run_dir=found[-1])
