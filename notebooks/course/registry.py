"""The strategies of a package: whatever its files define, so that a new strategy is one file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import TypeVar

from labkit import Strategy
from labkit.protocol.text import titled

S = TypeVar("S", bound=Strategy)


class ByTitle(dict[str, type[S]]):
    """Strategies by title; `ALL["fsdp2_x_tensor_parallel"]` finds one by its slug, too."""

    def __missing__(self, name: str) -> type[S]:
        try:
            return self[titled(name, self)]
        except ValueError as error:
            raise KeyError(str(error)) from None


def strategies(package: str, path: Sequence[str], first: type[S]) -> ByTitle[S]:
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
    by_title: ByTitle[S] = ByTitle()
    for each in found:
        if (other := by_title.setdefault(each.title, each)) is not each:
            raise ValueError(f"{other.__module__} and {each.__module__} both have a strategy {each.title!r}")
    return by_title
