"""Charts that change under some controls, as outputs of the cell and, where those do not change, as a widget."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from labkit.ui import kernel, page

if TYPE_CHECKING:
    from labkit.ui.charts import Chart


class Place:
    """Where a chart is shown, and another one later.

    JupyterLab's Plotly draws an output once, and passes over what comes to the same place later. So there are two: the
    new chart is drawn in the empty one before the other is emptied, and the page does not jump.
    """

    def __init__(self) -> None:
        self._shown, self._empty = kernel.reserve(), kernel.reserve()
        self._last: Any = None

    def show(self, bundle: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a chart, given as its bundle of MIME types. What is there already is left."""
        if bundle == self._last:
            return
        self._last = bundle
        self._shown, self._empty = self._empty, self._shown
        self._shown.update(bundle, metadata=metadata, raw=True)
        self._empty.update(kernel.NOTHING, raw=True)


class ChangingOutputs:
    """Charts, and a table below them.

    A notebook keeps outputs, so the charts are outputs. But JupyterLab takes changes of outputs only in the page that
    first received them, and not within `Output` or `Tab`. So `box`, to be shown above them, has the same charts as a
    widget, which is hidden in a page whose outputs have changed: the last output says what they have changed to.
    """

    def __init__(self, charts: int, has_table: bool = False) -> None:
        self.box = widgets.VBox()
        self._count, self._has_table = charts, has_table
        self._name = f"labkit-outputs-{secrets.token_hex(6)}"
        self._chart: Any = None
        self._now: tuple[list[dict[str, Any]], str, str] = ([], "", "")
        self._number = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Reserve the outputs. Called once `box` is shown."""
        self._places = [Place() for _ in range(self._count)]
        self._table = kernel.reserve() if self._has_table else None
        self._mark = kernel.display(self._mark_html(), raw=True, display_id=True)
        threading.Thread(target=self._add_widget, name="labkit-outputs", daemon=True).start()

    def show(self, charts: Sequence[Chart], table: Any = None) -> None:
        """Show these charts, and a table, a pandas `Styler`."""
        from labkit.ui.charts import PLOTLY  # not above: it imports Plotly, which is here once there are charts

        shown = [(chart.bundle(), chart.metadata()) for chart in charts]
        empty: list[tuple[dict[str, Any], dict[str, Any]]] = [(kernel.NOTHING, {})] * (self._count - len(charts))
        for place, (bundle, metadata) in zip(self._places, [*shown, *empty], strict=True):
            place.show(bundle, metadata)
        if self._table is not None:
            self._table.update(kernel.NOTHING if table is None else table, raw=table is None)
        figures = [bundle[PLOTLY] for bundle, _ in shown]
        now = (figures, "" if table is None else table._repr_html_(), "; ".join(chart.words() for chart in charts))
        with self._lock:
            if now[:1] + now[2:] == self._now[:1] + self._now[2:] and bool(now[1]) == bool(self._now[1]):
                self._now = now
                return
            self._now = now
            self._number += 1
            self._mark.update(self._mark_html(), raw=True)
            self._draw()

    def _mark_html(self) -> dict[str, str]:
        marked = f'<span class="{self._name} {self._name}-{self._number}"></span>'
        return {"text/html": marked, "text/plain": ""}

    def _add_widget(self) -> None:
        page.wait_for_answer()
        if page.runs_widgets_of_ours():
            from labkit.ui.live_chart import LiveChart

            with self._lock:
                self._chart = LiveChart(outputs=self._name)
                self.box.children = [self._chart]
                self._draw()

    def _draw(self) -> None:
        if self._chart is not None:
            figures, text, words = self._now
            self._chart.number = self._number - 1
            self._chart.draw(figures, text, words)
