"""Secrets in what is exported: a script reads them from the environment, for a folder is copied, sent and committed."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from labkit.exporting.names import with_replaced
from labkit.protocol.redaction import is_surely_secret, redact

Secret = str | bytes | int


class Environment:
    """The variables of the environment that a script reads."""

    def __init__(self) -> None:
        self._values: dict[str, Secret] = {}

    @property
    def variables(self) -> dict[str, str]:
        """The variables as this notebook would have to set them."""
        return {name: v.decode() if isinstance(v, bytes) else str(v) for name, v in self._values.items()}

    def expression(self, name: str, value: Secret) -> str:
        """Return the source that reads a secret: `os.environ["WANDB_KEY"]`."""
        wanted = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").upper() or "SECRET"
        variable, number = wanted, 1
        while self._values.setdefault(variable, value) != value:
            number += 1
            variable = f"{wanted}_{number}"
        read = f'os.environ["{variable}"]'
        return f"int({read})" if isinstance(value, int) else f"{read}.encode()" if isinstance(value, bytes) else read


class Literal(NamedTuple):
    """A text or a number in a source."""

    node: ast.Constant
    name: str
    """What it is called there: the variable, the parameter, the key; "" if nothing near says so."""
    is_docstring: bool = False


def without_secrets(text: str, expression: Callable[[str, Any], str]) -> str:
    """Return a source in which `expression(name, value)` stands for each secret; comments are without theirs."""
    text = _without_secret_comments(text)
    replacements: list[tuple[ast.expr, str]] = []
    for node, name, is_docstring in literals(ast.parse(text)):
        if is_surely_secret(name, node.value):
            there = ast.get_source_segment(text, node) or ""
            replacements.append((node, redact(there) if is_docstring else expression(name, node.value)))
    return with_replaced(text, replacements)


def lines_with_secrets(text: str) -> list[int]:
    """Return the lines of a source in which there are secrets."""
    return sorted({node.lineno for node, name, _ in literals(ast.parse(text)) if is_surely_secret(name, node.value)})


def literals(tree: ast.AST, name: str = "") -> Iterator[Literal]:
    """Yield the literals in a syntax tree, but for parts of f-strings."""
    if isinstance(tree, ast.Constant):
        yield Literal(tree, name)
    elif isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        yield Literal(tree.value, "", is_docstring=True)
    elif not isinstance(tree, ast.JoinedStr):
        for called, part in _parts(tree, name):
            yield from literals(part, called)


def _parts(tree: Any, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the parts of a node, each with what it is called."""
    named: list[tuple[str, ast.AST]] = []
    if isinstance(tree, ast.Assign):
        named = [(_title(tree.targets[0]), tree.value)]
    elif isinstance(tree, (ast.AnnAssign, ast.NamedExpr)) and tree.value is not None:
        named = [(_title(tree.target), tree.value)]
    elif isinstance(tree, ast.keyword):
        named = [(tree.arg or "", tree.value)]
    elif isinstance(tree, ast.Dict):
        named = [
            (key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else name, value)
            for key, value in zip(tree.keys, tree.values, strict=True)
        ]
    elif isinstance(tree, ast.arguments):
        by_place = [*tree.posonlyargs, *tree.args]
        defaults = zip(by_place[len(by_place) - len(tree.defaults) :], tree.defaults, strict=True)
        both = [*defaults, *zip(tree.kwonlyargs, tree.kw_defaults, strict=True)]
        named = [(argument.arg, default) for argument, default in both if default is not None]
    yield from named
    done = {id(part) for _, part in named}
    keeps_its_name = isinstance(tree, (ast.List, ast.Tuple, ast.Set, ast.IfExp, ast.BoolOp))
    for child in ast.iter_child_nodes(tree):
        if id(child) not in done:
            yield (name if keeps_its_name else ""), child


def _title(target: ast.AST) -> str:
    """Return what an assignment's target is called: `key`, `self.key`, `config["key"]`."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return str(getattr(target, "id", "") or getattr(target, "attr", ""))


def _without_secret_comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            whole = lines[line - 1]
            lines[line - 1] = whole[:column] + redact(token.string) + whole[column + len(token.string) :]
    return "".join(lines)
