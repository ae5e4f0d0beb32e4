"""Small changes of Python code, one at a time, of the kinds that a hasty edit makes."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,  # codespell:ignore notin
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
_SHOWN = 90  # characters of a piece of code, in an id


class Mutant(NamedTuple):
    """A text with one place changed."""

    id: str  # the same as long as the function and the changed piece of it are
    function: str  # file:qualified name; file:<module> for what runs at import
    text: str  # of the whole file


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """All of a file, from its top to its end."""
    data, seen = text.encode(), collections.Counter()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for names, old, new in _changes(ast.parse(text), ()):
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        piece = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(new, ast.expr):
            piece = f"({piece})"
        changed = (data[:begin] + piece.encode() + data[end:]).decode()
        where = ".".join(node.name for node in names) or "<module>"
        # What stands in a class runs at import.
        inner = next((i for i in range(len(names), 0, -1) if _is_function(names[i - 1])), 0)
        function = ".".join(node.name for node in names[:inner]) or "<module>"
        key = f"{file}:{where}: {_short(ast.unparse(old), piece)}"
        seen[key] += 1
        number = f" #{seen[key]}" if seen[key] > 1 else ""
        yield Mutant(key + number, f"{file}:{function}", changed)


def _short(old: str, new: str) -> str:
    """Both on a line, from a little before the first character that differs."""
    old, new = " ".join(old.split()), " ".join(new.strip("()").split())
    same = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), 0)
    begin = 0 if len(old) <= _SHOWN else max(same - _SHOWN // 2, 0)
    return f"{old[begin : begin + _SHOWN]} -> {new[begin : begin + _SHOWN]}"


def _changes(
    node: ast.AST, names: tuple[ast.AST, ...]
) -> Iterator[tuple[tuple[ast.AST, ...], ast.AST, ast.AST | str]]:
    """Functions and classes it is in, the node, what it becomes.

    Not of texts for people, types, decorators and imports.
    """
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = (*names, node)
    else:
        for new in _of_node(node):
            yield names, node, new
    if isinstance(node, ast.If | ast.While):
        yield names, node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, names)


def _of_node(node: ast.AST) -> Iterator[ast.AST | str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.BinOp() if type(node.op) in _OPERATORS and not _is_text(node):
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.IfExp():
            yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Call():
            for keyword in node.keywords:
                if keyword.arg:
                    rest = [k for k in node.keywords if k is not keyword]
                    yield ast.Call(node.func, node.args, rest)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return None"


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def _is_text(node: ast.BinOp) -> bool:
    parts = [node.left, node.right]
    texts = [p for p in parts if isinstance(p, ast.JoinedStr)]
    return bool(texts) or any(
        isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
