"""What stays of a run in a real JupyterLab: after a reload, in other widgets, after a restart, in another environment.

Screenshots are kept in build/screenshots; look at them.
"""

from __future__ import annotations

import json
import re

import pytest

from labkit.ui import view
from tests.browser.test_browser import LAST_STEP, PANEL
from tests.support.browser import LONG_S, SCREENSHOTS, write

pytestmark = pytest.mark.browser

PREPARE = """
import time, labkit, course
import ipywidgets as widgets
from IPython.display import display

def train(worker, steps=60, then="returns"):
    for step in range(steps):
        worker.log(loss=1 / (1 + step) + worker.rank)
    print("all steps of", worker.rank)
    if then == "fails" and worker.rank == 1:
        raise ValueError("image 17 has no label")
    while then == "stands still":
        time.sleep(0.1)
    while then == "goes on":
        step += 1
        worker.log(loss=1 / (1 + step) + worker.rank)
        time.sleep(0.2)

def fails():
    try:
        labkit.launch(train, then="fails")
    except labkit.WorkerFailed:
        pass
"""

DRAWN = """cell => {
    const panels = [...cell.querySelectorAll('.labkit-run [role=figure]')].filter(panel => panel.offsetParent);
    const plots = [...cell.querySelectorAll('.js-plotly-plot')].filter(plot => plot.offsetParent && plot._fullData);
    return [
        ...panels.map(panel => panel.plot.data.slice(1).map(y => y.filter(each => each != null).length)),
        ...plots.map(plot => plot._fullData.map(trace => trace._length)),
    ];
}"""
"""Of each chart that can be seen, live or kept, how many points each curve has."""

WHOLE = [[60] * 3]
"""One chart: two ranks and their mean, all points of each."""

IDLE = "text=/\\| Idle/"


def opened(page, name, *cells):
    """Open a notebook of these cells, below the first, which has run."""
    write(page.folder, f"{name}.ipynb", PREPARE.strip(), *(cell.strip() for cell in cells))
    page.open(f"{name}.ipynb")
    page.run_cell(0)
    page.wait_until_run(0)


def screenshot(page, name):
    page.page.screenshot(path=SCREENSHOTS / f"stays_{name}.png")


def wait_until_drawn(page, index, wanted=WHOLE):
    """Wait until what can be seen of a cell's charts is this."""
    for _ in range(10 * LONG_S):
        if (found := page.cell(index).evaluate(DRAWN)) == wanted:
            return
        page.page.wait_for_timeout(100)
    raise AssertionError(f"drawn is {found}, not {wanted}")


def says(page, index, words):
    """Wait until a cell's output says this."""
    page.cell(index).locator(".jp-OutputArea b:visible", has_text=words).first.wait_for()


def reopen(page, name):
    """Close the notebook and open it again; its kernel goes on."""
    page.page.evaluate("() => jupyterapp.shell.currentWidget.close()")
    page.page.locator(".jp-Notebook").wait_for(state="detached")
    page.page.evaluate("name => jupyterapp.commands.execute('docmanager:open', {path: name})", f"{name}.ipynb")
    page.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()


def test_a_page_that_was_reloaded_shows_what_stays_of_each_run(page):
    """Saved while they ran, so that the file has the views of widgets: running, standing still, finished, failed.

    At the end the kernel is restarted.
    """
    going = 'labkit.launch(train, then="{}", wait=False, name="{}")'
    opened(
        page,
        "reload",
        f"still = {going.format('stands still', 'still')}",
        f"ends = {going.format('goes on', 'ends')}",
        "labkit.launch(train, wait=False, name='short')",
        "labkit.launch(train, then='fails')",
        "labkit.launch(train, then='goes on', name='blocking')",
    )
    for index in range(1, 5):
        page.run_cell(index)
        page.wait_until_run(index)
    page.cell(2).locator(PANEL).first.wait_for()
    page.save(page.folder / "reload.ipynb")
    page.reload()
    wait_until_drawn(page, 1)  # of a run that stands still, all points
    assert page.cell(1).locator("button", has_text="Stop").is_enabled()
    screenshot(page, "reloaded_running")
    page.cell(2).locator("button", has_text="Stop").click()
    says(page, 2, "ends: stopped")
    says(page, 3, "short: finished")
    page.cell(3).locator(".jp-RenderedPlotly:visible").wait_for()  # as the file has it
    failed = page.cell(4)
    failed.locator("b:visible", has_text="rank 1 failed: ValueError: image 17 has no label").first.wait_for()
    assert re.search(r"Cell In\[1\], line \d+, in train", failed.inner_text())
    assert 'raise ValueError("image 17 has no label")' in failed.inner_text()
    assert "labkit/monitor" not in failed.inner_text()
    failed.locator("summary", has_text="what became of the other rank").click()
    failed.locator("li", has_text=re.compile("rank 0 ")).wait_for()
    failed.scroll_into_view_if_needed()
    screenshot(page, "reloaded_failed")
    # While its cell runs, too, it goes on, and can be stopped.
    page.run_cell(5)
    page.cell(5).locator(PANEL).first.wait_for()
    assert page.is_running(5)
    page.save(page.folder / "reload.ipynb")
    page.reload()
    page.cell(5).locator(PANEL).first.wait_for()
    page.cell(5).scroll_into_view_if_needed()
    screenshot(page, "reloaded_blocking")
    before = page.page.evaluate(LAST_STEP)
    page.wait_for(f"before => ({LAST_STEP})() > before", before)
    page.cell(5).locator(".labkit-run .tabs button", has_text="rank 1").click()
    page.cell(5).locator(".labkit-run pre:visible", has_text="all steps of 1").wait_for()
    assert not page.cell(5).locator(".labkit-not-drawn").bounding_box()["height"]
    page.cell(5).locator("button.stop").click()
    says(page, 5, "blocking: stopped")
    page.cell(5).locator(PANEL).first.wait_for()
    assert page.cell(5).locator("button.stop:visible").count() == 0
    page.cell(5).scroll_into_view_if_needed()
    screenshot(page, "reloaded_stopped")
    page.save(page.folder / "reload.ipynb")
    reopen(page, "reload")
    for index, words in ((2, "ends: stopped"), (3, "short: finished"), (5, "blocking: stopped")):
        says(page, index, words)
    wait_until_drawn(page, 1)
    screenshot(page, "reopened")
    assert page.real_errors() == []
    # The run that still stands is ended with its kernel, and so is its view.
    page.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    said = page.cell(1).locator(".labkit-run")
    said.filter(has_text="The kernel has been restarted: this run has ended with it.").wait_for()
    assert page.cell(1).locator("button", has_text="Stop").is_disabled()
    page.reload()
    page.cell(1).locator("text=/model not found/i").wait_for()
    page.wait_for("() => document.querySelector('.labkit-not-drawn').offsetHeight > 10")
    screenshot(page, "cut_off")


WITHIN = {
    "Output": "out = widgets.Output()\ndisplay(out)\nwith out:\n    labkit.launch(train)",
    "Output, failing": "out = widgets.Output()\ndisplay(out)\nwith out:\n    fails()",
    "Tab": """
outs = [widgets.Output(), widgets.Output()]
display(widgets.Tab(outs, selected_index=1))
with outs[1]:
    labkit.launch(train)
""",
    "on_click": """
out, button = widgets.Output(), widgets.Button(description="launch")
def clicked(_):
    with out:
        labkit.launch(train)
button.on_click(clicked)
display(button, out)
""",
}


def test_within_other_widgets_a_run_leaves_what_stays(page):
    opened(page, "within", *WITHIN.values())
    for index, kind in enumerate(WITHIN, 1):
        page.run_cell(index)
        page.wait_until_run(index)
        if kind == "on_click":
            page.cell(index).locator("button", has_text="launch").click()

    def all_stays(when):
        for index, kind in enumerate(WITHIN, 1):
            page.cell(index).scroll_into_view_if_needed()
            if "failing" in kind:
                page.cell(index).locator("b:visible", has_text="rank 1 failed: ValueError: image 17").first.wait_for()
                says(page, index, "train: failed")
            else:
                says(page, index, "train: finished")
                wait_until_drawn(page, index)
            assert page.cell(index).locator("button.stop:visible").count() == 0
            screenshot(page, f"within_{kind.replace(', ', '_')}_{when}")

    all_stays("at once")
    page.save(page.folder / "within.ipynb")
    page.reload()
    all_stays("reloaded")
    assert page.real_errors() == []


@pytest.mark.wide
def test_controls_work_after_a_reload(page):
    """Boxes to tick, sliders, predictions, the view of a session; nothing old stays in sight."""
    opened(
        page,
        "controls",
        "runs = {name: labkit.launch(train, name=name, live=False) for name in ('one', 'two')}\nlabkit.compare(runs)",
        """
import plotly.graph_objects as go
from course.explore import explore
def bars(batch_size=128):
    return go.Figure(go.Bar(x=["batch"], y=[batch_size]), {"title": f"batch {batch_size}"})
explore(bars, batch_size=[64, 128, 256])
""",
        'guess = course.predict("Which rank is first?", "rank 0", "rank 1")\nguess',
        "ranks = labkit.Session(2)\nranks",
        'guess.reveal("rank 1")',
        "ranks.close()",
    )
    for index in range(1, 5):
        page.run_cell(index)
        page.wait_until_run(index)
    titles = """cell => [...cell.querySelectorAll('.js-plotly-plot')].filter(plot => plot.offsetParent)
        .map(plot => plot.querySelector('.gtitle')?.textContent)"""
    page.cell(2).locator(".gtitle:visible", has_text="batch 128").first.wait_for()
    page.page.wait_for_timeout(2500)  # longer than a page waits for outputs to change
    assert page.cell(2).evaluate(titles) == ["batch 128"], "once"
    page.save(page.folder / "controls.ipynb")
    page.reload()
    page.page.locator(IDLE).first.wait_for()
    page.cell(2).locator(".noUi-handle").first.focus()
    page.page.keyboard.press("ArrowRight")
    page.cell(2).locator(".gtitle:visible", has_text="batch 256").first.wait_for()
    assert page.cell(2).evaluate(titles) == ["batch 256"]
    screenshot(page, "explore_reloaded")

    def legend():
        return page.cell(1).locator(".legendtext:visible").all_text_contents()

    page.cell(1).scroll_into_view_if_needed()
    page.cell(1).locator(".widget-checkbox label", has_text="one").first.click()
    for _ in range(10 * LONG_S):
        if "one" not in legend() and page.cell(1).locator("th.row_heading:visible").all_text_contents() == ["two"]:
            break
        page.page.wait_for_timeout(100)
    else:
        raise AssertionError(legend())
    screenshot(page, "compare_reloaded")
    for index in (5, 6):
        page.run_cell(index)
        page.wait_until_run(index)
    page.cell(3).locator("span:visible", has_text="rank 1").first.wait_for()
    assert page.cell(3).locator("button:visible").count() == 0
    page.cell(4).locator("text=/gone: they were closed/").wait_for()
    page.cell(4).scroll_into_view_if_needed()
    screenshot(page, "session_reloaded")
    assert page.real_errors() == []


BUTTONS = """() => [...new Set([...document.querySelectorAll('.js-plotly-plot .modebar-btn')]
    .map(button => button.getAttribute('data-title')))]"""


def test_charts_have_names_gaps_and_no_button_that_uploads_them(page):
    opened(
        page,
        "charts",
        """
def gaps(worker):
    for step in range(100_000):
        worker.log(loss=float("nan") if 40_000 <= step < 60_000 else float("inf") if step == 90_000 else 1 / (1 + step))
    while True:
        time.sleep(0.1)
run = labkit.launch(gaps, world_size=1, wait=False)
""",
        "labkit.charts.bars(['steps'], [2.0], 'ms', 'a title')",
    )
    for index in (1, 2):
        page.run_cell(index)
    page.wait_for(f"() => ({LAST_STEP})() == 99999")
    panel = page.cell(1).locator(PANEL).first
    assert panel.get_attribute("aria-label") == "loss: rank 0"
    found = panel.evaluate("panel => panel.plot.data[1].map(y => y === null)")
    edges = [here for before, here in zip(found, found[1:], strict=False) if before != here]
    assert edges == [True, False, True, False], "what is not finite is a gap"
    screenshot(page, "gaps")
    page.cell(2).locator(".js-plotly-plot").hover()
    buttons = page.page.evaluate(BUTTONS)
    assert any("Download" in button for button in buttons), buttons
    assert not [button for button in buttons if "cloud" in button.lower() or "share" in button.lower()], buttons
    assert page.real_errors() == []


RENDER = """async ([source, shown]) => {
  const view = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  let times = 0;
  const carrier = { get: () => shown, on() {}, off() {} };
  const get_model = async () => {
    if (++times < 4) throw Error("widget model not found");
    return carrier;
  };
  const el = document.body.appendChild(document.createElement("div"));
  const model = { get: () => "the carrier", send() {}, widget_manager: { get_model } };
  const leave = await view.default.render({ model, el });
  while (!el.textContent.includes("late")) await new Promise(requestAnimationFrame);
  leave();
  return times;
}"""


def test_a_view_waits_for_its_other_model_which_a_busy_page_may_make_seconds_later(page):
    """JupyterLab's `get_model` gives up after two seconds: the view of a page that was reloaded stayed empty."""
    shown = json.dumps({**view.EMPTY, "name": "late", "button": "Stop"})
    assert page.page.evaluate(RENDER, [view._source("uplot.min.js", "view.js"), shown]) == 4
