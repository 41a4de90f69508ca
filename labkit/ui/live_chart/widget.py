"""Plotly's `FigureWidget`, but for its JavaScript: a page that has none is sent it, and keeps it for all charts."""

from __future__ import annotations

import functools
import importlib.resources
from pathlib import Path

import plotly
import plotly.graph_objects as go
import traitlets

from labkit.ui import kernel


class LiveChart(go.FigureWidget):
    """A figure's widget that is there at once, in a page that may have to get Plotly first.

    The problem: every `FigureWidget` brings Plotly along, five megabytes, which the page compiles for each. And
    anywidget gives a model two seconds to load, after which no message ever reaches it (0.11: `AbortSignal.timeout` in
    its widget.js): on a busy machine charts stayed empty for good. Making such a chart again does not help while the
    machine is busy. So the model is a few lines of JavaScript, which ask for Plotly where the page has none. Where
    nobody could answer while the cell runs, in a front end without subshells, Plotly is sent unasked.

    What still fails: those few lines may come too late as well, and then `LiveView` hears of it and makes another.
    Changes that come before Plotly are lost, where the kernel cannot hear when it is there; the next redraw brings
    every curve whole.
    """

    _esm = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    _plotly_version = traitlets.Unicode(plotly.__version__).tag(sync=True)

    def __init__(self, figure: go.Figure) -> None:
        is_heard = kernel.has_been_given_a_subshell()
        if is_heard:
            self.on_msg(lambda *_: self._send_plotly())  # now: the page may ask as soon as there is a model
        super().__init__(figure)
        if not is_heard:
            self._send_plotly()

    def _send_plotly(self) -> None:
        self.send("", buffers=[_plotly()])


@functools.cache
def _plotly() -> bytes:
    return (importlib.resources.files(plotly) / "package_data" / "widgetbundle.js").read_bytes()
