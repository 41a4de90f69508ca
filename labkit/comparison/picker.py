"""What a person sees of a comparison: boxes to tick, four pictures and a table, drawn anew whenever that changes."""

from __future__ import annotations

import html
import logging
import threading
from typing import Any

import ipywidgets as widgets

from labkit.ui import kernel, summary
from labkit.ui.outputs import ChangingOutputs

LOG = logging.getLogger(__name__)


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
        self._outputs = ChangingOutputs([row, self._said], count=5)

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
