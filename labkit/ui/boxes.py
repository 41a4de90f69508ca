"""Two boxes in the live view of many ranks, and the lines of output that they choose."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.monitor.record import RunRecord
from labkit.ui import listing
from labkit.ui.formatting import output_html


class Boxes:
    """Two boxes in the view of many ranks: which of them to show besides, and what to look for in all ranks' output."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._drawn: object = None
        self.boxes = [
            widgets.Text(placeholder=says, continuous_update=False, layout=widgets.Layout(width="min(320px, 100%)"))
            for says in ("ranks to show besides: 3, 40-43", "words to find in all ranks' output")
        ]
        self.row = widgets.Box(self.boxes, layout=widgets.Layout(flex_flow="row wrap"))
        self.output = widgets.HTML(layout=widgets.Layout(display="none"))

    @property
    def ranks(self) -> list[int]:
        """The ranks that are asked for."""
        return listing.read_ranks(self.boxes[0].value, self._run.world_size)

    def draw(self) -> None:
        """Bring the output up to date, if there is more of it, or other words are looked for."""
        words = self.boxes[1].value.strip()
        asked_for = words, self.ranks, self._run.output_count
        if self._drawn != asked_for:
            self._drawn = asked_for
            lines = listing.output_lines(self._run, words, self.ranks) if self._run.output_count else []
            self.output.value = output_html("\n".join(lines))
            self.output.layout.display = None if lines else "none"
