"""The strategies of a package: whatever its files define, so that a new strategy is one file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import TypeVar

from labkit import Strategy

S = TypeVar("S", bound=Strategy)


def strategies(package: str, path: Sequence[str], first: type[S]) -> dict[str, type[S]]:
    """Return `first`, and every strategy that a file of the package defines, by title, in the order of the lessons.

    A file with strategies says in `LESSON` which lesson is about them; one without holds what they have in common.

    Raises ValueError if two have the same title.
    """
    names = [module.name for module in pkgutil.iter_modules(path)]
    files = [file for name in names if hasattr(file := importlib.import_module(f"{package}.{name}"), "LESSON")]
    found = [first]
    for file in sorted(files, key=lambda file: (file.LESSON, file.__name__)):
        own = (each for each in vars(file).values() if inspect.isclass(each) and each.__module__ == file.__name__)
        found += [each for each in own if issubclass(each, first) and "title" in vars(each)]
    by_title: dict[str, type[S]] = {}
    for each in found:
        if (other := by_title.setdefault(each.title, each)) is not each:
            raise ValueError(f"{other.__module__} and {each.__module__} both have a strategy {each.title!r}")
    return by_title
