import importlib.util
import io
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image
from plotly.subplots import make_subplots

import labkit
from labkit.monitor.history import History
from labkit.ui import charts, kernel
from labkit.ui.pictures import picture
from tests.support import logs


def log(history, rank, steps, **columns):
    history.add(logs.log(rank, steps, **columns))


def history_of(world_size=2, steps=20):
    """Rank r logs loss step + r, and every tenth step an accuracy."""
    history = History(world_size)
    for rank in range(world_size):
        log(history, rank, range(steps), loss=np.arange(steps) + rank, samples=[64] * steps)
        log(history, rank, range(0, steps, 10), accuracy=np.arange(0, steps, 10) / steps)
    return history


def drawn(figure):
    """Label → (x, y) of every curve, panel by panel."""
    panels = {}
    heads = [note.text for note in figure.layout.annotations]
    for trace in figure.data:
        number = (trace.yaxis or "y")[1:]
        name = figure.layout[f"yaxis{number}"].title.text or heads[int(number or 1) - 1]
        panels.setdefault(name, {})[trace.name] = (list(trace.x), list(trace.y))
    return panels


def test_a_panel_per_name_holds_a_curve_per_rank_and_their_mean():
    found = drawn(charts.logged(history_of(), title="DDP"))
    steps = list(range(20))
    assert {name: list(curves) for name, curves in found.items()} == {
        "loss": ["rank 0", "rank 1", "mean"],
        "accuracy": ["rank 0", "rank 1", "mean"],
    }
    assert found["loss"]["rank 1"] == (steps, [step + 1 for step in steps])
    assert found["loss"]["mean"] == (steps, [step + 0.5 for step in steps])
    assert found["accuracy"]["rank 0"] == ([0, 10], [0, 0.5])


def test_one_rank_has_no_mean_and_samples_are_not_drawn():
    assert {name: list(curves) for name, curves in drawn(charts.logged(history_of(1))).items()} == {
        "loss": ["rank 0"],
        "accuracy": ["rank 0"],
    }


def test_a_rank_has_one_colour_in_all_panels_and_another_than_its_neighbours():
    figure = charts.logged(history_of(8))
    colors = {trace.name: set() for trace in figure.data}
    for trace in figure.data:
        colors[trace.name].add(trace.line.color)
    assert [len(of_one) for of_one in colors.values()] == [1] * 9
    assert len(set.union(*colors.values())) == 9


def luminance(color):
    """WCAG 2's relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_a_chart_lies_on_the_pages_ground_and_can_be_read_on_any():
    layout = charts.logged(history_of(), title="DDP").layout
    grounds = {layout.template.layout[name] for name in ("paper_bgcolor", "plot_bgcolor")}
    assert grounds == {"rgba(255, 255, 255, 0)"}
    assert layout.template.layout.font.color == charts.INK
    ink, dark = luminance(charts.INK) + 0.05, luminance("#111111") + 0.05
    most = (1.05 / dark) ** 0.5
    assert min(1.05 / ink, ink / dark) == pytest.approx(most, abs=0.05), "no colour has more on both"
    assert min(luminance(color) + 0.05 for color in charts.RANK_COLORS) / dark >= 3


def test_the_page_knows_the_ink_as_a_browser_writes_it():
    rgb = ", ".join(str(int(charts.INK[i : i + 2], 16)) for i in (1, 3, 5))
    style = Path(charts.__file__).with_name("view.css").read_text()
    assert re.findall(r"(\w+): rgb\((.*?)\)", style) == [("fill", rgb), ("stroke", rgb)]


def test_every_curve_is_in_the_legend_once():
    history = History(2)
    log(history, 0, [0, 1], accuracy=[0, 1])  # only rank 0 measures it
    for rank in (0, 1):
        log(history, rank, [0, 1], loss=[1, 2])
    shown = [trace.name for trace in charts.logged(history).data if trace.showlegend]
    assert sorted(shown) == ["mean", "rank 0", "rank 1"]


def test_overlaid_draws_the_mean_of_each_run_that_logged_the_name():
    one, two, none = history_of(1), history_of(2), History(2)
    figure = labkit.charts.overlaid({"one": one, "two": two, "none": none}, "loss")
    steps = list(range(20))
    assert drawn(figure) == {"loss": {"one": (steps, steps), "two": (steps, [step + 0.5 for step in steps])}}
    assert len({(trace.line.color, trace.line.dash) for trace in figure.data}) == 2


def test_bars_have_their_values_beside_them():
    (trace,) = (figure := labkit.charts.bars(["gloo", "nccl"], [1234.6, 0.25], unit="ms")).data
    assert (list(trace.y), list(trace.x), trace.orientation) == (["gloo", "nccl"], [1234.6, 0.25], "h")
    assert list(trace.text) == ["1,235", "0.25"]
    assert figure.layout.xaxis.title.text == "ms"


def test_a_chart_shows_itself_as_plotly_json_and_picture_and_never_as_html(monkeypatch):
    shown = []
    monkeypatch.setattr(kernel, "display", lambda bundle, raw, metadata: shown.append(bundle))
    chart = charts.logged(history_of(), title="DDP")
    assert DisplayFormatter().format(chart) == ({}, {}), "shown by itself"
    for found in (*shown, chart._repr_mimebundle_()):
        assert set(found) == {charts.PLOTLY, "image/png", "text/plain"}
        assert found["text/plain"] == "<Chart: DDP>"
        assert len(found[charts.PLOTLY]["data"]) == 6
        assert "<script" not in str(found)
    assert len(shown) == 1


def test_a_long_title_is_broken_into_lines_and_has_room_for_them():
    short, long = labkit.charts.bars(["a"], [1.0], "s", "loss"), labkit.charts.bars(["a"], [1.0], "s", "a word " * 20)
    assert all(len(line) <= charts.TITLE_CHARACTERS for line in long.layout.title.text.split("<br>"))
    assert long.layout.margin.t > short.layout.margin.t
    assert "<br>" not in long._repr_mimebundle_()["text/plain"]


def test_the_saved_chart_has_template_defaults_only_for_the_traces_in_it():
    saved = charts.logged(history_of()).to_plotly_json_small()
    assert set(saved["layout"]["template"]["data"]) <= {"scatter"}


def bars(*traces, mode=None, **layout):
    return go.Figure(traces, {"barmode": mode, **layout})


def subplots():
    figure = make_subplots(rows=2, cols=2, subplot_titles=["a", "b", "c", "d"])
    for row, col in np.ndindex(2, 2):
        figure.add_scatter(x=[0, 1, 2], y=[row, col, 1], name=f"{row}{col}", row=row + 1, col=col + 1)
    return figure


def noted(figure, **where):
    return figure.add_annotation(text="here <b>is</b> $5", **where)


A, B = ["a", "b"], [1, 2]
HEAT = go.Heatmap(z=[[1, None, 3], [4, 5, 6]], x=["a", "b", "c"], y=["d", "e"])
PICTURES = {
    "curves": lambda: charts.logged(history_of(), title="DDP"),
    "many noisy curves": lambda: charts.style(
        go.Figure([go.Scatter(x=np.arange(1000), y=np.random.default_rng(i).normal(size=1000)) for i in range(9)])
    ),
    "overlaid": lambda: labkit.charts.overlaid({"one": history_of(1), "two": history_of(2)}),
    "horizontal bars": lambda: labkit.charts.bars(A, B, unit="ms"),
    "grouped bars": lambda: bars(go.Bar(x=A, y=B, name="1"), go.Bar(x=A, y=B, name="2"), mode="group"),
    "stacked bars": lambda: bars(go.Bar(x=A, y=B), go.Bar(x=A, y=B), mode="stack"),
    "horizontal stacked bars": lambda: bars(
        go.Bar(x=B, y=A, orientation="h"), go.Bar(x=B, y=A, orientation="h"), mode="stack"
    ),
    "gantt": lambda: bars(go.Bar(x=[1, 2, 1], y=["a", "b", "a"], base=[0, 1, 3], orientation="h"), mode="overlay"),
    "heat map": lambda: go.Figure(HEAT),
    "heat map with numbers": lambda: go.Figure(go.Heatmap(HEAT, text=[[1, "", 3], [4, 5, 6]], texttemplate="%{text}")),
    "heat map on a shared colour axis": lambda: go.Figure(
        go.Heatmap(z=[[0, 1], [2, 3]], coloraxis="coloraxis"),
        {"coloraxis": {"colorscale": "Portland", "cmin": 0, "cmax": 3, "colorbar": {"title": "ms"}}},
    ),
    "heat map without scale": lambda: go.Figure(go.Heatmap(z=np.eye(40), showscale=False)),
    "log axes": lambda: go.Figure(go.Scatter(x=[1, 10, 100], y=[1e-3, 1, 5], mode="lines+markers")).update_layout(
        xaxis_type="log", yaxis={"type": "log", "range": [-4, 1]}
    ),
    "markers": lambda: go.Figure(go.Scatter(x=np.arange(20), y=np.arange(20), mode="markers", marker_color="red")),
    "gaps": lambda: go.Figure(go.Scatter(x=[0, 1, 2, 3, 4], y=[1, 2, None, 2, float("nan")])),
    "subplots": subplots,
    "notes": lambda: noted(
        noted(go.Figure(go.Scatter(x=[0, 9], y=[0, 9])), x=1, y=1), x=0.5, y=1, xref="paper", yref="paper"
    ),
    "note at a bar": lambda: noted(bars(go.Bar(x=A, y=B)), x="b", y=2),
    "note on a heat map": lambda: noted(go.Figure(HEAT), x="b", y="e"),
    "curve without x": lambda: go.Figure(go.Scatter(y=[1, 3, 2])),
    "curve in Plotly's own colour words": lambda: go.Figure(go.Scatter(x=B, y=B, line_color="rgba(0, 114, 178, 0.9)")),
    "bars in Plotly's own colour words": lambda: bars(go.Bar(x=A, y=B, marker_color="rgb(0, 114, 178)")),
}


@pytest.mark.parametrize("figure", PICTURES.values(), ids=PICTURES)
def test_the_picture_is_a_small_png_with_something_on_it(figure):
    figure = figure()
    blob = picture(figure)
    image = Image.open(io.BytesIO(blob))
    assert (image.format, image.size) == ("PNG", (760, figure.layout.height or 360))
    assert len(blob) < 40_000
    pixels = np.asarray(image.convert("RGB")).astype(int)
    colourful = pixels.max(axis=2) - pixels.min(axis=2) > 60  # axes and text are grey
    assert colourful.sum() > 100


def test_the_picture_of_an_empty_history_has_its_words():
    figure = charts.logged(History(2))
    assert [note.text for note in figure.layout.annotations] == ["nothing logged"]
    pixels = np.asarray(Image.open(io.BytesIO(picture(figure))).convert("L"))
    assert (pixels < 128).sum() > 50


def test_bars_with_a_base_stand_on_it_even_where_others_are_stacked():
    """Plotly: "traces that set `base` will be excluded" from stacking, and are laid over instead."""
    spans = go.Bar(x=[1, 2], y=["a", "b"], base=[3, 1], orientation="h")
    assert picture(bars(spans, mode="stack")) == picture(bars(spans, mode="overlay"))


TWO_LINES = [go.Scatter(x=[0, 1], y=[0, 1]), go.Scatter(x=[0, 1], y=[1, 3], fillcolor="rgba(0, 114, 178, 0.3)")]
TWO_BARS, TWO_FLAT = [go.Bar(x=A, y=B)] * 2, [go.Bar(x=B, y=A, orientation="h")] * 2
LINE = go.Figure(go.Scatter(x=[1, 10, 100], y=[1, 2, 3]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (go.Figure(TWO_LINES), go.Figure([TWO_LINES[0], go.Scatter(TWO_LINES[1], fill="tonexty")])),
        (bars(*TWO_BARS, mode="stack"), bars(*TWO_BARS, mode="overlay")),
        (bars(*TWO_BARS, mode="group"), bars(*TWO_BARS, mode="overlay")),
        (bars(*TWO_FLAT, mode="stack"), bars(*TWO_FLAT, mode="overlay")),
        (bars(TWO_FLAT[0]), bars(TWO_FLAT[0], yaxis_autorange="reversed")),
        (bars(TWO_FLAT[0]), bars(go.Bar(TWO_FLAT[0], base=[1, 0]))),
        (LINE, go.Figure(LINE).update_xaxes(type="log")),
        (LINE, go.Figure(LINE).update_yaxes(range=[0, 10])),
        (LINE, go.Figure(LINE).update_xaxes(tickvals=[1, 100])),
        (LINE, noted(go.Figure(LINE), x=10, y=2)),
        (LINE, go.Figure(LINE).update_traces(error_y_array=[1, 1, 1])),
        (
            go.Figure(LINE).update_traces(error_y_array=[1, 1, 1]),
            go.Figure(LINE).update_traces(error_y_array=[1, 1, 1], error_y_arrayminus=[0, 0, 0]),
        ),
    ],
    ids=[
        "filled",
        "stacked",
        "grouped",
        "stacked flat",
        "reversed",
        "base",
        "log",
        "range",
        "ticks",
        "note",
        "error bars",
        "one-sided",
    ],
)
def test_what_differs_in_the_figure_differs_in_the_picture(one, other):
    assert picture(one) != picture(other)


def test_without_matplotlib_a_chart_is_its_data_and_says_what_its_picture_needs(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bundle = charts.logged(history_of(), "train").bundle()
    assert set(bundle) == {charts.PLOTLY, "text/plain"}
    assert bundle["text/plain"] == "<Chart: train; its picture needs pip install matplotlib>"
