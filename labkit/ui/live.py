"""The live view: widgets under the cell while a run goes on, and what stays there when it is over.

Everything is drawn from a `Run` by a thread of its own, at most ten times a second; nothing here reaches a rank.
"""

from __future__ import annotations

import base64
import html
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from labkit.monitor.history import FEW, SAMPLES
from labkit.monitor.record import RunRecord
from labkit.protocol.text import print_text
from labkit.ui import formatting, kernel, page, pictures, prewarm, summary
from labkit.ui.lines import Lines
from labkit.ui.tables import STATE_COLORS, ranks_html
from labkit.ui.watcher import Watcher
from labkit.ui.widgets import close_later, close_unshown

LOG = logging.getLogger(__name__)

REDRAW_S = 0.1
"""Least time between two redraws of the live view."""

CHART_AFTER_S = 0.1
"""Time from the first value to the chart. A run that fails at once has failed by then, and waits for no imports."""

UNHEARD_S = 1.0
"""Time between redraws while the browser has not said that it is done with the last."""

PICTURE_EVERY_S = 2.0
"""Time between redraws of the chart as a picture, where the page cannot draw it."""

STOPS = "End the run; what was logged, printed and returned by then is kept"
NO_SUBSHELLS = (
    "To stop the run, interrupt the kernel. This button would answer only after its cell has ended: it needs a kernel "
    "with subshells, ipykernel 7 or newer, and a front end that uses them, JupyterLab 4.4 or Notebook 7.4 or newer; or "
    "launch with wait=False"
)
"""What the Stop button says it does, and what it says where it can do nothing."""

JOINS_LATE = (
    "<style>.jp-OutputArea-child:has(> .lm-Panel.jp-OutputArea-output:not(.jupyter-widgets))"
    ":not(:has(> .lm-Panel.jp-OutputArea-output > *)) + .jp-OutputArea-child .labkit-joins-late "
    "{{ display: block !important }}</style>"
    '<div class="labkit-joins-late" style="display: none">{name} goes on in this cell. A kernel answers a page that '
    "was reloaded only when the cell has ended: then the run is shown here. To stop it, interrupt the kernel (■).</div>"
)
"""Below a widget for which JupyterLab says "Loading widget…", and only there: HTML, which needs no kernel."""

NAME_CHARACTERS = 20
"""Of a logged name in the table of ranks."""

SUBSHELL_S = 5.0
"""How long a front end may take to open a subshell for the first widget before it counts as one that opens none."""


class LiveView(Watcher):
    """The widgets under the cell: states and progress, a Stop button, live curves, the ranks' output behind tabs.

    What fails here is logged once and does not end the view: how the run ended, its error above all, is shown whatever
    happens, as plain text if need be.

    The problem of its end: what stays has to be in the saved notebook, which keeps outputs and no widgets, and in every
    page that shows the cell. JupyterLab takes a change of an output only in the page that first received the output,
    and only where the cell itself shows it: not after a reload, and not within `Output`, `interact`, `Tab`. So both are
    done: the output is replaced by the summary, and the widgets, where they are still shown, have it as their own last
    state. They stay open as long as the kernel lives. What still fails: a page that was reloaded while the run went on
    saves the view of a widget, which a later kernel does not have. And while the cell runs, such a page shows no
    widgets, because JupyterLab asks for them in the main shell and not in a subshell; it says so (`JOINS_LATE`).
    """

    def __init__(self, run: RunRecord, holds_the_cell: bool = False) -> None:
        super().__init__(run)
        close_unshown()
        self._title = widgets.HTML(title_html(run))
        # Apart from the title, which is always new: what is selected would be lost.
        self._notice = widgets.HTML(layout=widgets.Layout(display="none"))
        self._head = widgets.VBox([self._title, self._notice], layout=widgets.Layout(flex="1 1 0", min_width="0"))
        self._states = widgets.HTML(states_html(run))
        self._holds_the_cell, self._shown_s = holds_the_cell and kernel.has_kernel(), time.monotonic()
        layout = widgets.Layout(width="auto", min_width="90px", flex="0 0 auto", margin="2px 12px 2px 0")
        self._button = widgets.Button(button_style="danger", layout=layout, **self._button_says())
        self._button.on_click(lambda _: self._stop_clicked())
        self._output = Tabs(run)
        self._figure: Any = None
        """What was logged, as a chart, once it has been drawn."""
        self._chart: Any = None
        """The widget that shows it, once the page is known to run it …"""
        self._picture: Any = None
        """… and in its place a picture, where it does not."""
        self._lines: Any = None
        """Lines of text, where the page shows no widgets at all."""
        self._drawn: object = None
        self._chart_due_s, self._picture_due_s = math.inf, 0.0
        self._top = widgets.HBox([self._button, self._head])
        self._box = widgets.VBox(self._children())
        for widget in (self._button, self._output.output):
            kernel.answer_while_the_cell_runs(widget)
        self._heard = threading.Event()
        self._heard.set()
        self._has_failed = False
        self._bundle: dict[str, Any] = {}
        """How the run ended."""
        self._box_handle = kernel.display(self._box, display_id=True)
        joins_late = {"text/html": JOINS_LATE.format(name=html.escape(run.name)), "text/plain": ""}
        self._chart_handle = kernel.display(joins_late, raw=True, display_id=True)
        page.ask()

    def _children(self) -> list[Any]:
        middle = [part for part in (self._chart, self._picture) if part is not None]
        return [self._top, self._states, *middle, self._output.output]

    def _show(self) -> None:
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
        # What the notebook keeps is small and needs no kernel: no widget, no script.
        if not self._attempt(lambda: self._bundle.update(summary.bundle(self._run))):
            self._bundle = {"text/plain": formatting.plain(self._run)}
        self._box_handle.update(self._bundle, raw=True)

    def _show_last(self) -> None:
        if not (self._run.recorded.names and self._attempt(self._show_final_chart)):
            self._chart_handle.update(kernel.NOTHING, raw=True)
        if not self._attempt(self._leave):
            self._box.children = [widgets.HTML(f"<pre>{html.escape(formatting.plain(self._run))}</pre>")]

    def _show_final_chart(self) -> None:
        from labkit.ui import charts  # not above: it imports Plotly, which takes a second

        self._figure = charts.of_run(self._run)
        self._figure.update_shown(self._chart_handle)

    def _leave(self) -> None:
        """Have the widgets show what stays, and close what was only for a run that goes on."""
        bundle = self._bundle
        live: list[Any] = [self._top, self._states, self._output.output]
        page.wait_for_answer()
        stays: list[Any] = [widgets.HTML(bundle.get("text/html") or f"<pre>{html.escape(bundle['text/plain'])}</pre>")]
        if self._figure is not None and self._draw_figure(lives=""):
            stays.append(self._chart or self._picture)
        elif self._chart is not None:
            live.append(self._chart)
        self._box.children = stays
        if self._chart is not None:
            self._chart.settle()
        close_later(live)

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
        """Wait until the end has been said, for a second at most, if the run has finished by itself.

        Who has pressed Stop, or is to see an error, wants the cell back.
        """
        if self._run.status == "finished":
            self._said.wait(1)

    def _draw(self) -> None:
        self._title.value, self._states.value = title_html(self._run), states_html(self._run)
        self._notice.value = notice_html(self._run, page.missing())
        self._notice.layout.display = None if self._notice.value else "none"
        self._output.draw()
        for name, says in self._button_says().items() if not self._run.stopping else ():
            setattr(self._button, name, says)
        if self._lines is None and page.shows_no_widgets():
            print_text(page.missing())
            self._lines = Lines(self._run, in_notebook=False, wait=True)
            self._lines.start()
        if self._chart is None and kernel.has_been_given_a_subshell() and page.runs_widgets_of_ours():
            self._make_chart()  # before there is anything to draw: it says if the kernel is restarted
        self._draw_chart()

    def _draw_chart(self) -> None:
        history = self._run.recorded
        if not history.names:
            return
        self._chart_due_s = min(self._chart_due_s, time.monotonic() + CHART_AFTER_S)
        if time.monotonic() < self._chart_due_s:
            return
        prewarm.begin()
        if not prewarm.is_done():
            return  # the states are to be seen meanwhile, and the end, should it come
        from labkit.ui import charts

        now = (history.version, page.runs_widgets_of_ours())
        if now == self._drawn:
            return
        if self._figure is None or not charts.refresh(self._figure, history):
            self._figure = charts.logged(history)
        if self._draw_figure(lives="run"):
            self._drawn = now

    def _draw_figure(self, lives: str) -> bool:
        """Draw the figure in the page, or as a picture; return whether that was done."""
        runs_ours, said = page.runs_widgets_of_ours(), self._figure.words(self._run.name)
        if runs_ours is None:
            return False  # it may answer yet
        if runs_ours:
            if self._chart is None:
                self._make_chart()
            self._heard.clear()
            self._chart.draw([self._figure.to_plotly_json_small()], words=said, lives=lives)
            return True
        if not pictures.has_matplotlib() or (lives and time.monotonic() < self._picture_due_s):
            return False
        data, said = base64.b64encode(pictures.picture(self._figure)).decode(), html.escape(said)
        if self._picture is None:
            self._picture = widgets.HTML()
            self._box.children = self._children()
        self._picture.value = f'<img style="max-width:100%" alt="{said}" src="data:image/png;base64,{data}">'
        self._picture_due_s = time.monotonic() + PICTURE_EVERY_S
        return True

    def _make_chart(self) -> None:
        from labkit.ui.live_chart import LiveChart

        self._chart, self._picture = LiveChart(), None
        self._chart.when_drawn = self._heard.set
        self._chart.draw([], lives="run")
        self._box.children = self._children()

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
    """What the first `FEW` ranks print, a tab each."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        count = min(FEW, run.world_size)
        self._texts = [widgets.HTML() for _ in range(count)]
        self._seen = [""] * count
        self.output = widgets.Tab(self._texts)
        self.output.layout.display = "none"
        for rank in range(count):
            self.output.set_title(rank, f"rank {rank}")

    def draw(self) -> None:
        """Bring the tabs up to date."""
        for rank, tail in enumerate(self._run.output_tail(formatting.TAIL_LINES)[:FEW]):
            if tail != self._seen[rank]:
                self._seen[rank] = tail
                self._texts[rank].value = formatting.output_html(tail)
                self.output.layout.display = None


def title_html(run: RunRecord) -> str:
    """Return the run's name, phase and seconds, and the time that is left if that can be told."""
    again = f" · started again {run.attempt}×" if run.attempt else ""
    return f"<b>{html.escape(run.name)}</b> {formatting.phase(run)}{again} · {run.elapsed_s:.1f} s{_time_left(run)}"


def notice_html(run: RunRecord, of_page: str = "") -> str:
    """Return what a cluster says of the run (lines after the first are to be copied), and remarks on what is logged.

    `of_page` is what the page lacks.
    """
    said, _, to_copy = run.notice.partition("\n")
    said = " · ".join(filter(None, (said, run.placement, formatting.remark(run), formatting.many_names(run), of_page)))
    shown = f'<div style="line-height:1.4;opacity:0.7">{html.escape(said)}</div>' if said else ""
    if to_copy:  # a click selects all of it
        style = f"{formatting.WRAPPED};user-select:all;line-height:1.4;margin:2px 0"
        shown += f'<pre style="{style}">{html.escape(to_copy)}</pre>'
    return shown


def states_html(run: RunRecord) -> str:
    """Return a table of the ranks: state, step, progress, rates and last values.

    Of many it has the first and those that have failed, below how many there are in which state.
    """
    states = run.states
    rows = [(rank, states[rank], _progress_cells(run, rank, states[rank])) for rank in run.recorded.listed(states)]
    if run.world_size <= FEW:
        return ranks_html(rows)
    counts = ", ".join(f"{count:,} {state}" for state, count in Counter(states).most_common())
    return f'<div style="line-height:1.4">{run.world_size:,} ranks: {counts}</div>{ranks_html(rows)}'


def _progress_cells(run: RunRecord, rank: int, state: str) -> list[str]:
    progress, done, expected = run.progress(rank)
    return [
        _step(progress.last_step, done, expected),
        _bar(done / expected, STATE_COLORS[state]) if expected else "",
        "" if math.isnan(progress.steps_per_s) else f"{formatting.rate(progress.steps_per_s)} steps/s",
        "" if math.isnan(progress.samples_per_s) else f"{progress.samples_per_s:,.0f} samples/s",
        " ".join(_value(name, value) for name, value in list(progress.last.items())[:3] if name != SAMPLES),
    ]


def _step(last: int | None, done: int, expected: int) -> str:
    """Return "step 20 of 40"; of a training that was resumed at step 1,000, "step 1,234 (235 of 500)"."""
    if last is None:
        return ""
    if not expected:
        return f"step {last:,}"
    from_the_beginning = last in (done - 1, done)  # some count from 0, some from 1
    return f"step {last:,} of {expected:,}" if from_the_beginning else f"step {last:,} ({done:,} of {expected:,})"


def _value(name: str, value: float) -> str:
    """Return a logged value with its name; of a long one the ends, so that the row fits a narrow cell."""
    short = formatting.shortened(name, NAME_CHARACTERS)
    title = f' title="{html.escape(name)}"' if short != name else ""
    return (
        f"<span{title}>{html.escape(short)}&nbsp;{value:.4g}</span>"
        if title
        else f"{html.escape(name)}&nbsp;{value:.4g}"
    )


def _time_left(run: RunRecord) -> str:
    progress, done, expected = run.progress(0)
    if not expected or run.status != "running" or not progress.steps_per_s > 0:
        return ""
    return f" · about {max(0.0, expected - done) / progress.steps_per_s:.0f} s left"


def _bar(share: float, color: str) -> str:
    percent = 100 * min(1.0, max(0.0, share))
    return (
        '<div style="width:110px;height:8px;background:#8884;border-radius:4px;overflow:hidden;margin-top:5px">'
        f'<div style="width:{percent:.0f}%;height:8px;background:{color}"></div></div>'
    )
