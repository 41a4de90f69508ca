"""What a person sees of a run: widgets while it runs, a small still picture afterwards, text lines without a front end.

Everything is drawn from a `Run` by a thread of its own, at most ten times a second; nothing here reaches a rank.
"""

from __future__ import annotations

import html
import math
import sys
import threading
import time
import weakref
from typing import Any, Protocol

import numpy as np

from labkit.monitor.diagnosis import Diagnosis
from labkit.monitor.history import SAMPLES
from labkit.monitor.run import Run
from labkit.protocol.system import cores
from labkit.ui import kernel

REDRAW_S = 0.1
"""Least time between two redraws of the live view."""

CHART_AFTER_S = 0.1
"""Time from the first value to the chart. A run that fails at once has failed by then, and waits for no imports."""

UNHEARD_S = 1.0
"""Time between redraws while the browser has not said that it is done with the last."""

PATIENCE_S = 3.0
"""How long the end of a run waits for a browser to have drawn its first chart."""

CLOSE_AFTER_S = 2.0
"""Time from the end of a run until its widgets, no longer shown, are closed."""

LINE_EVERY_S = 5.0
"""Time between progress lines where there is no live view; the first few come sooner."""

TAIL_LINES = 200
"""Lines of each rank's output that the live view shows."""

SAVED_CHARACTERS = 40_000
"""Of all ranks' output together, in a saved notebook."""

STATE_COLORS = {
    "queued": "#CCBB44",
    "starting": "#9A9A9A",
    "idle": "#9A9A9A",
    "running": "#0072B2",
    "finished": "#009E73",
    "failed": "#D55E00",
    "stopped": "#E69F00",
    "ended": "#E69F00",
}

WRAPPED = "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
"""Style of text in lines that may be too long; JupyterLab's own cuts words in two."""

_shown_in: weakref.WeakKeyDictionary[Run, kernel.Execution | None] = weakref.WeakKeyDictionary()
"""In which execution of a cell a run was last shown, so that its cell does not show it twice."""


class Watcher(Protocol):
    """Something that follows a run and ends with it."""

    def finish(self) -> None:
        """Wait until the last state has been drawn, where that must be before the cell ends; but not for ever."""


def attach(run: Run, live: bool | None, wait: bool) -> Watcher | None:
    """Begin to show a run that has just been launched."""
    if live is not None and not live:
        return None
    in_notebook = kernel.has_kernel()
    if in_notebook:
        _shown_in[run] = kernel.this_execution()
    widgets = in_notebook and (live or kernel.has_a_reader())
    watcher = _Live(run) if widgets else _Lines(run, in_notebook, wait)
    watcher.start()
    return watcher


def show(thing: Any) -> None:
    """Show a run or a Plotly figure in the cell, so that the saved notebook stays small and readable anywhere.

    A run that is still going is shown live. A figure keeps its data, for JupyterLab, and a picture for everything
    else.
    """
    if not isinstance(thing, Run):
        from labkit.ui.charts import Chart

        kernel.display(thing if isinstance(thing, Chart) or _is_not_figure(thing) else Chart(thing))
        return
    if not kernel.has_kernel():
        print(_summary_text(thing))
        return
    now = kernel.this_execution()
    if _shown_in.get(thing) == now:
        return
    _shown_in[thing] = now
    if not thing.over.is_set() and kernel.has_a_reader():
        _Live(thing).start()
        return
    kernel.display(_summary(thing), raw=True)
    if thing.over.is_set():
        kernel.display(thing.figure())


def _is_not_figure(thing: Any) -> bool:
    from plotly.basedatatypes import BaseFigure

    return not isinstance(thing, BaseFigure)


# One line, for terminals and logs


def _per_s(run: Run) -> str:
    """Say how fast the run goes, over all ranks."""
    progress = [run.progress(rank)[0] for rank in range(run.world_size)]
    samples = sum(p.samples_per_s for p in progress)
    if not math.isnan(samples):
        return f"{samples:,.0f} samples/s"
    steps = [p.steps_per_s for p in progress if not math.isnan(p.steps_per_s)]
    return f"{_speed(min(steps))} steps/s" if steps else ""


def _speed(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _phase(run: Run) -> str:
    if run.status == "running" and run.stopping:
        return "stopping after this step"
    return "starting" if run.status == "running" and "starting" in run.states else run.status


def _line(run: Run) -> str:
    """Say where a run stands, in one line."""
    progress = [run.progress(rank)[0] for rank in range(run.world_size)]
    parts = [f"{run.name}: {_phase(run)}", f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"]
    steps = [p.last_step for p in progress if p.last_step is not None]
    if steps:
        parts.append(f"step {min(steps)}")
    for name in list(run.recorded.names)[:3]:
        values = [p.last[name] for p in progress if name in p.last]
        if values and name != SAMPLES:
            parts.append(f"{name} {sum(values) / len(values):.4g}")
    parts += [_per_s(run), f"{run.elapsed_s:.1f} s"]
    return " · ".join(part for part in parts if part)


def _sparkline(run: Run, width: int = 40) -> str:
    """Draw the first logged value's mean over ranks in a line of text."""
    names = [name for name in run.recorded.names if name != SAMPLES]
    if not names:
        return ""
    _, y = run.recorded.mean_curve(names[0])
    y = y[np.isfinite(y)]
    if len(y) < 2:
        return ""
    y = y[:: max(1, len(y) // width)]
    low, high = min(y), max(y)
    blocks = "▁▂▃▄▅▆▇█"
    drawn = "".join(blocks[int((value - low) / ((high - low) or 1) * 7)] for value in y)
    return f"{names[0]} {drawn} {low:.3g} … {high:.3g}"


def _summary_text(run: Run) -> str:
    lines = [_line(run)]
    if spark := _sparkline(run):
        lines.append(spark)
    if run.error is not None:
        lines.append(run.error.diagnosis.headline)
    return "\n".join(lines)


# Without a front end


class _Lines(threading.Thread):
    """Prints short progress lines and what the ranks print; leaves the final chart in a notebook."""

    def __init__(self, run: Run, in_notebook: bool, wait: bool) -> None:
        super().__init__(name="labkit-view", daemon=True)
        self._run = run
        self._places = [kernel.place() for _ in range(2)] if in_notebook else []
        self._wait = wait

    def run(self) -> None:
        start, next_line = time.monotonic(), 1.0
        notice = ""
        while not self._run.over.wait(0.1):
            print_output(self._run)
            if self._run.notice != notice:
                notice = self._run.notice
                if notice:
                    print(f"{self._run.name}: {notice}", flush=True)
            if time.monotonic() - start >= next_line and self._wait:
                print(_line(self._run), flush=True)
                next_line = min(next_line * 2, next_line + LINE_EVERY_S)
        print_output(self._run)
        if self._places:
            self._places[0].update(_summary(self._run), raw=True)
            if self._run.recorded.names:
                self._places[1].update(self._run.figure())
        else:
            print("\n".join(filter(None, (_line(self._run), _sparkline(self._run)))), flush=True)

    def finish(self) -> None:
        self.join(10)  # once the last cell has run, nobody takes what comes late


def print_output(run: Run) -> None:
    """Print the complete lines that ranks have printed since the last time, each with its rank."""
    for rank, lines in enumerate(run.take_new_output()):
        for line in lines:
            print(f"[rank {rank}] {line}")
    sys.stdout.flush()


# The still picture


def _summary(run: Run) -> dict[str, str]:
    """Say how a run ended, as HTML that needs no style sheet and no script, and as text."""
    return {"text/html": _summary_html(run), "text/plain": _summary_text(run)}


def _summary_html(run: Run) -> str:
    parts = [f"<b>{html.escape(_line(run))}</b>"]
    if run.error is not None:
        diagnosis = run.error.diagnosis
        color = STATE_COLORS["failed"]
        parts.append(f'<div style="color:{color}"><b>{html.escape(diagnosis.headline)}</b></div>')
        parts.append(f'<pre style="{WRAPPED}">{html.escape(diagnosis.cause)}</pre>')
        if diagnosis.others:
            listed = "".join(f"<li>{html.escape(line)}</li>" for line in diagnosis.others)
            parts.append(f"<details><summary>{_others_title(diagnosis)}</summary><ul>{listed}</ul></details>")
    for rank, text in enumerate(run.output):
        if text:
            tail = "\n".join(text.splitlines()[-TAIL_LINES:])[-SAVED_CHARACTERS // run.world_size :]
            parts.append(f"<details><summary>output of rank {rank}</summary><pre>{html.escape(tail)}</pre></details>")
    return "\n".join(parts)


def _others_title(diagnosis: Diagnosis) -> str:
    count = len(diagnosis.others)
    if diagnosis.rank is None:
        return "what became of the ranks"
    return "what became of the other rank" if count == 1 else f"what became of the other {count} ranks"


# The live view


def _states_html(run: Run) -> str:
    rows = []
    states = run.states
    for rank, state in enumerate(states):
        progress, expected = run.progress(rank)
        cells = [
            f'<span style="color:{STATE_COLORS[state]};font-size:1.3em">●</span> <b>rank {rank}</b> {state}',
            ""
            if progress.last_step is None
            else f"step {progress.last_step:,}" + (f" of {expected:,}" if expected else ""),
            _bar(progress.steps / expected, STATE_COLORS[state]) if expected else "",
            "" if math.isnan(progress.steps_per_s) else f"{_speed(progress.steps_per_s)} steps/s",
            "" if math.isnan(progress.samples_per_s) else f"{progress.samples_per_s:,.0f} samples/s",
            " ".join(f"{html.escape(n)}&nbsp;{v:.4g}" for n, v in list(progress.last.items())[:3] if n != SAMPLES),
        ]
        style = "padding:0 14px 0 0;text-align:left;white-space:nowrap"
        rows.append("<tr>" + "".join(f'<td style="{style}">{cell}</td>' for cell in cells) + "</tr>")
    return f'<table style="border:0;line-height:1.4;margin:0">{"".join(rows)}</table>'


def _title_html(run: Run) -> str:
    again = f" · started again {run.attempt}×" if run.attempt else ""
    return f"<b>{html.escape(run.name)}</b> {_phase(run)}{again} · {run.elapsed_s:.1f} s{_time_left(run)}"


def _notice_html(run: Run) -> str:
    said, _, to_copy = run.notice.partition("\n")
    shown = f'<div style="line-height:1.4;color:#666">{html.escape(said)}</div>' if said else ""
    if to_copy:  # a click selects all of it
        shown += f'<pre style="{WRAPPED};user-select:all;line-height:1.4;margin:2px 0">{html.escape(to_copy)}</pre>'
    return shown


def _time_left(run: Run) -> str:
    progress, expected = run.progress(0)
    if not expected or run.status != "running" or not progress.steps_per_s > 0:
        return ""
    return f" · about {max(0.0, expected - progress.steps) / progress.steps_per_s:.0f} s left"


def _bar(share: float, color: str) -> str:
    percent = 100 * min(1.0, max(0.0, share))
    return (
        '<div style="width:110px;height:8px;background:#E5E5E5;border-radius:4px;overflow:hidden;margin-top:5px">'
        f'<div style="width:{percent:.0f}%;height:8px;background:{color}"></div></div>'
    )


class _Live(threading.Thread):
    """The widgets under the cell: states and progress, a Stop button, live curves, the ranks' output behind tabs."""

    front_end_answers = True

    def __init__(self, run: Run) -> None:
        super().__init__(name="labkit-view", daemon=True)
        import ipywidgets as widgets

        self._run = run
        self._title = widgets.HTML(_title_html(run))
        # Apart from the title, which is always new: what is selected would be lost.
        self._notice = widgets.HTML(layout=widgets.Layout(display="none"))
        self._head = widgets.VBox([self._title, self._notice])
        self._states = widgets.HTML(_states_html(run))
        self._button = widgets.Button(
            description="Stop",
            icon="stop",
            button_style="danger",
            tooltip="End the run; what was logged, printed and returned by then is kept",
            layout=widgets.Layout(width="90px", flex="0 0 auto", margin="2px 12px 2px 0"),
        )
        self._button.on_click(lambda _: self._stop_clicked())
        self._texts = [widgets.HTML() for _ in range(run.world_size)]
        self._seen = [""] * run.world_size
        self._tabs = widgets.Tab(self._texts, layout=widgets.Layout(display="none"))
        for rank in range(run.world_size):
            self._tabs.set_title(rank, f"rank {rank}")
        self._figure: Any = None
        self._chart_due_s = math.inf
        self._top = widgets.HBox([self._button, self._head])
        self._box = widgets.VBox([self._top, self._states, self._tabs])
        for widget in (self._button, self._tabs):
            answer_while_the_cell_runs(widget)
        self._heard = threading.Event()
        self._heard.set()
        self._answered = threading.Event()
        self._place = kernel.display(self._box, display_id=True)
        self._chart_place = kernel.place()

    def run(self) -> None:
        if cores() > self._run.world_size and "starting" in self._run.states:  # a core to spare, and nothing to draw
            from plotly.graph_objects import FigureWidget  # noqa: F401  takes about a second
        while not self._run.over.is_set():
            began = time.monotonic()
            self._draw()
            took = time.monotonic() - began
            # Drawing takes a third of this thread's time at most, unless it is so slow that it would look stopped.
            self._run.over.wait(max(REDRAW_S - took, min(2 * took, UNHEARD_S)))
            while not (self._heard.is_set() or self._run.over.is_set()) and time.monotonic() < began + UNHEARD_S:
                self._heard.wait(0.05)
        if self._figure is not None:
            self._let_the_browser_finish(self._figure)
        try:
            # What stays is small and needs no kernel: no widget, no script.
            self._place.update(_summary(self._run), raw=True)
            if self._run.recorded.names:
                self._chart_place.update(self._run.figure())
        finally:
            # Not at once: a browser may still be making views of them, and would miss them.
            closing = threading.Timer(CLOSE_AFTER_S, self._close)
            closing.daemon = True
            closing.start()

    def finish(self) -> None:
        # Who has pressed Stop, or is to see an error, wants the cell back; the front end also takes what comes later.
        if self._run.status == "finished":
            self.join(1)

    def _draw(self) -> None:
        self._title.value, self._states.value = _title_html(self._run), _states_html(self._run)
        self._notice.value = _notice_html(self._run)
        self._notice.layout.display = None if self._notice.value else "none"
        self._draw_output()
        history = self._run.recorded
        if not history.names:
            return
        now = time.monotonic()
        self._chart_due_s = min(self._chart_due_s, now + CHART_AFTER_S)
        if now < self._chart_due_s:
            return
        import plotly.graph_objects as go

        from labkit.ui import charts

        if self._figure is not None and charts.refresh(self._figure, history):
            self._heard.clear()
            return
        old = self._figure
        self._figure = go.FigureWidget(charts.logged(history))
        # What the browser answers to an update. Plotly 7's on_edits_completed also waits for an answer about the
        # layout, which its JavaScript sends under a wrong name.
        self._figure.observe(self._browser_answered, names="_js2py_traceDeltas")
        answer_while_the_cell_runs(self._figure)
        self._box.children = [self._top, self._states, self._figure, self._tabs]
        if old is not None:
            close(old)

    def _draw_output(self) -> None:
        for rank, tail in enumerate(self._run.output_tail(TAIL_LINES)):
            if tail != self._seen[rank]:
                self._seen[rank] = tail
                # A column in reverse is scrolled to its end, so that the newest line stays in sight.
                column = "max-height:220px;overflow:auto;display:flex;flex-direction:column-reverse"
                text = "margin:0;flex:none;overflow:visible;font-size:12px;line-height:1.3"
                self._texts[rank].value = f'<div style="{column}"><pre style="{text}">{html.escape(tail)}</pre></div>'
                self._tabs.layout.display = None

    def _browser_answered(self, change: Any) -> None:
        if change["new"]:
            self._heard.set()
            self._answered.set()

    def _let_the_browser_finish(self, figure: Any) -> None:
        """Wait a moment for a browser that is still making the chart of a short run; taken away now, it would complain.

        A front end that has once failed to answer (it knows no subshells, or nobody looks) is not waited for again.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self._answered.is_set() and _Live.front_end_answers:
            _Live.front_end_answers = time.monotonic() < deadline
            figure.data[0].opacity = 0.8 - 0.01 * (time.monotonic() % 1)  # something to answer to
            self._answered.wait(0.1)

    def _stop_clicked(self) -> None:
        if self._run.stopping:
            self._button.disabled = True
            self._run.ask_to_stop(grace_s=0)
            return
        self._button.description = "End now"
        self._button.tooltip = "Do not wait for this step; ranks that have not returned by now return nothing"
        self._run.ask_to_stop()

    def _close(self) -> None:
        parts = (self._box, self._top, self._head, self._title, self._notice, self._button, self._states, self._tabs)
        for widget in (*parts, self._figure):
            if widget is not None:
                close(widget)
        for text in self._texts:
            close(text)


def close(widget: Any) -> None:
    """Close a widget and the models it brought along, so that nothing of it is saved with the notebook."""
    from ipywidgets import Widget

    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if isinstance(part, Widget):
            part.close()


def answer_while_the_cell_runs(widget: Any) -> None:
    """Let a widget's messages be handled by a kernel subshell, so that a button works while its own cell runs.

    JupyterLab sends widgets' messages to a subshell (JEP 91, https://jupyter.org/enhancement-proposals), but
    ipykernel 7.4 routes them back to the shell that last updated the widget, the one that is busy with the cell. Where
    a front end knows no subshells, `default` is None and the message waits for the main shell, as it always did.
    """
    widget.comm._reply_subshell_for = lambda data, default: default


def _draw(run: Run) -> Any:
    from labkit.ui import charts

    return charts.logged(run.recorded, title=run.name)


Run.show, Run.draw = show, _draw
