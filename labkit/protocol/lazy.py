"""Public names of a package that are imported when somebody first asks for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its public names when somebody first asks for them.

    `homes` says in which of its modules each name is; `modules` where those modules are that are public themselves.
    """

    def find(name: str) -> Any:
        if name not in homes and name not in modules:
            names = ", ".join(sorted([*homes, *modules]))
            it_has = f"; it has {names}" if names else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{it_has}")
        module = importlib.import_module(f"{package}.{modules.get(name) or homes[name]}")
        value = module if name in modules else getattr(module, name)
        vars(sys.modules[package])[name] = value
        return value

    return find
