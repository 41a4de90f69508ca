"""The charts of the lessons on scaling: what was measured, with its spread, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit import charts

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#7A7A7A"


class Spread(NamedTuple):
    """A number that was measured several times, or predicted with a range."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, measured: Sequence[float]) -> Spread:
        """Return the median of what was measured, and its 10th and 90th percentile."""
        return cls(*(float(np.quantile(measured, at)) for at in (0.5, 0.1, 0.9)))


class Panel(NamedTuple):
    """One chart of `predictions`: seconds of a step by number of ranks."""

    x_title: str
    predicted: Mapping[int, Any]
    """A `Prediction` of the cost model each."""
    fitted_to: Mapping[int, float]
    """Measured seconds that the model was fitted to …"""
    held_back: Mapping[int, float]
    """… and those that it never saw."""


def add_line(figure: go.Figure, x: Sequence[int], spreads: Iterable[Sequence[float]], **options: Any) -> None:
    """Add a line through the middles of some (middle, low, high), with bars to both ends."""
    middle, low, high = (np.array(values) for values in zip(*spreads, strict=True))
    error_y = {"array": np.maximum(0, high - middle), "arrayminus": np.maximum(0, middle - low), "thickness": 1.2}
    figure.add_scatter(x=x, y=middle, error_y=error_y, mode="lines+markers", **options)


def job(seconds: Mapping[int, Spread], published: Mapping[int, float], marks: Mapping[int, str], title: str) -> Any:
    """Return the chart of one job's seconds by number of ranks, beside 1 / n of one rank and what was published."""
    ranks = list(seconds)
    figure = go.Figure()
    add_line(figure, ranks, seconds.values(), name="measured", line={"color": BLUE})
    ideal = [seconds[ranks[0]].middle * ranks[0] / n for n in ranks]
    dashed = {"color": GREY, "dash": "dash"}
    figure.add_scatter(x=ranks, y=ideal, name="1 / n of one rank", mode="lines", line=dashed)
    figure.add_scatter(
        x=list(published),
        y=list(published.values()),
        name=f"published: {', '.join(f'{value:g} s' for value in published.values())}",
        mode="markers",
        marker={"color": ORANGE, "size": 12},
    )
    for n, text in marks.items():
        figure.add_annotation(x=n, y=130, text=text, showarrow=False)
    figure.update_xaxes(title_text="ranks", tickvals=sorted({*ranks, *published}))
    most = max(*published.values(), *(spread.high for spread in seconds.values()))
    figure.update_yaxes(title_text="seconds", range=[0, 1.06 * most])
    return charts.Chart(charts.style(figure, title, 400))


def speed_ups(seconds: Mapping[tuple[str, int], Spread], title: str) -> Any:
    """Return two charts, speed-up and efficiency, of seconds a step by ("strong" or "weak", ranks)."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.14)
    ranks = sorted({n for _, n in seconds})
    for kind, color in (("strong", BLUE), ("weak", GREEN)):
        one_s = seconds[kind, ranks[0]].middle
        ups = []
        for n in ranks:
            middle, low, high = seconds[kind, n]
            factor = one_s * (n if kind == "weak" else 1)
            ups.append((factor / middle, factor / high, factor / low))
        look: dict[str, Any] = {"line": {"color": color}, "name": f"{kind} scaling", "row": 1}
        add_line(figure, ranks, ups, **look, col=1)
        per_rank = [[value / n for value in up] for n, up in zip(ranks, ups, strict=True)]
        add_line(figure, ranks, per_rank, **look, col=2, showlegend=False)
    for column, line in ((1, ranks), (2, [1] * len(ranks))):
        look = {"name": "ideal", "mode": "lines", "line": {"color": GREY, "dash": "dash"}, "row": 1, "col": column}
        figure.add_scatter(x=ranks, y=line, showlegend=column == 1, **look)
    figure.update_xaxes(title_text="ranks", tickvals=ranks)
    figure.update_yaxes(title_text="speed-up", row=1, col=1, range=[0, 1.05 * ranks[-1]])
    figure.update_yaxes(title_text="efficiency", row=1, col=2, range=[0, 1.1])
    return charts.Chart(charts.style(figure, title, 360))


def predictions(title: str, *panels: Panel) -> Any:
    """Return a chart per panel: predicted milliseconds a step with their range, and the measured ones."""
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.12)
    for column, (x_title, predicted, *measured) in enumerate(panels, start=1):
        place: dict[str, Any] = {"row": 1, "col": column, "showlegend": column == 1}
        spreads = [[1000 * seconds for seconds in predicted[n]] for n in predicted]
        add_line(figure, list(predicted), spreads, name="predicted, 90 % range", line={"color": GREY}, **place)
        for name, color, found in zip(("fitted to", "held back"), (BLUE, ORANGE), measured, strict=True):
            figure.add_scatter(
                x=list(found),
                y=[1000 * seconds for seconds in found.values()],
                name=f"measured, {name}",
                mode="markers",
                marker={"color": color, "size": 10},
                **place,
            )
        figure.update_xaxes(title_text=x_title, tickvals=list(predicted), row=1, col=column)
        top = 1.05 * max(high for _, _, high in spreads)
        figure.update_yaxes(title_text="milliseconds a step", range=[0, top], row=1, col=column)
    return charts.Chart(charts.style(figure, title, 380))


def efficiencies(lines: Mapping[tuple[str, str], Mapping[int, Spread]], colors: Mapping[str, str], title: str) -> Any:
    """Return a chart per batch of the efficiency by ranks: `{(strategy, batch): {ranks: Spread}}`."""
    batches = list(dict.fromkeys(batch for _, batch in lines))
    figure = make_subplots(rows=1, cols=len(batches), horizontal_spacing=0.12)
    for (strategy, batch), line in lines.items():
        column = batches.index(batch) + 1
        look: dict[str, Any] = {"marker": {"size": 5}, "line": {"color": colors[strategy]}, "name": strategy}
        add_line(figure, list(line), line.values(), **look, showlegend=column == 1, row=1, col=column)
        figure.update_xaxes(title_text=f"ranks, {batch}", type="log", tickvals=list(line)[::2], row=1, col=column)
        figure.update_yaxes(title_text="efficiency", range=[0, 1.3], row=1, col=column)
    return charts.Chart(charts.style(figure, title, 400))


def steps(lines: Mapping[str, Mapping[int, float]], colors: Mapping[str, str], chosen: int, title: str) -> go.Figure:
    """Return the figure of calculated milliseconds a step by ranks, a line each, with a mark at a number of ranks."""
    figure = go.Figure()
    for name, line in lines.items():
        y = [1000 * seconds for seconds in line.values()]
        look = {"color": colors[name]} if name in colors else {"color": GREY, "dash": "dash"}
        figure.add_scatter(x=list(line), y=y, name=name, mode="lines+markers" if name in colors else "lines", line=look)
    at = list(next(iter(lines.values())))
    figure.add_vline(x=chosen, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="ranks (8 per machine)", type="log", tickvals=at)
    figure.update_yaxes(title_text="milliseconds a step", type="log")
    return charts.style(figure, title, 400)
