"""Where functions and classes are defined: the statement in a notebook's cell, or in the file of a module."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from typing import Any

from labkit.exporting.imports import Import
from labkit.exporting.names import first_line, kind_of, parsed, refusal
from labkit.ui import kernel


class Sources:
    """The cells of the notebook, or the file of the module, in which a function is defined.

    Args:
        title: the function's name, for what is refused.
        home: its globals.
    """

    def __init__(self, title: str, home: dict[str, Any]) -> None:
        self.title, self.home = title, home
        self._cells = {file: (_number(cell.title), cell.text) for file, cell in kernel.cells().items()}
        self.dotted: set[str] = set()
        """What they import as `import a.b`, once `imports` has looked."""

    def imports(self) -> dict[str, Import]:
        """Return the imports that the notebook's cells, or the function's module, have themselves."""
        found: dict[str, Import] = {}
        texts = [text for _, text in sorted(self._cells.values())]
        if isinstance(file := self.home.get("__file__"), str):
            texts.insert(0, "".join(linecache.getlines(file)))
        for text in texts:
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.asname or "." not in alias.name:
                            bound = alias.asname or alias.name
                            found[bound] = Import(alias.name, "", bound)
                        else:
                            self.dotted.add(alias.name)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        bound = alias.asname or alias.name
                        found[bound] = Import(node.module, alias.name, bound)
        return found

    def statement_of(self, value: Any, what: str, name: str = "") -> tuple[Any, str, tuple[int, int]]:
        """Find the statement that defines a function or a class; return its syntax tree, its text, and (cell, line).

        What a decorator returns may have no source of its own: it is looked for by its `name`.

        Raises ValueError if it is not to be found, or more than its source would be needed.
        """
        function = inspect.unwrap(value)
        if isinstance(value, type):
            file, line = self._find_class(value, what)
        else:
            code = getattr(function, "__code__", None)
            if code is None:
                raise self._refusal(f"{what}, {kind_of(value)} that has no source. Make it inside {self.title}")
            file, line = code.co_filename, code.co_firstlineno
            if "<locals>" in code.co_qualname and (decorated := self._find_decorated(name)):
                file, line = decorated
            elif code.co_freevars and "__class__" not in code.co_freevars:
                raise self._refusal(
                    f"{what}, which was made inside another function and keeps {code.co_freevars[0]!r} from there. "
                    "Define it in a cell, and pass what it needs"
                )
        text = self._text_of(file)
        statement = next((s for s in parsed(text).body if first_line(s) <= line <= (s.end_lineno or 0)), None)
        if statement is None:
            raise self._refusal(
                f"{what}, {kind_of(value)} whose source is not to be found. It may come from a cell that a magic "
                "runs, such as %%time, or from exec(); define it in a plain cell"
            )
        is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and first_line(statement) == line
        is_lambda = (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Lambda)
            and isinstance(statement.targets[0], ast.Name)
            and len(statement.targets) == 1
        )
        if not is_definition and not is_lambda:
            raise self._refusal(
                f"{what}, {kind_of(value)} made in the middle of other code (line {line} of {self._where(file)}). "
                "Define it with def or class at the beginning of a line"
            )
        lines = text.splitlines()
        first = first_line(statement) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        body = "\n".join(lines[first : statement.end_lineno]).rstrip()
        number, _ = self._cells.get(file, (0, ""))
        return statement, body, (number, line)

    def _find_decorated(self, name: str) -> tuple[str, int] | None:
        """Return the file and line of the newest function of a name that has a decorator."""
        for file in self._files():
            for node in reversed(parsed(self._text_of(file)).body):
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return (file, first_line(node)) if node.decorator_list else None
        return None

    def _files(self) -> list[str]:
        """Return the cells' files, newest first, and that of the module."""
        files = [file for file, _ in sorted(self._cells.items(), key=lambda item: item[1][0], reverse=True)]
        return files + ([file] if isinstance(file := self.home.get("__file__"), str) else [])

    def _find_class(self, cls: type, what: str) -> tuple[str, int]:
        """Return the file and line of a class: of its methods, or of the newest cell that defines one of that name."""
        name = cls.__qualname__
        methods = [
            (code.co_filename, code.co_firstlineno)
            for member in vars(cls).values()
            if (code := getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None))
            and code.co_qualname.startswith(f"{name}.")
            and code.co_filename != "<string>"  # what dataclass writes
        ]
        for file in [methods[0][0]] if methods else self._files():
            for node in reversed(parsed(self._text_of(file)).body):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    first, last = first_line(node), node.end_lineno or 0
                    if methods and not any(first <= line <= last for _, line in methods):
                        continue
                    return file, first
        raise self._refusal(f"{what}, a class whose source is not to be found. Define it in a plain cell")

    def check_wrapping(self, value: Any, node: Any, what: str) -> None:
        """Refuse `fast = wrap(step)`: the source of `step` would not say that it is wrapped."""
        layers = 0
        while not isinstance(value, type) and hasattr(value, "__wrapped__"):
            value, layers = value.__wrapped__, layers + 1
        if layers > len(node.decorator_list):
            raise self._refusal(
                f"{what}, which is {node.name} wrapped by something that its source does not say. Write that as a "
                f"decorator (@…), or do it inside {self.title}"
            )

    def _text_of(self, file: str) -> str:
        return self._cells[file][1] if file in self._cells else "".join(linecache.getlines(file))

    def _where(self, file: str) -> str:
        return f"cell {self._cells[file][0]}" if file in self._cells else file

    def _refusal(self, why: str) -> ValueError:
        return refusal(self.title, why)


def inner_definition(definition: Any, qualname: str) -> Any:
    """Return the def, class or lambda called `Net.forward` in the statement that defines `Net`; None if none is."""
    node: Any = definition.value if isinstance(definition, ast.Assign) else definition
    for name in qualname.split(".")[1:]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [inner for inner in node.body if isinstance(inner, kinds) and inner.name == name]
        if not found:
            return None
        node = found[-1]
    return node


def expression_of(definition: Any, kind: str, owner: str, name: str) -> ast.expr | None:
    """Return the expression that gives the "default" of a parameter, or the "value" of a name in a class's body.

    None if there is none, or more than one.
    """
    node = inner_definition(definition, owner)
    if kind == "default" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        by_place = [*node.args.posonlyargs, *node.args.args]
        first = len(by_place) - len(node.args.defaults)
        pairs = [*zip(by_place[first:], node.args.defaults, strict=True)]
        pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)  # type: ignore[arg-type]
        return next((default for argument, default in pairs if argument.arg == name), None)
    if kind == "value" and isinstance(node, ast.ClassDef):
        found = [
            inner.value
            for inner in node.body
            if isinstance(inner, (ast.Assign, ast.AnnAssign))
            for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
            if isinstance(target, ast.Name) and target.id == name
        ]
        return found[0] if len(found) == 1 else None
    return None


def _number(title: str) -> int:
    return int(found[0]) if (found := re.search(r"\d+", title)) else 0
