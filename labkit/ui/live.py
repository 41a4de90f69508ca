"""The live view: widgets under the cell while a run goes on, and what stays there when it is over.

Everything is drawn from a `Run` by a thread of its own, at most ten times a second; nothing here reaches a rank.
"""

from __future__ import annotations

import html
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.monitor.history import FEW, SAMPLES
from labkit.monitor.record import RunRecord
from labkit.ui import formatting, kernel, prewarm, summary
from labkit.ui.boxes import Boxes
from labkit.ui.tables import STATE_COLORS, ranks_html
from labkit.ui.widgets import WidthKeeper, close_later

LOG = logging.getLogger(__name__)

REDRAW_S = 0.1
"""Least time between two redraws of the live view."""

CHART_AFTER_S = 0.1
"""Time from the first value to the chart. A run that fails at once has failed by then, and waits for no imports."""

UNHEARD_S = 1.0
"""Time between redraws while the browser has not said that it is done with the last."""

STOPS = "End the run; what was logged, printed and returned by then is kept"
NO_SUBSHELLS = (
    "To stop the run, interrupt the kernel. This button would answer only after its cell has ended: it needs a kernel "
    "with subshells, ipykernel 7 or newer, and a front end that uses them, JupyterLab 4.4 or Notebook 7.4 or newer; or "
    "launch with wait=False"
)
"""What the Stop button says it does, and what it says where it can do nothing."""

SUBSHELL_S = 5.0
"""How long a front end may take to open a subshell for the first widget before it counts as one that opens none."""

PATIENCE_S = 3.0
"""How long the end of a run waits for a browser to have drawn its first chart."""


class LiveView(threading.Thread):
    """The widgets under the cell: states and progress, a Stop button, live curves, the ranks' output behind tabs.

    What fails here is logged once and does not end the view: how the run ended, its error above all, is shown whatever
    happens, as plain text if need be.
    """

    front_end_answers = True

    def __init__(self, run: RunRecord, holds_the_cell: bool = False) -> None:
        super().__init__(name="labkit-view", daemon=True)
        self._run = run
        self._title = widgets.HTML(title_html(run))
        # Apart from the title, which is always new: what is selected would be lost.
        self._notice = widgets.HTML(layout=widgets.Layout(display="none"))
        self._head = widgets.VBox([self._title, self._notice], layout=widgets.Layout(flex="1 1 0", min_width="0"))
        self._states = widgets.HTML(states_html(run))
        self._holds_the_cell, self._shown_s = holds_the_cell and kernel.has_kernel(), time.monotonic()
        layout = widgets.Layout(width="auto", min_width="90px", flex="0 0 auto", margin="2px 12px 2px 0")
        self._button = widgets.Button(button_style="danger", layout=layout, **self._button_says())
        self._button.on_click(lambda _: self._stop_clicked())
        self._output = Tabs(run) if run.world_size <= FEW else Boxes(run)
        self._figure: Any = None
        self._replaced: list[Any] = []
        """Earlier figures, without the curves that have come since."""
        self._chart_due_s = math.inf
        self._came_up_empty = False
        self._top = widgets.HBox([self._button, self._head])
        self._keeper = WidthKeeper()
        self._panel: Any = None
        """The debugger's, from the first question on."""
        self._box = widgets.VBox(self._children())
        for widget in (self._button, self._output.output, *self._output.boxes):
            kernel.answer_while_the_cell_runs(widget)
        self._heard = threading.Event()
        self._heard.set()
        self._has_failed = False
        self._answered = threading.Event()
        self._box_handle = kernel.display(self._box, display_id=True)
        self._chart_handle = kernel.reserve()

    def _children(self) -> list[Any]:
        middle = [part for part in (self._output.row, self._panel, self._figure) if part is not None]
        return [self._top, self._states, *middle, self._output.output, self._keeper]

    def run(self) -> None:
        """Draw until the run is over; then replace the widgets by what stays."""
        if {"starting", "queued"} & set(self._run.states):
            self._attempt(prewarm.begin)
        while not self._run.over.is_set():
            began = time.monotonic()
            self._attempt(self._draw)
            took = time.monotonic() - began
            # Drawing takes a third of this thread's time at most, unless it is so slow that it would look stopped.
            self._run.over.wait(max(REDRAW_S - took, min(2 * took, UNHEARD_S)))
            while not (self._heard.is_set() or self._run.over.is_set()) and time.monotonic() < began + UNHEARD_S:
                self._heard.wait(0.05)
        if self._figure is not None:
            self._attempt(self._let_the_browser_finish)
        try:
            # What stays is small and needs no kernel: no widget, no script.
            if not self._attempt(lambda: self._box_handle.update(summary.bundle(self._run), raw=True)):
                self._box_handle.update({"text/plain": formatting.plain(self._run)}, raw=True)
            if self._run.recorded.names:
                self._attempt(self._show_final_chart)
        finally:
            was_quick = self._figure is None or (self._answered.is_set() and not self._replaced)
            close_later([self._box, *self._replaced], was_quick)

    def _show_final_chart(self) -> None:
        from labkit.ui import charts  # not above: it imports Plotly, which takes a second

        self._chart_handle.update(charts.of_run(self._run, self._output.ranks).bundle(), raw=True)

    def _attempt(self, show: Callable[[], object]) -> bool:
        """Show something; return whether that went well. The first failure is logged."""
        try:
            show()
        except Exception:
            if not self._has_failed:
                LOG.exception(
                    "run %r: part of its live view could not be drawn. The run is not affected", self._run.name
                )
            self._has_failed = True
            return False
        return True

    def finish(self) -> None:
        """Wait until the end has been drawn, for a second at most, if the run has finished by itself.

        Who has pressed Stop, or is to see an error, wants the cell back; the front end also takes what comes later.
        """
        if self._run.status == "finished":
            self.join(1)

    def _draw(self) -> None:
        self._title.value, self._states.value = title_html(self._run), states_html(self._run, self._output.ranks)
        self._notice.value = notice_html(self._run)
        self._notice.layout.display = None if self._notice.value else "none"
        self._output.draw()
        for name, says in self._button_says().items() if not self._run.stopping else ():
            setattr(self._button, name, says)
        if self._panel is not (panel := self._run.panel):
            self._panel = panel
            self._box.children = self._children()
        history = self._run.recorded
        if not history.names:
            return
        self._chart_due_s = min(self._chart_due_s, time.monotonic() + CHART_AFTER_S)
        if time.monotonic() < self._chart_due_s:
            return
        prewarm.begin()
        if not prewarm.is_done():
            return  # the states are to be seen meanwhile, and the end, should it come
        from labkit.ui import charts, live_chart

        if self._figure is not None:
            if not self._came_up_empty and charts.refresh(self._figure, history, self._output.ranks):
                self._heard.clear()
                return
            # Not closed yet: a browser that is still making its view would miss it, and show none of the box.
            self._replaced.append(self._figure)
        self._came_up_empty = False
        figure = charts.logged(history, ranks=self._output.ranks)
        self._figure = live_chart.chart_widget(figure)
        self._figure._config = {**self._figure._config, **charts.CONFIG, "responsive": True}
        # What the browser answers to an update. Plotly 7's on_edits_completed also waits for an answer about the
        # layout, which its JavaScript sends under a wrong name.
        self._figure.observe(self._browser_answered, names="_js2py_traceDeltas")
        kernel.answer_while_the_cell_runs(self._figure)
        self._box.children = self._children()

    def _browser_answered(self, change: Any) -> None:
        answer = change["new"]
        if answer and answer["trace_deltas"]:
            self._heard.set()
            self._answered.set()
        elif answer:  # no message reaches it: it was too late for anywidget, and stays empty
            self._came_up_empty = True

    def _let_the_browser_finish(self) -> None:
        """Wait a moment for a browser that is still making the chart of a short run; taken away now, it would complain.

        A front end that has once failed to answer (it knows no subshells, or nobody looks) is not waited for again.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self._answered.is_set() and LiveView.front_end_answers:
            LiveView.front_end_answers = time.monotonic() < deadline
            self._figure.data[0].opacity = 0.8 - 0.01 * (time.monotonic() % 1)  # something to answer to
            self._answered.wait(0.1)

    def _button_says(self) -> dict[str, Any]:
        """Return the Stop button's words: how else to stop the run, where a click would wait for the cell to end."""
        is_new = time.monotonic() < self._shown_s + SUBSHELL_S
        is_heard = kernel.has_subshells() and (is_new or kernel.has_been_given_a_subshell())
        if self._holds_the_cell and not is_heard:
            return {"description": "use kernel ■", "icon": "", "tooltip": NO_SUBSHELLS, "disabled": True}
        return {"description": "Stop", "icon": "stop", "tooltip": STOPS, "disabled": False}

    def _stop_clicked(self) -> None:
        if self._run.stopping:
            self._button.disabled = True
            self._run.ask_to_stop(grace_s=0)
            return
        self._button.description = "End now"
        self._button.tooltip = "Do not wait for this step; ranks that have not returned by now return nothing"
        self._run.ask_to_stop()


class Tabs:
    """What the ranks print, a tab each. Of many ranks there is `Boxes` in its place."""

    ranks: Sequence[int] = ()
    """Those that are to be shown besides."""
    row: Any = None
    """A widget above the chart …"""
    boxes: Sequence[Any] = ()
    """… and those in it that one types into."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._texts = [widgets.HTML() for _ in range(run.world_size)]
        self._seen = [""] * run.world_size
        self.output = widgets.Tab(self._texts)
        self.output.layout.display = "none"
        for rank in range(run.world_size):
            self.output.set_title(rank, f"rank {rank}")

    def draw(self) -> None:
        """Bring the tabs up to date."""
        for rank, tail in enumerate(self._run.output_tail(formatting.TAIL_LINES)):
            if tail != self._seen[rank]:
                self._seen[rank] = tail
                self._texts[rank].value = formatting.output_html(tail)
                self.output.layout.display = None


def title_html(run: RunRecord) -> str:
    """Return the run's name, phase and seconds, and the time that is left if that can be told."""
    again = f" · started again {run.attempt}×" if run.attempt else ""
    return f"<b>{html.escape(run.name)}</b> {formatting.phase(run)}{again} · {run.elapsed_s:.1f} s{_time_left(run)}"


def notice_html(run: RunRecord) -> str:
    """Return what a cluster says of the run (lines after the first are to be copied), and remarks on what is logged."""
    said, _, to_copy = run.notice.partition("\n")
    said = " · ".join(filter(None, (said, run.placement, formatting.remark(run), formatting.many_names(run))))
    shown = f'<div style="line-height:1.4;opacity:0.7">{html.escape(said)}</div>' if said else ""
    if to_copy:  # a click selects all of it
        style = f"{formatting.WRAPPED};user-select:all;line-height:1.4;margin:2px 0"
        shown += f'<pre style="{style}">{html.escape(to_copy)}</pre>'
    return shown


def states_html(run: RunRecord, asked: Sequence[int] = ()) -> str:
    """Return a table of the ranks: state, step, progress, rates and last values.

    Of many it has only some, each with why; those that are asked for, say.
    """
    states, history = run.states, run.recorded
    why = history.listed(states, asked)
    rows = [
        (rank, states[rank], [*([said] if said else []), *_progress_cells(run, rank, states[rank])])
        for rank, said in why.items()
    ]
    headline = html.escape(history.headline(states))
    return (f'<div style="line-height:1.4">{headline}</div>' if headline else "") + ranks_html(rows)


def _progress_cells(run: RunRecord, rank: int, state: str) -> list[str]:
    progress, expected = run.progress(rank)
    step = (
        "" if progress.last_step is None else f"step {progress.last_step:,}" + (f" of {expected:,}" if expected else "")
    )
    return [
        step,
        _bar(progress.steps / expected, STATE_COLORS[state]) if expected else "",
        "" if math.isnan(progress.steps_per_s) else f"{formatting.rate(progress.steps_per_s)} steps/s",
        "" if math.isnan(progress.samples_per_s) else f"{progress.samples_per_s:,.0f} samples/s",
        " ".join(f"{html.escape(n)}&nbsp;{v:.4g}" for n, v in list(progress.last.items())[:3] if n != SAMPLES),
    ]


def _time_left(run: RunRecord) -> str:
    progress, expected = run.progress(0)
    if not expected or run.status != "running" or not progress.steps_per_s > 0:
        return ""
    return f" · about {max(0.0, expected - progress.steps) / progress.steps_per_s:.0f} s left"


def _bar(share: float, color: str) -> str:
    percent = 100 * min(1.0, max(0.0, share))
    return (
        '<div style="width:110px;height:8px;background:#8884;border-radius:4px;overflow:hidden;margin-top:5px">'
        f'<div style="width:{percent:.0f}%;height:8px;background:{color}"></div></div>'
    )
