"""Charts and tables that change under some controls: in a widget, and as outputs, which a notebook keeps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.ui import kernel

KEPT_AFTER_S = 0.5
"""Time since the last change after which the cell's outputs change, too."""

CHILD = ".jp-OutputArea-child"
SHOWN_ABOVE = f"{CHILD}:has(> .jp-OutputArea-output > .labkit-changes)"


class ChangingOutputs:
    """Some charts and tables below their controls.

    The problem: a notebook keeps outputs and no widgets. But JupyterLab takes changes of outputs only in the page that
    first received them, and not within `Output` or `Tab`. What is done: there are both, and a style, which comes with
    the widget, hides the outputs where the widget is shown. Where it is not, in a saved notebook, they are seen. Other
    front ends than Jupyter's own take changes of outputs, and have the outputs alone.
    """

    def __init__(self, controls: Sequence[widgets.Widget], count: int) -> None:
        self._live = widgets.Output() if kernel.is_jupyters_page() else None
        hidden = [SHOWN_ABOVE + f" + {CHILD}" * below for below in range(1, count + 1)]
        style = widgets.HTML(f"<style>{', '.join(hidden)} {{ display: none }}</style>")
        box = widgets.VBox([*controls, *([style, self._live] if self._live else [])])
        box.add_class("labkit-changes")
        kernel.display(box)
        self._places = [kernel.reserve() for _ in range(count)]
        self._keeping = threading.Timer(0, int)
        self._lock = threading.Lock()

    def show(self, things: Sequence[Any]) -> None:
        """Show these charts and tables (of pandas), at most `count`."""
        shown = [_bundle(thing) for thing in things]
        if self._live is None:
            self._keep(shown)
            return
        outputs = [{"output_type": "display_data", "data": data, "metadata": {}} for data in shown]
        if outputs != list(self._live.outputs):
            self._live.outputs = tuple(outputs)
        self._keeping.cancel()
        self._keeping = threading.Timer(KEPT_AFTER_S, self._keep, [shown])
        self._keeping.daemon = True
        self._keeping.start()

    def _keep(self, shown: list[dict[str, Any]]) -> None:
        empty = [kernel.NOTHING] * (len(self._places) - len(shown))
        with self._lock:
            for place, bundle in zip(self._places, [*shown, *empty], strict=True):
                place.update(bundle, raw=True)


def _bundle(thing: Any) -> dict[str, Any]:
    """Return the bundle of MIME types of a chart or a table."""
    from labkit.ui.charts import Chart  # not above: it imports Plotly, which is here once there are charts

    if isinstance(thing, Chart):
        return thing.bundle()
    return {"text/html": thing._repr_html_(), "text/plain": ""}
