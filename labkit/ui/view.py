"""A run while it goes on: one widget, whose state is always the whole picture; when it is over, an output that stays.

`view.js` draws it, with uPlot. Nothing here reaches a rank but a click on the button. `state_of` needs no browser.
"""

from __future__ import annotations

import html
import json
import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import numpy as np
import traitlets

from labkit.monitor.history import FEW, SAMPLES
from labkit.monitor.record import RunRecord
from labkit.ui import formatting, kernel, summary
from labkit.ui.tables import STATE_COLORS, look_of
from labkit.ui.watcher import Watcher

REDRAW_S = 0.2
"""Least time between two redraws of the live view."""

STILL_S = 1.0
"""Time between redraws where nothing has changed but the seconds."""

POINTS = 30_000
"""Drawn while a run goes on, at most: with more, the first names are drawn. The chart that stays has `PANELS` names."""

CHARACTERS = 10_000
"""Shown of what each rank has printed."""

SUBSHELL_S = 5.0
"""How long a front end may take to open a subshell for the first widget before it counts as one that opens none."""

HINTS = {
    "Stop": "End the run; what was logged, printed and returned by then is kept",
    "End now": "Do not wait for this step; ranks that have not returned by now return nothing",
    "use kernel ■": (
        "To stop the run, interrupt the kernel. This button would answer only after its cell has ended: it needs a "
        "kernel with subshells, ipykernel 7 or newer, and a front end that uses them, JupyterLab 4.4 or Notebook 7.4 "
        "or newer; or launch with wait=False"
    ),
}
"""What the button says, and what it does then."""

NOT_DRAWN = (
    "<style>.labkit-not-drawn {{ height: 0; overflow: hidden }} @keyframes labkit-late {{ to {{ height: auto }} }}"
    ".jp-OutputArea-child:not(:has(.labkit-run)) + .jp-OutputArea-child > .jp-OutputArea-output > .labkit-not-drawn "
    "{{ animation: labkit-late 0s 3s forwards }}</style>"
    '<div class="labkit-not-drawn">This page has no live view of {name}. If the cell still runs: the view comes when '
    "it has ended; to stop the run, interrupt the kernel (■). If the kernel has been restarted: the run has ended with "
    "it; run the cell again. If neither: JupyterLab's own environment needs <code>pip install anywidget plotly</code>."
    "</div>"
)
"""Below the widget, and seen only where JupyterLab has nothing in the widget's place but "Loading widget…" or "model
not found": HTML, which needs no kernel."""

HERE = Path(__file__).parent


def _source(*names: str) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


class RunWidget(anywidget.AnyWidget):
    """What a page has of a run.

    The problem: anywidget gives a model two seconds to load, after which no change ever reaches it (0.11:
    `AbortSignal.timeout`), so that on a busy machine a view stands still. What is done: `shown` is the value of a plain
    widget, the carrier, which this one only draws, however late it is loaded.

    `shown` is JSON as one string: as a dict, ipywidgets would walk through every number to look for buffers. It is
    always whole: a page that joins later draws what every page draws.
    """

    _esm = _source("uplot.min.js", "view.js")
    _css = _source("uplot.min.css", "view.css")
    carrier = traitlets.Unicode().tag(sync=True)

    def __init__(self, shown: dict[str, Any]) -> None:
        self._carrier = widgets.HTML(json.dumps(shown))
        super().__init__(carrier=self._carrier.model_id)
        self.on_msg(self._asked)
        for widget in (self, self._carrier):
            kernel.answer_while_the_cell_runs(widget)

    def show(self, shown: dict[str, Any]) -> None:
        """Have every page draw this instead."""
        self._carrier.value = json.dumps(shown)

    def _asked(self, _: Any, content: Any, __: Any) -> None:
        if content == {"wants": "shown"}:
            self._carrier.send_state("value")


class LiveView(Watcher):
    """The widget under the cell: a Stop button, a row and the output of each rank, and curves.

    The problem of its end: what stays has to be in the saved notebook, which keeps outputs and no widgets, and in every
    page that shows the cell. JupyterLab takes a change of an output only in the page that first received the output,
    and only where the cell itself shows it: not after a reload, and not within `Output`, `interact`, `Tab`. So both are
    done: the output is replaced by the summary, and the widget, where it is still shown, has it as its own last state.
    It stays open as long as the kernel lives. What still fails: a page that was reloaded while the run went on saves
    the view of a widget, which a later kernel does not have; `NOT_DRAWN` says so.
    """

    def __init__(self, run: RunRecord, holds_the_cell: bool = False) -> None:
        super().__init__(run)
        self._holds_the_cell, self._began_s = holds_the_cell and kernel.has_kernel(), time.monotonic()
        self._drawn: tuple[float, dict[str, Any]] = (0.0, {})
        """When it was drawn last, and what."""
        self._drawing, self._has_ended = threading.Lock(), False
        self._widget = RunWidget({**EMPTY, "name": run.name})
        self._widget.on_msg(self._clicked)
        self._draw()
        self._handle = kernel.display(self._widget, display_id=True)
        below = {"text/html": NOT_DRAWN.format(name=html.escape(run.name)), "text/plain": ""}
        self._chart_handle = kernel.display(below, raw=True, display_id=True)

    def _show(self) -> None:
        while not self._run.over.is_set():
            began = time.monotonic()
            self._draw()
            # Drawing takes a quarter of this thread's time at most.
            self._run.over.wait(max(REDRAW_S, 3 * (time.monotonic() - began)))
        bundle = summary.bundle(self._run)
        self._leave(bundle, {"html": bundle["text/html"], "panels": panels_of(self._run)})

    def _show_plainly(self, text: str) -> None:
        self._leave({"text/plain": text}, {"html": f"<pre>{html.escape(text)}</pre>"})

    def _leave(self, bundle: dict[str, str], shown: dict[str, Any]) -> None:
        """Replace the widget in the notebook by what is small and needs no kernel, and have pages show the last."""
        self._handle.update(bundle, raw=True)
        self._widget.on_msg(self._clicked, remove=True)
        with self._drawing:
            self._has_ended = True
        self._widget.show({**EMPTY, **shown})

    def _show_last(self) -> None:
        chart: Any = None
        try:
            if self._run.recorded.names:
                from labkit.ui import charts  # not above: it imports Plotly, which takes a second

                chart = charts.of_run(self._run, title="")
        finally:
            if chart is None:
                self._chart_handle.update(kernel.NOTHING, raw=True)
            else:
                chart.update_shown(self._chart_handle)

    def finish(self) -> None:
        """Wait until the end has been said, for a second at most, if the run has finished by itself.

        Who has pressed Stop, or is to see an error, wants the cell back.
        """
        if self._run.status == "finished":
            self._said.wait(1)

    def _draw(self) -> None:
        with self._drawing:  # after a click, by another thread
            if self._has_ended:
                return
            shown = state_of(self._run, self._is_heard())
            now, (drawn_s, before) = time.monotonic(), self._drawn
            if now - drawn_s >= STILL_S or {**shown, "title": ""} != {**before, "title": ""}:
                self._widget.show(shown)
                self._drawn = now, shown

    def _is_heard(self) -> bool:
        return not self._holds_the_cell or is_heard(self._began_s)

    def _clicked(self, _: Any, content: Any, __: Any) -> None:
        if clicked(self._run, content):
            self._draw()


def is_heard(began_s: float) -> bool:
    """Return whether a click is heard before the cell has ended; the widget was shown at `began_s`, monotonic."""
    is_new = time.monotonic() < began_s + SUBSHELL_S
    return kernel.has_subshells() and (is_new or kernel.has_been_given_a_subshell())


def clicked(run: RunRecord, content: Any) -> bool:
    """Stop the run, or end it: as the button said when it was clicked, so that a double click does not end it."""
    if content == {"clicked": "Stop"} and not run.stopping:
        run.ask_to_stop()
    elif content == {"clicked": "End now"}:
        run.ask_to_stop(grace_s=0)
    else:
        return False
    return True


EMPTY: dict[str, Any] = {
    **dict.fromkeys(("name", "title", "notice", "to_copy", "html", "button", "hint"), ""),
    **dict.fromkeys(("rows", "panels", "output"), ()),
}
"""A picture with nothing in it."""


def state_of(run: RunRecord, is_heard: bool = True) -> dict[str, Any]:
    """Return the state of the widget of a run that goes on, as JSON values.

    Args:
        run: the run.
        is_heard: whether a click on the button would be heard now.
    """
    states, is_over = run.states, run.over.is_set()
    said, _, to_copy = run.notice.partition("\n")
    counts = ", ".join(f"{count:,} {state}" for state, count in Counter(states).most_common())
    many = f"{run.world_size:,} ranks: {counts}" if run.world_size > FEW else ""
    panels, names = panels_of(run), [name for name in run.recorded.names if name != SAMPLES]
    first = f"the first {len(panels)} of {len(names)} names are drawn" if len(panels) < len(names) else ""
    remarks = (said, run.placement, formatting.remark(run), first, many)
    output = run.output_tail(formatting.TAIL_LINES)[:FEW]
    word = "End now" if run.stopping else "Stop" if is_heard else "use kernel ■"
    return {
        **EMPTY,
        "name": run.name,
        "title": _title(run),
        "notice": " · ".join(filter(None, remarks)),
        "to_copy": to_copy,  # a command, say
        "rows": [_row(run, rank, states[rank]) for rank in run.recorded.listed(states)],
        "panels": panels,
        "output": [[rank, text[-CHARACTERS:]] for rank, text in enumerate(output) if text],
        "button": "" if is_over else word,
        "hint": "" if is_over else HINTS[word],
    }


def panels_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return a panel of curves for each name: each with the number of its steps among the panel's `steps`."""
    panels: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, bytes], int] = {}
    points = 0
    for curve in run.recorded.drawn():
        points += len(curve.x)
        if points > POINTS and curve.name not in panels:
            break
        panel = panels.setdefault(curve.name, {"name": curve.name, "steps": [], "curves": []})
        at = found.setdefault((curve.name, curve.x.tobytes()), len(panel["steps"]))
        if at == len(panel["steps"]):
            panel["steps"].append(curve.x.astype(np.int64).tolist())
        panel["curves"].append({"label": curve.key, **look_of(curve.key), "steps": at, "y": _numbers(curve.y)})
    return list(panels.values())


def _numbers(values: Any) -> list[float | None]:
    """Return numbers in five digits, for a curve on a screen; JSON has no NaN and no infinity: there is a gap."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _title(run: RunRecord) -> str:
    """Return the run's phase and seconds, and the time that is left if that can be told."""
    again = f"started again {run.attempt}×" if run.attempt else ""
    progress, done, expected = run.progress(0)
    is_known = expected and run.status == "running" and progress.steps_per_s > 0
    left = f"about {max(0.0, expected - done) / progress.steps_per_s:.0f} s left" if is_known else ""
    return " · ".join(filter(None, (formatting.phase(run), again, f"{run.elapsed_s:.1f} s", left)))


def _row(run: RunRecord, rank: int, state: str) -> dict[str, Any]:
    """Return where a rank stands: step, rates and last values, and the share that is done."""
    progress, done, expected = run.progress(rank)
    values = [(name, value) for name, value in list(progress.last.items())[:3] if name != SAMPLES]
    cells = [
        _step(progress.last_step, done, expected),
        "" if math.isnan(progress.steps_per_s) else f"{formatting.rate(progress.steps_per_s)} steps/s",
        "" if math.isnan(progress.samples_per_s) else f"{progress.samples_per_s:,.0f} samples/s",
        "  ".join(f"{formatting.shortened(name, 20)} {value:.4g}" for name, value in values),
    ]
    share = min(1.0, max(0.0, done / expected)) if expected else None
    return {"rank": rank, "state": state, "color": STATE_COLORS[state], "cells": cells, "share": share}


def _step(last: int | None, done: int, expected: int) -> str:
    """Return "step 20 of 40"; of a training that was resumed at step 1,000, "step 1,234 (235 of 500)"."""
    if last is None:
        return ""
    if not expected:
        return f"step {last:,}"
    from_the_beginning = last in (done - 1, done)  # some count from 0, some from 1
    return f"step {last:,} of {expected:,}" if from_the_beginning else f"step {last:,} ({done:,} of {expected:,})"
