"""Who imports whom: arrows point down only, and there is no circle."""

import ast
from pathlib import Path

from hosts import ROOT

PROJECT = ROOT / "template"
# From the top: a file may import what stands below it, or beside it in its own folder.
FLOORS = [
    "compare",
    "train",
    "evaluate",
    "predict",
    "browse",
    "export",
    "trained",
    "dry_run",
    "find_lr",
    "benchmark",
    "ending",
    "actions",
    "evaluation",
    "report",
    "plots",
    "page",
    "run",
    "step",
    "tasks",
]
FLOORS += ["data", "engine", "config", "combinations", "settings", "flagfiles"]
# Imports nothing of the project and nothing heavy, so that every floor can use it.
GROUND = "hvdkit.stop"


def modules() -> dict[str, Path]:
    files = [p for p in PROJECT.rglob("*.py") if p.relative_to(PROJECT).parts[0] in parts()]
    return {".".join(p.relative_to(PROJECT).with_suffix("").parts): p for p in files}


def parts() -> set[str]:
    return {*FLOORS, *(f"{floor}.py" for floor in FLOORS)}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the project that a file imports, wherever in it, but for annotations only."""
    found, tree = set(), ast.parse(path.read_text())
    tree.body = [n for n in tree.body if "TYPE_CHECKING" not in ast.unparse(n).splitlines()[0]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & known.keys()


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, known) for name, path in known.items()}


def test_every_file_has_its_floor():
    top = {p.stem for p in PROJECT.glob("*.py")}
    assert top <= set(FLOORS), f"say on which floor these are: {top - set(FLOORS)}"


def test_nothing_imports_what_is_above_it():
    assert not graph()[GROUND]
    floor = {name: FLOORS.index(name.split(".")[0]) for name in modules()}
    floor[GROUND] = len(FLOORS)
    up = [(a, b) for a, below in graph().items() for b in below if floor[b] < floor[a]]
    assert not up


def test_there_is_no_circle():
    left = graph()
    assert len(left) > 50
    while ends := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in ends}
    assert not left, f"these import each other in a circle: {sorted(left)}"
