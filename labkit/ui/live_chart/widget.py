"""Charts that are drawn anew as their data change, in every page that shows them. `widget.js` draws them."""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from labkit.ui import kernel

PIECE_BYTES = 128 * 1024
"""Plotly is sent in pieces of so many bytes, so that on a slow line other messages pass between them."""


class LiveChart(anywidget.AnyWidget):
    """Some figures, one below the other, and a text in HTML.

    The problem: Plotly's own `FigureWidget` brings five megabytes of JavaScript along for each chart, tells a page only
    of changes, so that one that joins later draws a part of the data, and is deaf for good on a busy machine, because
    anywidget gives a model two seconds to load, after which no message ever reaches it (0.11: `AbortSignal.timeout`).

    What is done: what is to be drawn is the value of a plain widget, the carrier, as JSON, always whole. A page that
    joins gets it with all other widgets. This widget only draws it, however late it is loaded. It asks for Plotly where
    the page has none, piece by piece, and says when it has drawn, after a pause as long as drawing took.

    What still fails: where the kernel cannot hear while the cell runs, in a front end without subshells, Plotly is sent
    unasked, at once, and a redraw comes a second after the last.
    """

    _esm = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    carrier = traitlets.Unicode().tag(sync=True)
    source = traitlets.Unicode().tag(sync=True)
    """A widget that has all of Plotly, packed, where the page could not ask for it; else ""."""
    plotly_version = traitlets.Unicode().tag(sync=True)
    outputs = traitlets.Unicode().tag(sync=True)
    """A CSS class of outputs in which the page may have the same figures: see `labkit.ui.outputs`."""

    page_has_plotly = False
    """Whether a page has said so."""

    def __init__(self, outputs: str = "", ahead: bool = False) -> None:
        """Show nothing yet; `ahead` has the page get Plotly at once."""
        self._carrier = widgets.HTML(json.dumps({"number": 0, "figures": [], "html": "", "ahead": ahead}))
        self._source: Any = None
        self.number = self.drawn = 0
        """How often there was something new to draw, and which of these a page says that it has drawn."""
        self.when_drawn: Callable[[], object] = lambda: None
        self.on_msg(self._received)  # now: the page may ask as soon as there is a model
        is_heard = kernel.has_been_given_a_subshell() or LiveChart.page_has_plotly or ahead
        if not is_heard:
            self._source = widgets.Image(value=_packed())
        super().__init__(
            carrier=self._carrier.model_id,
            source="" if is_heard else self._source.model_id,
            plotly_version=importlib.metadata.version("plotly"),
            outputs=outputs,
        )
        for widget in (self, self._carrier):
            kernel.answer_while_the_cell_runs(widget)

    def draw(self, figures: Sequence[dict[str, Any]], text: str = "", words: str = "", lives: str = "") -> None:
        """Draw these instead.

        Args:
            figures: as JSON values.
            text: HTML below them.
            words: what screen readers say of it.
            lives: what ends if the kernel is restarted: "run", say; "" for nothing.
        """
        self.number += 1
        shown = {"number": self.number, "figures": list(figures), "html": text, "words": words, "lives": lives}
        self._carrier.value = json.dumps(shown)

    def settle(self) -> None:
        """Keep no copy of Plotly, now that whatever waits for the kernel can be heard again."""
        if self._source is not None:
            self.source = ""
            self._source.close()
            self._source = None

    def close(self) -> None:
        """Close it, and what belongs to it."""
        self.settle()
        for part in (self._carrier.layout, self._carrier.style, self._carrier, self.layout):
            part.close()
        super().close()

    def _received(self, _: Any, content: Any, __: Any) -> None:
        if not isinstance(content, dict):
            return
        if "wants" in content:
            packed, first = _packed(), int(content["wants"]) * PIECE_BYTES
            said = {"piece": content["wants"], "of": -(-len(packed) // PIECE_BYTES)}
            self._carrier.send(said, buffers=[packed[first : first + PIECE_BYTES]])
        if content.get("has_plotly"):
            LiveChart.page_has_plotly = True
        if "drawn" in content:
            self.drawn = int(content["drawn"])
            self.when_drawn()


_ahead: LiveChart | None = None


def get_ready() -> None:
    """Have the page get Plotly, before there is a chart; and every page that joins later."""
    global _ahead
    if _ahead is None:
        _ahead = LiveChart(ahead=True)


@functools.cache
def _packed() -> bytes:
    """Return Plotly, packed to less than a third."""
    (folder,) = importlib.util.find_spec("plotly").submodule_search_locations  # type: ignore[union-attr, misc]
    return gzip.compress((Path(folder) / "package_data" / "plotly.min.js").read_bytes(), 6)
