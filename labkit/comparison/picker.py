"""What a person sees of a comparison: boxes to tick, four pictures and a table, drawn anew whenever that changes."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as widgets

from labkit.ui import kernel, page, summary
from labkit.ui.outputs import ChangingOutputs


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
        page.ask()
        self._outputs = ChangingOutputs(charts=4, has_table=True)
        row = widgets.Box(list(self.boxes.values()), layout=widgets.Layout(flex_flow="row wrap"))
        kernel.display(widgets.VBox([row, self._said, self._outputs.box]))
        self._outputs.begin()

    def draw(self) -> None:
        """Draw for what is ticked now."""
        with self._drawing:
            runs = dict(self._comparison.runs)
            failed = [summary.as_html(run) for run in runs.values() if run.error is not None]
            to_come = [title for title in self._comparison.titles if title not in runs]
            self._said.value = "<br>".join([*failed, *([f"to come: {', '.join(to_come)}"] if to_come else [])])
            titles = [title for title, box in self.boxes.items() if box.value and title in runs]
            pictures = self._comparison.pictures(titles) if titles else []
            self._outputs.show(pictures, self._comparison.table(titles) if titles else None)
