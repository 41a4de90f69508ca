"""A figure with sliders, without a browser: what `explore` shows and refuses, and what turning a slider draws."""

from __future__ import annotations

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


@pytest.fixture
def explored(monkeypatch):
    """Explore where a person watches, on JupyterLab's page or another; give what was reserved, and what is below."""

    def explored(is_jupyters_page, **choices):
        outputs, boxes = [], []
        monkeypatch.setattr(kernel, "is_interactive", lambda: True)
        monkeypatch.setattr(kernel, "is_jupyters_page", lambda: is_jupyters_page)
        monkeypatch.setattr(kernel, "display", lambda thing, **options: boxes.append(thing) or Output())
        monkeypatch.setattr(kernel, "reserve", lambda: outputs.append(Output()) or outputs[-1])
        explore(draw, **choices)
        return outputs, boxes[0].children

    return explored


def test_moving_a_slider_draws_a_live_chart_again_at_once(explored):
    outputs, (sliders, _, live) = explored(True, batch_size=[32, 64, 128], latency_us=[1, 10])
    batch, latency = sliders.children
    assert (batch.value, latency.value, batch.description) == (64, 10, "batch size")

    def drawn():
        (output,) = live.outputs
        assert "image/png" not in output["data"]
        return output["data"][PLOTLY]["data"][0]["y"]

    def kept():
        bundles = [output.shown[-1] for output in outputs if output.shown and PLOTLY in output.shown[-1]]
        return [bundle[PLOTLY]["data"][0]["y"] for bundle in bundles]

    assert drawn() == [64, 10]
    batch.value = 128
    assert drawn() == [128, 10]
    latency.value = 1
    assert drawn() == [128, 1]
    wait_until(lambda: kept() == [[128, 1]])  # which a notebook keeps, one at a time


def test_a_front_end_that_takes_changes_of_outputs_has_them_alone(explored):
    outputs, (sliders,) = explored(False, batch_size=[32, 64, 128])
    sliders.children[0].value = 128
    shown = [output.shown[-1] for output in outputs]
    assert [bundle[PLOTLY]["data"][0]["y"] for bundle in shown if PLOTLY in bundle] == [[128, 10]]


def test_a_slider_needs_a_default_to_begin_with():
    with pytest.raises(TypeError, match="draw needs a parameter 'ranks' with a default"):
        explore(draw, ranks=[1, 2])
    with pytest.raises(ValueError, match=r"the default batch_size=64 is none of the choices \[1, 2\]"):
        explore(draw, batch_size=[1, 2])
