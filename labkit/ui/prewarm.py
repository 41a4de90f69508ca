"""What the first launch and chart need, done while the notebook is idle and the reader reads.

`import labkit` in a notebook's kernel begins it (`begin_when_idle`). The ranks come first: a chart has a second's time
once its run has begun.

Plotly and the widgets are imported, and tried, before the first chart needs them. That takes half a second. Every other
thread of the kernel gets on slowly meanwhile, because one at a time runs Python: a run that was stopped just then took
one to two seconds to end. So it is done while a run's ranks start, when the kernel only waits for them (`LiveView`), or
while the notebook is idle.
"""

from __future__ import annotations

import threading
from array import array

from labkit.engines import standby
from labkit.ui import kernel

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

        from labkit.monitor.history import History
        from labkit.protocol.events import Log
        from labkit.ui import charts

        # The first chart is four times as dear as the next, which find its template and checks made.
        history = History(1)
        history.add(Log(0, ("loss",), array("q", [0]), array("d", [0.0]), array("d", [0.0])))
        charts.logged(history)
    finally:
        _done.set()  # who needs it imports it again, and gets the error


def begin_when_idle() -> None:
    """Begin with all of it, in the background, once the notebook is idle."""
    # In full, before any thread may draw: Plotly looks for pandas.Series in a pandas that is half imported, and fails.
    import pandas  # noqa: F401

    # LaunchArgs now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    threading.Thread(target=_prewarm, args=(kernel.is_interactive(),), name="labkit-prewarm", daemon=True).start()


def _after_cell(_: object) -> None:
    standby.renew()


def _prewarm(is_interactive: bool) -> None:
    if (shell := kernel.shell()) is not None:
        shell.events.register("post_run_cell", _after_cell)
    if is_interactive:
        standby.prewarm_first_launch()
    standby.idle.wait()
    if is_interactive:
        from labkit.ui import page

        page.ask()
    wait()
    # Where a person watches, the browser draws, and nobody needs a picture.
    if is_interactive:
        from labkit.ui import live_chart

        live_chart.get_ready()
    else:
        from labkit.ui import pictures

        pictures.get_ready()
