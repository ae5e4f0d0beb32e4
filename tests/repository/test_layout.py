"""Lint, the shape of the code, and what flagfiles say of themselves."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from projects import ROOT, shell

from hvdkit import settings as settings_lib

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of the engine and the template, and where each is."""
    for pattern in ("hvdkit/src/**/*.py", "template/*.py", "template/tasks/*.py"):
        for path in ROOT.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, FUNCTIONS):
                    yield f"{path}:{node.lineno} {node.name}", node


def splats(function: ast.AST) -> list[str]:
    """What the function makes as a dict, list or tuple and then passes as `**name` or `*name`.

    A misspelt key of such a dict passes every check. zip(*rows) is how rows become columns.
    """
    made = set()
    passed = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Dict | ast.List | ast.Tuple | ast.BinOp):
                made.update(ast.unparse(target) for target in targets)
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "zip":
            passed += [word.value for word in node.keywords if word.arg is None]
            passed += [
                word.value for word in node.args if isinstance(word, ast.Starred)
            ]
    return [name for name in map(ast.unparse, passed) if name in made]


def hidden_names(module: ast.Module) -> list[str]:
    """The module's own names that a comprehension's variable takes.

    A function that also uses the hidden one fails in Python 3.12.1, not in 3.11 or 3.13.
    """
    names = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names.add(alias.asname or alias.name.split(".")[0])
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(ast.unparse(target) for target in targets)
    hidden = []
    for node in ast.walk(module):
        if isinstance(node, ast.comprehension):
            variables = [
                part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)
            ]
            hidden += [name for name in variables if name in names]
    return hidden


def test_lint_finds_nothing():
    """Nor broken links, misspelt words and imports between rooms that do not point down."""
    shell("make -o setup lint", ROOT, timeout=600)


def test_no_function_has_more_than_40_statements():
    for place, function in functions():
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
        assert statements <= 40, place


def test_no_modules_import_each_other_in_a_circle():
    """Nor where functions import them."""
    graph = grimp.build_graph("hvdkit", exclude_type_checking_imports=True)
    imported = {
        name: graph.find_modules_directly_imported_by(name) for name in graph.modules
    }
    TopologicalSorter(imported).prepare()  # CycleError names the modules


def test_the_page_of_rooms_has_each_of_them():
    page = (ROOT / "docs/rooms.md").read_text()
    engine = ROOT / "hvdkit/src"
    for file in engine.glob("hvdkit/*/**/__init__.py"):
        assert f"`{file.parent.relative_to(engine)}/`" in page


def test_arguments_are_passed_by_name_not_in_a_dict_or_list_made_for_it():
    assert splats(ast.parse("how = {} | x; parts = [1]; g(*parts, **how)")) == [
        "how",
        "parts",
    ]
    for place, function in functions():
        assert not splats(function), place


def test_no_comprehension_hides_a_name_of_its_module():
    code = "def kind(x): ...\ndef f(a, b): return [kind(x) for x in a], [kind for kind in b]"
    assert hidden_names(ast.parse(code)) == ["kind"]
    for file in sorted(ROOT.glob("*/**/*.py")):
        if not any(part.startswith(".") for part in file.relative_to(ROOT).parts):
            assert not hidden_names(ast.parse(file.read_text())), file


def test_what_a_fork_reads_first_is_read_in_one_sitting():
    assert len((ROOT / "template/train.py").read_text().splitlines()) <= 100


def test_without_a_flag_the_demo_is_trained():
    named = settings_lib.parse(["train.py", "--flagfile=configs/demo.cfg"])
    assert settings_lib.parse(["train.py"]) == named


CONFIGS = {*(ROOT / "template/configs").glob("*.cfg")} - {
    ROOT / "template/configs/default.cfg"
}


@pytest.mark.parametrize("path", sorted(CONFIGS), ids=str)
def test_configs_say_how_to_run_them_and_what_to_expect(path: Path):
    """Those of published models name the paper; the others what was seen here."""
    head = "".join(line for line in path.open() if line.startswith("#"))
    assert f"train.py --flagfile=configs/{path.name}" in head
    if re.search(r"arXiv:\d{4}\.\d{5}", head):
        assert "not run here" in head and "GPU" in head
    else:
        ranks = "(one rank|two ranks|one and two ranks)"
        seen = rf"Seen on two CPU cores, {ranks}: validation (mIoU|accuracy) [\d.]+"
        assert "horovodrun -np 2 python train.py" in head and re.search(seen, head)
