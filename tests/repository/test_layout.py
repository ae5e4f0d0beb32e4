"""The shape of the code: layers by import-linter, and how large functions and files may be."""

import ast
import subprocess
from pathlib import Path

import pytest
from hosts import ROOT

FORK = {"train.py": 100, "settings.py": 40, "models.py": 120, "tasks/blank.py": 110}
FORK |= {"tasks/segmentation.py": 215, "tests/test_task.py": 120}


def code() -> list[Path]:
    files = [*ROOT.glob("hvdkit/src/**/*.py"), *ROOT.glob("template/*.py")]
    return [*files, *ROOT.glob("template/tasks/*.py")]


def test_imports_between_rooms_point_down():
    ended = subprocess.run(["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_no_function_is_longer_than_60_lines():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for path in code():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


@pytest.mark.parametrize("name", FORK)
def test_a_forks_file_is_read_in_one_sitting(name):
    assert len((ROOT / "template" / name).read_text().splitlines()) <= FORK[name]
