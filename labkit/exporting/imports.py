"""The imports of a script: as the notebook has them, where each module is from, and which of them can be written."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import site
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from labkit.exporting.names import parsed

NOTEBOOK_ONLY = {"IPython", "ipykernel", "ipywidgets"}
"""Packages that a script is to do without."""


class Import(NamedTuple):
    """An import as it will be written, by the name that it binds."""

    module: str
    name: str
    """What is taken from the module; "" for the module itself."""
    bound: str

    def value(self) -> Any:
        """Give what this import binds, from modules that are loaded; None if it cannot be had."""
        module = sys.modules.get(self.module)
        if self.name:
            return getattr(module, self.name, sys.modules.get(f"{self.module}.{self.name}"))
        return module

    def __str__(self) -> str:
        renamed = f" as {self.bound}" if self.bound != (self.name or self.module) else ""
        return f"from {self.module} import {self.name}{renamed}" if self.name else f"import {self.module}{renamed}"


def import_lines(imports: Collection[Import]) -> list[str]:
    """Return imports as isort would write them: groups with an empty line between them."""
    lines: list[str] = []
    for group in ("stdlib", "installed", "local", "labkit"):
        mine = [one for one in imports if _group(one.module) == group]
        plain = sorted(str(one) for one in mine if not one.name)
        names: dict[str, list[Import]] = {}
        for one in mine:
            if one.name:
                names.setdefault(one.module, []).append(one)
        taken = [_from_line(module, names[module]) for module in sorted(names)]
        if plain or taken:
            lines += [*([""] if lines else []), *plain, *taken]
    return lines


def _from_line(module: str, ones: list[Import]) -> str:
    names = [
        one.name if one.bound == one.name else f"{one.name} as {one.bound}"
        for one in sorted(ones, key=lambda one: (not one.name.isupper(), not one.name[0].isupper(), one.name))
    ]
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 120:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


# Where modules come from


def _group(module: str) -> str:
    top = module.partition(".")[0]
    if top == "labkit":
        return "labkit"
    if top in sys.stdlib_module_names:
        return "stdlib"
    return "local" if local_file(top) else "installed"


@functools.cache
def local_file(top: str) -> Path | None:
    """Return the file of a module that is not installed; its folder if it is a package."""
    if top in sys.stdlib_module_names or top == "labkit":
        return None
    spec = importlib.util.find_spec(top)
    where = next(iter(spec.submodule_search_locations or []), spec.origin) if spec else None
    if where is None:
        return None
    installed = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    path = Path(where).absolute()
    return None if any(path.is_relative_to(place) for place in installed) else path


def check_origin(module: str, why: str) -> None:
    """Refuse a module that can neither be installed nor copied."""
    top = module.partition(".")[0]
    if top in NOTEBOOK_ONLY:
        raise ValueError(f"{why} {top}, which only a notebook has. Keep that to other cells")
    file = local_file(top)
    if file is not None and file.suffix != ".py" and not (file / "__init__.py").is_file():
        raise ValueError(
            f"{why} {top}, which lies in {file}, is not installed and is no Python source. Install it (pip install, "
            "not -e), or define in a cell what is used of it"
        )


def local_modules(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules that `a.b.c` needs, with their files, if `a` is not installed: `a`, `a.b`, and that of `c`.

    `c` may be a function, and `b.c` a name that its package imports from elsewhere when it is first asked for.
    """
    top, *rest = name.split(".")
    if local_file(top) is None:
        return
    module = top
    while True:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return
        yield module, Path(spec.origin)
        if spec.submodule_search_locations is None or not rest:
            return
        attribute = rest.pop(0)
        if importlib.util.find_spec(f"{module}.{attribute}"):
            module = f"{module}.{attribute}"
            continue
        value = getattr(importlib.import_module(module), attribute, None)
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
        if home.startswith(f"{module}."):
            yield from local_modules(home)
        return


def imported(text: str) -> set[str]:
    """Return the modules that a source may import, `a.b.c` for `from a.b import c` too; not those for type checkers.

    And `a.b.c` where `a` is imported and `a.b.c` used: `a` may import `b` when it is first asked for it.
    """
    found: set[str] = set()
    renamed = {"labkit": "labkit"}

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                top = alias.name.partition(".")[0]
                renamed[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                renamed[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            first, _, chain = ast.unparse(node).partition(".")
            if first in renamed and re.fullmatch(r"[\w.]+", chain):
                found.add(f"{renamed[first]}.{chain}")
        for child in ast.iter_child_nodes(node):
            look(child)

    look(parsed(text))
    return found
