"""Functions that pickle and cloudpickle cannot send by value: what decorators of Python and PyTorch make of them.

Such a wrapper pickles by its name, or holds a lock or a weak reference. It is made anew, from the function it wraps. So
is what else pickles as a name of the notebook's, or belongs to a class that PyTorch has made for it alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as by_value

ALL = "*"
"""Stands for every name of the notebook: a function looks them up in ways that its code does not tell."""

_LOOK_UP_ANY_NAME = {"globals", "eval", "exec", "vars", "locals"}

_Cached: Any = type(functools.cache(lambda: None))
_dispatcher_code = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]

DEFINITIONS = {types.FunctionType, _Cached}
"""What `def` makes, with decorators or without."""


def reduce(value: Any) -> Any:
    """Return what a pickler takes as `reducer_override`'s answer."""
    kind = type(value)
    if kind is types.FunctionType:
        return _reduce_function(value)
    if kind is types.CodeType:  # its file, too, which cloudpickle leaves out from 3.1.3 on: else no traceback has lines
        return _code, (value.co_filename, *cloudpickle.Pickler.dispatch_table[kind](value))
    if kind is _Cached and not is_by_name(value):
        others = {name: given for name, given in vars(value).items() if name not in ("__wrapped__", "cache_parameters")}
        return _cached, (value.__wrapped__, value.cache_parameters()), others, None, None, _set_attributes
    if kind is functools.cached_property and "lock" in vars(value):  # before Python 3.12
        return functools.cached_property, (value.func,), {"attrname": value.attrname}
    if kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__.startswith("Parametrized"):
        return _new, kind.__bases__, vars(value), None, None, _parametrize
    return NotImplemented


def _reduce_function(function: types.FunctionType) -> Any:
    if "_torchdynamo_orig_callable" in vars(function) and "aot_compile" in vars(function):
        return _compiled, (function._torchdynamo_orig_callable, _compile_options(function))  # type: ignore[attr-defined]
    if function.__code__ is _dispatcher_code and not is_by_name(function):
        implementations = dict(function.registry)  # type: ignore[attr-defined]
        wrapped = function.__wrapped__  # type: ignore[attr-defined]
        return functools.singledispatch, (wrapped,), implementations, None, None, _register
    return NotImplemented


def pickled_by_name(value: Any, module: str) -> tuple[str, Callable[..., Any], tuple[Any, ...]] | None:
    """Return (name, function, arguments) by which a value can be made that pickles as its name in a module.

    Such are what `typing.NewType` and its like have made, and the one object of a class whose `__reduce__` says so.
    """
    kind = type(value)
    if kind.__module__ == "typing" and getattr(value, "__module__", None) == module:
        make = _OF_TYPING.get(kind.__name__)
        return (value.__name__, _make_for, (module, kind, *make(value))) if make else None
    if kind.__module__ == module and kind.__reduce__ is not object.__reduce__:
        there = vars(sys.modules[module])
        if any(one is value for one in list(there.values())):
            name: Any = value.__reduce__()
            if isinstance(name, str) and there.get(name) is value:
                return name, _make_object, (kind, getattr(value, "__dict__", {}))
    return None


_OF_TYPING: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "NewType": lambda one: (one.__name__, one.__supertype__),
    "ParamSpec": lambda one: (one.__name__,),
    "TypeVarTuple": lambda one: (one.__name__,),
    "TypeAliasType": lambda one: (one.__name__, one.__value__),
}
"""What each is made with."""


def _make_for(module: str, kind: type, *args: Any) -> Any:
    value = kind(*args)
    with contextlib.suppress(AttributeError):
        value.__module__ = module
    return value


def _make_object(kind: type, attributes: Mapping[str, Any]) -> Any:
    value = _new(kind)
    _set_attributes(value, attributes)
    return value


def is_by_name(value: Any) -> bool:
    """Whether a function is found by its name in a module that others can import."""
    return by_value._lookup_module_and_qualname(value, getattr(value, "__qualname__", None)) is not None


def _code(file: str, make: Callable[..., types.CodeType], args: Any) -> types.CodeType:
    return make(*args).replace(co_filename=file)


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    for name, given in attributes.items():
        setattr(value, name, given)


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrize(module: Any, state: Mapping[str, Any]) -> None:
    """Give a module what it had, and the class that PyTorch makes for one whose weights are computed."""
    from torch.nn.utils import parametrize

    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


_MADE_ANEW = {"step", "_zero_grad_profile_name"}
"""Attributes of an optimizer that it, or a scheduler of learning rates, makes for this one object."""


def reduce_optimizer(optimizer: Any) -> Any:
    """Return how an optimizer is pickled with its hooks and with what its class has added, which PyTorch leaves out."""
    kept = optimizer.__getstate__()
    more = {name: value for name, value in vars(optimizer).items() if name not in kept and name not in _MADE_ANEW}
    return _new, (type(optimizer),), (kept, more), None, None, _set_optimizer


def _set_optimizer(optimizer: Any, state: tuple[Any, Mapping[str, Any]]) -> None:
    optimizer.__setstate__(state[0])
    vars(optimizer).update(state[1])


def _register(function: Any, implementations: Mapping[type, Callable[..., Any]]) -> None:
    for kind, implementation in implementations.items():
        function.register(kind, implementation)


def _compile_options(function: Any) -> dict[str, Any]:
    """Return what `torch.compile` was given. Raises TypeError if this PyTorch does not tell."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    context: Any = cells["self"].cell_contents if "self" in cells else None
    backend = getattr(context, "callback", None)
    while inner := getattr(backend, "_torchdynamo_orig_backend", None):
        backend = inner
    try:
        return {"backend": backend, "fullgraph": context.fullgraph, "dynamic": context._dynamic}
    except AttributeError:
        raise TypeError(
            "it is compiled, and this version of PyTorch does not say how; call torch.compile in the launched function"
        ) from None


def _compiled(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    import torch

    return torch.compile(function, **options)


# Modules that the notebook has made, and entered into `sys.modules`: nobody else can import them


def made_by_hand(name: Any) -> types.ModuleType | None:
    """Return the module of this name if no file and no library is behind it."""
    module = sys.modules.get(name) if isinstance(name, str) and "." not in name else None
    if type(module) is not types.ModuleType or name in ("__main__", "__mp_main__"):
        return None
    return module if module.__spec__ is None and not hasattr(module, "__file__") else None


def reduce_made(module: types.ModuleType) -> Any:
    """Return how such a module is pickled, with all that is in it."""
    state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
    return _make_module, (module.__name__,), state, None, None, _fill_module


class NamespaceOf(dict):
    """Stands for the globals of functions in such a module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return vars, (self._module,)


def _make_module(name: str) -> types.ModuleType:
    module = made_by_hand(name) or types.ModuleType(name)
    sys.modules[name] = module
    return module


def _fill_module(module: types.ModuleType, state: Mapping[str, Any]) -> None:
    vars(module).update(state)


# Names


def mentioned(value: Any) -> set[str]:
    """Return the names that a definition mentions in ways which pickle does not follow: by texts in annotations.

    With `ALL` among them if it looks names up by `globals()`, `eval` and the like.
    """
    code = getattr(value, "__code__", None)
    annotations = getattr(value, "__annotations__", None) if code else vars(value).get("__annotations__")
    found: set[str] = set()
    todo = list(annotations.values()) if isinstance(annotations, dict) else []
    while todo:
        annotation = todo.pop()
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            found.update(_names_in(annotation))
        else:
            todo += typing.get_args(annotation)
    if code and not _LOOK_UP_ANY_NAME.isdisjoint(by_value._extract_code_globals(code)):
        found.add(ALL)
    return found


@functools.lru_cache(maxsize=10_000)
def _names_in(annotation: str) -> tuple[str, ...]:
    try:
        code = compile(annotation, "<annotation>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError):
        return ()
    within = [name for text in code.co_consts if isinstance(text, str) for name in _names_in(text)]
    return (*code.co_names, *within)
