"""Charts in widgets: a page gets Plotly once, and every page that joins later gets the whole chart."""

from __future__ import annotations

from labkit.ui.live_chart.widget import LiveChart, get_ready

__all__ = ["LiveChart", "get_ready"]
