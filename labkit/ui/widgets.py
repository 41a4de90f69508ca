"""What the live parts share: a widget that keeps charts as wide as their cell, and how widgets are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anywidget
from ipywidgets import Widget

CLOSE_AFTER_S = 2.0
"""Time for which widgets stay open that are no longer shown …"""

CLOSE_SLOW_AFTER_S = 20.0
"""… and for which they do where a browser has been slow to make them."""


class WidthKeeper(anywidget.AnyWidget):
    """Has the charts in the same box redrawn whenever they are not as wide as the box.

    Plotly's `FigureWidget` is drawn before it is part of the page, 700 px wide, and then looks only when the window
    changes: not when the file browser is opened, and not when it has become part of a page that is narrower. So this
    watches the box, and tells the charts in it what they listen for.

    Its style becomes part of the page, and stays there when this is closed: by it charts follow JupyterLab's theme.
    """

    _esm = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    _css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def close(widgets: Iterable[Any]) -> None:
    """Close widgets, those in them and the models they brought along, so that nothing is saved with the notebook."""
    for widget in widgets:
        close(getattr(widget, "children", ()))
        for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
            if isinstance(part, Widget):
                part.close()


def close_later(widgets: Iterable[Any], has_answered: bool = True) -> None:
    """Close widgets after a while: a browser may still be making views of them, and would miss them.

    One that has not answered for a chart yet is slow, and has longer.
    """
    closing = threading.Timer(CLOSE_AFTER_S if has_answered else CLOSE_SLOW_AFTER_S, close, [list(widgets)])
    closing.daemon = True
    closing.start()
