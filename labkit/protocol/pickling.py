"""Pickling by value what travels between notebook and ranks, and saying what of it cannot travel."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle

from labkit.protocol.pages import more


class _Pickler(cloudpickle.Pickler):
    """Sends modules of a type of their own, such as `torch.backends.cudnn`, by name, as any other module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Pickle by value; `cloudpickle.loads` reads it. Raises what the value raises that cannot be pickled."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name by which the reader knows a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pack a call for the ranks. Raises ValueError that names what cannot be sent."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        culprit = next(_unsendable(fn, args, kwargs), None)
        title = name_of(fn)
        if culprit is None:
            raise ValueError(f"{title} cannot be sent to the ranks: {error}\n{more('cannot_be_sent')}") from error
        where, value, why = culprit
        raise ValueError(
            f"{title} cannot be sent to the ranks: {where} is a {type(value).__name__}, which cannot be pickled "
            f"({why}). Make it inside the function instead, or pass what it is made from\n{more('cannot_be_sent')}"
        ) from error


def pack_result(result: Any, what: str = "the function returned") -> bytes:
    """Pack what is to reach the notebook. Raises ValueError if that cannot be."""
    try:
        return dumps(result)
    except Exception as error:
        raise ValueError(
            f"{what} a {type(result).__name__} that cannot be sent to the notebook ({error}). "
            f"Return plain values, tensors or a state_dict instead\n{more('cannot_be_sent')}"
        ) from error


def _unsendable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Find the values that cannot be pickled: (where, value, why)."""
    for index, value in enumerate(args):
        yield from _look_into(f"argument {index + 1} (after the worker)", value, set())
    for key, value in kwargs.items():
        yield from _look_into(f"argument {key}=…", value, set())
    yield from _look_into(name_of(fn), fn, set())


def _look_into(where: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any, str]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    try:
        dumps(value)
        return
    except Exception as error:
        why = str(error) or type(error).__name__
    parts: list[tuple[str, Any]] = []
    function = inspect.unwrap(getattr(value, "func", value))
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        used = {**names.globals, **names.nonlocals}
        parts = [(f"{name!r}, which {function.__name__} uses,", part) for name, part in used.items()]
    elif isinstance(value, dict):
        parts = [(f"{where}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set)):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    elif isinstance(value, type):
        parts = [(f"{value.__name__}.{name}", part) for name, part in vars(value).items() if inspect.isfunction(part)]
    found = [deeper for place, part in parts for deeper in _look_into(place, part, seen)]
    yield from found or [(where, value, why)]
