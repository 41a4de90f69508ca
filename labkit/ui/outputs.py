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


class Place:
    """Where something is shown, and something else later.

    JupyterLab's Plotly draws an output once, and passes over what comes to the same place later. So there are two: the
    new chart is drawn in the empty one before the other is emptied, and the page does not jump.
    """

    def __init__(self) -> None:
        self._shown, self._empty = kernel.reserve(), kernel.reserve()
        self._last: Any = kernel.NOTHING

    def show(self, bundle: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show something, given as its bundle of MIME types. What is there already is left."""
        if bundle == self._last:
            return
        self._last = bundle
        self._shown, self._empty = self._empty, self._shown
        self._shown.update(bundle, metadata=metadata, raw=True)
        self._empty.update(kernel.NOTHING, raw=True)


class ChangingOutputs:
    """Some charts and tables below their controls.

    The problem: a notebook keeps outputs and no widgets. But JupyterLab takes changes of outputs only in the page that
    first received them, and not within `Output` or `Tab`. What is done: there are both, and a style, which comes with
    the widget, hides the outputs where the widget is shown. Where it is not, in a saved notebook, they are seen. Other
    front ends than Jupyter's own take changes of outputs, and have the outputs alone.
    """

    def __init__(self, controls: Sequence[widgets.Widget], count: int) -> None:
        self._live = widgets.Output() if kernel.is_jupyters_page() else None
        hidden = [SHOWN_ABOVE + f" + {CHILD}" * below for below in range(1, 2 * count + 1)]
        style = widgets.HTML(f"<style>{', '.join(hidden)} {{ display: none }}</style>")
        box = widgets.VBox([*controls, *([style, self._live] if self._live else [])])
        box.add_class("labkit-changes")
        kernel.display(box)
        self._places = [Place() for _ in range(count)]
        self._keeping = threading.Timer(0, int)
        self._lock = threading.Lock()

    def show(self, things: Sequence[Any]) -> None:
        """Show these charts and tables (of pandas), at most `count`."""
        shown = [_bundle(thing) for thing in things]
        if self._live is None:
            self._keep(shown)
            return
        outputs = [{"output_type": "display_data", "data": data, "metadata": more} for data, more in shown]
        if outputs != list(self._live.outputs):
            self._live.outputs = tuple(outputs)
        self._keeping.cancel()
        self._keeping = threading.Timer(KEPT_AFTER_S, self._keep, [shown])
        self._keeping.daemon = True
        self._keeping.start()

    def _keep(self, shown: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        empty: list[tuple[dict[str, Any], dict[str, Any]]] = [(kernel.NOTHING, {})] * (len(self._places) - len(shown))
        with self._lock:
            for place, (bundle, metadata) in zip(self._places, [*shown, *empty], strict=True):
                place.show(bundle, metadata)


def _bundle(thing: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the bundle of MIME types of a chart or a table, and its metadata."""
    from labkit.ui.charts import Chart  # not above: it imports Plotly, which is here once there are charts

    if isinstance(thing, Chart):
        return thing.bundle(), thing.metadata()
    return {"text/html": thing._repr_html_(), "text/plain": ""}, {}
