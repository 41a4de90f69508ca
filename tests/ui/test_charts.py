import base64
import re
from pathlib import Path

import numpy as np
import plotly.io as pio
from IPython.core.formatters import DisplayFormatter

import labkit
from labkit.monitor.history import History
from labkit.ui import charts, kernel
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


def test_a_rank_has_one_colour_in_all_panels_and_another_than_its_neighbours():
    figure = charts.logged(history_of(8))
    colors = {trace.name: set() for trace in figure.data}
    for trace in figure.data:
        colors[trace.name].add(trace.line.color)
    assert [len(of_one) for of_one in colors.values()] == [1] * 9
    assert len(set.union(*colors.values())) == 9


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
    assert trace.textposition == "outside", "a bar that is too short to be seen has its number, too"
    assert figure.layout.xaxis.title.text == "ms"


def test_a_chart_shows_itself_as_plotlys_data_and_never_as_html(monkeypatch):
    shown = []
    monkeypatch.setattr(kernel, "display", lambda bundle, raw: shown.append(bundle))
    chart = charts.logged(history_of(), title="DDP")
    assert DisplayFormatter().format(chart) == ({}, {}), "shown by itself"
    for found in (*shown, chart._repr_mimebundle_()):
        assert set(found) == {charts.PLOTLY, "text/plain"}
        assert found["text/plain"] == "<Chart: DDP>"
        assert len(found[charts.PLOTLY]["data"]) == 6
        assert set(found[charts.PLOTLY]["layout"]["template"]["data"]) <= {"scatter"}, "defaults of these traces only"
        assert "<script" not in str(found)
    assert len(shown) == 1


def test_whoever_asks_plotly_for_pictures_has_them(monkeypatch):
    """By PLOTLY_RENDERER, which Plotly reads as it is imported; kaleido and a Chrome draw them, here pretended."""
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype+png")
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype+png")
    monkeypatch.setattr(pio._base_renderers, "to_image", lambda *_, **__: b"drawn")
    found = charts.logged(history_of(), title="DDP")._repr_mimebundle_()
    assert set(found) == {charts.PLOTLY, "image/png", "text/plain"}
    assert base64.b64decode(found["image/png"]) == b"drawn"


def test_a_long_title_is_broken_into_lines_and_has_room_for_them():
    short, long = labkit.charts.bars(["a"], [1.0], "s", "loss"), labkit.charts.bars(["a"], [1.0], "s", "a word " * 20)
    assert all(len(line) <= charts.TITLE_CHARACTERS for line in long.layout.title.text.split("<br>"))
    assert long.layout.margin.t > short.layout.margin.t
    assert "<br>" not in long._repr_mimebundle_()["text/plain"]


def test_a_run_of_few_steps_has_no_marks_between_them():
    few, many = charts.logged(history_of(steps=2)), charts.logged(history_of(steps=20))
    assert few.layout.xaxis.dtick == 1
    assert many.layout.xaxis.dtick is None


def test_an_empty_history_has_its_words():
    assert [note.text for note in charts.logged(History(2)).layout.annotations] == ["nothing logged"]
