"""How widgets are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ipywidgets import Widget

CLOSE_AFTER_S = 20.0
"""Time for which widgets stay open that are no longer shown."""


def close(widgets: Iterable[Any]) -> None:
    """Close widgets, those in them and the models they brought along."""
    for widget in widgets:
        close(getattr(widget, "children", ()))
        for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
            if isinstance(part, Widget):
                part.close()


def close_later(widgets: Iterable[Any]) -> None:
    """Close widgets after a while: a slow browser may still be making views of them, and would miss them."""
    closing = threading.Timer(CLOSE_AFTER_S, close, [list(widgets)])
    closing.daemon = True
    closing.start()
