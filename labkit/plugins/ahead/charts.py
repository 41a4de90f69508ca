"""Plotly and its widgets, imported and tried before the first chart needs them.

That takes half a second or more, in which every other thread of the kernel gets on slowly, because one at a time runs
Python: a run that was stopped just then took one to two seconds to end. So it is done while a run's ranks start, when
the kernel only waits for them (`LiveView`), or while the notebook is idle.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import types
from array import array
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()
_importing: threading.Thread | None = None
_done = threading.Event()


def begin() -> None:
    """Begin to import what live charts need, in the background, if that has not been begun."""
    global _importing
    with _lock:
        if _importing is None:
            _importing = threading.Thread(target=_import, name="labkit-plotly", daemon=True)
            _importing.start()


def is_done() -> bool:
    """Return whether a live chart can be drawn without an import."""
    return _done.is_set()


def wait() -> None:
    """Import what live charts need, and return when that is done."""
    begin()
    _done.wait()


def _import() -> None:
    try:
        import ipywidgets  # noqa: F401
        import plotly.graph_objects as go

        with without_a_grammar():
            go.FigureWidget  # noqa: B018 - imported when it is first asked for

        from labkit.monitor.history import History
        from labkit.protocol.events import Log
        from labkit.ui import charts

        # The first chart is four times as dear as the next, which find its template and checks made.
        history = History(1)
        history.add(Log(0, ("loss",), array("q", [0]), array("d", [0.0]), array("d", [0.0])))
        charts.logged(history)
    finally:
        _done.set()  # who needs it imports it again, and gets the error


@contextlib.contextmanager
def without_a_grammar() -> Iterator[None]:
    """Have whoever imports `rfc3987_syntax` meanwhile get it when he first calls it.

    The problem: Plotly's widget asks for nbformat's version, that imports jsonschema, and that, where Jupyter's server
    has brought it, a check of international addresses which parses its grammar as it is imported: 1.3 of the 1.6 s
    that the widget takes, and nobody here checks an address. importlib's LazyLoader does not help: jsonschema takes
    the function out at once. What still takes the time: a kernel in which somebody imports nbformat first.
    """
    name = "rfc3987_syntax"
    if name in sys.modules or importlib.util.find_spec(name) is None:
        yield
        return

    def is_valid_syntax(*args: Any) -> Any:
        return importlib.import_module(name).is_valid_syntax(*args)

    stand_in = types.ModuleType(name)
    vars(stand_in).update(is_valid_syntax=is_valid_syntax)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
