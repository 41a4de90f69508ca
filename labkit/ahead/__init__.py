"""What the first launch and the first chart need, got while the notebook is idle and the reader reads.

Begun by `import labkit` in a notebook's kernel. The ranks come first: a chart has a second's time once its run has
begun. `charts` has what live charts need imported, in any case while a run's ranks start.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import Any

from labkit.ui import kernel


def begin() -> None:
    """Begin, in the background."""
    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    threading.Thread(target=_get, args=(kernel.is_interactive(),), name="labkit-ahead", daemon=True).start()


def charts_are_ready() -> bool:
    """Begin to import what live charts need, if nobody has; return whether one can be drawn without an import."""
    from labkit.ahead import charts

    charts.begin()
    return charts.is_done()


def _get(is_interactive: bool) -> None:
    standby, png = _wing("standby"), _wing("png")
    if standby is not None:
        kernel.after_each_cell(standby.renew)
        if is_interactive:
            standby.ahead_of_the_first_launch()
        standby.idle.wait()
    importlib.import_module("labkit.ahead.charts").wait()
    if png is not None and not is_interactive:  # where a person watches, the browser draws the pictures
        png.get_ready()


def _wing(name: str) -> Any:
    return importlib.import_module(f"labkit.{name}") if importlib.util.find_spec(f"labkit.{name}") else None
