"""A Plotly figure as a picture, drawn with Matplotlib, for notebooks that are run where nobody watches.

Plotly's own way, kaleido, drives a Chrome, which a machine that trains need not have. The promise kept here is that a
notebook run headless has all its charts as pictures, with no more than the packages that the course needs anyway. So
this knows what labkit's charts and its lessons draw with: curves, error bars, bars, heat maps, panels in a grid with
titles, notes, lines across a panel, logarithmic axes. What else Plotly can do is left out.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

from labkit.ui.tables import INK

DASHES = {"dash": "--", "dot": ":", "dashdot": "-."}

Places = dict[str, dict[Any, int]]
"""Where the categories of an axis, such as "x2", stand on it."""


def get_ready() -> None:
    """Import what the first picture needs."""
    if has_matplotlib():
        import PIL.Image  # noqa: F401


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def picture(figure: go.Figure) -> bytes:
    """Return a small PNG of a Plotly figure, 760 px wide. Raises ModuleNotFoundError without Matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    height = (figure.layout.height or 360) / 100
    page = Figure(figsize=(7.6, height), dpi=100, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(page)
    panels = _panels(figure, page)
    places: Places = {}
    for key, panel in panels.items():
        traces = [trace for trace in figure.data if (trace.xaxis or "x") == key]
        if bars := [trace for trace in traces if trace.type == "bar"]:
            _draw_bars(panel, bars, figure.layout.barmode or "group", places)
        for before, trace in zip([None, *traces], traces, strict=False):
            if trace.type == "heatmap":
                _draw_heatmap(panel, page, trace, figure.layout, places)
            elif trace.type == "scatter":
                _draw_curve(panel, trace, before)
        for axis in (panel.xaxis, panel.yaxis):
            _set_axis(axis, figure.layout[_name(axis.axis_name, traces[0])])
    _write(figure, page, panels, places)
    canvas.draw()
    small = io.BytesIO()
    # A chart has few colours: with a palette it takes a third of the bytes.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


def _name(direction: str, trace: Any) -> str:
    """Return what the layout calls a trace's axis in this direction, "x" or "y": "xaxis2", say."""
    return f"{direction}axis{(getattr(trace, f'{direction}axis') or direction)[1:]}"


def _panels(figure: go.Figure, page: Any) -> dict[str, Any]:
    """Return Matplotlib's axes by Plotly's name of the x axis, in a grid as Plotly's domains have it."""
    corners: dict[str, tuple[float, float]] = {}
    for trace in figure.data:
        x, y = figure.layout[_name("x", trace)].domain, figure.layout[_name("y", trace)].domain
        corners.setdefault(trace.xaxis or "x", ((x or (0, 1))[0], -(y or (0, 1))[0]))
    columns, rows = (sorted({corner[i] for corner in corners.values()}) for i in (0, 1))
    grid = page.add_gridspec(max(1, len(rows)), max(1, len(columns)))
    panels = {key: page.add_subplot(grid[rows.index(y), columns.index(x)]) for key, (x, y) in corners.items()}
    for panel in panels.values():
        panel.grid(color="#E5E5E5", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, length=2)
    return panels


def _set_axis(axis: Any, layout: Any) -> None:
    axis.set_label_text(_plain(layout.title.text or ""), fontsize=8.5)
    is_log = layout.type == "log"
    if is_log:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if layout.range:
        axis.axes.set(**{f"{axis.axis_name}lim": [10**v if is_log else v for v in layout.range]})
    if layout.autorange == "reversed":
        axis.set_inverted(True)
    if layout.tickvals is not None:
        axis.set_ticks(layout.tickvals, labels=layout.ticktext or [f"{value:,g}" for value in layout.tickvals])
        axis.set_tick_params(which="minor", size=0, labelsize=0)


def _draw_curve(panel: Any, trace: Any, before: Any) -> None:
    mode, color = trace.mode or "lines", _rgb(trace.line.color or trace.marker.color)
    y = np.asarray(trace.y, dtype=float)
    x = np.arange(len(y)) if trace.x is None else np.asarray(trace.x)
    if (above := trace.error_y.array) is not None:
        below = above if trace.error_y.arrayminus is None else trace.error_y.arrayminus
        panel.errorbar(x, y, (below, above), fmt="none", ecolor=color or "#7A7A7A", elinewidth=1, capsize=3)
    label = trace.name if trace.showlegend is not False else None
    if trace.fill == "tonexty" and before is not None:  # down to a curve with the same x, as in labkit's charts
        below = np.asarray(before.y, dtype=float)
        panel.fill_between(x, below, y, color=_rgb(trace.fillcolor), label=label, linewidth=0)
        return
    panel.plot(
        x,
        y,
        label=label,
        color=color,
        linestyle=DASHES.get(trace.line.dash, "-") if "lines" in mode else "none",
        linewidth=(2 if trace.line.width is None else trace.line.width) * 0.75,
        marker="o" if "markers" in mode else None,
        markersize=trace.marker.size * 0.75 if isinstance(trace.marker.size, (int, float)) else 4,
        alpha=trace.opacity,
    )


def _draw_bars(panel: Any, bars: list[Any], mode: str, places: Places) -> None:
    flat = bars[0].orientation == "h"
    labels = dict.fromkeys(label for bar in bars for label in (bar.y if flat else bar.x))
    where = {label: index for index, label in enumerate(labels)}
    places[(bars[0].yaxis or "y") if flat else (bars[0].xaxis or "x")] = where
    tops = dict.fromkeys(where, 0.0)
    thick = 0.8 / len(bars) if mode == "group" else 0.8
    for index, bar in enumerate(bars):
        of, lengths = (bar.y, bar.x) if flat else (bar.x, bar.y)
        shift = (index - (len(bars) - 1) / 2) * thick if mode == "group" else 0.0
        base: Any = np.broadcast_to(0.0 if bar.base is None else bar.base, len(of))
        if mode in ("stack", "relative") and bar.base is None:  # Plotly lays bars with a base over the rest
            base = [tops[label] for label in of]
            tops.update({label: tops[label] + float(length) for label, length in zip(of, lengths, strict=True)})
        drawn = (panel.barh if flat else panel.bar)(
            [where[label] + shift for label in of],
            list(lengths),
            bar.width if isinstance(bar.width, float) else thick,
            **{"left" if flat else "bottom": base},
            color=_rgb(bar.marker.color),
            label=bar.name if bar.showlegend is not False else None,
            edgecolor="white",
            linewidth=0.5,
        )
        if bar.text is not None and not isinstance(bar.text, str):
            panel.bar_label(drawn, [_plain(str(text)) for text in bar.text], fontsize=7, padding=2)
    (panel.yaxis if flat else panel.xaxis).set_ticks(range(len(where)), [_plain(str(label)) for label in where])


def _draw_heatmap(panel: Any, page: Any, trace: Any, layout: Any, places: Places) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    scale = layout.coloraxis if trace.coloraxis else trace
    low, high = (scale.cmin, scale.cmax) if trace.coloraxis else (trace.zmin, trace.zmax)
    colors = [(share, _rgb(color)) for share, color in scale.colorscale or ()]
    panel.grid(False)
    image = panel.imshow(
        np.asarray(trace.z, dtype=float),
        aspect="equal" if layout.yaxis.scaleanchor else "auto",
        origin="lower",
        cmap=LinearSegmentedColormap.from_list("plotly", colors) if colors else "viridis",
        vmin=low,
        vmax=high,
        interpolation="nearest",
    )
    for axis, name, labels in (
        (panel.xaxis, trace.xaxis or "x", trace.x),
        (panel.yaxis, trace.yaxis or "y", trace.y),
    ):
        places[name] = {label: i for i, label in enumerate(() if labels is None else labels)}
        if 0 < len(places[name]) <= 30:
            axis.set_ticks(range(len(labels)), [_plain(str(label)) for label in labels])
    for (y, x), text in np.ndenumerate(() if trace.text is None else np.asarray(trace.text, dtype=object)):
        panel.text(x, y, _plain(str(text)), fontsize=7.5, ha="center", va="center")
    if layout.xaxis.visible is False:
        panel.set_axis_off()
    if scale.showscale is not False:
        bar = page.colorbar(image, ax=panel, fraction=0.04, pad=0.02, ticks=scale.colorbar.tickvals)
        bar.ax.tick_params(labelsize=7)
        bar.set_label(_plain(scale.colorbar.title.text or ""), fontsize=8)


def _write(figure: go.Figure, page: Any, panels: dict[str, Any], places: Places) -> None:
    """Draw what is not a trace: title, legend, notes, and lines across a panel."""
    if figure.layout.title.text:
        page.suptitle(_plain(figure.layout.title.text), x=0.01, ha="left", fontsize=10, weight="bold")
    named = [panel.get_legend_handles_labels() for panel in panels.values()]
    found = {label: handle for handles, labels in named for handle, label in zip(handles, labels, strict=True)}
    if found and (len(figure.data) > 1 or figure.layout.showlegend):
        columns = max(1, min(len(found), int(110 / (6 + max(map(len, found))))))
        where = {"loc": "outside lower left", "ncols": columns}
        page.legend(found.values(), map(_plain, found), **where, fontsize=8, frameon=False, handlelength=1.4)
    heads = {_head(figure, trace): panels[trace.xaxis or "x"] for trace in figure.data}
    for note in figure.layout.annotations:
        text = _plain(note.text)
        if note.xref != "paper" and (note.xref or "x") in panels:
            x = places.get(note.xref or "x", {}).get(note.x, note.x)
            y = places.get(note.yref or "y", {}).get(note.y, note.y)
            panels[note.xref or "x"].annotate(text, (x, y), fontsize=7.5, ha="center")
        elif (note.x, note.y) in heads:
            heads[note.x, note.y].set_title(text, fontsize=8.5)
        else:
            page.text(note.x, note.y, text, fontsize=8.5, ha="center", va="top" if note.y == 1 else "center")
    for shape in figure.layout.shapes:
        panel = panels.get((shape.xref or "x").split()[0])
        if panel is not None and shape.type == "line":
            look = {"color": _rgb(shape.line.color) or "#7A7A7A", "linewidth": (shape.line.width or 2) * 0.75}
            if shape.y0 == shape.y1:
                panel.axhline(shape.y0, linestyle="--", **look)
            elif shape.x0 == shape.x1:
                panel.axvline(shape.x0, linestyle="--", **look)


def _head(figure: go.Figure, trace: Any) -> tuple[float, float]:
    """Return where `make_subplots` writes the title of a trace's panel: above its middle, in parts of the page."""
    (x0, x1), (_, y1) = (figure.layout[_name(direction, trace)].domain or (0, 1) for direction in "xy")
    return (x0 + x1) / 2, y1


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text.replace("<br>", "\n"))).replace("$", r"\$")


def _rgb(color: Any) -> Any:
    """Return one of Plotly's colours, "#0072B2" or "rgba(0, 114, 178, 0.9)", or several, as Matplotlib wants them."""
    if isinstance(color, str):
        if not color.startswith("rgb"):
            return "#1A1A1A" if color == INK else color  # which is for any ground; this one is white
        red, green, blue, *alpha = map(float, color[color.index("(") + 1 : -1].split(","))
        return red / 255, green / 255, blue / 255, *alpha
    is_words = color is not None and all(isinstance(each, str) for each in color)
    return [_rgb(each) for each in color] if is_words else None
