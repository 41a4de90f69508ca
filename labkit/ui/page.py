"""What the page can show: asked of the page itself, as it may have another environment than the kernel.

On a JupyterHub, JupyterLab often runs in one environment and the kernel in another. What the kernel can import says
nothing there: the page needs its own extensions for widgets (`ipywidgets`), for labkit's charts (`anywidget`) and for
charts that stay (`plotly`).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.ui import kernel

if TYPE_CHECKING:
    from ipywidgets import Widget

ANSWER_S = 4.0
"""How long a page may take to answer before it counts as one that cannot."""

CHART_WAITS_S = 1.0
"""How long the first chart of all waits for the answer."""


class _Asked:
    """What this kernel has asked its page, and heard."""

    def __init__(self) -> None:
        self.widget: Widget | None = None
        self.since_s = 0.0
        self.answered = threading.Event()
        self.draws_plotly: bool | None = None
        """None: the page is none of JupyterLab's or Notebook's, and does not say."""
        self.has_waited = False


_asked = _Asked()
_lock = threading.Lock()


def ask() -> None:
    """Ask the page, if that has not been done: it answers when it loads what is sent here, now or after a reload."""
    with _lock:
        if _asked.widget is not None:
            return
        import anywidget

        class Page(anywidget.AnyWidget):
            """Answers for the page. It is shown nowhere, and stays as long as the kernel.

            Its style becomes part of the page: by it, charts follow JupyterLab's theme.
            """

            _esm = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
            _css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

        _asked.since_s = time.monotonic()
        _asked.widget = widget = Page()
    widget.on_msg(lambda _, content, __: _take(content))
    kernel.answer_while_the_cell_runs(widget)


def _take(content: Any) -> None:
    if isinstance(content, dict) and "draws_plotly" in content:
        _asked.draws_plotly = content["draws_plotly"]
        _asked.answered.set()


def runs_widgets_of_ours() -> bool | None:
    """Return whether the page runs labkit's own widgets, its charts above all; None while that is not known."""
    if _asked.answered.is_set() or not kernel.is_jupyters_page():
        return True  # VS Code, Colab and Kaggle bring what widgets need
    return None if time.monotonic() < _asked.since_s + ANSWER_S else False


def wait_for_answer() -> None:
    """Wait until the page has answered, or counts as one that cannot."""
    while runs_widgets_of_ours() is None:
        _asked.answered.wait(0.1)


def shows_no_widgets() -> bool:
    """Return whether the page is known to show no widgets at all: for the first one it would have opened a subshell.

    A page that is only slow gets twice the time: lines of text, once begun, stay.
    """
    is_silent = runs_widgets_of_ours() is False and time.monotonic() >= _asked.since_s + 2 * ANSWER_S
    return is_silent and kernel.has_subshells() and not kernel.has_been_given_a_subshell()


def draws_plotly() -> bool:
    """Return whether the page is known to draw Plotly's data, so that no picture is needed beside them.

    Colab's and Kaggle's own pages are not: there Plotly shows a page with a script (`plotly.io.renderers`). That fails
    in turn where VS Code has Colab's kernel (github.com/googlecolab/colab-vscode/issues/339, 2026-01), as data do not.
    """
    if {"COLAB_RELEASE_TAG", "KAGGLE_URL_BASE"} & set(os.environ):
        return False
    if not kernel.is_jupyters_page():
        return True
    _wait_once()
    return _asked.answered.is_set() and _asked.draws_plotly is not False


def _wait_once() -> None:
    """Give the page a moment to answer, where it could be heard; for the first chart only."""
    if kernel.has_subshells() and not (_asked.has_waited or _asked.answered.is_set()):
        ask()
        _asked.answered.wait(CHART_WAITS_S)
        _asked.has_waited = True


def missing() -> str:
    """Return what JupyterLab's environment lacks, in words; "" for nothing, or where that is not known."""
    if shows_no_widgets():
        cannot, packages = "shows no widgets", "ipywidgets anywidget plotly"
    elif runs_widgets_of_ours() is False:
        cannot, packages = "cannot draw live charts, so there are pictures", "anywidget plotly"
    elif kernel.is_jupyters_page() and _asked.answered.is_set() and _asked.draws_plotly is False:
        cannot, packages = "cannot draw charts that stay, so there are pictures", "plotly"
    else:
        return ""
    return f"This page {cannot}. In JupyterLab's own environment, which is not the kernel's: pip install {packages}"
