"""How a run or a figure is shown: live where a person watches, still once it is over.

Plotly and the widgets are imported when they are first needed.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

from labkit.monitor.record import RunRecord
from labkit.protocol.text import print_text
from labkit.ui import kernel, prewarm, summary
from labkit.ui.lines import Lines
from labkit.ui.watcher import launch_begins

if TYPE_CHECKING:
    from labkit.ui.view import LiveView

LOG = logging.getLogger(__name__)

_shown_in: weakref.WeakKeyDictionary[RunRecord, kernel.Execution | None] = weakref.WeakKeyDictionary()
"""In which execution of a cell a run was last shown, so that its cell does not show it twice."""


def watch(run: RunRecord, live: bool | None, wait: bool) -> LiveView | Lines | None:
    """Begin to show a run that has just been launched, and return what shows it; None if nothing does."""
    launch_begins()
    if live is not None and not live:
        return None
    in_notebook = kernel.has_kernel()
    if in_notebook:
        _shown_in[run] = kernel.this_execution()
    watcher: LiveView | Lines | None = None
    if in_notebook and (live or kernel.is_interactive()):
        try:
            if {"starting", "queued"} & set(run.states):
                prewarm.begin()
            watcher = _live_view(run, wait)
        except Exception:
            LOG.exception("run %r has no live view. It is not affected", run.name)
    watcher = watcher or Lines(run, in_notebook, wait)
    watcher.begin()
    return watcher


def show(thing: Any) -> None:
    """Show a run or a Plotly figure in the cell, so that the saved notebook stays small and readable anywhere.

    A run that is still going is shown live. A figure becomes a `Chart`: a live Plotly chart where a person watches, its
    data elsewhere. It keeps its own look; `labkit.charts.style(figure)` gives it that of labkit's charts,
    which lie on the page's ground in light themes and in dark ones.
    """
    if not isinstance(thing, RunRecord):
        kernel.display(as_chart(thing))
        return
    if not kernel.has_kernel():
        print_text(summary.bundle(thing)["text/plain"])
        return
    now = kernel.this_execution()
    if _shown_in.get(thing) == now:
        return
    _shown_in[thing] = now
    if not thing.over.is_set() and kernel.is_interactive():
        _live_view(thing).begin()
        return
    kernel.display(summary.bundle(thing), raw=True)
    if thing.over.is_set():
        from labkit.ui import charts  # not above: it imports Plotly, which takes a second

        kernel.display(charts.of_run(thing, title=""))


def as_chart(thing: Any) -> Any:
    """Return a Plotly figure as a `Chart`, and anything else as it is."""
    if "plotly" not in sys.modules:  # so it is no figure, and there is nothing to import for
        return thing
    from plotly.basedatatypes import BaseFigure

    from labkit.ui.charts import Chart

    return Chart(thing) if isinstance(thing, BaseFigure) and not isinstance(thing, Chart) else thing


def _live_view(run: RunRecord, holds_the_cell: bool = False) -> LiveView:
    from labkit.ui.view import LiveView  # not above: it imports the widgets

    return LiveView(run, holds_the_cell)
