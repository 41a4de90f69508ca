"""What a program has defined, as plain data, so that two processes can compare theirs.

An exported job runs where the notebook is not. So what a fresh process has after the job's definitions is described
there, and what the notebook has is described here; `differences` finds what is not the same. `python describe.py` is
the fresh process. It imports nothing of labkit, since the job brings its own.

Described are the reader's functions (code, defaults, closures, attributes, registrations of `singledispatch`), classes
(bases, members), containers and objects, down to plain values; that two names share one object, too. What is imported
is described by its name. Not described: annotations, caches, and what has no comparable state (locks, files,
PyTorch's compilers).
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

LEAVES = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range, slice),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(pathlib.PurePath, re.Pattern),
)
"""Told by their text alone."""

TYPES = (types.GenericAlias, types.UnionType)
TORCH_PLAIN = ("dtype", "device", "layout", "memory_format", "Size")

DESCRIPTORS = (
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType),
)

OPAQUE = re.compile(
    r"(_?thread(ing)?|_?weakref|_?contextvars|asyncio|_?io|_?socket|logging|torch\._\w+|torch\.jit)(\.|$)"
)
"""Modules whose objects have no state that two processes could share."""

NOT_DESCRIBED = {
    *("__dict__", "__weakref__", "__module__", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__conditional_annotations__", "__firstlineno__", "__static_attributes__"),
    *("__slotnames__", "__type_params__", "__wrapped__", "_abc_impl"),
}
"""Of a class or function: from where it is, what Python itself notes there, and what is described otherwise."""

FUTURES = 0xFFFF
"""The flags of a code object without those of `from __future__ import …`, which holds for a whole file."""


class Part(NamedTuple):
    """A part of an object: "default" "lr" of a function, "attribute" "scale" of a class."""

    kind: str
    name: str
    value: str | int
    """The text of a plain value, or the number of an object."""


class Node(NamedTuple):
    """An object."""

    title: str
    parts: list[Part]
    is_shared: bool
    """Whether it matters that this is one object: it can change, or is asked for by identity."""


class Description:
    """The objects that some names lead to.

    Args:
        names: what is bound, by name.
        home: the module whose functions and classes are the program's own.
        rewritten: names of definitions whose source is not what it was, so that their code is not compared.
    """

    def __init__(self, names: Mapping[str, Any], home: str, rewritten: Iterable[str] = ()) -> None:
        self._home, self._rewritten = home, set(rewritten)
        self.objects: list[Any] = []
        self.nodes: list[Node] = [Node("", [], True)]
        self._numbers: dict[int, int] = {}
        self.objects.append(names)
        self.nodes[0] = Node("", [Part("name", name, self._value(value)) for name, value in names.items()], True)

    def _value(self, value: Any) -> str | int:
        if (text := self._leaf(value)) is not None:
            return text
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        number = self._numbers[id(value)] = len(self.nodes)
        self.objects.append(value)  # and so no other object gets its id
        self.nodes.append(Node("", [], True))
        title, parts = self._node(value)
        described = [Part(kind, name, self._value(part)) for kind, name, part in parts]
        self.nodes[number] = Node(title, described, not isinstance(value, (tuple, frozenset, types.MethodType)))
        return number

    def _leaf(self, value: Any) -> str | None:
        """Return the text of what is told by a text: plain values, what is imported, and what cannot be compared."""
        kind = type(value)
        if isinstance(value, enum.Enum) and kind.__module__ != self._home:
            return f"{_full_name(kind)}.{value.name}"
        if isinstance(value, LEAVES) and kind.__module__ != self._home:
            return f"{kind.__name__} {value!r}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return None if value.__module__ == self._home else f"class {_full_name(value)}"
        if isinstance(value, DESCRIPTORS):
            return f"{kind.__name__} {value.__qualname__}"
        if isinstance(value, TYPES) or kind.__module__ == "typing" or kind.__name__ in TORCH_PLAIN:
            return repr(value).replace(f"{self._home}.", "")
        if isinstance(value, types.FunctionType):
            is_imported = value.__module__ != self._home and _imported(value) is value
            return f"function {_full_name(value)}" if is_imported else None
        return f"a {_full_name(kind)}" if OPAQUE.match(kind.__module__) else None

    def _node(self, value: Any) -> tuple[str, Iterator[tuple[str, str, Any]]]:
        """Return what an object is, and its parts."""
        kind = type(value)
        if isinstance(value, types.FunctionType):
            return f"function {value.__name__}", self._of_function(value)
        if isinstance(value, type):
            return f"class {value.__name__}", self._of_class(value)
        title = f"a {kind.__name__ if kind.__module__ in (self._home, 'builtins') else _full_name(kind)}"
        return title, self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
        code = function.__code__
        for name, default in defaults_of(function).items():
            yield "default", name, default
        if function.__module__ == self._home and code.co_qualname.partition(".")[0] not in self._rewritten:
            yield "code", "", _digest_of_code(code)
        if registry := registry_of(function):
            for cls, registered in registry.items():
                yield "registered", cls.__qualname__, registered
        else:
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                yield "closure", name, _content(cell)
        for name, value in sorted(vars(function).items()):
            if name not in NOT_DESCRIBED and not (registry and name in REGISTRY_METHODS):
                yield "attribute", name, value

    def _of_class(self, cls: type) -> Iterator[tuple[str, str, Any]]:
        for number, base in enumerate(cls.__bases__):
            yield "base", str(number), base
        yield "metaclass", "", type(cls)
        for name, value in sorted(vars(cls).items()):
            if name not in NOT_DESCRIBED:
                yield "attribute", name, value

    def _of_object(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        kind = type(value)
        if kind.__module__ == self._home:
            yield "class", "", kind
        if _is_tensor(value):
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
            sha = hashlib.sha256(data.view(sys.modules["torch"].uint8).numpy()).hexdigest()
            yield "value", "", f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {sha}"
            return
        for base in (int, float, complex, str, bytes):
            if isinstance(value, base):
                yield "value", "", base.__repr__(value)
        if isinstance(value, dataclasses.Field):
            for name in ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only"):
                yield "attribute", name, getattr(value, name)
            return
        if isinstance(value, (Mapping, types.MappingProxyType)):
            keys = [self._key(key) for key in value]
            yield "order", "", ", ".join(keys)
            for key, item in zip(keys, value.values(), strict=True):
                yield "item", key, item
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield "item", str(number), item
        elif isinstance(value, (set, frozenset)):
            yield "order", "", ", ".join(sorted(map(self._key, value)))
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            yield "function", "", value.__func__
        elif isinstance(value, property):
            for name in ("fget", "fset", "fdel"):
                yield "function", name, getattr(value, name)
        elif isinstance(value, functools.partial):
            yield from (
                ("function", "", value.func),
                ("item", "args", value.args),
                ("item", "keywords", value.keywords),
            )
        elif not hasattr(value, "__dict__") and not _slots(kind):
            yield from self._reduced(value)
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            yield "function", "__wrapped__", wrapped
        for name, attribute in sorted(getattr(value, "__dict__", {}).items()):
            if name not in NOT_DESCRIBED:
                yield "attribute", name, attribute
        for name in _slots(kind):
            yield "attribute", name, getattr(value, name, "not set")

    def _reduced(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        """Yield what pickle would keep of an object without attributes."""
        try:
            kept = value.__reduce_ex__(4)
        except Exception:  # any object's own
            return
        if isinstance(kept, tuple):
            for number, part in enumerate(kept):
                yield "state", str(number), list(part) if isinstance(part, Iterator) else part

    def _key(self, key: Any) -> str:
        leaf = self._leaf(key)
        return leaf if leaf is not None else str(getattr(key, "__qualname__", type(key).__qualname__))


REGISTRY_METHODS = ("register", "dispatch", "registry", "_clear_cache")


def registry_of(function: Any) -> Mapping[type, Callable[..., Any]] | None:
    """Return what a function of `functools.singledispatch` has for which class; None of another function."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != functools.singledispatch.__code__.co_filename:
        return None
    registry = getattr(function, "registry", None)
    return registry if isinstance(registry, types.MappingProxyType) else None


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's parameters."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


SAME = {"LOAD_METHOD": "LOAD_ATTR"}
WITHOUT_MEANING = {"PUSH_NULL", "PRECALL", "CACHE", "NOP", "RESUME", "EXTENDED_ARG"}
"""Python calls `module.function` by other instructions where the same file imports the module."""


def _digest_of_code(code: types.CodeType) -> str:
    """Return the same text for the same code, in whatever file and line it is."""

    def told(value: Any) -> str:
        if isinstance(value, types.CodeType):
            return _digest_of_code(value)
        if isinstance(value, frozenset):
            return f"frozenset {sorted(map(told, value))}"
        return f"{type(value).__name__} {list(map(told, value)) if isinstance(value, tuple) else repr(value)}"

    steps = [
        (SAME.get(each.opname, each.opname), "" if each.opcode in JUMPS else told(each.argval))
        for each in dis.get_instructions(code)
        if each.opname not in WITHOUT_MEANING
    ]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & FUTURES)
    text = f"{steps} {code.co_varnames[: sum(counts[:3])]} {counts} {told(code.co_consts[:1])}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


JUMPS = {*dis.hasjrel, *dis.hasjabs}


def _imported(value: Any) -> Any:
    found = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _slots(kind: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__ if base.__module__ != "builtins"]
    return [name for slots in found for name in ([slots] if isinstance(slots, str) else slots) if name[:2] != "__"]


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided


# Comparing


class Step(NamedTuple):
    """A step on the way to what differs."""

    owner: int
    """The number of the object, in the first description."""
    kind: str
    name: str


IN_WORDS = {
    "name": "{1}",
    "default": "the default {1}= of {0}",
    "attribute": "{0}.{1}",
    "item": "{0}[{key}]",
    "base": "the base class of {0}",
    "closure": "{1!r} inside {0}",
    "registered": "{0}, registered for {1},",
    "code": "the code of {0}",
}
"""What each kind of step leads to, said of what it begins at."""


class Difference(NamedTuple):
    """What two programs do not have alike."""

    path: tuple[Step, ...]
    ours: str
    theirs: str

    def __str__(self) -> str:
        """Return where it is, as a reader would say it: `Net.scale`, "the default lr= of train"."""
        text = ""
        for _, kind, name in self.path:
            if kind in IN_WORDS:
                text = IN_WORDS[kind].format(text, name, key=name.partition(" ")[2] or name)
        return text


ABSENT = "not there"


def differences(ours: list[Node], theirs: list[Node]) -> list[Difference]:
    """Return what is not the same in two descriptions."""
    found: list[Difference] = []
    pairs: dict[int, int] = {}
    partners: dict[int, int] = {}
    first: dict[int, Difference] = {}

    # Breadth first, so that a path is the shortest: what has a name of its own is told by that.
    todo: collections.deque[tuple[str | int, str | int, tuple[Step, ...]]] = collections.deque([(0, 0, ())])
    while todo:
        one, other, path = todo.popleft()
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                found.append(Difference(path, _told(one, ours), _told(other, theirs)))
            continue
        mine, their = ours[one], theirs[other]
        if mine.is_shared and their.is_shared:
            if pairs.get(one) == other:
                continue
            if one in pairs or other in partners:
                same = f"the same object as {first[one if one in pairs else partners[other]]}"
                said = (same, "another object") if one in pairs else ("another object", same)
                found.append(Difference(path, *said))
                continue
            pairs[one], partners[other], first[one] = other, one, Difference(path, "", "")
        if mine.title != their.title:
            found.append(Difference(path, mine.title, their.title))
            continue
        my_parts = {part[:2]: part.value for part in mine.parts}
        their_parts = {part[:2]: part.value for part in their.parts}
        for kind, name in {**my_parts, **their_parts}:
            step = Step(one, kind, name)
            todo.append((my_parts.get(step[1:], ABSENT), their_parts.get(step[1:], ABSENT), (*path, step)))
    return found


def _told(value: str | int, nodes: list[Node]) -> str:
    if isinstance(value, int):
        return nodes[value].title
    return value.partition(" ")[2] if value.partition(" ")[0] in PLAIN_TITLES else value


PLAIN_TITLES = {kind.__name__ for kind in LEAVES}


# The fresh process


def of_a_script(folder: str, names: list[str], rewritten: list[str]) -> dict[str, Any]:
    """Run the definitions of `train.py` in a folder; return what they have made, or why they do not run."""
    file = os.path.join(folder, "train.py")
    with open(file, encoding="utf-8") as opened:
        tree = ast.parse(opened.read())
    tree.body.pop()  # if __name__ == "__main__"
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins)
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), main.__dict__)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return {"error": f"{type(error).__name__}: {error}", "line": lines[-1] if lines else 0}
    finally:
        sys.modules["__main__"] = before
    found = {name: vars(main)[name] for name in names if name in vars(main)}
    return {"nodes": Description(found, "__main__", rewritten).nodes}


def nodes_from(data: list[Any]) -> list[Node]:
    """Return what `of_a_script` gave, after JSON."""
    return [Node(title, [Part(*part) for part in parts], is_shared) for title, parts, is_shared in data]


def _serve() -> None:
    """Describe the script in the folder that standard input names; answer there where standard output was."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the script prints is not an answer
    request = json.load(sys.stdin)
    sys.path.insert(0, request["folder"])
    os.chdir(request["folder"])
    with answer:
        json.dump(of_a_script(**request), answer)


if __name__ == "__main__":
    _serve()
