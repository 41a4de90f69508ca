"""Tables: of ranks with their states, and one that a click on a heading sorts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

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

SORT = (
    "(e => {const h = e.target.closest('th.col_heading'); if (!h) return;"
    "const body = this.tBodies[0], i = [...h.parentNode.children].indexOf(h);"
    "const key = row => {const text = row.children[i].innerText, number = parseFloat(text.replace(/[, ]/g, ''));"
    "return isNaN(number) ? (text === 'nan' ? Infinity : text) : number};"
    "const rows = [...body.rows].sort((a, b) => key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0);"
    "if (this.sortedBy === i) rows.reverse();"
    "this.sortedBy = this.sortedBy === i ? -1 : i; body.append(...rows)})(event)"
)
"""What a click on a heading does; in the table itself, so that it also works in a page without a network."""


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


def sortable(table: pd.DataFrame | Styler) -> Styler:
    """Return a table whose rows a click on a heading sorts by that column; a second click reverses them.

    Works in JupyterLab and in the pages that `nbconvert` makes. A code host, and a notebook that is not trusted, show
    the same table unsorted.
    """
    given: Any = table
    style: Styler = getattr(given, "style", given)
    style.set_table_attributes(f'onclick="{SORT}" title="click on a heading to sort"')
    style.set_table_styles([{"selector": "th.col_heading", "props": "cursor:pointer"}], overwrite=False)
    return style
