"""What a function from a cell uses, as the source of one script.

Follows every name that the code uses: what a cell defines is written as source, what a package has is imported,
numbers, texts and collections of them become assignments, anything else is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import inspect
import linecache
import math
import pathlib
import re
import site
import symtable
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import labkit
from labkit.ui import kernel

LITERAL_CHARACTERS = 10_000
"""A constant that is longer as source belongs into a file."""

BUILTINS = set(dir(builtins)) - {"display", "get_ipython", "__IPYTHON__"}
BUILTINS |= {"exit", "quit", "__name__", "__file__", "__doc__"}
"""Names that a script has by itself; IPython adds some to a notebook's, and takes some away."""

NOTEBOOK_ONLY = {"IPython", "ipykernel", "ipywidgets"}
"""Packages that a script is to do without."""

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))

FUTURE = "from __future__ import annotations\n"


class _Import(NamedTuple):
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


class _Definition(NamedTuple):
    """A function, a class or a constant as it will be written."""

    name: str
    text: str
    place: tuple[int, int]
    """Where it stands in the notebook: (cell, line). Constants come first."""
    at_once: set[str]
    """Names that must be there before it."""
    if_called: set[str]
    """Names that must be there when it is called, of a function."""
    postponed: bool = False
    """Whether its annotations are never evaluated (`from __future__ import annotations`)."""


class Script:
    """Collects what a function needs, and writes it down."""

    def __init__(self, fn: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._title = fn.__name__
        self._home: dict[str, Any] = inspect.unwrap(fn).__globals__
        self._cells = {file: (_number(cell.title), cell.text) for file, cell in kernel.cells().items()}
        self._dotted: set[str] = set()
        """What the notebook imports as `import a.b`."""
        self._own_imports = self._find_imports()
        self._imports: dict[str, _Import] = {}
        self._definitions: dict[str, _Definition] = {}
        self._bound: dict[str, Any] = {}
        """Everything that the script binds, by name."""
        self._made: set[str] = set()
        """Names that its functions make global by themselves."""
        self._missing: dict[str, str] = {}
        """Names that the notebook does not define, and who uses them."""
        self._need(fn.__name__, fn, "")
        self._arguments = "".join(
            f'"{name}": {self._expression(value, f"the argument {name}=…", set())}, '
            for name, value in arguments.items()
        ).removesuffix(", ")
        for name, user in self._missing.items():
            if name not in self._made:
                raise self._refusal(f"{user} uses {name!r}, which the notebook does not define (any more)")

    def text(self, seed: int | None) -> str:
        """Give the whole script."""
        title, made = self._title, time.strftime("%Y-%m-%d")
        head = (
            f'"""{title}, exported from a notebook by labkit {labkit.__version__} on {made}.\n\n'
            "    torchrun --standalone --nproc-per-node=2 train.py    on this machine\n"
            "    sbatch job.sbatch                                    on a SLURM cluster\n"
            "    python train.py --help                               its options\n\n"
            'README.txt says more.\n"""'
        )
        ordered = self._in_order()
        future = FUTURE.rstrip() if any(definition.postponed for definition in ordered) else ""
        constants = "\n".join(d.text for d in ordered if d.place < (0, 0))
        top = "\n\n".join(filter(None, [future, "\n".join(self._import_lines()), constants]))
        body = "\n\n\n".join(d.text for d in ordered if d.place >= (0, 0))
        tail = (
            '\n\n\nif __name__ == "__main__":\n'
            "    import labkit.exporting.script\n\n"
            f"    labkit.exporting.script.main({title}, {{{self._arguments}}}, seed={seed!r})\n"
        )
        text = f"{head}\n\n{top}\n\n\n{body}{tail}" if top else f"{head}\n\n\n{body}{tail}"
        compile(text, "train.py", "exec")
        assert _names(text)[0] <= self._bound.keys() | self._made | BUILTINS | {"labkit"}
        return text

    # What is needed

    def _need(self, name: str, value: Any, why: str) -> None:
        """Provide for a name in the script. `why` is for the reader: "train uses"."""
        if name in self._bound:
            if self._bound[name] is not value and not _equal(self._bound[name], value):
                raise self._refusal(
                    f"it needs two things called {name!r} ({_kind_of(self._bound[name])} and {_kind_of(value)}; {why} "
                    f"the second). Run the cell that defines {name!r} again, and those that use it; or rename one"
                )
            return
        if not name.isidentifier():
            raise self._refusal(f"{why} {_kind_of(value)} called {name!r}, which is no name. Use def")
        self._bound[name] = value
        own = self._own_imports.get(name)
        if own is not None and value is not None and own.value() is value:
            self._import(own, why)
        elif isinstance(value, types.ModuleType):
            self._import_module(name, value, why)
        elif (isinstance(value, type) or (callable(value) and hasattr(value, "__name__"))) and not _is_builtin(value):
            self._need_code(name, value, why)
        else:
            text = f"{name} = {self._expression(value, f'{why} {name!r}', set())}"
            used, at_once = _names(text)
            place = (0, 0) if at_once & self._definitions.keys() else (-1, len(self._bound))
            self._definitions[name] = _Definition(name, text, place, at_once, used)

    def _need_code(self, name: str, value: Any, why: str) -> None:
        """Provide for a function or a class: from the notebook as source, from elsewhere by import."""
        if getattr(value, "__module__", None) != self._home.get("__name__"):
            self._import_object(name, value, why)
            return
        what = f"{why} {name!r}" if why else name
        node, text, place = self._source(value, what)
        if isinstance(node, ast.Assign):  # a lambda with a name
            known_as = ast.unparse(node.targets[0])
        else:
            known_as = node.name
            self._check_wrapping(value, node, what)
        if known_as != name:
            # The same thing under another name: define it as it was, then name it.
            self._need(known_as, value, why)
            self._definitions[name] = _Definition(name, f"{name} = {known_as}", place, {known_as}, {known_as})
            return
        code = getattr(inspect.unwrap(value), "__code__", None)
        postponed = bool(code and code.co_flags & annotations.compiler_flag) or _postpones(value)
        used, at_once = _names((FUTURE if postponed else "") + text)
        hints = _names(text)[0] - used
        if_called = set() if isinstance(value, type) else used
        self._definitions[name] = _Definition(name, text, place, at_once, if_called, postponed)
        self._made |= _made_global(text)
        for used_name in sorted(used | hints):
            self._need_name(used_name, name, must=used_name in used)

    def _need_name(self, name: str, user: str, must: bool) -> None:
        """Provide for a name that the source of `user` mentions."""
        here = self._home.get(name, self)
        if name == "get_ipython" or (name == "display" and here is self):
            raise self._refusal(f"{user} uses {name}, which only a notebook has (a line with % or ! uses get_ipython)")
        if here is self or _stands_for_builtin(name, here):
            if name in BUILTINS or not must:
                return
            self._missing.setdefault(name, user)
            return
        if name in BUILTINS and name.startswith("__"):
            return
        self._need(name, here, f"{user} uses")
        if isinstance(here, types.ModuleType):
            self._import_submodules(name, user)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"{self._title} cannot be exported: {why}")

    # Imports

    def _find_imports(self) -> dict[str, _Import]:
        """Give the imports that the notebook's cells, or the function's module, have themselves."""
        found: dict[str, _Import] = {}
        texts = [text for _, text in sorted(self._cells.values())]
        if isinstance(file := self._home.get("__file__"), str):
            texts.insert(0, "".join(linecache.getlines(file)))
        for text in texts:
            for node in ast.walk(_parsed(text)):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.asname or "." not in alias.name:
                            bound = alias.asname or alias.name
                            found[bound] = _Import(alias.name, "", bound)
                        else:
                            self._dotted.add(alias.name)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        bound = alias.asname or alias.name
                        found[bound] = _Import(node.module, alias.name, bound)
        return found

    def _import(self, one: _Import, why: str) -> None:
        check_origin(one.module, f"{self._title} cannot be exported: {why} {one.bound!r}, from")
        self._imports[one.bound] = one

    def _import_module(self, name: str, module: types.ModuleType, why: str) -> None:
        full = module.__name__
        if sys.modules.get(full) is not module or full == "__main__":
            raise self._refusal(f"{why} the module {name!r}, which cannot be imported. Put it into a file")
        package, _, last = full.rpartition(".")
        self._import(_Import(package, last, name) if package and last == name else _Import(full, "", name), why)

    def _import_submodules(self, name: str, user: str) -> None:
        """Repeat the notebook's `import a.b` where `a.b` is used: `import a` alone may not load it."""
        text = self._definitions[user].text if user in self._definitions else ""
        for dotted in self._dotted:
            if dotted.startswith(f"{name}.") and re.search(rf"\b{re.escape(dotted)}\b", text):
                self._imports[dotted] = _Import(dotted, "", dotted)

    def _import_object(self, name: str, value: Any, why: str) -> None:
        module, title = getattr(value, "__module__", None), getattr(value, "__qualname__", name)
        one = _Import(module or "", title, name)
        if module and "." not in title and one.value() is value:
            self._import(one, why)
        elif text := self._attribute(value, why):
            self._definitions[name] = _Definition(name, f"{name} = {text}", (-1, len(self._bound)), set(), set())
        else:
            raise self._refusal(
                f"{why} {name!r}, {_kind_of(value)} that cannot be imported from {module or 'any module'} by its name. "
                f"Make it inside {self._title}"
            )

    def _attribute(self, value: Any, why: str) -> str:
        """Give `nn.Linear` for what a module of the notebook's has; "" if none does."""
        title = str(getattr(value, "__name__", ""))
        for name, module in self._home.items():
            if isinstance(module, types.ModuleType) and getattr(module, title, None) is value:
                self._need(name, module, why)
                return f"{name}.{title}"
        return ""

    def _import_lines(self) -> list[str]:
        lines: list[str] = []
        for group in ("stdlib", "installed", "local", "labkit"):
            mine = [one for one in self._imports.values() if _group(one.module) == group]
            plain = sorted(str(one) for one in mine if not one.name)
            names: dict[str, list[_Import]] = {}
            for one in mine:
                if one.name:
                    names.setdefault(one.module, []).append(one)
            taken = [_from_line(module, names[module]) for module in sorted(names)]
            if plain or taken:
                lines += [*([""] if lines else []), *plain, *taken]
        return lines

    # Source

    def _source(self, value: Any, what: str) -> tuple[Any, str, tuple[int, int]]:
        """Find the statement that defines a function or a class: (its syntax tree, its text, its place)."""
        function = inspect.unwrap(value)
        if isinstance(value, type):
            file, line = self._find_class(value, what)
        else:
            code = getattr(function, "__code__", None)
            if code is None:
                raise self._refusal(f"{what}, {_kind_of(value)} that has no source. Make it inside {self._title}")
            file, line = code.co_filename, code.co_firstlineno
            if code.co_freevars and "__class__" not in code.co_freevars:
                raise self._refusal(
                    f"{what}, which was made inside another function and keeps {code.co_freevars[0]!r} from there. "
                    "Define it in a cell, and pass what it needs"
                )
        text = self._text_of(file)
        statement = next((s for s in _parsed(text).body if _first_line(s) <= line <= (s.end_lineno or 0)), None)
        if statement is None:
            raise self._refusal(
                f"{what}, {_kind_of(value)} whose source is not to be found. It may come from a cell that a magic "
                "runs, such as %%time, or from exec(); define it in a plain cell"
            )
        is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and _first_line(statement) == line
        is_lambda = (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Lambda)
            and isinstance(statement.targets[0], ast.Name)
            and len(statement.targets) == 1
        )
        if not is_definition and not is_lambda:
            raise self._refusal(
                f"{what}, {_kind_of(value)} made in the middle of other code (line {line} of {self._where(file)}). "
                "Define it with def or class at the beginning of a line"
            )
        lines = text.splitlines()
        first = _first_line(statement) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        body = "\n".join(lines[first : statement.end_lineno]).rstrip()
        number, _ = self._cells.get(file, (0, ""))
        return statement, body, (number, line)

    def _find_class(self, cls: type, what: str) -> tuple[str, int]:
        """Give the file and line of a class: of its methods, or of the newest cell that defines one of that name."""
        name = cls.__qualname__
        files = [file for file, _ in sorted(self._cells.items(), key=lambda item: item[1][0], reverse=True)]
        files += [file] if isinstance(file := self._home.get("__file__"), str) else []
        methods = [
            (code.co_filename, code.co_firstlineno)
            for member in vars(cls).values()
            if (code := getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None))
            and code.co_qualname.startswith(f"{name}.")
            and code.co_filename != "<string>"  # what dataclass writes
        ]
        for file in [methods[0][0]] if methods else files:
            for node in reversed(_parsed(self._text_of(file)).body):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    first, last = _first_line(node), node.end_lineno or 0
                    if methods and not any(first <= line <= last for _, line in methods):
                        continue
                    self._check_methods(cls, file, first, last, what)
                    return file, first
        raise self._refusal(f"{what}, a class whose source is not to be found. Define it in a plain cell")

    def _check_methods(self, cls: type, file: str, first: int, last: int, what: str) -> None:
        for name, member in vars(cls).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            code = getattr(function, "__code__", None)
            if code is None or getattr(function, "__module__", None) != cls.__module__:
                continue
            if code.co_filename != "<string>" and not (
                code.co_filename == file and first <= code.co_firstlineno <= last
            ):
                raise self._refusal(f"{what}, a class that was given {name!r} later on. Write {name!r} into the class")

    def _check_wrapping(self, value: Any, node: Any, what: str) -> None:
        """Refuse `fast = wrap(step)`: the source of `step` would not say that it is wrapped."""
        layers = 0
        while not isinstance(value, type) and hasattr(value, "__wrapped__"):
            value, layers = value.__wrapped__, layers + 1
        if layers > len(node.decorator_list):
            raise self._refusal(
                f"{what}, which is {node.name} wrapped by something that its source does not say. Write that as a "
                f"decorator (@…), or do it inside {self._title}"
            )

    def _text_of(self, file: str) -> str:
        return self._cells[file][1] if file in self._cells else "".join(linecache.getlines(file))

    def _where(self, file: str) -> str:
        return f"cell {self._cells[file][0]}" if file in self._cells else file

    # Values

    def _expression(self, value: Any, what: str, inside: set[int]) -> str:
        """Write a value as source. Raises ValueError that names it."""
        text = self._written(value, what, inside | {id(value)} if id(value) not in inside else None)
        if len(text) > LITERAL_CHARACTERS:
            raise self._refusal(f"{what}, {len(text):,} characters as source. Keep it in a file, and read that")
        return text

    def _written(self, value: Any, what: str, inside: set[int] | None) -> str:
        if inside is None:
            raise self._refusal(f"{what}, {_kind_of(value)} that contains itself")

        def each(values: Iterable[Any]) -> list[str]:
            return [self._expression(item, what, inside) for item in values]

        kind = type(value)
        if kind is float and not math.isfinite(value):
            return f'float("{value}")'
        if kind is str and not {'"', "'"} & set(value):
            return f'"{repr(value)[1:-1]}"'
        if kind in PLAIN:
            return repr(value)
        if kind is tuple:
            return f"({', '.join(each(value))}{',' if len(value) == 1 else ''})"
        if kind is list:
            return f"[{', '.join(each(value))}]"
        if kind in (set, frozenset):
            items = ", ".join(sorted(each(value)))
            text = f"{{{items}}}" if items else "set()"
            return text if kind is set else f"frozenset({text if items else ''})"
        if kind is dict:
            pairs = zip(each(value.keys()), each(value.values()), strict=True)
            return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
        if kind is range:
            return repr(value)
        if kind in (torch.dtype, torch.device):
            self._need("torch", torch, f"{self._title} needs")
            return f'torch.device("{value}")' if kind is torch.device else str(value)
        if isinstance(value, pathlib.PurePath):
            self._need("Path", pathlib.Path, f"{self._title} needs")
            return f'Path("{value.as_posix()}")'
        if kind is functools.partial:
            self._need("functools", functools, f"{self._title} needs")
            keywords = [f"{name}={self._expression(item, what, inside)}" for name, item in value.keywords.items()]
            return f"functools.partial({', '.join([*each([value.func]), *each(value.args), *keywords])})"
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return self._name_for(value, what)
        raise self._refusal(
            f"{what}, {_kind_of(value)}, which cannot be written as source. Make it inside {self._title}, or pass what "
            "it is made from"
        )

    def _name_for(self, value: Any, what: str) -> str:
        """Give an expression for a function or a class that stands in a collection, say."""
        if _is_builtin(value):
            return str(value.__name__)
        name = next((name for name, here in self._home.items() if here is value and not name.startswith("_")), None)
        if name is None and (text := self._attribute(value, what)):
            return text
        name = name or str(value.__name__)
        self._need(name, value, what)
        return name

    # Order

    def _in_order(self) -> list[_Definition]:
        """Give the definitions in the notebook's order, but each after what it needs at once."""
        done: dict[str, _Definition] = {}
        under_way: list[str] = []

        def add(definition: _Definition) -> None:
            if definition.name in done:
                return
            if definition.name in under_way:
                circle = " → ".join([*under_way[under_way.index(definition.name) :], definition.name])
                raise self._refusal(f"its parts need each other before they are there: {circle}")
            under_way.append(definition.name)
            for name in self._before(definition):
                add(self._definitions[name])
            under_way.pop()
            done[definition.name] = definition

        for definition in sorted(self._definitions.values(), key=lambda d: d.place):
            add(definition)
        return list(done.values())

    def _before(self, definition: _Definition) -> list[str]:
        """Give the definitions that must come before one. A function that it names at once may be called at once."""
        found: set[str] = set()
        todo = set(definition.at_once)
        while todo:
            name = todo.pop()
            if name in self._definitions and name not in found:
                found.add(name)
                todo |= self._definitions[name].if_called
        return sorted(found - {definition.name})


def _names(text: str) -> tuple[set[str], set[str]]:
    """Give the global names that a piece of code uses, and those of them that it needs as soon as it is run."""
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
            look(child, now and (str(child.get_type()) == "class" or comprehension))

    look(symtable.symtable(text, "<cell>", "exec"), True, True)
    return used, at_once


def _made_global(text: str) -> set[str]:
    """Give the names that functions in a piece of code declare global and assign to."""

    def look(table: symtable.SymbolTable) -> set[str]:
        mine = {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
        return mine.union(*map(look, table.get_children()))

    return look(symtable.symtable(text, "<cell>", "exec"))


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _first_line(node: Any) -> int:
    """Give a statement's first line, its decorators' included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _postpones(value: Any) -> bool:
    """Whether a class's annotations are texts: its cell has `from __future__ import annotations`."""
    hints = vars(value).get("__annotations__", {}) if isinstance(value, type) else {}
    return bool(hints) and all(isinstance(hint, str) for hint in hints.values())


def _number(title: str) -> int:
    return int(found[0]) if (found := re.search(r"\d+", title)) else 0


def _kind_of(value: Any) -> str:
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    kind = type(value).__name__
    return "a lambda" if getattr(value, "__name__", "") == "<lambda>" else f"a{'n' * (kind[0] in 'aeiouAEIOU')} {kind}"


def _is_builtin(value: Any) -> bool:
    title = getattr(value, "__name__", "")
    return title in BUILTINS and getattr(builtins, title, None) is value


def _stands_for_builtin(name: str, value: Any) -> bool:
    """Whether this is what IPython puts in a built-in's place: `open`, `exit`."""
    module = getattr(value, "__module__", None) or ""
    is_wrapped = getattr(value, "__wrapped__", None) is getattr(builtins, name, value)
    return name in BUILTINS and (is_wrapped or module.startswith(("IPython", "ipykernel")))


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and type(one) in PLAIN and one == other


def _from_line(module: str, ones: list[_Import]) -> str:
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
    """Give the file of a module that is not installed; its folder if it is a package."""
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
    if file is not None and file.suffix != ".py":
        raise ValueError(
            f"{why} the package {top}, which lies in {file} and is not installed. Install it (pip install, not -e), "
            "or define in a cell what is used of it"
        )


def imported(text: str) -> set[str]:
    """Give the modules that a source may import, `a.b.c` for `from a.b import c` too; not those for type checkers."""
    found: set[str] = set()
    renamed = {"labkit": "labkit"}

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                if alias.name == "labkit" and alias.asname:
                    renamed[alias.asname] = "labkit"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if renamed.get(chain.partition(".")[0]) and re.fullmatch(r"[\w.]+", chain):
                found.add("labkit." + chain.partition(".")[2])
        for child in ast.iter_child_nodes(node):
            look(child)

    look(_parsed(text))
    return found
