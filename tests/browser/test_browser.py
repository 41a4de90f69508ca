"""Controls, an exercise and a session in a real JupyterLab in a real Chromium. Screenshots are in build/screenshots."""

from __future__ import annotations

import json

import pytest

from course import exercises
from course.exercises.progress import FILE
from tests.support.browser import SCREENSHOTS, write

pytestmark = pytest.mark.browser

STAYS = ".jp-RenderedPlotly.js-plotly-plot .scatterlayer .trace"
"""A curve of a chart that needs no kernel."""

PANEL = ".labkit-run .charts > [role=figure]"
"""A panel of curves of a run that goes on."""

LAST_STEP = f"""() => {{
    const plots = [...document.querySelectorAll('{PANEL}')].map(panel => panel.plot);
    return Math.max(0, ...plots.map(plot => plot.data[0]?.at(-1) ?? 0));
}}"""


TITLES = """() => [...document.querySelectorAll('.jp-OutputArea-output .gtitle')].filter(title => title.closest('div')
    .offsetParent).map(title => title.textContent).join()"""
"""The titles of the charts that can be seen."""


def screenshot(page, name):
    page.page.screenshot(path=SCREENSHOTS / f"{name}.png")


CONTROLS = (
    """
import course, pandas as pd
import plotly.graph_objects as go
from course.explore import explore
course.sortable(pd.DataFrame({'ms': [2.5, 10, 1], 'way': ['b', 'a', 'c']}, index=list('xyz')))
""",
    """
def bars(batch_size=128, bandwidth_gb_s=10, latency_us=10):
    return go.Figure(go.Bar(x=["batch", "latency"], y=[batch_size, latency_us]), {"title": f"batch {batch_size}"})
explore(bars, batch_size=[64, 128, 256], bandwidth_gb_s=[1, 10], latency_us=[1, 10, 100])
print("printed below")
""",
    'guess = course.predict("Which rank is first?", "rank 0", "rank 1", "no one knows")\nguess',
    'guess.reveal("no one knows")',
)
TABLE, EXPLORE, QUESTION, REVEAL = range(4)


def test_tables_are_sorted_sliders_redraw_and_predictions_are_made_by_a_click(page):
    write(page.folder, "controls.ipynb", *map(str.strip, CONTROLS))
    page.open("controls.ipynb")
    for index in (TABLE, EXPLORE, QUESTION):
        page.run_cell(index)
        page.wait_until_run(index)
    heading = page.page.locator("th.col_heading", has_text="ms")
    rows = page.cell(TABLE).locator("tbody th")
    assert rows.all_text_contents() == ["x", "y", "z"]
    heading.click()
    assert rows.all_text_contents() == ["z", "x", "y"], "by number, not by text"
    assert heading.get_attribute("aria-sort") == "ascending"
    page.cell(TABLE).locator(".jp-OutputArea table").focus()  # as by the tab key; it hands on to its first heading
    page.page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows.all_text_contents() == ["y", "x", "z"]
    page.wait_for(f"() => ({TITLES})() == 'batch 128'")
    assert page.cell(EXPLORE).get_by_text("printed below", exact=True).is_visible()
    page.cell(EXPLORE).locator(".noUi-handle").first.press("ArrowRight")
    page.wait_for(f"() => ({TITLES})() == 'batch 256'")
    assert page.cell(EXPLORE).locator(".widget-readout").first.inner_text() == "256"
    page.page.wait_for_timeout(1500)  # until the output that the notebook keeps has changed, too
    assert page.page.locator(".jp-RenderedPlotly:visible").count() == 1
    page.cell(QUESTION).locator("button", has_text="rank 1").click()
    page.page.wait_for_timeout(300)
    page.run_cell(REVEAL)
    page.cell(REVEAL).locator("text=You said rank 1; it was no one knows: surprised?").wait_for()
    page.cell(QUESTION).locator(".jp-OutputArea span", has_text="rank 1").wait_for()  # in the place of the buttons
    assert page.cell(QUESTION).locator("button", has_text="rank 1").count() == 0
    screenshot(page, "controls")
    page.save(page.folder / "controls.ipynb")
    assert "batch 256" in (page.folder / "controls.ipynb").read_text()
    assert (page.folder / "controls.ipynb").stat().st_size < 50_000
    assert page.real_errors() == []


NAME = "average_gradients"
EXERCISE = ("import course\nanswers = None", f'course.exercises.statement("{NAME}")', exercises.starter(NAME).strip())
STATEMENT, ANSWER, CHECK = range(1, 4)


def answer(page, source):
    """Replace what stands in the answer's cell, and run it and the check."""
    page.cell(ANSWER).locator(".cm-content").click()
    page.page.keyboard.press("Control+a")
    page.page.keyboard.insert_text(source)
    for cell in (ANSWER, CHECK):
        page.run_cell(cell)
        page.wait_until_run(cell)


def test_a_learner_is_wrong_reads_why_opens_a_hint_and_is_right(page):
    write(page.folder, "exercise.ipynb", *EXERCISE, f"course.check({NAME}, answers)")
    page.open("exercise.ipynb")
    for cell in range(CHECK + 1):
        page.run_cell(cell)
        page.wait_until_run(cell)
    page.cell(STATEMENT).locator("h4", has_text="Average the gradients").wait_for()
    shown = page.cell(CHECK)
    shown.locator("text=/not answered yet: write your answer in the place of/").wait_for()
    head = exercises.starter(NAME).replace("    ...\n", "")
    loop = "    for parameter in model.parameters():\n        if parameter.grad is not None:\n"
    wrong = f"{head}{loop}            dist.all_reduce(parameter.grad)"
    answer(page, wrong)
    shown.locator("text=/2 ranks, rank 0, with .*summed, not averaged/").wait_for()
    hint = shown.locator("text=/replaces .* by the sum over the ranks/")
    assert not hint.is_visible()
    shown.locator("summary", has_text="Hint 1").click()
    hint.wait_for()
    assert not shown.locator("summary", has_text="Hint 3").is_visible()
    screenshot(page, "exercise_wrong")
    assert not json.loads((page.folder / FILE).read_text())["exercises"][NAME]["solved"]
    answer(page, f"{wrong}\n            parameter.grad /= dist.get_world_size()")
    shown.locator("b", has_text=f"{NAME}: right").wait_for()
    shown.locator("svg[role=img]").wait_for()
    screenshot(page, "exercise_right")
    assert json.loads((page.folder / FILE).read_text())["exercises"][NAME]["solved"]
    assert page.real_errors() == []


SESSION = (
    """
import os, time, torch, torch.distributed as dist, labkit
ranks = labkit.Session(2)
ranks
""",
    """
def train(worker, steps=100_000):
    for step in range(steps):
        total = torch.tensor(float(worker.rank))
        dist.all_reduce(total)
        worker.log(loss=1 / (1 + step))
        time.sleep(0.1)
run = labkit.launch(train, on=ranks, wait=False)
""",
    "run.stop()\nrun.status, run.states",
    """
def die(worker):
    if worker.rank == 1:
        os._exit(3)
    dist.barrier()
try:
    labkit.launch(die, on=ranks, live=False)
except labkit.WorkerFailed as failure:
    print(failure.diagnosis.headline)
""",
    "print(labkit.launch(train, 3, on=ranks, live=False).status)",
)


def test_a_session_shows_its_ranks_idle_busy_and_replaced_until_it_is_closed(page):
    write(page.folder, "session.ipynb", *SESSION)
    page.open("session.ipynb")
    page.run_cell(0)
    view = page.cell(0).locator(".jp-OutputArea").last
    view.locator("text=/2 reserved ranks · idle/").wait_for()
    for rank in (0, 1):
        view.locator(f"text=/rank {rank} ?idle/").or_(view.locator("b", has_text=f"rank {rank}")).first.wait_for()
    screenshot(page, "session_idle")
    process = view.locator("tr", has_text="rank 1").first.inner_text()
    page.run_cell(1)
    view.locator("text=/busy with train/").wait_for()
    view.locator("td", has_text="running").first.wait_for()
    page.page.locator(PANEL).first.wait_for()
    screenshot(page, "session_busy")
    page.run_cell(2)
    page.wait_until_run(2)
    page.run_cell(3)
    page.wait_until_run(3)
    assert "(exit code 3)" in page.cell(3).inner_text()
    page.run_cell(4)
    page.wait_until_run(4)
    view.locator("text=/2 reserved ranks · idle/").wait_for()
    page.page.wait_for_timeout(1500)  # it is drawn anew twice a second
    assert view.locator("tr", has_text="rank 1").first.inner_text() != process, "another's"
    view.scroll_into_view_if_needed()
    screenshot(page, "session_replaced")
    view.locator("button", has_text="Close").click()
    page.cell(0).locator("text=/gone: they were closed/").wait_for()
    screenshot(page, "session_closed")
    assert page.real_errors() == []
