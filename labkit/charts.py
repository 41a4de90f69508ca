"""Charts of what is measured, beside those of what was logged: data in, Plotly figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from labkit.monitor.history import History
from labkit.ui.charts import RANK_COLORS, Chart, compact, logged, rank_color, single, style
from labkit.ui.tables import INK

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

PART_COLORS = {
    "data": "#CC79A7",
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "communication": "#D55E00",
    "optimizer": "#009E73",
    "waiting": "#D9D9D9",
}
"""Of the parts of a step, the same in every chart."""


def overlaid(histories: Mapping[str, History], name: str = "loss", title: str = "") -> Chart:
    """Draw one logged value of several runs over each other: the mean over ranks of each."""
    figure = go.Figure()
    for index, (label, history) in enumerate(histories.items()):
        if name not in history.names:
            continue
        x, y = history.mean_curve(name)
        dash = ("solid", "dash", "dot", "dashdot")[index % 4]
        # The first line is broad, so that runs that agree show as lines within it.
        line = {"color": rank_color(index), "width": max(1.6, 5.5 - 1.3 * index), "dash": dash}
        figure.add_scatter(x=compact(x), y=single(y), name=label, mode="lines", line=line)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=name)
    return Chart(style(figure, title))


def bars(labels: Sequence[str], values: Sequence[float], unit: str, title: str = "") -> Chart:
    """Draw one horizontal bar per label, with its value written beside it."""
    text = [f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in values]
    colors = [rank_color(index) for index in range(len(labels))]
    figure = go.Figure(go.Bar(x=list(values), y=list(labels), orientation="h", text=text, marker={"color": colors}))
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
            base=[1000 * start for _, start, _ in found],
            x=[1000 * length for *_, length in found],
            name=part,
            orientation="h",
            marker={"color": PART_COLORS.get(part, rank_color(len(figure.data)))},
            width=0.3 if part == "communication" else 0.8,
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="milliseconds")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(rows))
    return Chart(style(figure, title, height=150 + 34 * len(rows)))
