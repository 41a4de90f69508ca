"""What a person sees of a comparison: boxes to tick, four pictures, a table; drawn anew whenever that changes."""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.comparison.reading import HERE, ON_DEVICES, measured
from labkit.run import Run
from labkit.ui import kernel, prewarm, summary

LOG = logging.getLogger(__name__)

REDRAW_S = 1.0
"""Least time between two drawings of the growing curves."""


class Place:
    """Where a chart is shown, and another one later.

    JupyterLab's Plotly draws an output once, and passes over what comes to the same place later. So there are two: the
    new chart is drawn in the empty one before the other is emptied, and the page does not jump.
    """

    def __init__(self) -> None:
        self._shown, self._empty = kernel.reserve(), kernel.reserve()
        self._last: Any = None

    def show(self, chart: Any) -> None:
        """Show a chart, or nothing for None. What is there already is left."""
        bundle = {"text/plain": ""} if chart is None else chart.bundle()
        if bundle == self._last:
            return
        self._last = bundle
        self._shown, self._empty = self._empty, self._shown
        self._shown.update(bundle, raw=True)
        self._empty.update({"text/plain": ""}, raw=True)


class View(threading.Thread):
    """Shows a comparison: while its runs go on from this thread, afterwards when a person ticks something."""

    def __init__(
        self,
        titles: Callable[[], Sequence[str]],
        runs: Callable[[], Mapping[str, Run]],
        is_over: Callable[[], bool],
        pictures: Callable[[Sequence[str], bool], Sequence[Any]],
        table: Callable[[Sequence[str]], Any],
    ) -> None:
        """Show widgets in the cell.

        Args:
            titles: returns those of all runs, also of those that are still to come.
            runs: returns those that have begun, by title.
            is_over: returns whether no run is going on, or to come.
            pictures: returns the charts of these runs, by this machine's clock or the devices'.
            table: returns the table of these runs.
        """
        super().__init__(name="labkit-comparison", daemon=True)
        self._get_titles, self._get_runs, self._is_over = titles, runs, is_over
        self._pictures, self._table_of = pictures, table
        self._drawing, self._has_failed = threading.Lock(), False
        layout = widgets.Layout(width="auto", margin="0 18px 0 0")
        self._boxes = {
            title: widgets.Checkbox(value=True, description=title, indent=False, layout=layout) for title in titles()
        }
        self._clock = widgets.ToggleButtons(options=[ON_DEVICES, HERE], layout=widgets.Layout(display="none"))
        self._clock.style.button_width = "auto"
        self._said = widgets.HTML()
        row = widgets.Box(list(self._boxes.values()), layout=widgets.Layout(flex_flow="row wrap"))
        for widget in (*self._boxes.values(), self._clock):
            kernel.answer_while_the_cell_runs(widget)
            widget.observe(lambda _: self.draw(), names="value")
        kernel.display(widgets.VBox([row, self._clock, self._said]))
        self._places = [Place() for _ in range(4)]
        self._table = kernel.reserve()
        self._now = ""

    @property
    def _titles(self) -> Sequence[str]:
        return self._get_titles()

    @property
    def _runs(self) -> Mapping[str, Run]:
        return self._get_runs()

    def run(self) -> None:
        """Draw until nothing is going on any more."""
        self._say()  # drawing may first have to be imported
        prewarm.wait()
        while not self._is_over():
            began_s = time.monotonic()
            self._attempt()
            time.sleep(max(REDRAW_S, 2 * (time.monotonic() - began_s)))
        self._attempt()

    def _attempt(self) -> None:
        """Write and draw; what fails is logged once, and tried again."""
        try:
            self._say()
            self.draw()
        except Exception:
            if not self._has_failed:
                LOG.exception(
                    "<Comparison of %s> could not be drawn. Its runs are not affected", ", ".join(self._titles)
                )
            self._has_failed = True

    def _say(self) -> None:
        """Write what is going on, and what has failed."""
        lines = []
        for title in self._titles:
            run = self._runs.get(title)
            if run is not None and run.error is not None:
                lines.append(summary.as_html(run))
            elif run is not None and not run.over.is_set():
                lines.append(html.escape(summary.line(run)))
        to_come = [title for title in self._titles if title not in self._runs]
        if to_come:
            lines.append(f"to come: {html.escape(', '.join(to_come))}")
        text = "".join(f'<div style="line-height:1.5">{line}</div>' for line in lines)
        if text != self._now:
            self._said.value = self._now = text

    def draw(self) -> None:
        """Draw for what is ticked now."""
        with self._drawing:
            # The other clock is of use only where functions were timed on both.
            has_two = any(hasattr(rank, "simulated") and rank.simulated.steps for rank in self._results())
            self._clock.layout.display = None if has_two else "none"
            titles = [title for title, box in self._boxes.items() if box.value and title in self._runs]
            logged = any(run.recorded.names for title, run in self._runs.items() if title in titles)
            pictures: Sequence[Any] = self._pictures(titles, self._clock.value == HERE) if logged else []
            for place, picture in zip(self._places, [*pictures, None, None, None, None], strict=False):
                place.show(picture)
            self._table.update(self._table_of(titles) if titles else {"text/plain": ""}, raw=not titles)

    def _results(self) -> list[Any]:
        return [rank for run in self._runs.values() for rank in measured(run)]
