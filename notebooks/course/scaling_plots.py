"""The charts of the lessons on scaling: what was measured, with its spread, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from labkit import charts

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#7A7A7A"


class Spread(NamedTuple):
    """A number that was measured several times, or predicted with a range."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, measured: Sequence[float]) -> Spread:
        """Return the median of what was measured, and its 10th and 90th percentile."""
        return cls(*(float(np.quantile(measured, at)) for at in (0.5, 0.1, 0.9)))


class Panel(NamedTuple):
    """One chart of `predictions`: seconds of a step by number of ranks."""

    x_title: str
    predicted: Mapping[int, float]
    fitted_to: Mapping[int, float]
    """Measured seconds that the model was fitted to …"""
    held_back: Mapping[int, float]
    """… and those that it never saw."""


Row = tuple[Any, ...]
"""Of a line: its panel, its name, a number of ranks, and the middle, the low and the high value there."""


def lines_of(rows: Iterable[Row], y_title: str, colors: Mapping[str, str], **options: Any) -> go.Figure:
    """Return a line chart per panel, with bars from low to high."""
    frame = pd.DataFrame(rows, columns=["panel", "name", "ranks", y_title, "low", "high"])
    frame["above"] = (frame["high"] - frame[y_title]).clip(lower=0)
    frame["below"] = (frame[y_title] - frame["low"]).clip(lower=0)
    bars = {"error_y": "above", "error_y_minus": "below", "color_discrete_map": dict(colors), "markers": True}
    figure = px.line(
        frame, "ranks", y_title, color="name", facet_col="panel", facet_col_spacing=0.12, **bars, **options
    )
    figure.for_each_annotation(lambda note: note.update(text=note.text.removeprefix("panel=")))
    return figure.update_xaxes(tickvals=sorted(set(frame["ranks"]))).update_layout(legend_title_text="")


def speed_ups(seconds: Mapping[tuple[str, int], Spread], title: str) -> Any:
    """Return two charts, speed-up and efficiency, of seconds a step by ("strong" or "weak", ranks)."""
    ranks, rows = sorted({n for _, n in seconds}), []
    for kind in ("strong", "weak"):
        for n in ranks:
            middle, low, high = seconds[kind, n]
            factor = seconds[kind, ranks[0]].middle * (n if kind == "weak" else 1)
            for panel, divided in (("speed-up", 1), ("efficiency", n)):
                up = (factor / each / divided for each in (middle, high, low))
                rows.append((panel, f"{kind} scaling", n, *up))
    rows += [
        (panel, "ideal", n, *[n if panel == "speed-up" else 1] * 3)
        for panel in ("speed-up", "efficiency")
        for n in ranks
    ]
    figure = lines_of(rows, "", {"strong scaling": BLUE, "weak scaling": GREEN, "ideal": GREY})
    figure.update_yaxes(matches=None, showticklabels=True, range=[0, 1.1])
    figure.update_yaxes(range=[0, 1.05 * ranks[-1]], col=1)
    return charts.Chart(charts.style(figure, title, 360))


def predictions(title: str, *panels: Panel) -> Any:
    """Return a chart per panel: predicted milliseconds a step, and the measured ones."""
    rows: list[Row] = []
    for x_title, predicted, fitted_to, held_back in panels:
        groups = ("predicted", predicted), ("measured, fitted to", fitted_to), ("measured, held back", held_back)
        for name, found in groups:
            rows += [(x_title, name, n, *[1000 * seconds] * 3) for n, seconds in found.items()]
    colors = {"predicted": GREY, "measured, fitted to": BLUE, "measured, held back": ORANGE}
    figure = lines_of(rows, "milliseconds a step", colors)
    figure.for_each_trace(lambda trace: trace.update(mode="markers"), lambda trace: trace.name.startswith("measured"))
    figure.update_yaxes(range=[0, 1.05 * max(high for *_, high in rows)])
    return charts.Chart(charts.style(figure, title, 380))
