"""Tables of the lessons that a click on a heading sorts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

SORT = (
    "const h = event.target.closest('th.col_heading');"
    "if (h && (event.type === 'click' || event.key === 'Enter' || event.key === ' ')) {"
    "event.preventDefault();"
    "const body = this.tBodies[0], i = [...h.parentNode.children].indexOf(h);"
    "const key = row => {const text = row.children[i].innerText, number = parseFloat(text.replace(/[, ]/g, ''));"
    "return isNaN(number) ? (/^(nan|not |$)/i.test(text) ? Infinity : text) : number};"
    "const rows = [...body.rows].sort((a, b) => key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0);"
    "const isUp = h.getAttribute('aria-sort') !== 'ascending';"
    "if (!isUp) rows.reverse();"
    "for (const other of h.parentNode.children) other.removeAttribute('aria-sort');"
    "h.setAttribute('aria-sort', isUp ? 'ascending' : 'descending'); body.append(...rows)}"
)
"""What a click on a heading does, or Enter there; in the table itself, so that it also works in a page without a
network."""

FOCUS = (
    "if (event.target === this) {"
    "for (const h of this.querySelectorAll('th.col_heading')) h.tabIndex = 0;"
    "this.removeAttribute('tabindex'); this.querySelector('th.col_heading')?.focus()}"
)
"""pandas gives headings no attributes, so what the keyboard comes to first is the table, which makes them known."""


def sortable(table: pd.DataFrame | Styler) -> Styler:
    """Return a table whose rows a click on a heading, or Enter there, sorts by that column; another reverses them.

    Works in JupyterLab and in the pages that `nbconvert` makes. A code host, and a notebook that is not trusted, show
    the same table unsorted.
    """
    given: Any = table
    style: Styler = getattr(given, "style", given)
    on = f'onclick="{SORT}" onkeydown="{SORT}" onfocus="{FOCUS}" tabindex="0"'
    style.set_table_attributes(f'{on} title="click on a heading to sort"')
    style.set_table_styles([{"selector": "th.col_heading", "props": "cursor:pointer"}], overwrite=False)
    return style
