"""A Plotly figure as a picture, drawn with Matplotlib, for notebooks that are run where nobody watches."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import plotly.graph_objects as go


def picture(figure: go.Figure, width: float = 7.6) -> bytes:
    """Draw a Plotly figure as a small PNG with Matplotlib: lines, markers, bars, heat maps and annotations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    height = (figure.layout.height or 360) / 100
    canvas = FigureCanvasAgg(Figure(figsize=(width, height), dpi=100, facecolor="white"))
    _draw(figure, canvas.figure, width, height)
    raw = io.BytesIO()
    canvas.print_png(raw)
    small = io.BytesIO()
    # A chart has few colours: with a palette it takes a third of the bytes.
    Image.open(raw).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


def _draw(figure: go.Figure, page: Any, width: float, height: float) -> None:
    names = [_plain(t.name) for t in figure.data if t.name and t.showlegend is not False]
    legend = bool(names) and (len(figure.data) > 1 or bool(figure.layout.showlegend))
    named = [t for t in figure.data if (t.type == "bar" and t.orientation == "h") or t.type == "heatmap"]
    sideways = [str(y) for t in named if t.y is not None for y in t.y]
    # Room in inches for what stands around the panels; a letter of the small print is about 0.075 wide.
    left = max(0.62, 0.15 + 0.075 * max(map(len, sideways), default=0)) / width
    right = (0.15 + (0.4 + 0.075 * max(map(len, names)) if legend else 0)) / width
    bottom, top = 0.5 / height, (0.45 if figure.layout.title.text else 0.15) / height
    wide, high = 1 - left - right, 1 - top - bottom

    def place(axis_x: Any, axis_y: Any) -> list[float]:
        (x0, x1), (y0, y1) = axis_x.domain or (0, 1), axis_y.domain or (0, 1)
        return [left + x0 * wide, bottom + y0 * high, (x1 - x0) * wide, (y1 - y0) * high]

    panels: dict[str, Any] = {}
    bar_room: dict[str, _Bars] = {}
    categories: dict[str, dict[Any, int]] = {}  # by axis, such as "x2": where its categories stand
    for trace in figure.data:
        key = getattr(trace, "xaxis", None) or "x"
        suffix = key[1:]
        layout_x, layout_y = figure.layout[f"xaxis{suffix}"], figure.layout[f"yaxis{suffix}"]
        if key not in panels:
            panels[key] = page.add_axes(place(layout_x, layout_y))
            _dress(panels[key], layout_x, layout_y)
        if trace.type == "bar":
            same = [t for t in figure.data if t.type == "bar" and (t.xaxis or "x") == key]
            bar_room.setdefault(key, _Bars(figure.layout.barmode or "group", len(same))).draw(panels[key], trace)
            axis = f"y{suffix}" if trace.orientation == "h" else f"x{suffix}"
            categories[axis] = bar_room[key].places()
        elif trace.type == "heatmap":
            _heatmap(panels[key], page, trace, figure.layout)
            for axis, labels in ((f"x{suffix}", trace.x), (f"y{suffix}", trace.y)):
                categories[axis] = {} if labels is None else {label: i for i, label in enumerate(labels)}
        elif trace.type == "scatter":
            _scatter(panels[key], trace)
    for key, panel in panels.items():
        suffix = key[1:]
        _limit(panel, figure.layout[f"xaxis{suffix}"], figure.layout[f"yaxis{suffix}"])
    if legend:
        _legend(page, panels, 1 - right + 0.1 / width, 1 - top)
    if figure.layout.title.text:
        page.text(left, 1 - 0.16 / height, _plain(figure.layout.title.text), fontsize=10, va="center", weight="bold")
    for note in figure.layout.annotations:
        if note.xref == "paper" and note.yref == "paper":
            page.text(
                left + note.x * wide, bottom + note.y * high, _plain(note.text), fontsize=8.5, ha="center", va="bottom"
            )
        elif (note.xref or "x") in panels:
            x = categories.get(note.xref or "x", {}).get(note.x, note.x)
            y = categories.get(note.yref or "y", {}).get(note.y, note.y)
            panels[note.xref or "x"].annotate(_plain(note.text), (x, y), fontsize=7.5, ha="center")
    for shape in figure.layout.shapes:
        panel = panels.get((shape.xref or "x").split()[0])
        if panel is not None and shape.type == "line":
            look = {"color": _rgb(shape.line.color or "#7A7A7A"), "linewidth": (shape.line.width or 2) * 0.75}
            if shape.y0 == shape.y1:
                panel.axhline(shape.y0, linestyle="--", **look)
            elif shape.x0 == shape.x1:
                panel.axvline(shape.x0, linestyle="--", **look)


def _plain(text: str) -> str:
    import html
    import re

    return html.unescape(re.sub(r"<[^>]+>", "", text.replace("<br>", "\n"))).replace("$", r"\$")


def _dress(panel: Any, layout_x: Any, layout_y: Any) -> None:
    panel.grid(color="#E5E5E5", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.tick_params(labelsize=8, length=2)
    panel.set_xlabel(_plain(layout_x.title.text or ""), fontsize=8.5, labelpad=1)
    panel.set_ylabel(_plain(layout_y.title.text or ""), fontsize=8.5, labelpad=2)


def _limit(panel: Any, layout_x: Any, layout_y: Any) -> None:
    for layout, scale, limits, invert, axis in (
        (layout_x, panel.set_xscale, panel.set_xlim, panel.invert_xaxis, panel.xaxis),
        (layout_y, panel.set_yscale, panel.set_ylim, panel.invert_yaxis, panel.yaxis),
    ):
        if layout.type == "log":
            scale("log")
        if layout.range:
            limits(*(10**v if layout.type == "log" else v for v in layout.range))
        elif layout.autorange == "reversed":
            invert()
        if layout.tickvals is not None:
            axis.set_ticks(layout.tickvals, labels=layout.ticktext or [f"{value:,g}" for value in layout.tickvals])
            axis.minorticks_off()


def _scatter(panel: Any, trace: Any) -> None:
    mode = trace.mode or "lines"
    styles = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
    color = trace.line.color or trace.marker.color
    y = np.asarray(trace.y, dtype=float)
    x = np.arange(len(y)) if trace.x is None else np.asarray(trace.x)
    if trace.error_y.array is not None:
        above = np.asarray(trace.error_y.array, dtype=float)
        below = above if trace.error_y.arrayminus is None else np.asarray(trace.error_y.arrayminus, dtype=float)
        panel.errorbar(x, y, (below, above), fmt="none", ecolor=_rgb(color or "#7A7A7A"), elinewidth=1, capsize=3)
    panel.plot(
        x,
        y,
        label=trace.name if trace.showlegend is not False else None,
        color=_rgb(color) if isinstance(color, str) else None,
        linestyle=styles.get(trace.line.dash or "solid", "-") if "lines" in mode else "none",
        linewidth=(trace.line.width or 2) * 0.75,
        marker="o" if "markers" in mode else None,
        markersize=trace.marker.size * 0.75 if isinstance(trace.marker.size, (int, float)) else 4,
        alpha=1 if trace.opacity is None else trace.opacity,
    )


class _Bars:
    """Places the bars of one panel beside or upon each other."""

    def __init__(self, mode: str, traces: int) -> None:
        self._mode, self._traces, self._drawn = mode, traces, 0
        self._tops: dict[Any, float] = {}

    def draw(self, panel: Any, trace: Any) -> None:
        flat = trace.orientation == "h"
        labels, lengths = (trace.y, trace.x) if flat else (trace.x, trace.y)
        names = list(dict.fromkeys([*self._tops, *labels]))
        for name in names:
            self._tops.setdefault(name, 0.0)
        side_by_side = self._mode == "group"
        thick = 0.8 / self._traces if side_by_side else (trace.width if isinstance(trace.width, float) else 0.8)
        shift = (self._drawn - (self._traces - 1) / 2) * thick if side_by_side else 0.0
        at = [names.index(label) + shift for label in labels]
        given = trace.base if trace.base is not None else 0.0
        bases = list(given) if isinstance(given, (tuple, list, np.ndarray)) else [given] * len(at)
        if self._mode in ("stack", "relative") and trace.base is None:  # Plotly lays bars with a base over the rest
            bases = [self._tops[label] for label in labels]
            for label, length in zip(labels, lengths, strict=True):
                self._tops[label] += float(length)
        color = trace.marker.color
        if isinstance(color, str):
            color = _rgb(color)
        elif color is not None:
            color = [_rgb(each) for each in color] if all(isinstance(each, str) for each in color) else None
        shape = {"color": color, "label": trace.name, "edgecolor": "white", "linewidth": 0.5}
        if flat:
            drawn = panel.barh(at, list(lengths), thick, left=bases, **shape)
            panel.set_yticks(range(len(names)), [_plain(str(name)) for name in names])
        else:
            drawn = panel.bar(at, list(lengths), thick, bottom=bases, **shape)
            panel.set_xticks(range(len(names)), [_plain(str(name)) for name in names])
        if trace.text is not None and not isinstance(trace.text, str):
            panel.bar_label(drawn, [_plain(str(text)) for text in trace.text], fontsize=7, padding=2)
        self._drawn += 1

    def places(self) -> dict[Any, int]:
        """Give where each category stands."""
        return {name: index for index, name in enumerate(self._tops)}


def _heatmap(panel: Any, page: Any, trace: Any, layout: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shared = layout.coloraxis if trace.coloraxis else None
    scale = (shared.colorscale if shared else trace.colorscale) or ()
    colors = [(place, _rgb(color)) for place, color in scale]
    panel.grid(False)
    image = panel.imshow(
        np.asarray(trace.z, dtype=float),
        aspect="equal" if layout.yaxis.scaleanchor else "auto",
        origin="lower",
        cmap=LinearSegmentedColormap.from_list("plotly", colors) if colors else "viridis",
        vmin=shared.cmin if shared else trace.zmin,
        vmax=shared.cmax if shared else trace.zmax,
        interpolation="nearest",
    )
    for axis, labels in ((panel.set_xticks, trace.x), (panel.set_yticks, trace.y)):
        if labels is not None and len(labels) <= 30:
            axis(range(len(labels)), [_plain(str(label)) for label in labels])
    for y, row in enumerate(() if trace.text is None else trace.text):
        for x, text in enumerate(row):
            panel.text(x, y, _plain(str(text)), fontsize=7.5, ha="center", va="center")
    if layout.xaxis.visible is False:
        panel.set_axis_off()
    if (shared.showscale if shared else trace.showscale) is not False:
        bar = page.colorbar(
            image, ax=panel, fraction=0.04, pad=0.02, ticks=shared.colorbar.tickvals if shared else None
        )
        bar.ax.tick_params(labelsize=7)
        if shared and shared.colorbar.title.text:
            bar.set_label(_plain(shared.colorbar.title.text), fontsize=8)


def _rgb(color: str) -> Any:
    """Give one of Plotly's colours, "#0072B2" or "rgb(0, 114, 178)", as Matplotlib wants it."""
    if color.startswith("rgb"):
        return tuple(float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3])
    return color


def _legend(page: Any, panels: dict[str, Any], x: float, y: float) -> None:
    found: dict[str, Any] = {}
    for panel in panels.values():
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    page.legend(
        found.values(),
        [_plain(label) for label in found],
        loc="upper left",
        bbox_to_anchor=(x, y),
        fontsize=8,
        frameon=False,
        handlelength=1.4,
        borderaxespad=0,
    )
