"""Tables of ranks with their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

INK = "#797979"
"""Of what charts write, and of curves that are of no rank: 4.3 : 1 on white and on JupyterLab's dark ground, and no
colour has more on both. Where `page.css` is known, it is the colour of the theme's own text."""


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
