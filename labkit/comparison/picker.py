"""What a person sees of a comparison: boxes to tick, the run that goes on, and four pictures and a table of all."""

from __future__ import annotations

import contextlib
import html
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets

from labkit.run import Run
from labkit.ui import kernel, summary
from labkit.ui.outputs import ChangingOutputs
from labkit.ui.view import EMPTY, RunWidget, clicked, is_heard, state_of

LOG = logging.getLogger(__name__)

REDRAW_S = 1.0
"""Time between two redraws of a run that goes on: its steps are timed, so what draws is to take little of the cores."""


class Picker:
    """Shows a comparison in the cell."""

    def __init__(self, comparison: Any) -> None:
        self._comparison, self._drawing = comparison, threading.Lock()
        layout = widgets.Layout(width="auto", margin="0 18px 0 0")
        self.boxes = {
            title: widgets.Checkbox(value=True, description=title, indent=False, layout=layout)
            for title in comparison.titles
        }
        """By title: which runs are drawn."""
        self._said = widgets.HTML()
        for box in self.boxes.values():
            kernel.answer_while_the_cell_runs(box)
            box.observe(lambda _: self.draw(), names="value")
        row = widgets.Box(list(self.boxes.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self._live = RunWidget(EMPTY)
        self._outputs = ChangingOutputs([row, self._said, self._live], count=5)

    @contextlib.contextmanager
    def showing(self, run: Run) -> Iterator[None]:
        """Show a run as long as it is waited for, with a Stop button."""

        def act(_: Any, content: Any, __: Any) -> None:
            clicked(run, content)

        self.say()
        left = threading.Event()
        thread = threading.Thread(target=self._follow, args=(run, left), name="labkit-picker", daemon=True)
        self._live.on_msg(act)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
            self._live.on_msg(act, remove=True)
            self._live.show(EMPTY)

    def _follow(self, run: Run, left: threading.Event) -> None:
        began_s = time.monotonic()
        try:
            while not left.wait(REDRAW_S):
                self._live.show(state_of(run, is_heard(began_s)))
        except Exception:
            LOG.exception("run %r could not be shown. It is not affected", run.name)

    def say(self) -> None:
        """Say what has failed, what runs, and what is to come."""
        runs = dict(self._comparison.runs)
        failed = [summary.as_html(run) for run in runs.values() if run.error is not None]
        running = [title for title, run in runs.items() if not run.over.is_set()]
        to_come = [title for title in self._comparison.titles if title not in runs]
        states = {"running": running, "to come": to_come}
        said = [f"{state}: {html.escape(', '.join(titles))}" for state, titles in states.items() if titles]
        self._said.value = "<br>".join([*failed, *said])

    def draw(self) -> None:
        """Draw for what is ticked now. What fails is logged: it is not to end the runs."""
        with self._drawing:
            try:
                self.say()
                runs = dict(self._comparison.runs)
                titles = [title for title, box in self.boxes.items() if box.value and title in runs]
                pictures = self._comparison.pictures(titles) if titles else []
                self._outputs.show([*pictures, *([self._comparison.table(titles)] if titles else [])])
            except Exception:
                LOG.exception("%r could not be drawn. Its runs are not affected", self._comparison)
