"""The notebook's definitions, to be read on a rank when somebody asks its `__main__` for one: no data.

A launched function brings what it uses. These are the others: the class in a file that a rank loads, a name in an
annotation. Each is pickled alone, once, and again only when it has changed; so a launch only looks whether it has. One
that uses others names them, to be read with it. Modules and plain values that a definition uses come along; other data
stay, as do definitions that hold much of it or cannot be pickled.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import io
import re
import types
import typing
from typing import Any, NamedTuple

import torch

from labkit.protocol import pickling
from labkit.protocol.reducing import DEFINITIONS

MOST_BYTES = 1 << 18
"""Of one pickle: a definition that takes more holds data, and stays."""

MOST_PLAIN = 1000
"""Plain values in a container that comes along."""

_OF_IPYTHON = re.compile(r"_+\d*|_i+\d*|_[ido]h|In|Out|exit|quit|get_ipython|open|__\w+__")
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_BY_NAME = (types.ModuleType, type, *DEFINITIONS, types.BuiltinFunctionType, types.GenericAlias, types.UnionType)
_UNCHANGING = (
    *(_PLAIN, _BY_NAME, type(Ellipsis), types.CodeType, types.MemberDescriptorType, types.GetSetDescriptorType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, dataclasses.Field, enum.Enum, typing.TypeVar),
    type(vars(abc.ABC)["_abc_impl"]),
)
"""Of these, as long as it is the same object, it says the same: those typed in the notebook are looked into."""


_CONTEXTS = (torch.utils._contextlib._DecoratorContextManager, functools.cached_property)
"""Of these too, what they hold is looked into: `torch.no_grad()` as a decorator."""


class Entry(NamedTuple):
    """One name of the notebook."""

    pickled: bytes
    uses: tuple[str, ...] = ()
    """Names that it needs besides."""


class Definitions(NamedTuple):
    """What a notebook has defined."""

    entries: dict[str, Entry]
    left_behind: dict[str, str]
    """Data that definitions use: their types, by name."""


class _Known(NamedTuple):
    """What is known of a name since an earlier launch."""

    value: Any
    parts: list[Any]
    """What it was made of then; none if a change could not be seen."""
    entry: Entry | None
    """None: it cannot come along."""


_known: dict[str, _Known] = {}


def collect() -> Definitions:
    """Return the definitions in this process's `__main__`."""
    there = {name: value for name, value in vars(pickling.main_of_notebook()).copy().items() if value is not None}
    for name in _known.keys() - there.keys():
        del _known[name]
    found = Definitions({}, {})
    todo = [name for name, value in there.items() if is_definition(value) and not _OF_IPYTHON.fullmatch(name)]
    todo += {"__file__"} & there.keys()
    seen = set(todo)
    while todo:
        name = todo.pop()
        if entry := _entry(name, there[name]):
            found.entries[name] = entry
            used = [each for each in entry.uses if each in there and each not in seen]
            todo += used
            seen.update(used)
        elif not is_definition(there[name]):
            found.left_behind[name] = type(there[name]).__name__
    return found


def is_definition(value: Any) -> bool:
    """Whether a value is a class or a function that was typed in the notebook."""
    kind = type(value)
    return (kind in DEFINITIONS or issubclass(kind, type)) and getattr(value, "__module__", None) == pickling.MAIN


def _entry(name: str, value: Any) -> Entry | None:
    known = _known.get(name)
    if known is not None and known.value is value:
        if known.entry is None:
            return None
        parts = _parts(name, value)
        if parts and len(parts) == len(known.parts) and all(map(lambda a, b: a is b, parts, known.parts)):
            return known.entry
    entry = None
    if isinstance(value, _BY_NAME) or type(value).__module__ == "typing" or _is_plain(value):
        try:
            entry = _pickled(name, value)
        except Exception:  # whatever it holds; what the launched function uses is another matter
            entry = None
    _known[name] = _Known(value, _parts(name, value), entry)
    return entry


def _is_plain(value: Any) -> bool:
    """Whether a value is a small one of Python's own types."""
    todo, count = [value], 0
    while todo:
        value, count = todo.pop(), count + 1
        if type(value) in _CONTAINERS and count + len(todo) + len(value) <= MOST_PLAIN:
            todo += [*value, *value.values()] if type(value) is dict else value
        elif type(value) not in _PLAIN:
            return False
    return True


def _parts(name: str, value: Any) -> list[Any]:
    """Return the objects that a value consists of, as far as it is defined in the notebook; none if any may change."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        found.append(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)
        if is_definition(value) and (value.__qualname__ == name or value.__qualname__.startswith(f"{name}.")):
            todo += _inside(value)
        elif kind in _CONTAINERS:
            todo += [*value, *value.values()] if kind is dict else value
        elif kind in (staticmethod, classmethod):
            todo.append(value.__func__)
        elif kind is property:
            todo += (value.fget, value.fset, value.fdel)
        elif kind is types.CellType:
            todo += _inside_cell(value)
        elif kind is types.MethodType:
            todo += (value.__func__, value.__self__)
        elif issubclass(kind, _CONTEXTS):
            todo.append(vars(value))
        elif not (isinstance(value, _UNCHANGING) or kind.__module__ in ("typing", "dataclasses")):
            return []
    return found


def _inside(definition: Any) -> list[Any]:
    if isinstance(definition, type):
        return [part for pair in vars(definition).items() for part in pair]
    if not isinstance(definition, types.FunctionType):
        return [definition.__wrapped__]
    function = definition
    others = (function.__defaults__, function.__kwdefaults__, function.__closure__, function.__annotations__)
    return [function.__code__, vars(function), *filter(None, others)]


def _inside_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise ValueError("too large for a definition")
        return super().write(data)


class _EntryPickler(pickling.Pickler):
    """Pickles one definition; others, and the names that its functions use, are only named."""

    def __init__(self, name: str, file: io.BytesIO) -> None:
        super().__init__(is_known=self._is_another, file=file)
        self._name = name

    def _is_another(self, name: str, _: Any) -> bool:
        if name == self._name or name.startswith(f"{self._name}."):
            return False
        self.names.add(name.partition(".")[0])
        return True

    def _dynamic_function_reduce(self, func: Any) -> Any:
        make, args, state, *rest = super()._dynamic_function_reduce(func)
        if func.__globals__ is vars(pickling.main_of_notebook()):
            self.names.update(state[1]["__globals__"])
            state[1]["__globals__"] = {}
        return (make, args, state, *rest)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        raise ValueError("tensors are data")


def _pickled(name: str, value: Any) -> Entry:
    with _Limited() as file:
        pickler = _EntryPickler(name, file)
        pickler.dump(value)
        return Entry(file.getvalue(), tuple(sorted(pickler.names - {name})))
