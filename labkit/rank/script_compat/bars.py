"""tqdm's bars for notebooks in a rank: bars of text, which move where the rank's output is shown.

A widget that is made in a rank has no notebook to be shown in: it prints itself once, at 0 %, and stays there.
`tqdm.auto` sees that and makes bars of text; `tqdm.notebook` is what a cell has imported by name, or a library has.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAME = "tqdm.notebook"


def as_text() -> None:
    """Have `tqdm.notebook` make bars of text in this process, once somebody imports it."""
    if NAME not in sys.modules:
        sys.meta_path.insert(0, _TextBars())


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `tqdm.notebook`, and makes it of what `tqdm` has for terminals."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find this one module."""
        return importlib.machinery.ModuleSpec(NAME, self) if fullname == NAME else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module with what the real one has for its callers."""
        tqdm: Any = sys.modules["tqdm"]  # of which this is a part

        class TextBar(tqdm.tqdm):
            """A bar of text that takes what a bar of widgets takes."""

            def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
                super().__init__(*args, **options)

        def text_range(*args: int, **options: Any) -> TextBar:
            return TextBar(range(*args), **options)

        vars(module).update(tqdm=TextBar, tqdm_notebook=TextBar, trange=text_range, tnrange=text_range, IProgress=None)
