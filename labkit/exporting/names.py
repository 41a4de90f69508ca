"""What a piece of code names, and what stands behind a name: by its symbol table, without running it."""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import types
from collections.abc import Iterable
from typing import Any

BUILTINS = set(dir(builtins)) - {"display", "get_ipython", "__IPYTHON__"}
BUILTINS |= {"exit", "quit", "__name__", "__file__", "__doc__"}
"""Names that a script has by itself; IPython adds some to a notebook's, and takes some away."""


def names_in(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a piece of code uses, and those of them that it needs as soon as it is run."""
    used: set[str] = set()
    at_once: set[str] = set()

    def look(table: symtable.SymbolTable, now: bool, top: bool = False) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
                if now:
                    at_once.add(symbol.get_name())
        for child in table.get_children():
            comprehension = child.get_name() in ("listcomp", "setcomp", "dictcomp", "genexpr")
            # Python 3.14 looks at annotations later; where the export is to run may be an older one.
            look(child, now and (str(child.get_type()) in ("class", "annotation") or comprehension))

    look(symtable.symtable(text, "<cell>", "exec"), True, True)
    return used, at_once


def made_global(text: str) -> set[str]:
    """Return the names that functions in a piece of code declare global and assign to."""

    def look(table: symtable.SymbolTable) -> set[str]:
        mine = {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
        return mine.union(*map(look, table.get_children()))

    return look(symtable.symtable(text, "<cell>", "exec"))


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a cell; an empty one if it is not Python (a magic)."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def first_line(node: Any) -> int:
    """Return a statement's first line, its decorators' included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def with_replaced(text: str, replacements: Iterable[tuple[ast.expr, str]]) -> str:
    """Return a source with other text in the place of some expressions, and with as many lines as before."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]

    def end(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return node.end_lineno - 1, node.end_col_offset

    for node, new in sorted(replacements, key=lambda found: end(found[0]), reverse=True):
        first, left = node.lineno - 1, node.col_offset
        last, right = end(node)
        after = lines[last][right:]
        # Lines that have gone stay as empty texts, so that those before still have their numbers.
        lines[first : last + 1] = [lines[first][:left] + new.encode() + after, *[b""] * (last - first)]
    return b"".join(lines).decode()


def kind_of(value: Any) -> str:
    """Return what a reader would call a value: "a Tensor"."""
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    kind = type(value).__name__
    return "a lambda" if getattr(value, "__name__", "") == "<lambda>" else f"a{'n' * (kind[0] in 'aeiouAEIOU')} {kind}"


def is_builtin(value: Any) -> bool:
    """Whether a script has this without import."""
    title = getattr(value, "__name__", "")
    return title in BUILTINS and getattr(builtins, title, None) is value


def stands_for_builtin(name: str, value: Any) -> bool:
    """Whether this is what IPython puts in a built-in's place: `open`, `exit`."""
    module = getattr(value, "__module__", None) or ""
    is_wrapped = getattr(value, "__wrapped__", None) is getattr(builtins, name, value)
    return name in BUILTINS and (is_wrapped or module.startswith(("IPython", "ipykernel")))


def refusal(title: str, why: str) -> ValueError:
    """Return the error that says why the function called `title` cannot be exported."""
    return ValueError(f"{title} cannot be exported: {why}")
