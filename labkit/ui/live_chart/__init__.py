"""The live view's chart, for which a page gets Plotly once: it is there at once, also on a machine that is busy.

Without this it is Plotly's own widget, that brings all of Plotly along each time. `widget` and `widget.js` do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def chart_widget(figure: go.Figure) -> Any:
    """Return a widget that shows a figure, and what it becomes."""
    import anywidget
    import plotly.graph_objects as go

    if not issubclass(go.FigureWidget, anywidget.AnyWidget):  # Plotly 5, which hosted notebooks have
        return go.FigureWidget(figure)
    from labkit.ui.live_chart.widget import LiveChart

    return LiveChart(figure)


def get_ready() -> None:
    """Have the page get Plotly, before there is a chart: by one that is not shown."""
    import plotly.graph_objects as go

    from labkit.ui import widgets

    widgets.close_later([chart_widget(go.Figure())], has_answered=False)
