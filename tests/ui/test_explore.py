"""A figure with sliders, without a browser: what `explore` shows and refuses, and what turning a slider draws."""

from __future__ import annotations

import json
import re

import plotly.graph_objects as go
import pytest

from course.explore import explore
from labkit.ui import kernel, present
from labkit.ui.charts import PLOTLY
from tests.conftest import wait_until
from tests.ui.test_view import open_widgets


class Output:
    """Where a display handle would show something; keeps all that was shown."""

    def __init__(self):
        self.shown = []

    def update(self, data, raw=False, metadata=None):
        self.shown.append(data)


def draw(batch_size=64, latency_us=10, color="#0072B2"):
    return go.Figure(go.Scatter(y=[batch_size, latency_us], line={"color": color}))


def test_without_a_person_only_the_figure_for_the_defaults_is_shown(monkeypatch):
    shown, before = [], len(open_widgets)
    monkeypatch.setattr(present, "show", shown.append)
    explore(draw, batch_size=[32, 64], latency_us=[1, 10])
    assert [list(figure.data[0].y) for figure in shown] == [[64, 10]]
    assert len(open_widgets) == before, "no widget, which a saved notebook would keep"


def test_moving_a_slider_draws_a_live_chart_again_at_once(monkeypatch):
    outputs, boxes = [], []
    monkeypatch.setattr(kernel, "is_interactive", lambda: True)
    monkeypatch.setattr(kernel, "display", lambda thing, **options: boxes.append(thing) or Output())
    monkeypatch.setattr(kernel, "reserve", lambda: outputs.append(Output()) or outputs[-1])
    explore(draw, batch_size=[32, 64, 128], latency_us=[1, 10])
    batch, latency = boxes[0].children[0].children
    assert (batch.value, latency.value, batch.description) == (64, 10, "batch size")

    def drawn():
        (bundle,) = [output.shown[-1] for output in outputs if PLOTLY in output.shown[-1]]  # one at a time
        assert "image/png" not in bundle
        return bundle[PLOTLY]["data"][0]["y"]

    assert drawn() == [64, 10]
    batch.value = 128
    assert drawn() == [128, 10]
    latency.value = 1
    assert drawn() == [128, 1]
    # A page that was reloaded takes no change of an output: there the widget below the sliders has the same chart.
    wait_until(lambda: boxes[0].children[1].children)
    (chart,) = boxes[0].children[1].children
    drawn_there = json.loads(chart._carrier.value)
    assert drawn_there["figures"][0]["data"][0]["y"] == [128, 1]
    marks = re.findall(r"labkit-outputs-\w+-(\d+)", boxes[1]["text/html"])
    assert (marks, drawn_there["number"]) == (["0"], 3), "and hides it where the outputs have changed as often"


def test_a_slider_needs_a_default_to_begin_with():
    with pytest.raises(TypeError, match="draw needs a parameter 'ranks' with a default"):
        explore(draw, ranks=[1, 2])
    with pytest.raises(ValueError, match=r"the default batch_size=64 is none of the choices \[1, 2\]"):
        explore(draw, batch_size=[1, 2])
