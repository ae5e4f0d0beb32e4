"""Lint, the shape of the code, and what flagfiles say of themselves."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from projects import ROOT, shell

from hvdkit import settings as settings_lib

FORK = {"train.py": 100, "settings.py": 40, "models.py": 120, "tasks/blank.py": 110}
FORK |= {"tasks/segmentation.py": 215, "tests/test_task.py": 120}


def test_lint_finds_nothing():
    """Nor broken links, misspelt words and imports between rooms that do not point down."""
    shell("make -o setup lint", ROOT, timeout=600)


def test_no_function_is_longer_than_60_lines():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    patterns = ("hvdkit/src/**/*.py", "template/*.py", "template/tasks/*.py")
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_no_modules_import_each_other_in_a_circle():
    """Nor where functions import them."""
    graph = grimp.build_graph("hvdkit", exclude_type_checking_imports=True)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # CycleError names the modules


def test_the_page_of_rooms_has_each_of_them():
    page = (ROOT / "docs/rooms.md").read_text()
    engine = ROOT / "hvdkit/src"
    for file in engine.glob("hvdkit/*/**/__init__.py"):
        assert f"`{file.parent.relative_to(engine)}/`" in page


@pytest.mark.parametrize("name", FORK)
def test_a_forks_file_is_read_in_one_sitting(name):
    assert len((ROOT / "template" / name).read_text().splitlines()) <= FORK[name]


def test_without_a_flag_the_demo_is_trained():
    named = settings_lib.parse(["train.py", "--flagfile=configs/demo.cfg"])
    assert settings_lib.parse(["train.py"]) == named


CONFIGS = {*(ROOT / "template/configs").glob("*.cfg")} - {ROOT / "template/configs/default.cfg"}


@pytest.mark.parametrize("path", sorted(CONFIGS), ids=str)
def test_configs_say_how_to_run_them_and_what_to_expect(path: Path):
    """Those of published models name the paper; the others what was seen here."""
    head = "".join(line for line in path.open() if line.startswith("#"))
    assert f"train.py --flagfile=configs/{path.name}" in head
    if re.search(r"arXiv:\d{4}\.\d{5}", head):
        assert "not run here" in head and "GPU" in head
    else:
        seen = r"Seen on two CPU cores, (one rank|two ranks): validation (mIoU|accuracy) [\d.]+"
        assert "horovodrun -np 2 python train.py" in head and re.search(seen, head)
