"""What was logged in, Plotly figures out. No process, no widget, no browser."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from labkit.monitor import not_finite
from labkit.monitor.history import MEAN, PANELS, SAMPLES, Curve, History
from labkit.monitor.not_finite import NotFinite
from labkit.monitor.record import RunRecord
from labkit.ui import kernel
from labkit.ui.formatting import shortened
from labkit.ui.tables import DASHES, INK, RANK_COLORS, STATE_COLORS, rank_color, rank_dash

__all__ = [
    "INK",
    "PART_COLORS",
    "RANK_COLORS",
    "Chart",
    "bars",
    "gantt",
    "logged",
    "overlaid",
    "rank_color",
    "stacked",
    "style",
]

PLOTLY = "application/vnd.plotly.v1+json"
CONFIG = {"displaylogo": False, "showSendToCloud": False}
"""JupyterLab's extension resizes a chart with its cell; `responsive` besides, and both at once leave it no height.
Plotly 7.1 has a button that uploads the chart to Plotly's cloud, and is shown unless it is said not to be.
"""

HOSTED = {"COLAB_RELEASE_TAG", "KAGGLE_URL_BASE"}
"""Set in Colab's and Kaggle's kernels, whose own pages draw Plotly's HTML and not its data. The data stay beside it: VS
Code draws them, and may have Colab's kernel (github.com/googlecolab/colab-vscode/issues/339, 2026-01)."""

NOT_FINITE = "not finite"
"""Name of the mark at the first NaN or Inf."""

PART_COLORS = {
    "data": "#CC79A7",
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "communication": "#D55E00",
    "optimizer": "#009E73",
    "waiting": "#D9D9D9",
    "transfer": "#D55E00",
    "other": "#F0E442",
}
"""Of the parts of a step, the same in every chart."""

CLEAR, GRID = "rgba(255, 255, 255, 0)", "rgba(128, 128, 128, 0.25)"
plotly.io.templates["labkit"] = go.layout.Template(
    layout={
        **dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), CLEAR),
        "font": {"color": INK},
        "colorway": list(RANK_COLORS),
        **{axis: {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID} for axis in ("xaxis", "yaxis")},
        "modebar": {"bgcolor": CLEAR, "color": INK, "activecolor": INK},
        "hoverlabel": {"bgcolor": "#FFFFFF", "font": {"color": "#1A1A1A"}},
        "shapedefaults": {"line": {"color": INK}},
    }
)
"""No ground of its own, so that a chart lies on the page's, in a light theme and in a dark one."""

PANEL_HEIGHT = 250
"""Pixels per row of panels."""

FONT_SIZE = 12
LINE_HEIGHT = 19
"""Pixels per line of a title."""

PANEL_CHARACTERS = 30
"""In the title of one of two panels side by side; in the middle of a longer one stands "…"."""

TITLE_CHARACTERS = 50
"""In a line of a title: Plotly breaks none, and cuts off what does not fit into a narrow cell."""


class Chart(go.Figure):
    """A Plotly figure that is as wide as its cell, and whose saved notebook stays small and needs no kernel.

    Where a person watches it gives its data alone: beside a picture, JupyterLab's Plotly would show the picture until
    somebody points at it. JupyterLab adds a picture itself when it has drawn the chart, so that the saved notebook has
    one for nbconvert and code hosts. A notebook that runs headless has the data alone; with kaleido installed,
    PLOTLY_RENDERER=plotly_mimetype+png adds pictures. Colab and Kaggle draw Plotly's HTML.
    """

    _repr_html_ = None  # it would put a script that needs the network into every notebook

    def _ipython_display_(self) -> None:
        # Displayed, not returned to IPython: where it is the value of a cell, beside "Out[3]", JupyterLab gives a chart
        # no height of its own, and Plotly shrinks it to one line when it fits it to its cell.
        kernel.display(self.bundle(), raw=True)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, validate: bool = True, **_: Any) -> Any:
        return self.bundle()

    def update_shown(self, handle: Any) -> None:
        """Show it in the place of what has been displayed with this handle."""
        handle.update(self.bundle(), raw=True)

    def bundle(self) -> dict[str, Any]:
        """Return the chart by MIME type, as a notebook shows it."""
        panels = ", ".join(each.text for each in self.layout.annotations if each.text)
        title = (self.layout.title.text or panels or "untitled").replace("<br>", " ")
        bundle: dict[str, Any] = {PLOTLY: self.to_plotly_json_small(), "text/plain": f"<Chart: {title}>"}
        if "PLOTLY_RENDERER" in os.environ:
            bundle = {**super()._repr_mimebundle_(), "text/plain": bundle["text/plain"]}
        elif HOSTED & set(os.environ):
            bundle["text/html"] = self.to_html(full_html=False, include_plotlyjs="cdn", config=CONFIG)
        return bundle

    def to_plotly_json_small(self) -> dict[str, Any]:
        """Return the figure as plain JSON values, without the template's defaults for traces that it has not."""
        plain = json.loads(self.to_json())
        template = plain["layout"].get("template", {})
        used = {trace["type"] for trace in plain["data"]}
        template["data"] = {kind: look for kind, look in template.get("data", {}).items() if kind in used}
        for scale in ("colorscale", "geo", "mapbox", "scene", "ternary", "polar"):
            template.get("layout", {}).pop(scale, None)
        return {**plain, "config": CONFIG}


def style(figure: go.Figure, title: str | None = None, height: int | None = None) -> go.Figure:
    """Return a figure, changed to the look of this package's own: as wide as its cell, the legend in lines below."""
    lines = textwrap.wrap(title or "", TITLE_CHARACTERS)
    top = (24 + LINE_HEIGHT * len(lines) if lines else 16) + (12 if figure.layout.annotations else 0)
    # A legend at the side would take its width from the panels, and be cut off where there is none left to take.
    at_the_foot = {"x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"}
    figure.update_layout(
        template="plotly_white+labkit",
        autosize=True,
        height=(height or figure.layout.height or 360) + LINE_HEIGHT * max(0, len(lines) - 1),
        margin={"l": 50, "r": 16, "t": top, "b": 46},
        font={"size": FONT_SIZE},
        hovermode="x unified" if figure.data and figure.data[0].type == "scatter" else None,
        legend={"orientation": "h", "traceorder": "normal", **at_the_foot},
    )
    if title is not None:
        # The first of several lines Plotly puts 10 px higher than an only one.
        pad = {"t": 20 if len(lines) > 1 else 10}
        at_the_top = {"x": 0.01, "xref": "container", "y": 1, "yref": "container", "yanchor": "top", "pad": pad}
        figure.update_layout(title={"text": "<br>".join(lines), "font": {"size": FONT_SIZE + 2}, **at_the_top})
    return figure


def single(values: Any) -> Any:
    """Return 32-bit numbers; a loss beyond their range becomes infinite, quietly."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float64).astype(np.float32)


def logged(history: History, title: str = "") -> Chart:
    """Draw all that was logged: a panel per name; in it a curve per rank, and their mean.

    Of more than 16 ranks it has the least, mean and greatest value at each step.
    """
    curves = history.drawn()
    names = list(dict.fromkeys(curve.name for curve in curves))
    if (count := len([name for name in history.names if name != SAMPLES])) > PANELS:
        title = f"{title} (the first {PANELS} of {count:,} names)".strip()
    columns = min(2, len(names)) or 1
    rows = max(1, -(-len(names) // columns))
    room = PANEL_CHARACTERS if columns > 1 else TITLE_CHARACTERS
    # Names stand above: beside, each would take its width from the panel to its left.
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[shortened(name, room) for name in names] or None,
        horizontal_spacing=0.12,
        vertical_spacing=0.24 / rows,
    )
    figure.update_annotations(font_size=FONT_SIZE + 1)
    where = {name: {"row": at // columns + 1, "col": at % columns + 1} for at, name in enumerate(names)}
    in_legend: set[str] = set()
    for curve in curves:
        figure.add_trace(_line(curve, curve.key not in in_legend), **where[curve.name])
        in_legend.add(curve.key)
    for name in names[-columns:]:  # below which there is none
        figure.update_xaxes(title_text="step", title_standoff=2, **where[name])
    ends = [step for curve in curves for step in (*curve.x[:1], *curve.x[-1:])]
    if ends and max(ends) - min(ends) < 6:
        figure.update_xaxes(dtick=1)  # there is no step 0.2
    first = not_finite.first(history)
    if first is not None and first.name in names:
        _mark_not_finite(figure, first, where[first.name])
    if not names:
        figure.add_annotation(text="nothing logged", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return Chart(style(figure, title, height=(136 if title else 112) + PANEL_HEIGHT * rows))


def _line(curve: Curve, is_in_legend: bool) -> go.Scatter:
    is_mean, is_rank = curve.key == MEAN, curve.key.startswith("rank ")
    rank = int(curve.key.split()[1]) if is_rank else 0
    line = {"color": rank_color(rank) if is_rank else INK, "width": 2.2 if is_mean else 1.2}
    return go.Scatter(
        x=curve.x,
        y=single(curve.y),
        name=curve.key,
        line={**line, "dash": rank_dash(rank)},
        mode="lines+markers" if len(curve.x) <= 12 else "lines",
        opacity=1.0 if is_mean else 0.8,
        legendgroup=curve.key,
        showlegend=is_in_legend,
        marker={"size": 5},
    )


def of_run(run: RunRecord, title: str | None = None) -> Chart:
    """Return the chart of what a run has logged so far; its title is the run's name, or the given one."""
    return logged(run.recorded, run.name if title is None else title)


def _mark_not_finite(figure: go.Figure, first: NotFinite, where: dict[str, int]) -> None:
    """Mark the step of the first value that is NaN or infinite in its panel, with its rank."""
    color = STATE_COLORS["failed"]
    figure.add_vline(
        x=first.step,
        **where,
        name=NOT_FINITE,
        line={"color": color, "width": 1.2, "dash": "dot"},
        annotation={"text": f"rank {first.rank}: {first.in_words}", "font": {"color": color, "size": FONT_SIZE}},
    )


def overlaid(histories: Mapping[str, History], name: str = "loss", title: str = "") -> Chart:
    """Draw one logged value of several runs over each other: the mean over ranks of each."""
    figure = go.Figure()
    for index, (label, history) in enumerate(histories.items()):
        if name not in history.names:
            continue
        x, y = history.mean_curve(name)
        dash = list(DASHES)[index % len(DASHES)]
        # The first line is broad, so that runs that agree show as lines within it.
        line = {"color": rank_color(index), "width": max(1.6, 5.5 - 1.3 * index), "dash": dash}
        figure.add_scatter(x=x, y=single(y), name=label, mode="lines", line=line)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=name)
    return Chart(style(figure, title))


def bars(labels: Sequence[str], values: Sequence[float], unit: str, title: str = "") -> Chart:
    """Draw one horizontal bar per label, with its value written beside it."""
    text = [f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in values]
    colors = [rank_color(index) for index in range(len(labels))]
    bar = go.Bar(x=list(values), y=list(labels), orientation="h", text=text, marker={"color": colors})
    # Within its bar, Plotly leaves out the number of a bar that is too short to be seen.
    figure = go.Figure(bar.update(textposition="outside", cliponaxis=False))
    figure.update_xaxes(title_text=unit)
    figure.update_yaxes(autorange="reversed")
    return Chart(style(figure, title, height=120 + 32 * len(labels)))


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str, title: str = "") -> Chart:
    """Draw one horizontal bar per row, made of its parts laid end to end: `{"DDP": {"forward": 3.1, …}, …}`."""
    figure = go.Figure()
    for index, part in enumerate(dict.fromkeys(part for parts in rows.values() for part in parts)):
        lengths = [parts.get(part, 0.0) for parts in rows.values()]
        color = PART_COLORS.get(part, rank_color(index))
        figure.add_bar(y=list(rows), x=lengths, name=part, orientation="h", marker={"color": color})
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=unit)
    figure.update_yaxes(autorange="reversed")
    return Chart(style(figure, title, height=140 + 26 * len(rows) + 10 * len(figure.data)))  # a legend in lines


def gantt(rows: Mapping[str, Sequence[tuple[str, float, float]]], title: str = "") -> Chart:
    """Draw when each row did what: `{"rank 0": [("forward", start_s, end_s), …], …}`, in ms since the first began.

    A mark called "step", the step as a whole, is left out; communication gets a thin line of its own in the row's
    middle, as it may go on while something else is computed.
    """
    zero_s = min((start for marks in rows.values() for _, start, _ in marks), default=0.0)
    figure = go.Figure()
    for part in dict.fromkeys(what for marks in rows.values() for what, *_ in marks if what != "step"):
        found = [
            (row, start - zero_s, end - start) for row, marks in rows.items() for w, start, end in marks if w == part
        ]
        figure.add_bar(
            y=[row for row, *_ in found],
            base=[round(1000 * start, 3) for _, start, _ in found],
            x=[round(1000 * length, 3) for *_, length in found],
            name=part,
            orientation="h",
            marker={"color": PART_COLORS.get(part, rank_color(len(figure.data)))},
            width=0.3 if part == "communication" else 0.8,
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="milliseconds")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(rows))
    return Chart(style(figure, title, height=150 + 34 * len(rows)))
