"""tqdm's bars for notebooks in a rank: bars of text, which move where the rank's output is shown.

A widget that is made in a rank has no notebook to be shown in: it prints itself once, at 0 %, and stays there.
`tqdm.auto` sees that and makes bars of text; `tqdm.notebook` is what a cell has imported by name, or a library has.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

NAME = "tqdm.notebook"


def as_text() -> None:
    """Have `tqdm.notebook` make bars of text in this process, once somebody imports it."""
    sys.meta_path.insert(0, _TextBars())


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds this one module, and makes it of what `tqdm` has for terminals."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == NAME else None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__getattr__"] = _of_text


def _of_text(name: str) -> Any:
    import tqdm.std  # not before: most ranks show no bars

    return getattr(tqdm.std, {"tqdm_notebook": "tqdm", "tnrange": "trange"}.get(name, name))
