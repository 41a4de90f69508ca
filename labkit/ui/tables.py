"""The colours of ranks and their states, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

STATE_COLORS = {
    "queued": "#CCBB44",
    "starting": "#9A9A9A",
    "idle": "#9A9A9A",
    "running": "#0072B2",
    "finished": "#009E73",
    "failed": "#D55E00",
    "stopped": "#E69F00",
    "ended": "#E69F00",
}

RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7A7A7A")
"""Okabe and Ito's colours, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/)."""

DASHES = {"solid": [], "dash": [8, 4], "dot": [2, 3], "dashdot": [8, 3, 2, 3]}
"""By Plotly's name, as a canvas has it."""

INK = "#797979"
"""Of what charts write, and of curves that are of no rank: 4.3 : 1 on white and on JupyterLab's dark ground, and no
colour has more on both. Where `view.css` is known, it is the colour of the theme's own text."""


def rank_color(rank: int) -> str:
    """Return the colour of a rank, the same in every chart."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def rank_dash(rank: int) -> str:
    """Return the dash of a rank's curve: of ranks with the same colour each has another."""
    return list(DASHES)[rank // len(RANK_COLORS) % len(DASHES)]


def look_of(key: str) -> dict[str, Any]:
    """Return the look of a curve on a canvas: of "rank 3", "mean", …"""
    if not key.startswith("rank "):
        return {"color": INK, "width": 2.2 if key == "mean" else 1.2, "dash": []}
    rank = int(key.split()[1])
    return {"color": rank_color(rank), "width": 1.2, "dash": DASHES[rank_dash(rank)]}


def ranks_html(rows: Iterable[tuple[int, str, Sequence[str]]]) -> str:
    """Return an HTML table with a row for each (rank, state, further cells as HTML).

    Scrolls sideways where its cell is too narrow for it.
    """
    style = "padding:0 14px 0 0;text-align:left;white-space:nowrap"
    lines = []
    for rank, state, cells in rows:
        dot = f'<span style="color:{STATE_COLORS[state]};font-size:1.3em">●</span>'
        texts = (f"{dot} <b>rank {rank}</b> {state}", *cells)
        lines.append("<tr>" + "".join(f'<td style="{style}">{text}</td>' for text in texts) + "</tr>")
    table = f'<table style="border:0;line-height:1.4;margin:0">{"".join(lines)}</table>'
    # Contained, so that the widget around it does not ask how wide the table would like to be.
    return f'<div style="overflow-x:auto;contain:inline-size">{table}</div>'
