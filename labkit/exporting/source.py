"""What a function from a cell uses, as the source of one script.

Follows every name that the code uses: what a cell defines is written as source, what a package has is imported,
numbers, texts and collections of them become assignments, anything else is refused by name.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import math
import os
import pathlib
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

import labkit
from labkit.exporting.describe import Difference, defaults_of, registry_of
from labkit.exporting.imports import Import, check_origin, import_lines
from labkit.exporting.names import (
    BUILTINS,
    is_builtin,
    kind_of,
    made_global,
    names_in,
    parsed,
    refusal,
    stands_for_builtin,
    with_replaced,
)
from labkit.exporting.secrets import Environment, without_secrets
from labkit.exporting.statements import Sources, expression_of, inner_definition
from labkit.protocol.redaction import is_surely_secret

LITERAL_CHARACTERS = 10_000
"""A constant that is longer as source belongs into a file."""

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))

FUTURE = "from __future__ import annotations\n"


class Definition(NamedTuple):
    """A function, a class or a constant as it will be written."""

    name: str
    text: str
    position: tuple[int, int]
    """Where it stands in the notebook: (cell, line). Constants come first."""
    at_once: set[str]
    """Names that must be there before it."""
    if_called: set[str]
    """Names that must be there when it is called, of a function."""
    postponed: bool = False
    """Whether its annotations are never evaluated (`from __future__ import annotations`)."""


class Change(NamedTuple):
    """Where the notebook has another value than the source of a definition gives today."""

    kind: str
    """"default" of a parameter, "value" in a class's body, or an attribute that was given "later"."""
    owner: str
    """The function or class: `Net.forward`."""
    name: str


CONTAINERS = (list, dict, set, functools.partial)
"""Of these it matters whether two names mean one object."""

LAST = 10**6
"""The position of what was given later: after all cells."""


class Script:
    """Collects what a function needs, and writes it down.

    Args:
        fn: the function.
        arguments: for it.
        changes: values that are written as they are now, and not as the source of their definition has them.
    """

    def __init__(
        self, fn: Callable[..., Any], arguments: dict[str, Any], changes: Mapping[Change, Any] | None = None
    ) -> None:
        self._title = fn.__name__
        self._changes = changes or {}
        self._home: dict[str, Any] = inspect.unwrap(fn).__globals__
        self._sources = Sources(fn.__name__, self._home)
        self._own_imports = self._sources.imports()
        self._containers = {
            id(value): name
            for name, value in reversed(self._home.items())
            if type(value) in CONTAINERS and not name.startswith("_")
        }
        """What the notebook calls its containers."""
        self._imports: dict[str, Import] = {}
        self._definitions: dict[str, Definition] = {}
        self._environment = Environment()
        self._bound: dict[str, Any] = {}
        """Everything that the script binds, by name."""
        self._made: set[str] = set()
        """Names that its functions make global by themselves."""
        self.rewritten: set[str] = set()
        """Definitions whose code is not what it was: it reads secrets from the environment."""
        self._missing: dict[str, str] = {}
        """Names that the notebook does not define, and who uses them."""
        self._need(fn.__name__, fn, "")
        self._arguments = "".join(
            f'"{name}": {self._expression(value, f"the argument {name}=…", set(), name)}, '
            for name, value in arguments.items()
        ).removesuffix(", ")
        for name, user in self._missing.items():
            if name not in self._made and name not in self._bound:
                raise self._refusal(f"{user} uses {name!r}, which the notebook does not define (any more)")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the environment that the script reads, in place of secrets that the notebook has."""
        return self._environment.variables

    @property
    def bound(self) -> dict[str, Any]:
        """What the script binds, as the notebook has it, by name."""
        return self._bound

    def is_constant(self, name: str) -> bool:
        """Whether a name is bound by an assignment, to a value."""
        definition = self._definitions.get(name)
        return definition is not None and definition.text.startswith(f"{name} = ") and not callable(self._bound[name])

    @property
    def home(self) -> str:
        """The name of the module in which the function is."""
        return str(self._home.get("__name__"))

    def text(self, seed: int | None) -> str:
        """Return the whole script."""
        title, made = self._title, time.strftime("%Y-%m-%d")
        head = (
            f'"""{title}, exported from a notebook by labkit {labkit.__version__} on {made}.\n\n'
            "    torchrun --standalone --nproc-per-node=2 train.py    on this machine\n"
            "    sbatch job.sbatch                                    on a SLURM cluster\n"
            "    ray job submit … -- python submit_ray.py             on a Ray cluster\n"
            "    python train.py --help                               its options\n\n"
            'README.txt says more.\n"""'
        )
        ordered = self._in_order()
        future = FUTURE.rstrip() if any(definition.postponed for definition in ordered) else ""
        constants = "\n".join(d.text for d in ordered if d.position < (0, 0))
        top = "\n\n".join(filter(None, [future, "\n".join(import_lines(self._imports.values())), constants]))
        body = "\n\n\n".join(d.text for d in ordered if d.position >= (0, 0))
        tail = (
            '\n\n\nif __name__ == "__main__":\n'
            "    import labkit.exporting.script\n\n"
            f"    labkit.exporting.script.main({title}, {{{self._arguments}}}, seed={seed!r})\n"
        )
        text = f"{head}\n\n{top}\n\n\n{body}{tail}" if top else f"{head}\n\n\n{body}{tail}"
        compile(text, "train.py", "exec")
        assert names_in(text)[0] <= self._bound.keys() | self._made | BUILTINS | {"labkit"}
        return text

    # What is needed

    def _need(self, name: str, value: Any, why: str) -> None:
        """Provide for a name in the script. `why` is for the reader: "train uses"."""
        if name in self._bound:
            if self._bound[name] is not value and not _equal(self._bound[name], value):
                raise self._refusal(
                    f"it needs two things called {name!r} ({kind_of(self._bound[name])} and {kind_of(value)}; {why} "
                    f"the second). Run the cell that defines {name!r} again, and those that use it; or rename one"
                )
            return
        if not name.isidentifier():
            raise self._refusal(f"{why} {kind_of(value)} called {name!r}, which is no name. Use def")
        self._bound[name] = value
        own = self._own_imports.get(name)
        if own is not None and value is not None and own.value() is value:
            self._import(own, why)
        elif isinstance(value, types.ModuleType):
            self._import_module(name, value, why)
        elif (isinstance(value, type) or (callable(value) and hasattr(value, "__name__"))) and not is_builtin(value):
            self._need_code(name, value, why)
        elif (first := self._containers.get(id(value), name)) != name:
            self._need(first, value, why)
            self._define_constant(name, first)
        else:
            self._define_constant(name, self._expression(value, f"{why} {name!r}", set(), name, is_named=True))

    def _define_constant(self, name: str, expression: str) -> None:
        text = f"{name} = {expression}"
        used, at_once = names_in(text)
        later = [d for n in at_once if (d := self._definitions.get(n)) and d.position >= (0, 0)]
        position = (0, 0) if later else (-1, len(self._bound))
        self._definitions[name] = Definition(name, text, position, at_once, used)

    def _need_code(self, name: str, value: Any, why: str) -> None:
        """Provide for a function or a class: from the notebook as source, from elsewhere by import."""
        if getattr(value, "__module__", None) != self._home.get("__name__"):
            self._import_object(name, value, why)
            return
        what = f"{why} {name!r}" if why else name
        node, text, position = self._sources.statement_of(value, what, name)
        if isinstance(node, ast.Assign):  # a lambda with a name
            known_as = ast.unparse(node.targets[0])
        else:
            known_as = node.name
            self._sources.check_wrapping(value, node, what)
        if known_as != name:
            # The same thing under another name: define it as it was, then name it.
            self._need(known_as, value, why)
            self._definitions[name] = Definition(name, f"{name} = {known_as}", position, {known_as}, {known_as})
            return
        changed = self._with_changes(name, text)
        text = without_secrets(changed, self._from_environment)
        if text != changed:
            self.rewritten.add(name)
        code = getattr(inspect.unwrap(value), "__code__", None)
        postponed = bool(code and code.co_flags & annotations.compiler_flag) or _postpones(value)
        used, at_once = names_in((FUTURE if postponed else "") + text)
        hints = names_in(text)[0] - used
        if_called = set() if isinstance(value, type) else used
        self._definitions[name] = Definition(name, text, position, at_once, if_called, postponed)
        self._made |= made_global(text)
        for used_name in sorted(used | hints):
            self._need_name(used_name, name, must=used_name in used)
        for (kind, owner, attribute), now in self._changes.items():
            if kind == "later" and owner.partition(".")[0] == name:
                expression = self._expression(now, f"{owner}.{attribute}", set(), attribute)
                self._define_later(f"{owner}.{attribute}", f"{owner}.{attribute} = {expression}")
        for cls, registered in (registry_of(value) or {}).items():
            if registered is not inspect.unwrap(value):
                self._need_registered(name, cls, registered)

    def _with_changes(self, name: str, text: str) -> str:
        """Return the source of a definition with values as they are now."""
        replacements: list[tuple[ast.expr, str]] = []
        for change, now in self._changes.items():
            if change.kind != "later" and change.owner.partition(".")[0] == name:
                node = expression_of(parsed(text).body[0], *change)
                assert node is not None
                what = f"{change.owner} has {change.name!r}"
                replacements.append((node, self._expression(now, what, set(), change.name)))
        return with_replaced(text, replacements)

    def _define_later(self, title: str, text: str, position: tuple[int, int] = (LAST, 0)) -> None:
        """Write a statement that comes after a definition, and what it needs."""
        used, at_once = names_in(text)
        self._definitions[title] = Definition(title, text, position, at_once, used)
        for name in sorted(used):
            self._need_name(name, title, must=True)

    def _need_registered(self, name: str, cls: type, registered: Any) -> None:
        """Provide for what `functools.singledispatch` calls for a class."""
        why = f"{name} has, registered for {cls.__qualname__},"
        known_as = registered.__name__
        node, text, position = self._sources.statement_of(registered, why)
        if not getattr(node, "decorator_list", []):
            written = f"{name}.register({self._name_for(cls, why)}, {self._name_for(registered, why)})"
            self._define_later(f"{name}.register {cls.__qualname__}", written)
        elif self._home.get(known_as) is registered and known_as != "_":
            self._need(known_as, registered, why)
        else:  # several are called `_`
            self._define_later(
                f"{name}.register {cls.__qualname__}", without_secrets(text, self._from_environment), position
            )

    def change_for(self, difference: Difference, objects: list[Any]) -> tuple[Change, Any] | None:
        """Return how to write as it is now what differs; None if there is no way. `objects`: of the description."""
        root = difference.path[0].name
        try:
            definition, _, _ = self._sources.statement_of(self._bound[root], root, root)
        except ValueError:
            return None
        owner = ast.unparse(definition.targets[0]) if isinstance(definition, ast.Assign) else str(definition.name)
        for number, kind, name in difference.path[1:]:
            thing = objects[number]
            if kind == "default":
                if getattr(thing, "__qualname__", "") not in (owner, "<lambda>") or name not in defaults_of(thing):
                    return None
                change = Change("default", owner, name)
                if inner_definition(definition, owner) is None:  # a dataclass's __init__, a named tuple's __new__
                    change = Change("value", owner.rpartition(".")[0], name)
                return (change, defaults_of(thing)[name]) if expression_of(definition, *change) else None
            if kind == "attribute" and isinstance(thing, (type, types.FunctionType)):
                now = vars(thing).get(name, self)
                function = inspect.unwrap(getattr(now, "__func__", getattr(now, "fget", now)))
                if getattr(function, "__qualname__", "") == f"{owner}.{name}":
                    owner = f"{owner}.{name}"
                    continue
                change = Change("value", owner, name)
                if expression_of(definition, *change) and change not in self._changes:
                    return change, _declared(thing, name, now)
                is_made = name.startswith("__") or hasattr(thing, "_fields")  # by dataclass, by NamedTuple
                return None if now is self or is_made else (Change("later", owner, name), now)
            if kind not in ("closure", "function"):
                return None
        return None

    def _need_name(self, name: str, user: str, must: bool) -> None:
        """Provide for a name that the source of `user` mentions."""
        here = self._home.get(name, self)
        if name == "get_ipython" or (name == "display" and here is self):
            raise self._refusal(f"{user} uses {name}, which only a notebook has (a line with % or ! uses get_ipython)")
        if here is self or stands_for_builtin(name, here):
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
        return refusal(self._title, why)

    # Imports

    def _import(self, one: Import, why: str) -> None:
        check_origin(one.module, f"{self._title} cannot be exported: {why} {one.bound!r}, from")
        self._imports[one.bound] = one

    def _import_module(self, name: str, module: types.ModuleType, why: str) -> None:
        full = module.__name__
        if sys.modules.get(full) is not module or full == "__main__":
            raise self._refusal(f"{why} the module {name!r}, which cannot be imported. Put it into a file")
        package, _, last = full.rpartition(".")
        self._import(Import(package, last, name) if package and last == name else Import(full, "", name), why)

    def _import_submodules(self, name: str, user: str) -> None:
        """Repeat the notebook's `import a.b` where `a.b` is used: `import a` alone may not load it."""
        text = self._definitions[user].text if user in self._definitions else ""
        for dotted in self._sources.dotted:
            if dotted.startswith(f"{name}.") and re.search(rf"\b{re.escape(dotted)}\b", text):
                self._imports[dotted] = Import(dotted, "", dotted)

    def _import_object(self, name: str, value: Any, why: str) -> None:
        module, title = getattr(value, "__module__", None), getattr(value, "__qualname__", name)
        one = Import(module or "", title, name)
        if module and "." not in title and one.value() is value:
            self._import(one, why)
        elif text := self._attribute(value, why):
            self._definitions[name] = Definition(name, f"{name} = {text}", (-1, len(self._bound)), set(), set())
        else:
            raise self._refusal(
                f"{why} {name!r}, {kind_of(value)} that cannot be imported from {module or 'any module'} by its name. "
                f"Make it inside {self._title}"
            )

    def _attribute(self, value: Any, why: str) -> str:
        """Return `nn.Linear` for what a module of the notebook's has; "" if none does."""
        title = str(getattr(value, "__name__", ""))
        for name, module in self._home.items():
            if isinstance(module, types.ModuleType) and getattr(module, title, None) is value:
                self._need(name, module, why)
                return f"{name}.{title}"
        return ""

    # Values

    def _expression(self, value: Any, what: str, inside: set[int], name: str = "", *, is_named: bool = False) -> str:
        """Write a value as source; `name` is what it is called there, and `is_named` if it is bound to that.

        Raises ValueError that names it.
        """
        if is_surely_secret(name, value):
            return self._from_environment(name, value)
        container = self._containers.get(id(value))
        if container and not is_named and id(value) not in inside:
            self._need(container, value, what)
            return container
        text = self._written(value, what, inside | {id(value)} if id(value) not in inside else None, name)
        if len(text) > LITERAL_CHARACTERS:
            raise self._refusal(f"{what}, {len(text):,} characters as source. Keep it in a file, and read that")
        return text

    def _from_environment(self, name: str, value: Any) -> str:
        self._need("os", os, f"{self._title} needs")
        return self._environment.expression(name, value)

    def _written(self, value: Any, what: str, inside: set[int] | None, name: str) -> str:
        if inside is None:
            raise self._refusal(f"{what}, {kind_of(value)} that contains itself")

        def each(values: Iterable[Any]) -> list[str]:
            return [self._expression(item, what, inside, name) for item in values]

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
            named = ((key, item, key if isinstance(key, str) else name) for key, item in value.items())
            pairs = ((self._expression(k, what, inside), self._expression(v, what, inside, n)) for k, v, n in named)
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
            keywords = [f"{n}={self._expression(item, what, inside, n)}" for n, item in value.keywords.items()]
            return f"functools.partial({', '.join([*each([value.func]), *each(value.args), *keywords])})"
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return self._name_for(value, what)
        raise self._refusal(
            f"{what}, {kind_of(value)}, which cannot be written as source. Make it inside {self._title}, or pass what "
            "it is made from"
        )

    def _name_for(self, value: Any, what: str) -> str:
        """Return an expression for a function or a class that stands in a collection, say."""
        if is_builtin(value):
            return str(value.__name__)
        name = next((name for name, here in self._home.items() if here is value and not name.startswith("_")), None)
        if name is None and (text := self._attribute(value, what)):
            return text
        name = name or str(value.__name__)
        self._need(name, value, what)
        return name

    # Order

    def _in_order(self) -> list[Definition]:
        """Return the definitions in the notebook's order, but each after what it needs at once."""
        done: dict[str, Definition] = {}
        under_way: list[str] = []

        def add(definition: Definition) -> None:
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

        for definition in sorted(self._definitions.values(), key=lambda d: d.position):
            add(definition)
        return list(done.values())

    def _before(self, definition: Definition) -> list[str]:
        """Return the definitions that must come before one. A function that it names at once may be called at once."""
        found: set[str] = set()
        todo = set(definition.at_once)
        while todo:
            name = todo.pop()
            if name in self._definitions and name not in found:
                found.add(name)
                todo |= self._definitions[name].if_called
        return sorted(found - {definition.name})


def _postpones(value: Any) -> bool:
    """Whether a class's annotations are texts: its cell has `from __future__ import annotations`."""
    hints = vars(value).get("__annotations__", {}) if isinstance(value, type) else {}
    return bool(hints) and all(isinstance(hint, str) for hint in hints.values())


def _declared(thing: Any, name: str, now: Any) -> Any:
    """Return what the body of a class has for a name: a field's default, the value of a member of an enumeration."""
    if isinstance(thing, enum.EnumType) and name in thing.__members__:
        return thing[name].value
    field = getattr(thing, "__dataclass_fields__", {}).get(name)
    return now if field is None or field.default is dataclasses.MISSING else field.default


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and type(one) in PLAIN and one == other
