"""Mistakes planted by machine: each mutant of a function differs from it in one place."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def _in_place(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The ways to change one node: what to call it, and what does it to a copy."""
    operator = getattr(node, "op", None)
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(operator) in SWAPPED:
        yield (
            f"{type(operator).__name__} → {SWAPPED[type(operator)].__name__}",
            lambda n: setattr(n, "op", SWAPPED[type(n.op)]()),
        )
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other = SWAPPED[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} → {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} → {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        yield "the last one left out", _shorten
    if isinstance(node, ast.Call) and len(node.args) == 2 and _name(node) in ("send", "recv", "isend", "irecv"):
        yield "another rank", lambda n: n.args.__setitem__(1, _sum(n.args[1], 1))
    if isinstance(node, ast.If):
        yield "never", lambda n: setattr(n, "test", ast.Constant(False))
        yield "always", lambda n: setattr(n, "test", ast.Constant(True))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _sum(node: ast.expr, number: int) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(number))


def _shorten(call: Any) -> None:
    last = 0 if len(call.args) == 1 else 1
    call.args[last] = ast.BinOp(call.args[last], ast.Sub(), ast.Constant(1))


def _changed(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    nodes = list(ast.walk(tree))
    docstrings = {id(node.body[0]) for node in nodes if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}
    for index, node in enumerate(nodes):
        for title, change in _in_place(node):
            mutant = copy.deepcopy(tree)
            change(list(ast.walk(mutant))[index])
            yield f"line {node.lineno}: {title}", mutant
        for field in ("body", "orelse"):
            for place, statement in enumerate(getattr(node, field, []) if isinstance(node, ast.stmt) else []):
                if id(statement) in docstrings or isinstance(statement, (ast.FunctionDef, ast.Return)):
                    continue
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    continue  # a name that is then missing is no mistake in thinking
                mutant = copy.deepcopy(tree)
                getattr(list(ast.walk(mutant))[index], field)[place] = ast.Pass()
                yield f"line {statement.lineno}: `{ast.unparse(statement).splitlines()[0]}` left out", mutant


def mutants(source: str, names: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return every mutant of the one function in the source, and where it differs. `names` are the globals it uses."""
    tree = ast.parse(source)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    for title, mutant in _changed(tree):
        # Sent to the ranks by value: it is in no module that they could import.
        found = {**{k: v for k, v in names.items() if not k.startswith("__")}, "__name__": "__main__"}
        exec(compile(ast.fix_missing_locations(mutant), f"<mutant, {title}>", "exec"), found)
        yield title, found[function.name]
