"""A figure with sliders: whatever a person moves, it is drawn again at once. Without a person, just the figure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from labkit.ui import kernel, present


def explore(draw: Callable[..., Any], **choices: Sequence[Any]) -> None:
    """Show the Plotly figure that `draw` returns, with a slider for each of the named choices, which redraw it at once.

    The sliders begin with the defaults of `draw`'s parameters. Where nobody watches there are no sliders, only the
    figure for the defaults, as `labkit.show` shows it. A saved notebook keeps the last figure, not the megabytes of a
    `FigureWidget`.

    Raises ValueError for a default that is not among the choices, TypeError for a parameter that has none.
    """
    start = {name: _default(draw, name, values) for name, values in choices.items()}
    if kernel.is_interactive():
        _Explorer(draw, start, choices)
    else:
        present.show(draw())


def _default(draw: Callable[..., Any], name: str, values: Sequence[Any]) -> Any:
    parameter = inspect.signature(draw).parameters.get(name)
    if parameter is None or parameter.default is parameter.empty:
        raise TypeError(f"{draw.__qualname__} needs a parameter {name!r} with a default, where its slider begins")
    if parameter.default not in values:
        raise ValueError(f"the default {name}={parameter.default!r} is none of the choices {list(values)!r}")
    return parameter.default


class _Explorer:
    def __init__(self, draw: Callable[..., Any], start: dict[str, Any], choices: dict[str, Sequence[Any]]) -> None:
        import ipywidgets as widgets

        from labkit.ui.outputs import ChangingOutputs

        self._draw = draw
        self._sliders = {
            name: widgets.SelectionSlider(
                options=values,
                value=start[name],
                description=name.replace("_", " "),
                layout=widgets.Layout(width="min(400px, 100%)"),
                style={"description_width": "140px"},
            )
            for name, values in choices.items()
        }
        for slider in self._sliders.values():
            slider.observe(lambda _: self.redraw(), names="value")
        row = widgets.Box(list(self._sliders.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self._outputs = ChangingOutputs([row], count=1)
        self.redraw()

    def redraw(self) -> None:
        """Draw for what the sliders say now."""
        figure = self._draw(**{name: slider.value for name, slider in self._sliders.items()})
        self._outputs.show([present.as_chart(figure)])
