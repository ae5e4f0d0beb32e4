"""Completes a list of packages (CycloneDX, JSON): hvdkit is on no index, nor is the project.

own_parts.py PROJECT ENGINE <list >completed
"""

import json
import re
import sys
import tomllib
from pathlib import Path


def main(project: str, engine: str) -> None:
    """PROJECT, ENGINE: folders with a pyproject.toml each."""
    parts = json.load(sys.stdin)
    set_license(parts["metadata"]["component"], folder=Path(project))
    parts["components"].append(engine_component(Path(engine)))
    json.dump(parts, sys.stdout, indent=2)


def engine_component(folder: Path) -> dict:
    """The engine's entry; its version stands in its code."""
    code = (folder / "src/hvdkit/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    component = {
        "type": "library",
        "bom-ref": f"hvdkit@{version}",
        "name": "hvdkit",
        "version": version,
    }
    set_license(component, folder=folder)
    return component


def set_license(component: dict, *, folder: Path) -> None:
    """Adds the license, where the folder's pyproject.toml has one: SPDX, or an older table."""
    about = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    license = about.get("license")
    if isinstance(license, str):
        component["licenses"] = [{"expression": license}]
    elif license:
        # {text = "..."} or {file = "..."}
        (name,) = license.values()
        component["licenses"] = [{"license": {"name": name}}]


main(*sys.argv[1:])
