"""Folders of which each file defines one thing, an exercise or an exhibit, and is named as that."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Collection, Iterable
from typing import Any


def names(package: str, machinery: Collection[str]) -> list[str]:
    """Return the names of a package's files, but for those that are its machinery."""
    path = importlib.import_module(package).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.name not in machinery]


def defined(
    package: str, name: str, constant: str, machinery: Collection[str], all_names: Callable[[], Iterable[str]]
) -> Any:
    """Return what a file of a package defines as this constant.

    Raises ValueError, which has all names, if there is no such file.
    """
    file = f"{package}.{name}"
    if name in machinery or importlib.util.find_spec(file) is None:
        raise ValueError(f"there is no {constant.lower()} {name!r}; there are {', '.join(all_names())}")
    return getattr(importlib.import_module(file), constant)
