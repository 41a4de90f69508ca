"""What the first launch, step and chart need, got while the notebook is idle and the reader reads.

Begun by `import labkit` in a notebook's kernel. The ranks come first: a chart has a second's time once its run has
begun. `labkit.ui.prewarm` imports what live charts need, in any case while a run's ranks start; `first_step` is for
ranks.
"""

from __future__ import annotations

import threading


def rank_waits() -> None:
    """Use the time while a rank has no work."""
    from labkit.plugins.ahead import first_step

    first_step.get_ready()


def begin() -> None:
    """Begin, in the background."""
    from labkit.ui import kernel  # not above: ranks import this

    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    threading.Thread(target=_get, args=(kernel.is_interactive(),), name="labkit-ahead", daemon=True).start()


def _get(is_interactive: bool) -> None:
    from labkit.engines import standby
    from labkit.ui import kernel, prewarm

    if (shell := kernel.shell()) is not None:
        shell.events.register("post_run_cell", lambda _: standby.renew())
    if is_interactive:
        standby.ahead_of_the_first_launch()
    standby.idle.wait()
    prewarm.wait()
    # Where a person watches, the browser draws, and nobody needs a picture.
    if is_interactive:
        from labkit.ui import live_chart

        live_chart.get_ready()
    else:
        from labkit.ui import pictures

        pictures.get_ready()
