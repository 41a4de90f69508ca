"""How widgets are closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ipywidgets import Widget

CLOSE_AFTER_S = 20.0
"""Time for which widgets stay open at least that are no longer shown."""

_unshown: list[tuple[float, list[Any]]] = []
"""Widgets that are no longer shown, and since when."""

_lock = threading.Lock()


def close(widgets: Iterable[Any]) -> None:
    """Close widgets, those in them and the models they brought along."""
    for widget in widgets:
        close(getattr(widget, "children", ()))
        for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
            if isinstance(part, Widget):
                part.close()


def close_later(widgets: Iterable[Any]) -> None:
    """Have widgets closed by `close_unshown`, when the next view begins.

    The problem: a slow browser may still be making views of them. And a page that was reloaded asks the kernel which
    widgets there are, and then each for its state. If one is closed in between, ipywidgets 8.1 waits for its answer
    for ever (`_loadFromKernelModels`), and the page shows no widget at all. What does not work: to close them after a
    time, which passes at any moment. What is done: the next view closes them. It begins in a cell, and a kernel that
    works through cells answers a page before them or after them all. What still fails: a page that is loaded in the
    moment in which a cell is run.
    """
    with _lock:
        _unshown.append((time.monotonic(), list(widgets)))


def close_unshown() -> None:
    """Close the widgets that have not been shown for a while. Called when a view begins."""
    latest_s = time.monotonic() - CLOSE_AFTER_S
    with _lock:
        due = [widgets for since_s, widgets in _unshown if since_s <= latest_s]
        _unshown[:] = [each for each in _unshown if each[0] > latest_s]
    for widgets in due:
        close(widgets)
