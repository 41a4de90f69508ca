"""Which value keeps a call from being sent to the ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

Dumps = Callable[[Any], object]
"""Pickles a value, or raises."""


def explain(title: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dumps: Dumps) -> str | None:
    """Return which value of a call cannot be pickled, why, and what to do; None if that is not known."""
    for where, value, why in find(title, fn, args, kwargs, dumps):
        what = f"{where} is a {type(value).__name__}, which cannot be pickled ({why})"
        if type(value).__module__.startswith("multiprocessing."):
            return f"{what}. Return values from the function instead: run.results has each rank's"
        return f"{what}. Make it inside the function instead, or pass what it is made from"
    return None


def find(
    title: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dumps: Dumps
) -> Iterator[tuple[str, Any, str]]:
    """Find the values that cannot be pickled: (where, value, why)."""
    for index, value in enumerate(args):
        yield from _look_into(f"argument {index + 1} (after the worker)", value, set(), dumps)
    for key, value in kwargs.items():
        yield from _look_into(f"argument {key}=…", value, set(), dumps)
    yield from _look_into(title, fn, set(), dumps)


def _look_into(where: str, value: Any, seen: set[int], dumps: Dumps) -> Iterator[tuple[str, Any, str]]:
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
    elif inspect.ismethod(function):
        parts = [(f"self, a {type(function.__self__).__name__},", function.__self__)]
    elif isinstance(value, dict):
        called = {key: f"{key!r}" if isinstance(key, str) else f"item {key!r}" for key in value}
        parts = [(f"{called[key]} of {where}", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set)):
        parts = [(f"item {index} of {where}", part) for index, part in enumerate(value)]
    elif isinstance(value, type):
        parts = [(f"{value.__name__}.{name}", part) for name, part in vars(value).items() if inspect.isfunction(part)]
    else:
        parts = [(f"{name!r} of {where}", part) for name, part in _state(value).items()]
    found = [deeper for place, part in parts for deeper in _look_into(place, part, seen, dumps)]
    yield from found or [(where, value, why)]


def _state(value: Any) -> dict[str, Any]:
    """Return what pickle would take of an object, by the names of its attributes; {} if it asks for something else."""
    with contextlib.suppress(Exception):
        state = value.__reduce_ex__(4)[2]
        with_slots = state if isinstance(state, tuple) else (state,)
        return {name: part for each in with_slots if isinstance(each, dict) for name, part in each.items()}
    return {}
