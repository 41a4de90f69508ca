"""The live view in a real JupyterLab in a real Chromium. Screenshots are kept in build/screenshots; look at them."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.browser import LONG_S, SCREENSHOTS, write
from tests.tools.run_notebooks import LIMIT_BYTES

pytestmark = pytest.mark.browser

STAYS = ".jp-RenderedPlotly.js-plotly-plot .scatterlayer .trace"
"""A curve of a chart that needs no kernel."""

HAS_A_PICTURE = "() => JSON.stringify(jupyterapp.shell.currentWidget.content.model.toJSON()).includes('image/png')"
"""JupyterLab adds the picture of a chart that it has drawn, for everything that has no Plotly."""

PANEL = ".labkit-run .charts > [role=figure]"
"""A panel of curves of a run that goes on."""

LAST_STEP = f"""() => {{
    const plots = [...document.querySelectorAll('{PANEL}')].map(panel => panel.plot);
    return Math.max(0, ...plots.map(plot => plot.data[0]?.at(-1) ?? 0));
}}"""

SLOWLY = {
    "epochs = 15": "epochs = 5000",
    "batch_size = 48": "batch_size = 480",
    "worker.log(loss=losses[-1]": "__import__('time').sleep(0.2), worker.log(loss=losses[-1]",
}


def screenshot(page, name):
    page.page.screenshot(path=SCREENSHOTS / f"{name}.png")


def test_a_click_on_a_heading_sorts_a_table(page):
    source = (
        "import course, pandas as pd\n"
        "course.sortable(pd.DataFrame({'ms': [2.5, 10, 1], 'way': ['b', 'a', 'c']}, index=list('xyz')))"
    )
    write(page.folder, "table.ipynb", source)
    page.open("table.ipynb")
    page.run_cell(0)
    heading = page.page.locator("th.col_heading", has_text="ms")
    heading.wait_for()
    rows = page.page.locator(".jp-OutputArea tbody th")
    assert rows.all_text_contents() == ["x", "y", "z"]
    heading.click()
    assert rows.all_text_contents() == ["z", "x", "y"], "by number, not by text"
    assert heading.get_attribute("aria-sort") == "ascending"
    page.page.locator(".jp-OutputArea table").focus()  # as by the tab key; it hands on to its first heading
    page.page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows.all_text_contents() == ["y", "x", "z"]
    page.page.locator("th.col_heading", has_text="way").click()
    assert rows.all_text_contents() == ["y", "x", "z"]
    assert page.real_errors() == []


def test_curves_grow_while_the_cell_runs_and_stop_is_obeyed(page):
    """Lesson 00 with many epochs, of a few steps that mostly wait: a page that draws ten times a second, and ranks that
    compute, would take all cores. Cells 0 to 5 are parameters, imports, the
    machine, one process, which is left out, the function, the launch."""
    lesson = (page.folder / "00_start_here.ipynb").read_text()
    for line, instead in SLOWLY.items():
        assert lesson.count(line) == 1
        lesson = lesson.replace(line, instead)
    (page.folder / "long.ipynb").write_text(lesson)
    page.open("long.ipynb")
    for index in (0, 1, 2, 4):
        page.run_cell(index)
    page.wait_until_run(4)
    launched = time.monotonic()
    page.run_cell(5)
    page.page.locator(PANEL).first.wait_for()
    drawn_s = time.monotonic() - launched
    assert drawn_s < 5 * page.opened_s, "two ranks' curves in a few times what it takes to open a notebook"
    for _ in range(4):  # the curves grow, and keep growing
        before = page.page.evaluate(LAST_STEP)
        page.wait_for(f"before => ({LAST_STEP})() > before", before)
    assert page.is_running(5)
    labels = page.page.locator(f"{PANEL} .u-label").all_text_contents()
    assert labels[:4] == ["step", "rank 0", "rank 1", "mean"]
    page.page.locator(".labkit-run .tabs button", has_text="rank 1").click()
    page.page.locator(".labkit-run pre:visible", has_text="epoch 0").wait_for()
    screenshot(page, "1_running")
    asked = time.monotonic()
    page.page.locator("button.stop", has_text="Stop").click()
    page.wait_until_run(5)
    took = time.monotonic() - asked
    page.page.locator("b", has_text="train: stopped").wait_for()
    page.page.locator(STAYS).first.wait_for()
    screenshot(page, "2_stopped")
    assert took < 3 * drawn_s, "about as soon as ranks start and their first curves are drawn"
    assert page.page.locator("button.stop", has_text="Stop").count() == 0, "what stays needs no kernel"
    assert page.real_errors() == []


def test_the_first_lesson_runs_by_itself_and_the_saved_file_is_small(page):
    page.open("00_start_here.ipynb")
    page.run_all()
    # Not the last cell's prompt: JupyterLab has none of a cell that it has not drawn yet.
    ready = page.page.locator("text=ready: 2 ranks trained, in cells and as a file")
    ready.wait_for(timeout=5 * 1000 * LONG_S)
    page.cell(5).scroll_into_view_if_needed()
    page.page.locator(STAYS).first.wait_for(state="attached")
    screenshot(page, "3_first_lesson")
    page.wait_for(HAS_A_PICTURE)
    page.save(page.folder / "00_start_here.ipynb")
    saved = (page.folder / "00_start_here.ipynb").read_text()
    assert len(saved.encode()) <= LIMIT_BYTES
    assert "widget-view+json" not in saved
    assert page.real_errors() == []


def test_a_background_run_and_a_failure_are_shown_readably(page):
    write(
        page.folder,
        "failure.ipynb",
        "import time, labkit, torch.distributed as dist",
        "def forever(worker):\n    while True:\n        worker.log(loss=1.0)\n"
        "        time.sleep(0.2)\n        dist.barrier()",
        "run = labkit.launch(forever, wait=False)",
        "6 * 7",
        "def train(worker):\n    for step in range(40):\n        worker.log(loss=1 / (1 + step))\n"
        "        if worker.rank == 1 and step == 30:\n            raise ValueError('image 17 has no label')\n"
        "        dist.barrier()\nlabkit.launch(train)",
    )
    page.open("failure.ipynb")
    for index in range(3):
        page.run_cell(index)
    page.wait_until_run(2)
    page.page.locator(PANEL).first.wait_for()
    page.run_cell(3)
    page.wait_until_run(3)
    before = page.page.evaluate(LAST_STEP)
    # The live view goes on after another cell has run.
    page.wait_for(f"before => ({LAST_STEP})() > before", before)
    page.page.locator("button.stop", has_text="Stop").click()
    page.page.locator("b", has_text="forever: stopped").wait_for()
    page.run_cell(4)
    page.wait_until_run(4)
    shown = page.cell(4)
    shown.locator("text=rank 1 failed: ValueError: image 17 has no label").first.wait_for()
    text = shown.inner_text()
    assert "Cell In[5], line 5, in train" in text
    assert "raise ValueError('image 17 has no label')" in text
    assert "labkit/monitor/run.py" not in text
    shown.locator("summary", has_text="what became of the other rank").click()
    became = re.compile("rank 0 (lost its connection as a consequence|was still running and was ended)")
    shown.locator("li", has_text=became).wait_for()
    shown.scroll_into_view_if_needed()
    screenshot(page, "4_failure")
    assert page.real_errors() == []


EXPLORE = """
import plotly.graph_objects as go
from course.explore import explore


def bars(batch_size=128, bandwidth_gb_s=10, latency_us=10):
    return go.Figure(go.Bar(x=["batch", "latency"], y=[batch_size, latency_us]), {"title": f"batch {batch_size}"})


explore(bars, batch_size=[64, 128, 256], bandwidth_gb_s=[1, 10], latency_us=[1, 10, 100])
"""
SHOWN = """() => [...document.querySelectorAll('.jp-OutputArea-output .gtitle')].filter(title => title.closest('div')
    .offsetParent).map(title => title.textContent).join()"""


def test_a_slider_redraws_its_figure_and_the_saved_file_is_small(page):
    write(page.folder, "explore.ipynb", EXPLORE)
    page.open("explore.ipynb")
    page.run_cell(0)
    page.wait_until_run(0)
    page.wait_for(f"() => ({SHOWN})() == 'batch 128'")
    page.page.locator(".jp-OutputArea .noUi-handle").first.press("ArrowRight")
    page.wait_for(f"() => ({SHOWN})() == 'batch 256'")
    page.page.wait_for_timeout(1500)  # until the output that the notebook keeps has changed, too
    assert page.page.locator(".jp-RenderedPlotly:visible").count() == 1
    assert page.page.locator(".widget-readout").first.inner_text() == "256"
    screenshot(page, "explore")
    page.save(page.folder / "explore.ipynb")
    assert "batch 256" in (page.folder / "explore.ipynb").read_text()
    assert (page.folder / "explore.ipynb").stat().st_size < 50_000
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
    view.locator("td", has_text="after exit code 3").wait_for()
    page.run_cell(4)
    page.wait_until_run(4)
    view.scroll_into_view_if_needed()
    screenshot(page, "session_replaced")
    view.locator("button", has_text="Close").click()
    page.cell(0).locator("text=/gone: they were closed/").wait_for()
    screenshot(page, "session_closed")
    assert page.real_errors() == []
