"""The lessons' own pictures, each of what its lesson has measured: data in, a Plotly figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.ui.charts import Chart, rank_color, style

NOBODY, GREY = "#FFFFFF", "#404040"


def grids(panels: Mapping[str, Sequence[Any]], title: str, columns: int = 2) -> Chart:
    """Draw tensors of few numbers, a panel for each `{name: tensors by rank}`: a row per rank, a field per number.

    A number's decimal digits say which ranks are in it: rank r counts in steps of 10**r. It has that rank's colour;
    sums are grey, the darker the more ranks are in them; zeros are white.
    """
    world_size = max(len(tensors) for tensors in panels.values())
    palette = [NOBODY, *(_tint(rank_color(rank)) for rank in range(world_size))]
    palette += [_tint(GREY, 0.15 + 0.4 * k / world_size) for k in range(1, world_size)]
    rows = -(-len(panels) // columns)
    spacing = {"vertical_spacing": 0.22, "horizontal_spacing": 0.2 / columns}
    figure = make_subplots(rows, columns, subplot_titles=list(panels), **spacing)
    for index, tensors in enumerate(panels.values()):
        values = [[float(value) for value in tensor] for tensor in tensors]
        wide = max(len(row) for row in values)
        figure.add_heatmap(
            z=[[_place(value, world_size) for value in row] + [0] * (wide - len(row)) for row in values],
            text=[[f"{value:g}" for value in row] + [""] * (wide - len(row)) for row in values],
            x=list(range(wide)),
            y=list(range(world_size)),
            coloraxis="coloraxis",
            xgap=2,
            ygap=2,
            texttemplate="%{text}",
            row=index // columns + 1,
            col=index % columns + 1,
        )
    figure.update_layout(coloraxis={**_steps(palette), "showscale": False})
    figure.update_xaxes(dtick=1, showgrid=False).update_yaxes(dtick=1, showgrid=False, autorange="reversed")
    figure.update_yaxes(title="rank", col=1)
    return Chart(style(figure, title, height=70 + rows * (50 + 30 * world_size)))


def _tint(color: str, share: float = 0.55) -> str:
    """Return a colour mixed with white, so that black numbers can be read on it."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return f"rgb({', '.join(str(round(255 - share * (255 - part))) for part in parts)})"


def _place(value: float, world_size: int) -> int:
    """Return the number of a value's colour: 0 for nothing, 1 + rank for one rank's, then sums of 2, 3, … ranks."""
    owners = [rank for rank, digit in enumerate(reversed(str(int(value)))) if digit != "0"]
    return 0 if not owners else 1 + owners[0] if len(owners) == 1 else world_size + len(owners) - 1


def _steps(palette: Sequence[str]) -> dict[str, Any]:
    """Return a colour axis on which the number k has the k-th colour, with nothing in between."""
    count = len(palette)
    edges = [(index + side) / count for index in range(count) for side in (0, 1)]
    scale = [[edge, color] for edge, color in zip(edges, np.repeat(palette, 2).tolist(), strict=True)]
    return {"colorscale": scale, "cmin": -0.5, "cmax": count - 0.5}


def who_saw_what(seen: Sequence[Sequence[Sequence[int]]], title: str, first: int = 60) -> Chart:
    """Draw which rank saw which sample in which epoch: `seen[rank][epoch]` are the samples' indices."""
    owners = np.full((len(seen[0]), first), np.nan)
    for rank, epochs in enumerate(seen):
        for epoch, indices in enumerate(epochs):
            owners[epoch, [index for index in indices if index < first]] = rank
    axis = _steps([rank_color(rank) for rank in range(len(seen))])
    figure = go.Figure(go.Heatmap(z=owners, coloraxis="coloraxis", xgap=1, ygap=1, hoverongaps=False))
    bar = {"title": "rank", "tickvals": list(range(len(seen)))}
    figure.update_layout(coloraxis={**axis, "colorbar": bar})
    figure.update_xaxes(title_text="sample").update_yaxes(title_text="epoch", dtick=1, autorange="reversed")
    return Chart(style(figure, title, height=280))


def overlap(passes: Sequence[Mapping[str, Any]], title: str) -> Chart:
    """Draw a backward pass, two lanes a rank: when each gradient was there, and when each all-reduce was under way.

    A dashed line stands where the last gradient was there. Of every rank
    `{"gradients": [when_s, …], "calls": [(begin_s, end_s), …]}`, in seconds since its pass began.
    """
    figure = go.Figure()
    lanes = [f"rank {rank}: {what}" for rank in range(len(passes)) for what in ("compute", "all-reduce")]
    for rank, found in enumerate(passes):
        when = [0.0, *found["gradients"]]
        layers = list(zip(when, when[1:], strict=False))
        for what, spans, color in (("compute", layers, "#56B4E9"), ("all-reduce", found["calls"], "#D55E00")):
            figure.add_bar(
                y=[f"rank {rank}: {what}"] * len(spans),
                base=[1000 * begin for begin, _ in spans],
                x=[1000 * (end - begin) for begin, end in spans],
                name="a layer's gradient" if what == "compute" else "a bucket's all-reduce",
                orientation="h",
                showlegend=rank == 0,
                marker={"color": color, "line": {"color": "white", "width": 1}},
                opacity=0.85,
                width=0.7,
            )
    last_ms = 1000 * max(found["gradients"][-1] for found in passes)
    figure.add_vline(x=last_ms, line_dash="dot")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="milliseconds since backward began", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=lanes)
    return Chart(style(figure, title, height=170 + 30 * len(lanes)))
