"""What the first launch, step and chart need, got while the notebook is idle and the reader reads.

Begun by `import labkit` in a notebook's kernel. The ranks come first: a chart has a second's time once its run has
begun. `charts` has what live charts need imported, in any case while a run's ranks start; `first_step` is the ranks'.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import Any


def rank_waits() -> None:
    """Use the time while a rank has no work."""
    from labkit.plugins.ahead import first_step

    first_step.get_ready()


def begin() -> None:
    """Begin, in the background."""
    from labkit.ui import kernel  # not above: ranks import this

    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    threading.Thread(target=_get, args=(kernel.is_interactive(),), name="labkit-ahead", daemon=True).start()


def charts_are_ready() -> bool:
    """Begin to import what live charts need, if nobody has; return whether one can be drawn without an import."""
    from labkit.plugins.ahead import charts

    charts.begin()
    return charts.is_done()


def _get(is_interactive: bool) -> None:
    from labkit.engines import standby
    from labkit.ui import kernel

    live_chart, png = map(_plugin, ("live_chart", "png"))
    if (shell := kernel.shell()) is not None:
        shell.events.register("post_run_cell", lambda _: standby.renew())
    if is_interactive:
        standby.ahead_of_the_first_launch()
    standby.idle.wait()
    importlib.import_module("labkit.plugins.ahead.charts").wait()
    # Where a person watches, the browser draws, and nobody needs a picture.
    if (draws := live_chart if is_interactive else png) is not None:
        draws.get_ready()


def _plugin(name: str) -> Any:
    found = importlib.util.find_spec(f"labkit.plugins.{name}")
    return importlib.import_module(f"labkit.plugins.{name}") if found else None
