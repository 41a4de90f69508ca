"""Tables that a click on a heading sorts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

SORT = (
    "(e => {const h = e.target.closest('th.col_heading'); if (!h) return;"
    "const body = this.tBodies[0], i = [...h.parentNode.children].indexOf(h);"
    "const key = row => {const text = row.children[i].innerText, number = parseFloat(text.replace(/[, ]/g, ''));"
    "return isNaN(number) ? (/^(nan|not |$)/i.test(text) ? Infinity : text) : number};"
    "const rows = [...body.rows].sort((a, b) => key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0);"
    "if (this.sortedBy === i) rows.reverse();"
    "this.sortedBy = this.sortedBy === i ? -1 : i; body.append(...rows)})(event)"
)
"""What a click on a heading does; in the table itself, so that it also works in a page without a network."""


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
