"""The part of a notebook that one of its closing assertions needs: what is left is run when a mistake is planted."""

from __future__ import annotations

import ast
import contextlib
import copy
import re
import symtable
from collections.abc import Iterable, Iterator

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

LEAST_CHARACTERS = 10
"""An assertion is known by so long a piece of what it says, or a longer one."""


def slice_for(notebook: nbformat.NotebookNode, said: str) -> nbformat.NotebookNode:
    """Return a copy with only the code cells that the assertion which says `said` needs, directly or through others.

    Of the cell that holds the assertion, one of the last, only that one is kept, with the statements that it needs;
    later cells are left out. A notebook with `%%ranks` is returned whole: what its cells share may lie on ranks. Names
    in a shell's command and in `%%writefile` are not seen.
    """
    notebook = copy.deepcopy(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(re.search(r"^%%?ranks|= %ranks", cell.source, re.MULTILINE) for cell in code):
        return notebook
    parts = [ast.parse(TransformerManager().transform_cell(cell.source)).body for cell in code]
    every_code_cell = code
    code, parts, (*closing, check) = _asserting(code, parts, said)
    lines = [[statement] for statement in closing if not isinstance(statement, ast.Assert)]
    kept = _needed([*parts, *lines], check)
    code[-1].source = "\n".join(ast.unparse(statement) for (statement,) in lines if statement in sum(kept, []))
    code[-1].source += f"\n{ast.unparse(check)}"
    gone = [
        id(cell)
        for cell, part in zip(code, parts, strict=False)
        if part not in kept and "parameters" not in cell.metadata.get("tags", [])
    ]
    gone += [id(cell) for cell in every_code_cell[len(code) :]]
    notebook.cells = [cell for cell in notebook.cells if id(cell) not in gone]
    return notebook


def _asserting(
    code: list[nbformat.NotebookNode], parts: list[list[ast.stmt]], said: str
) -> tuple[list[nbformat.NotebookNode], list[list[ast.stmt]], list[ast.stmt]]:
    """The cells up to the last one that asserts this, the statements of those before it, and its own up to there."""
    for last in reversed(range(len(parts))):
        with contextlib.suppress(ValueError):
            return code[: last + 1], parts[:last], _until(parts[last], said)
    raise ValueError(f"no assertion says {said!r}")


def _until(statements: list[ast.stmt], said: str) -> list[ast.stmt]:
    """Those up to the assertion that says this."""
    for index, statement in enumerate(statements):
        messages = [node.msg for node in ast.walk(statement) if isinstance(node, ast.Assert) and node.msg]
        constants = [node.value for message in messages for node in ast.walk(message) if isinstance(node, ast.Constant)]
        texts = [text.strip(" :,") for text in constants if isinstance(text, str)]
        if any(len(text) >= LEAST_CHARACTERS and (text in said or said in text) for text in texts):
            return statements[: index + 1]
    raise ValueError(f"no assertion says {said!r}")


def _needed(parts: list[list[ast.stmt]], check: ast.stmt) -> list[list[ast.stmt]]:
    """Those parts, in the order of the notebook, that give a value to what is used after them, or change it."""
    later = {
        statement.name: _globals(statement)
        for part in parts
        for statement in part
        if isinstance(statement, ast.FunctionDef | ast.ClassDef)
    }
    modules = {name for part in parts for statement in part for name in _imported(statement)}
    needed, kept = _used(check, later), []
    for part in reversed(parts):
        if needed.isdisjoint(set().union(*map(_bound, part)).union(*(_changed(s) - modules for s in part))):
            continue
        kept.insert(0, part)
        free: set[str] = set()
        sure: set[str] = set()
        for statement in part:
            free |= _used(statement, later) - sure
            if not isinstance(statement, ast.If | ast.For | ast.While | ast.Try):
                sure |= _bound(statement)
        needed = needed - sure | free
    return kept


def _used(statement: ast.stmt, later: dict[str, set[str]]) -> set[str]:
    """Names that a statement uses when it runs, those of the functions that it may call included."""
    if isinstance(statement, ast.FunctionDef):
        inside = [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        todo = list(_globals(*map(ast.Expr, inside)))
    else:
        todo = list(_globals(statement))
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += later.get(name, ())
    return found


def _globals(*statements: ast.stmt) -> set[str]:
    """The global names that statements use, in functions too."""
    text = "\n".join(map(ast.unparse, statements))
    todo, found = [symtable.symtable(text, "<cell>", "exec")], set()
    while todo:
        table = todo.pop()
        top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
        todo += table.get_children()
    return found


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the statement runs."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += _children(node)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """Those of a node; of a comprehension only what it goes through: its variables are its own."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return [generator.iter for generator in node.generators]
    return ast.iter_child_nodes(node)


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a value."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    stored = {n.id for n in _outside_functions(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | _imported(statement)


def _imported(statement: ast.stmt) -> set[str]:
    return {
        (name.asname or name.name).split(".")[0]
        for node in _outside_functions(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }


def _changed(statement: ast.stmt) -> set[str]:
    """Names of objects that a statement changes: by `x.a = …`, `x[…] = …`, or a call of a method for its effect."""
    found = set()
    for node in _outside_functions(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            place: ast.expr = node.value.func
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            place = node
        else:
            continue
        while isinstance(place, ast.Attribute | ast.Subscript | ast.Call):
            place = place.func if isinstance(place, ast.Call) else place.value
        if isinstance(place, ast.Name):
            found.add(place.id)
    return found
