"""What the first launch and chart need, done while the notebook is idle.

`import labkit` in a notebook's kernel begins it (`begin_when_idle`). The ranks come first.

Plotly, which draws the chart that stays, and the widgets are imported, and tried, before the first run needs them. That
takes half a second. Every other thread of the kernel gets on slowly meanwhile, because one at a time runs Python: a run
that was stopped just then took one to two seconds to end. So it is done while a run's ranks start, when the kernel only
waits for them (`present.watch`), or while the notebook is idle.
"""

from __future__ import annotations

import functools
import threading
from array import array

from labkit.engines import standby
from labkit.ui import kernel


@functools.cache
def begin() -> threading.Thread:
    """Begin to import what charts need, in a thread, if that has not been begun; return it."""
    thread = threading.Thread(target=_import, name="labkit-plotly", daemon=True)
    thread.start()
    return thread


def _import() -> None:
    from labkit.monitor.history import History
    from labkit.protocol.events import Log
    from labkit.ui import charts

    # The first chart takes four times as long as the next, which find its template and checks made.
    history = History(1)
    history.add(Log(0, ("loss",), array("q", [0]), array("d", [0.0]), array("d", [0.0])))
    charts.logged(history)


def begin_when_idle() -> None:
    """Begin with all of it, in the background, once the notebook is idle."""
    # In full, before any thread may draw: Plotly looks for pandas.Series in a pandas that is half imported, and fails.
    import pandas  # noqa: F401

    kernel.end_ranks_at_shutdown()
    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
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
        import labkit.ui.view  # noqa: F401 - first: the live view draws without Plotly
    begin()
