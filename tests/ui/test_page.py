"""What the kernel makes of what the page says of itself, and of a page that says nothing. No page, no kernel."""

from __future__ import annotations

import re

import pytest

from labkit.ui import charts, kernel, live, page
from labkit.ui.charts import PLOTLY
from tests.ui.test_view import Shown, end, started, wait_until


@pytest.fixture
def jupyters(monkeypatch):
    """A page of JupyterLab's or Notebook's that has been asked, long ago."""
    monkeypatch.setattr(page, "_asked", page._Asked())
    monkeypatch.setattr(kernel, "is_jupyters_page", lambda: True)
    monkeypatch.setattr(kernel, "is_interactive", lambda: True)
    monkeypatch.setattr(kernel, "has_subshells", lambda: True)
    monkeypatch.setattr(kernel, "has_been_given_a_subshell", lambda: True)
    monkeypatch.setattr(page, "CHART_WAITS_S", 0.01)
    monkeypatch.setattr(page, "ANSWER_S", 0.0)
    page.ask()


def answer(draws_plotly):
    page._asked.widget._handle_custom_msg({"draws_plotly": draws_plotly}, [])


@pytest.mark.parametrize(
    ("said", "picture", "lacks"),
    [
        (True, False, ""),
        (None, False, ""),  # a page that does not say
        (False, True, "pip install plotly"),
        ("nothing", True, "pip install anywidget plotly"),
    ],
)
def test_a_chart_that_stays_has_a_picture_unless_the_page_draws_plotly(jupyters, said, picture, lacks):
    if said != "nothing":
        answer(said)
    bundle = charts.Chart(charts.style(charts.go.Figure(charts.go.Scatter(y=[1, 2])))).bundle()
    assert (PLOTLY in bundle, "image/png" in bundle) == (True, picture)
    assert page.missing().endswith(lacks)
    assert bool(page.missing()) == bool(lacks)


def test_other_front_ends_bring_what_widgets_need(jupyters, monkeypatch):
    monkeypatch.setattr(kernel, "is_jupyters_page", lambda: False)
    assert page.runs_widgets_of_ours() is True
    assert page.draws_plotly()
    assert page.missing() == ""


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(kernel, "display", lambda thing, **_: found.append(Shown(thing)) or found[-1])
    return found


def test_a_page_without_labkits_widgets_has_a_picture_of_the_run_and_is_told_what_to_install(jupyters, shown):
    run = started(steps=20)
    view = live.LiveView(run)
    view.start()
    wait_until(lambda: view._picture is not None)
    assert re.match('<img .*alt="train: loss rank 0 from 1 to 0.05.*" src="data:image/png;base64,', view._picture.value)
    assert "pip install anywidget plotly" in view._notice.value
    end(run, view)
    summary, picture = view._box.children
    assert "train: finished" in summary.value
    assert picture is view._picture
    assert view._chart is None, "which would show an error of JavaScript there"
    assert "image/png" in shown[1].things[-1]


def test_a_page_that_answers_late_has_the_chart_in_place_of_the_picture(jupyters, shown):
    run = started(steps=20)
    view = live.LiveView(run)
    view.start()
    wait_until(lambda: view._picture is not None)
    answer(True)
    wait_until(lambda: view._chart is not None)
    assert view._chart in view._box.children
    assert view._picture is None
    end(run, view)


def test_a_page_without_any_widgets_has_lines_of_text(jupyters, shown, monkeypatch, capsys):
    monkeypatch.setattr(kernel, "has_been_given_a_subshell", lambda: False)
    run = started(steps=20)
    view = live.LiveView(run)
    view.start()
    wait_until(lambda: view._lines is not None)
    end(run, view)
    view._lines.join(10)
    said = capsys.readouterr().out
    assert "This page shows no widgets" in said
    assert "pip install ipywidgets anywidget plotly" in said
    assert "train: finished · 2 ranks" in said
    assert "image/png" in shown[1].things[-1]


def test_a_cell_is_known_to_be_jupyters_by_what_only_its_front_ends_send(monkeypatch):
    class Shell:
        parent_header = None

    def sent(kind, **metadata):
        Shell.parent_header = {"header": {"msg_type": kind}, "metadata": metadata}
        return kernel.is_jupyters_page()

    monkeypatch.setattr(kernel, "shell", lambda: Shell)
    monkeypatch.setattr(kernel, "_is_jupyters_page", False)
    assert not sent("execute_request", cellId="a")
    assert sent("execute_request", cellId="a", deletedCells=[], recordTiming=False)
    assert sent("comm_msg"), "a widget's message, after that cell"
    assert not sent("execute_request", colab={"cell_id": "a"})
